//! Programs of this user that run over Windlass now, and the NCCLs that are mapped in each.
//!
//! A program is known by its counters in shared memory, so from its first communicator on, and not with
//! `WINDLASS_STATS=off`. Programs whose maps cannot be read are passed over.

use crate::elf;
use nccl_sys::exported::Exports;
use regex::bytes::{Captures, Regex};
use serde::Serialize;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use windlass_base::stats::files::{self, FOLDER, Owner};
use windlass_base::stats::snapshot::Snapshot;

/// Of a command line, this many bytes are told.
const COMMAND_MAX: usize = 120;

/// A program.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Running {
    pub process: u32,
    /// Its command line, shortened.
    pub command: String,
    /// Every real NCCL that is mapped, the one that Windlass opened first. More than one is trouble.
    pub nccl: Vec<PathBuf>,
    /// `fixed` or `strict` where it asks for fixed order, else empty.
    pub order: String,
    /// Its reductions that round, in that order and not.
    pub ordered: (u64, u64),
}

/// What was found in files, by device and inode: many processes map the same. One that could not be read is tried again in the next process:
/// the first may just have ended.
type Seen = HashMap<(String, u64), Exports>;

/// Looks at every such program.
pub fn look() -> Vec<Running> {
    let user = rustix::process::getuid().as_raw();
    let mut seen = Seen::new();
    let segments = files::list(Path::new(FOLDER)).into_iter();
    let segments = segments.filter_map(|path| Some((files::owner(&path)?, path)));
    let own = segments.filter(|(owner, path)| owner.user == user && files::is_own(path));
    own.filter_map(|(Owner { process, .. }, path)| look_at(process, &path, &mut seen)).collect()
}

/// None where the segment is a dead process's, whose number another may have now: who has it does not map the segment.
fn look_at(process: u32, segment: &Path, seen: &mut Seen) -> Option<Running> {
    let folder = PathBuf::from(format!("/proc/{process}"));
    let maps = parse(&std::fs::read(folder.join("maps")).ok()?);
    maps.iter().find(|mapping| mapping.path.file_name() == segment.file_name())?;
    let counted = Snapshot::of_file(segment).ok();
    let opened = counted.as_ref().map(|counted| &counted.nccl_path);
    let mut files = code(&maps);
    // The sort is stable: all others stay in the order of addresses.
    files.sort_by_key(|mapping| opened.is_none_or(|opened| mapping.path != Path::new(opened)));
    let judged: Vec<_> = files.iter().map(|mapping| (*mapping, mapping.exports(&folder, seen))).collect();
    // Only of a process that lives the files could be read.
    std::fs::read_link(folder.join("exe")).ok()?;
    let ordered = counted.as_ref().map_or((0, 0), Snapshot::ordered);
    let order = counted.map_or_else(String::new, |counted| counted.order);
    Some(Running { process, command: command(&folder), nccl: real(&judged), order, ordered })
}

/// The real NCCLs. A file that cannot be read (deleted) is judged by its name, unless it may be Windlass itself.
fn real(judged: &[(&Mapping, Option<Exports>)]) -> Vec<PathBuf> {
    let windlass_is_known = judged.iter().any(|(_, exports)| *exports == Some(Exports::Windlass));
    let is_real = |(mapping, exports): &(&Mapping, Option<Exports>)| match exports {
        Some(exports) => *exports == Exports::Nccl,
        None => windlass_is_known && mapping.is_named_nccl(),
    };
    judged.iter().filter(|file| is_real(file)).map(|(mapping, _)| mapping.path.clone()).collect()
}

fn command(folder: &Path) -> String {
    let line = std::fs::read(folder.join("cmdline")).unwrap_or_default();
    let text = String::from_utf8_lossy(&line).trim_end_matches('\0').replace(char::is_control, " ");
    match text.char_indices().find(|(at, _)| *at >= COMMAND_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// A line of `/proc/PID/maps`.
#[derive(Clone, Debug, Default, PartialEq)]
struct Mapping {
    /// First and last address, as hexadecimal digits.
    range: (String, String),
    is_code: bool,
    device: String,
    inode: u64,
    path: PathBuf,
    is_deleted: bool,
}

impl Mapping {
    /// Asked from the mapped file itself where the kernel lets us, else by its path as the process sees it; none if neither
    /// can be read.
    fn exports(&self, folder: &Path, seen: &mut Seen) -> Option<Exports> {
        let identity = (self.device.clone(), self.inode);
        if let Some(known) = seen.get(&identity) {
            return Some(*known);
        }
        let (start, end) = &self.range;
        let mapped = folder.join("map_files").join(format!("{start}-{end}"));
        let root = folder.join("root");
        let by_path =
            self.path.strip_prefix("/").ok().filter(|_| !self.is_deleted).map(|path| root.join(path));
        let found = std::iter::once(mapped).chain(by_path).find_map(|file| elf::exports(&file).ok())?;
        seen.insert(identity, found);
        Some(found)
    }

    fn is_named_nccl(&self) -> bool {
        self.path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"libnccl.so"))
    }
}

