//! Tells whether a program's loader would load Windlass: the loader exists, and the C library beside it is new
//! enough.

use super::decision::Library;
use crate::elf::Elf;
use crate::elf::versions::order;
use crate::program::Program;
use crate::{elf, search};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The C library that programs for glibc need; programs for musl need another.
const GLIBC: &str = "libc.so.6";

/// What a program would be loaded with.
#[derive(Debug, Default)]
pub struct Loading {
    /// Whether the loader that the program asks for exists.
    pub has_loader: bool,
    /// The libraries of which Windlass needs versions, by name, as far as they were found.
    pub libraries: BTreeMap<String, Provided>,
}

/// A library and the versions that it defines.
#[derive(Debug, Default)]
pub struct Provided {
    pub path: PathBuf,
    pub versions: BTreeSet<String>,
}

/// Looks for libraries first beside the loader, since a C library and its loader are installed together.
pub fn look(program: &Program, windlass: &Elf) -> Loading {
    let Some(loader) = &program.elf.loader else { return Loading::default() };
    let real_loader = std::fs::canonicalize(loader).ok();
    let beside: Vec<PathBuf> = [real_loader.as_deref(), Some(loader)]
        .into_iter()
        .flatten()
        .filter_map(Path::parent)
        .map(PathBuf::from)
        .collect();
    let names: BTreeSet<&str> = windlass.versions_needed.iter().map(|needed| &*needed.library).collect();
    let provide = |name: &str| {
        let path = search::resolve(name, &beside)?;
        let versions = elf::read(&path).ok()?.versions_defined;
        Some((name.to_owned(), Provided { path, versions }))
    };
    Loading { has_loader: real_loader.is_some(), libraries: names.into_iter().filter_map(provide).collect() }
}

/// The reason why the loader would not load Windlass into a program.
pub fn refuse(program: &Program, windlass: &Library, loading: &Loading) -> Option<String> {
    let loader = program.elf.loader.as_ref()?;
    let name = program.executable.display();
    if !loading.has_loader {
        return Some(format!("{name} asks for the loader {}, which is not there", loader.display()));
    }
    let is_musl = loader.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"ld-musl"));
    if is_musl && windlass.elf.needed.iter().any(|library| library == GLIBC) {
        return Some(format!(
            "{name} is a program for musl (its loader is {}), but {} is a library for glibc: run a program for glibc",
            loader.display(),
            windlass.path.display()
        ));
    }
    let lacks = |library: &str, version: &str| {
        loading.libraries.get(library).is_some_and(|provided| !provided.versions.contains(version))
    };
    let missing =
        windlass.elf.versions_needed.iter().filter(|needed| lacks(&needed.library, &needed.version));
    let newest = missing.max_by_key(|needed| order(&needed.version))?;
    let provided = loading.libraries.get(&newest.library)?;
    Some(format!(
        "{} needs {}, but {} of {name} {}: this C library is too old; take a Windlass that is built for an older glibc",
        windlass.path.display(),
        newest.version,
        provided.path.display(),
        up_to(&provided.versions, &newest.version)
    ))
}

/// The latest of a library's versions of the same kind.
fn up_to(versions: &BTreeSet<String>, like: &str) -> String {
    let kind = like.split('_').next().unwrap_or_default();
    let same_kind = versions.iter().filter(|version| version.split('_').next() == Some(kind));
    match same_kind.max_by_key(|version| order(version)) {
        Some(newest) => format!("has versions up to {newest}"),
        None => format!("has no versions {kind}_"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elf::versions::Needed;

    fn program(loader: &str) -> Program {
        let elf = Elf { loader: Some(loader.into()), ..Elf::default() };
        Program { executable: "/bin/train".into(), elf, python: None, privilege: None, cleared_by: None }
    }

    /// A Windlass that needs these versions of the C library.
    fn windlass(versions: &[&str]) -> Library {
        let need = |version: &&str| Needed { library: GLIBC.into(), version: (*version).into() };
        let elf = Elf {
            needed: vec![GLIBC.into()],
            versions_needed: versions.iter().map(need).collect(),
            ..Elf::default()
        };
        Library { path: "/w/libwindlass.so".into(), elf }
    }

    fn loading(versions: &[&str]) -> Loading {
        let versions = versions.iter().map(|version| (*version).to_owned()).collect();
        let provided = Provided { path: "/lib/libc.so.6".into(), versions };
        Loading { has_loader: true, libraries: BTreeMap::from([(GLIBC.into(), provided)]) }
    }

    const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";

    /// A C library with all versions is good; for an old one the reason names what it has and what is needed.
    #[test]
    fn old_c_library() {
        let windlass = windlass(&["GLIBC_2.9", "GLIBC_2.28", "GLIBC_2.34"]);
        let new = loading(&["GLIBC_2.9", "GLIBC_2.28", "GLIBC_2.34", "GLIBC_2.41", "GLIBC_PRIVATE"]);
        assert_eq!(refuse(&program(LOADER), &windlass, &new), None);
        let old = loading(&["GLIBC_2.9", "GLIBC_2.28", "GLIBC_2.31", "GLIBC_PRIVATE"]);
        let refusal = refuse(&program(LOADER), &windlass, &old).unwrap();
        assert!(
            refusal.starts_with(
                "/w/libwindlass.so needs GLIBC_2.34, but /lib/libc.so.6 of /bin/train has versions up to GLIBC_2.31: "
            ),
            "{refusal}"
        );
        let unseen = Loading { has_loader: true, ..Loading::default() };
        assert_eq!(refuse(&program(LOADER), &windlass, &unseen), None);
    }

    /// Programs for musl cannot load a library for glibc, but one for musl.
    #[test]
    fn musl() {
        let musl = program("/lib/ld-musl-x86_64.so.1");
        let loading = Loading { has_loader: true, ..Loading::default() };
        let refusal = refuse(&musl, &windlass(&[]), &loading).unwrap();
        assert!(refusal.contains("a program for musl (its loader is /lib/ld-musl-x86_64.so.1)"), "{refusal}");
        let for_musl = Library { path: "/w/libwindlass.so".into(), elf: Elf::default() };
        assert_eq!(refuse(&musl, &for_musl, &loading), None);
    }

    /// A missing loader is named.
    #[test]
    fn no_loader() {
        let refusal = refuse(&program(LOADER), &windlass(&[]), &Loading::default()).unwrap();
        assert_eq!(refusal, format!("/bin/train asks for the loader {LOADER}, which is not there"));
        assert!(!look(&program("/no/such/loader"), &Elf::default()).has_loader);
    }

    /// This test program is loaded with the C library beside its loader, which has the needed versions.
    #[test]
    fn looks_beside_the_loader() {
        let executable = std::env::current_exe().unwrap();
        let own = elf::read(&executable).unwrap();
        let program = Program { executable, elf: own.clone(), ..program(LOADER) };
        let own = Library { path: "/x/own".into(), elf: own };
        let loading = look(&program, &own.elf);
        assert!(loading.has_loader);
        assert!(loading.libraries[GLIBC].versions.contains("GLIBC_2.2.5"), "{loading:?}");
        assert_eq!(refuse(&program, &own, &loading), None);
    }
}
