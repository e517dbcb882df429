//! The search for the real NCCL that a command would load: who names it, in which order, and why files are refused.
//!
//! Windlass searches again in the process itself (`nccl_sys::find`), where it sees what is mapped; `run` decides before
//! and names its choice in `WINDLASS_NCCL`.

use crate::asking::output_within;
use crate::elf::{self, Bits, Elf};
use crate::program::{self, Program};
use anyhow::{Result, bail};
use nccl_sys::find::{DEFAULT_FOLDERS, LIBRARY};
use serde::Serialize;
use std::collections::{BTreeSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const CACHE: &str = "/etc/ld.so.cache";
/// Libraries looked through for one that needs NCCL; large programs have a few hundred.
const LIBRARIES_MAX: usize = 1000;

/// A file that was looked at.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Looked {
    pub path: PathBuf,
    /// Who names it.
    pub because: String,
    /// Why it was not taken; `None` for the one that was.
    pub refused: Option<String>,
}

/// A search and its result.
#[derive(Clone, Debug, Default)]
pub struct Search {
    pub looked: Vec<Looked>,
    pub chosen: Option<(PathBuf, Elf)>,
}

/// Looks for the library that was named (`--nccl`), else for the program's, best place first. Stops at the first good one.
pub fn search(named: Option<&Path>, program: Option<&Program>) -> Search {
    let mut search = Search::default();
    let of_variable = || Some((PathBuf::from(variable("WINDLASS_NCCL")?), "WINDLASS_NCCL"));
    if let Some((path, because)) = named.map(|path| (path.to_owned(), "--nccl")).or_else(of_variable) {
        // A folder that a user names means the library in it.
        search.look(if path.is_dir() { path.join(LIBRARY) } else { path }, because);
        return search;
    }
    let python = program.and_then(|program| program.python.clone());
    if let Some(python) = &python {
        search.look_in(&python_folders(python), &format!("packages of {}", python.display()));
    }
    if let Some(program) = program.filter(|_| search.chosen.is_none()) {
        for (file, needs) in needed_through(program) {
            search.look(file, &format!("needed by {}", needs.display()));
        }
    }
    search.look_in(&library_path(), "LD_LIBRARY_PATH");
    if python.is_none() && search.chosen.is_none() {
        // A launcher or a shell: what it starts later most likely comes from the same environment.
        if let Ok(python) = program::find_in_path(OsStr::new("python3")) {
            search.look_in(&python_folders(&python), &format!("packages of {}", python.display()));
        }
    }
    for file in nccl_sys::cache::look_up(Path::new(CACHE), LIBRARY) {
        search.look(file, "the loader's cache");
    }
    search.look_in(&DEFAULT_FOLDERS.map(PathBuf::from), "default folder");
    search
}

/// The library for `demo` and `bench` on GPUs, or an error with the search.
pub fn for_tools(named: Option<&Path>) -> Result<PathBuf> {
    let search = search(named, None);
    match search.chosen {
        Some((path, _)) => Ok(path),
        None => bail!("no {LIBRARY} found; name one with --nccl PATH. Looked at:\n{}", search.describe()),
    }
}

/// That there is no real NCCL for whom, and the way to one: where it was named, another name.
pub fn not_found(looked: &[Looked], for_whom: &str) -> String {
    match looked {
        [Looked { path, because, refused: Some(why) }]
            if ["--nccl", "WINDLASS_NCCL"].contains(&because.as_str()) =>
        {
            format!(
                "found no real NCCL{for_whom}: {because} is {}: {why}; expected a {LIBRARY} or its folder; without {because} it is searched",
                path.display()
            )
        }
        _ => format!(
            "found no real NCCL{for_whom}: install one (pip install nvidia-nccl-cu12, of CUDA 13 nvidia-nccl-cu13) or name an existing one with \
             --nccl PATH"
        ),
    }
}

impl Search {
    fn look_in(&mut self, folders: &[PathBuf], because: &str) {
        for folder in folders {
            self.look(folder.join(LIBRARY), because);
        }
    }

    /// Judges one file, unless a good one is found already.
    fn look(&mut self, path: PathBuf, because: &str) {
        if self.chosen.is_some() || self.looked.iter().any(|looked| looked.path == path) {
            return;
        }
        let refused = match read_existing(&path).and_then(|elf| judge(&elf).map(|()| elf)) {
            Ok(elf) => {
                let path = std::fs::canonicalize(&path).unwrap_or_else(|_| path.clone());
                self.chosen = Some((path, elf));
                None
            }
            Err(reason) => Some(reason),
        };
        self.looked.push(Looked { path, because: because.to_owned(), refused });
    }

