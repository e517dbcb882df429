//! Finds the NCCL that the processes of a run have mapped: both sides should run over the same.

use crate::elf;
use nccl_sys::exported::Exports;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// After this time a process without an NCCL is read again; not earlier, since its list of mappings is long.
const AGAIN: Duration = Duration::from_secs(1);

/// What is known of the mappings of a run's processes.
#[derive(Default)]
pub struct Libraries {
    /// The real NCCLs that were found.
    pub found: BTreeSet<PathBuf>,
    /// When a process was read that had none; none for processes that have one.
    asked: BTreeMap<u32, Option<Instant>>,
    judged: BTreeMap<PathBuf, bool>,
}

impl Libraries {
    /// Reads the mappings of each process that is not known to have an NCCL.
    pub fn look(&mut self, family: &BTreeSet<u32>) {
        for process in family {
            let asked = self.asked.get(process);
            if asked.is_some_and(|when| when.is_none_or(|when| when.elapsed() < AGAIN)) {
                continue;
            }
            let maps = std::fs::read(format!("/proc/{process}/maps")).unwrap_or_default();
            let real: Vec<PathBuf> = named(&String::from_utf8_lossy(&maps))
                .into_iter()
                .filter(|path| self.is_real(path))
                .collect();
            self.asked.insert(*process, real.is_empty().then(Instant::now));
            self.found.extend(real);
        }
    }

    /// Whether the file is a real NCCL, since Windlass may have the same name.
    fn is_real(&mut self, path: &Path) -> bool {
        let judge = || elf::exports(path).is_ok_and(|exports| exports == Exports::Nccl);
        *self.judged.entry(path.to_owned()).or_insert_with(judge)
    }
}

/// The mapped files with NCCL's name.
fn named(maps: &str) -> BTreeSet<PathBuf> {
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    let is_named = |path: &&Path| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"libnccl.so"))
    };
    paths.filter(is_named).map(Path::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files are found by their names, each once.
    #[test]
    fn names() {
        let maps = "7f10-7f20 r-xp 0 08:02 7  /a b/libnccl.so.2\n7f20-7f30 r--p 0 08:02 7  /a b/libnccl.so.2\n\
                    7f30-7f40 r-xp 0 08:02 8  /c/libnccl-net.so\n7f40-7f50 rw-p 0 00:00 0\n";
        assert_eq!(named(maps), BTreeSet::from([PathBuf::from("/a b/libnccl.so.2")]));
    }

    /// This process has no NCCL; it is not read twice in a moment.
    #[test]
    fn own() {
        let mut libraries = Libraries::default();
        let family = BTreeSet::from([std::process::id()]);
        libraries.look(&family);
        libraries.look(&family);
        assert!(libraries.found.is_empty());
    }
}
