//! Libraries that are preloaded already: which stay in front of Windlass, and which come behind it.

use super::decision::Library;
use crate::{elf, search};
use nccl_sys::find::LIBRARY;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A library in LD_PRELOAD, as it is named there.
#[derive(Clone, Debug, PartialEq)]
pub struct Preload {
    pub name: OsString,
    /// Whether it passes on calls of NCCL, as tracers do. Behind Windlass it would see none.
    pub is_interposer: bool,
}

/// The libraries of LD_PRELOAD, without Windlass.
pub fn look(environment: &BTreeMap<OsString, OsString>, windlass: &Library) -> Vec<Preload> {
    let value = environment.get(OsStr::new("LD_PRELOAD")).map_or(&[][..], |value| value.as_bytes());
    let parts = value.split(|byte| matches!(byte, b' ' | b':')).filter(|part| !part.is_empty());
    let others = parts.map(OsStr::from_bytes).filter(|part| *part != windlass.path.as_os_str());
    let preload = |name: &OsStr| Preload { name: name.into(), is_interposer: is_interposer(name, windlass) };
    others.map(preload).collect()
}

fn is_interposer(name: &OsStr, windlass: &Library) -> bool {
    let file = name.to_str().and_then(|name| search::resolve(name, &search::library_path()));
    let elf = file.and_then(|file| elf::read(&file).ok()).unwrap_or_default();
    // A whole NCCL has its second names, too, unless it was built without.
    let is_whole = elf.functions.contains("pncclCommInitRank") || elf.soname.as_deref() == Some(LIBRARY);
    !is_whole && !elf.functions.is_disjoint(&windlass.elf.functions)
}

/// The value of LD_PRELOAD with Windlass.
pub fn with(windlass: &Path, preloads: &[Preload]) -> OsString {
    let [front, behind] = sides(preloads);
    [front, vec![windlass.as_os_str()], behind].concat().join(OsStr::new(":"))
}

/// The value of LD_PRELOAD without Windlass; none without other libraries.
pub fn without(preloads: &[Preload]) -> Option<OsString> {
    let names: Vec<&OsStr> = preloads.iter().map(|preload| &*preload.name).collect();
    (!names.is_empty()).then(|| names.join(OsStr::new(":")))
}

/// Names all of them, and their places.
pub fn told(preloads: &[Preload]) -> Option<String> {
    let [front, behind] = sides(preloads).map(|names| names.join(OsStr::new(", ")).display().to_string());
    match (&*front, &*behind) {
        ("", "") => None,
        ("", behind) => Some(format!("preloaded behind Windlass: {behind}")),
        (front, "") => Some(format!("preloaded in front of Windlass, to see NCCL's calls: {front}")),
        (front, behind) => {
            Some(format!("preloaded in front of Windlass, to see NCCL's calls: {front}; behind it: {behind}"))
        }
    }
}

fn sides(preloads: &[Preload]) -> [Vec<&OsStr>; 2] {
    let (front, behind): (Vec<_>, Vec<_>) = preloads.iter().partition(|preload| preload.is_interposer);
    [front, behind].map(|side| side.into_iter().map(|preload| &*preload.name).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Interposers keep their order in front, all others behind; both are named.
    #[test]
    fn places() {
        let preload = |name: &str, is_interposer| Preload { name: name.into(), is_interposer };
        let all = [preload("/m.so", false), preload("/t.so", true), preload("/u.so", true)];
        let windlass = Path::new("/w.so");
        assert_eq!(with(windlass, &all), "/t.so:/u.so:/w.so:/m.so");
        assert_eq!(with(windlass, &all[..1]), "/w.so:/m.so");
        assert_eq!(with(windlass, &[]), "/w.so");
        assert_eq!((without(&all), without(&[])), (Some("/m.so:/t.so:/u.so".into()), None));
        let in_front = "preloaded in front of Windlass, to see NCCL's calls: /t.so, /u.so";
        assert_eq!(told(&all), Some(format!("{in_front}; behind it: /m.so")));
        assert_eq!(told(&all[1..]), Some(in_front.into()));
        assert_eq!((told(&all[..1]), told(&[])), (Some("preloaded behind Windlass: /m.so".into()), None));
    }

    /// Windlass is not named twice; libraries that are not found count as others.
    #[test]
    fn in_the_environment() {
        let windlass = Library { path: "/w/libwindlass.so".into(), elf: elf::Elf::default() };
        let names = |value: &str| -> Vec<String> {
            let environment = BTreeMap::from([("LD_PRELOAD".into(), value.into())]);
            look(&environment, &windlass).into_iter().map(|one| one.name.display().to_string()).collect()
        };
        assert_eq!(names("/x/libjemalloc.so:/w/libwindlass.so"), ["/x/libjemalloc.so"]);
        assert_eq!(names("/a.so /b.so:"), ["/a.so", "/b.so"]);
        assert!(look(&BTreeMap::new(), &windlass).is_empty());
    }
}