/// Lines `start-end permissions offset device inode path`; mappings of no file have no path. The folder `map_files` names addresses without
/// leading zeros.
fn parse(maps: &[u8]) -> Vec<Mapping> {
    let line = r"(?m-u)^0*([0-9a-f]+)-0*([0-9a-f]+) (\S+) \S+ (\S+) ([0-9]+) +(/.*?)( \(deleted\))?$";
    Regex::new(line).map_or_else(|_| Vec::new(), |line| line.captures_iter(maps).map(mapping).collect())
}

fn mapping(line: Captures<'_>) -> Mapping {
    let text = |group: usize| String::from_utf8_lossy(&line[group]).into_owned();
    Mapping {
        range: (text(1), text(2)),
        is_code: line[3].contains(&b'x'),
        device: text(4),
        inode: text(5).parse().unwrap_or(0),
        path: OsStr::from_bytes(&line[6]).into(),
        is_deleted: line.get(7).is_some(),
    }
}

/// The files from which code is mapped, each once: by device and inode, as a path may have been replaced.
fn code(maps: &[Mapping]) -> Vec<&Mapping> {
    let mut known = std::collections::HashSet::new();
    maps.iter().filter(|map| map.is_code && known.insert((&map.device, map.inode))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &[u8] = b"\
00400000-00452000 r-xp 00000000 08:02 173521      /usr/bin/my program
7f10-7f20 rw-s 00000000 00:18 5    /dev/shm/windlass-0-1-a
7f20-7f30 r--p 00000000 08:02 7    /a/libnccl.so.2
7f30-7f40 r-xp 00001000 08:02 7    /a/libnccl.so.2
7f40-7f50 r-xp 00001000 08:02 8    /a/libnccl.so.2 (deleted)
7f50-7f60 r-xp 00001000 08:02 7    /link/libnccl.so.2
7f60-7f70 rw-p 00000000 00:00 0
7f70-7f80 r-xp 00000000 00:00 0    [vdso]
";

    /// Files with code, each once by device and inode; paths may have spaces.
    #[test]
    fn reads_maps() {
        let maps = parse(MAPS);
        let files = code(&maps);
        let seen: Vec<_> =
            files.iter().map(|file| (file.path.to_str().unwrap(), file.inode, file.is_deleted)).collect();
        assert_eq!(
            seen,
            [
                ("/usr/bin/my program", 173521, false),
                ("/a/libnccl.so.2", 7, false),
                ("/a/libnccl.so.2", 8, true)
            ]
        );
        assert_eq!(files[0].range, ("400000".into(), "452000".into()));
        assert_eq!(parse(b"nonsense\n7f10-7f20 r-xp\n"), []);
    }

    /// What exports decides; names only of what cannot be read, and only where it cannot be Windlass.
    #[test]
    fn real_ones() {
        let file = |path: &str| Mapping { path: path.into(), ..Mapping::default() };
        let [nccl, plugin, ours, other] =
            ["/a/libnccl.so.2", "/a/libnccl-net.so", "/w/libnccl.so.2", "/x/libtorch.so"].map(file);
        let read = [
            (&nccl, Some(Exports::Nccl)),
            (&plugin, Some(Exports::Other)),
            (&ours, Some(Exports::Windlass)),
            (&other, Some(Exports::Nccl)),
        ];
        assert_eq!(real(&read), [nccl.path.clone(), other.path.clone()]);
        let gone =
            [(&nccl, Some(Exports::Nccl)), (&plugin, None), (&ours, Some(Exports::Windlass)), (&nccl, None)];
        assert_eq!(real(&gone), [nccl.path.clone(), nccl.path.clone()]);
        assert_eq!(real(&[(&nccl, Some(Exports::Nccl)), (&ours, None)]).len(), 1);
    }

    /// A file that could not be read in a process that ended is read in the next one, and then known.
    #[test]
    fn reads_again() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        std::fs::create_dir_all(folder.join("map_files")).unwrap();
        let program = std::env::current_exe().unwrap();
        std::os::unix::fs::symlink(program, folder.join("map_files/7f10-7f20")).unwrap();
        let file = Mapping { range: ("7f10".into(), "7f20".into()), ..Mapping::default() };
        let (ended, mut seen) = (Path::new("/no/such"), Seen::new());
        let judged = [ended, folder, ended].map(|folder| file.exports(folder, &mut seen));
        assert_eq!(judged, [None, Some(Exports::Other), Some(Exports::Other)]);
    }

    /// This very process runs over no Windlass: without its segment it is not told of, though its maps can be read.
    #[test]
    fn unknown_files() {
        let segment = Path::new("/dev/shm/windlass-0-1-no-such");
        assert_eq!(look_at(std::process::id(), segment, &mut Seen::new()), None);
        assert!(command(Path::new("/proc/self")).len() <= COMMAND_MAX + 3);
    }
}
