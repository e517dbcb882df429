//! Where Windlass's own files are: the library and the simulators, beside this executable or in its library folders.

use anyhow::{Context, Result, bail};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// The library, `libwindlass.so`.
pub fn windlass_library() -> Result<PathBuf> {
    find("libwindlass.so", "install the command with its library, or build it with `cargo build -p windlass`")
}

/// Folders in which the files of an installation may be, best first.
fn folders(executable: &Path) -> Vec<PathBuf> {
    let Some(beside) = executable.parent() else { return Vec::new() };
    let mut folders = vec![beside.to_owned()];
    if let Some(prefix) = beside.parent() {
        folders.extend(
            ["lib/windlass", "lib", "lib64", "lib/x86_64-linux-gnu"].map(|folder| prefix.join(folder)),
        );
    }
    folders
}

fn find(name: &str, otherwise: &str) -> Result<PathBuf> {
    let executable = std::env::current_exe().context("cannot find this executable")?;
    let folders = folders(&executable);
    match folders.iter().map(|folder| folder.join(name)).find(|file| file.exists()) {
        Some(file) => Ok(std::fs::canonicalize(file)?),
        None => {
            let looked: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
            bail!("{name} is not in {}: {otherwise}", looked.join(", "))
        }
    }
}

/// Whether a library is the simulator of NCCL, by whatever name.
pub fn is_simulator(nccl: &Path) -> bool {
    let real = |path: &Path| std::fs::canonicalize(path).ok();
    find(SIMULATED_NCCL, "").is_ok_and(|simulator| real(nccl) == Some(simulator))
}

const SIMULATED_NCCL: &str = "libsim_nccl.so";

/// The simulators under the names by which programs look for the real libraries.
pub struct SimulatorLibraries {
    folder: tempfile::TempDir,
}

impl SimulatorLibraries {
    /// Lays out a folder with both libraries.
    pub fn lay_out() -> Result<Self> {
        let build = "build the simulator with `cargo build -p sim-cuda -p sim-kernels -p sim-nccl`";
        let cuda = find("libsim_cuda.so", build)?;
        let nccl = find(SIMULATED_NCCL, build)?;
        let folder =
            tempfile::Builder::new().prefix("windlass-sim-").tempdir().context("cannot make a folder")?;
        // Clients look for libcuda under both names, and a toolkit's stub may lie somewhere under the first.
        for name in ["libcuda.so", "libcuda.so.1"] {
            std::os::unix::fs::symlink(&cuda, folder.path().join(name))?;
        }
        std::os::unix::fs::symlink(&nccl, folder.path().join("libnccl.so.2"))?;
        Ok(Self { folder })
    }

    pub fn nccl(&self) -> PathBuf {
        self.folder.path().join("libnccl.so.2")
    }

    /// `LD_LIBRARY_PATH` for processes that shall find the simulators.
    pub fn library_path(&self) -> OsString {
        let mut path = self.folder.path().as_os_str().to_owned();
        if let Some(before) = std::env::var_os("LD_LIBRARY_PATH").filter(|value| !value.is_empty()) {
            path.push(OsStr::new(":"));
            path.push(before);
        }
        path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Build folders and installed trees are both looked into.
    #[test]
    fn looks_beside_and_in_lib() {
        let folders = folders(Path::new("/opt/windlass/bin/windlass"));
        assert_eq!(folders[0], Path::new("/opt/windlass/bin"));
        assert!(folders.contains(&PathBuf::from("/opt/windlass/lib")));
    }
}