    /// One line a file.
    pub fn describe(&self) -> String {
        let line = |looked: &Looked| {
            let result = looked.refused.as_deref().unwrap_or("taken");
            format!("  {} ({}): {result}", looked.path.display(), looked.because)
        };
        self.looked.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}

fn read_existing(path: &Path) -> Result<Elf, String> {
    if !path.exists() {
        return Err("no such file".into());
    }
    elf::read(path).map_err(|error| format!("{error:#}"))
}

/// Whether a library can be the real NCCL of this machine.
fn judge(elf: &Elf) -> Result<(), String> {
    if elf.bits == Bits::Is32 || elf.machine != elf::native_machine() {
        return Err(format!("it is for {}", elf::machine_name(elf.machine)));
    }
    if elf.is_windlass() {
        return Err("it is Windlass itself, the real NCCL is wanted".into());
    }
    if !elf.is_nccl() {
        return Err("it exports no ncclGetVersion: not NCCL".into());
    }
    Ok(())
}

fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// The folders of LD_LIBRARY_PATH.
pub fn library_path() -> Vec<PathBuf> {
    let value = variable("LD_LIBRARY_PATH").unwrap_or_default();
    nccl_sys::objects::expand_search_path(&value, Path::new(""))
}

/// Where a Python's packages keep NCCL, asked from that Python without importing any of them.
fn python_folders(python: &Path) -> Vec<PathBuf> {
    const SCRIPT: &str = "
import importlib.util, json, os, sys
def folders(name):
    try:
        spec = importlib.util.find_spec(name)
    except Exception:
        return []
    return [os.path.join(folder, 'lib') for folder in (spec and spec.submodule_search_locations) or []]
print(json.dumps(folders('nvidia.nccl') + folders('torch') + [os.path.join(sys.prefix, 'lib')]))
";
    let mut command = Command::new(python);
    command.args(["-c", SCRIPT]).env_remove("LD_PRELOAD");
    let printed = output_within(command, Duration::from_secs(10)).unwrap_or_default();
    serde_json::from_str(printed.lines().last().unwrap_or_default()).unwrap_or_default()
}

/// The NCCL that the program's own libraries would load, and which of them needs it. Follows DT_NEEDED through RPATH,
/// RUNPATH, LD_LIBRARY_PATH, the cache and the default folders, as the loader does but for the finer rules of
/// inheritance: a search path is good for everything found below it.
fn needed_through(program: &Program) -> Vec<(PathBuf, PathBuf)> {
    let mut found = Vec::new();
    let mut seen = BTreeSet::new();
    let mut waiting = VecDeque::from([(program.executable.clone(), program.elf.clone(), Vec::new())]);
    while let Some((file, elf, inherited)) = waiting.pop_front() {
        let folders: Vec<PathBuf> = [elf.search_path, inherited, library_path()].concat();
        for name in elf.needed {
            if seen.len() >= LIBRARIES_MAX {
                return found;
            }
            let Some(path) = resolve(&name, &folders) else { continue };
            if name == LIBRARY {
                found.push((path, file.clone()));
            } else if seen.insert(path.clone())
                && let Ok(elf) = elf::read(&path)
            {
                waiting.push_back((path, elf, folders.clone()));
            }
        }
    }
    found
}

/// The file that a loader would take for a library's name: in these folders, else as its cache and its default folders have it.
pub fn resolve(name: &str, folders: &[PathBuf]) -> Option<PathBuf> {
    if name.contains('/') {
        return Some(PathBuf::from(name)).filter(|file| file.exists());
    }
    let in_folders = folders.iter().map(|folder| folder.join(name));
    let cached = nccl_sys::cache::look_up(Path::new(CACHE), name);
    let usual = DEFAULT_FOLDERS.iter().map(|folder| Path::new(folder).join(name));
    in_folders.chain(cached).chain(usual).find(|file| file.exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn library(functions: &[&str]) -> Elf {
        Elf {
            machine: elf::native_machine(),
            functions: functions.iter().map(|name| (*name).to_owned()).collect(),
            ..Elf::default()
        }
    }

    /// NCCL is taken; Windlass, other libraries and other machines are not.
    #[test]
    fn judges() {
        assert_eq!(judge(&library(&["ncclGetVersion"])), Ok(()));
        let windlass = library(&["ncclGetVersion", elf::WINDLASS_MARK]);
        assert!(judge(&windlass).unwrap_err().contains("Windlass itself"));
        assert!(judge(&library(&[])).unwrap_err().contains("not NCCL"));
        let foreign = Elf { machine: 8, ..library(&["ncclGetVersion"]) };
        assert!(judge(&foreign).unwrap_err().contains("it is for"));
    }

    /// What a user names is the only candidate, and the refusal says why.
    #[test]
    fn named_alone() {
        let search = search(Some(Path::new("/no/such/libnccl.so.2")), None);
        assert!(search.chosen.is_none());
        assert_eq!(search.looked.len(), 1);
        assert_eq!(search.describe(), "  /no/such/libnccl.so.2 (--nccl): no such file");
    }
}
