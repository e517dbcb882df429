//! Where Windlass's own files are: the library and the simulators, beside this executable or in its library folders.

use anyhow::{Context, Result, bail};
use std::ffi::{OsStr, OsString};
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The library, `libwindlass.so`.
pub fn windlass_library() -> Result<PathBuf> {
    find("libwindlass.so", "install Windlass again, or in a checkout run `cargo build -p windlass`")
}

/// Folders in which the files of an installation may be, best first.
fn folders(executable: &Path) -> Vec<PathBuf> {
    let beside = executable.parent();
    let prefix = beside.and_then(Path::parent);
    let libraries = ["lib/windlass", "lib", "lib64", "lib/x86_64-linux-gnu"];
    let libraries = libraries.into_iter().filter_map(|folder| Some(prefix?.join(folder)));
    beside.map(Path::to_owned).into_iter().chain(libraries).collect()
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
const NCCL: &str = "libnccl.so.2";

/// The simulators under the names by which programs look for the real libraries.
pub struct SimulatorLibraries {
    folder: PathBuf,
    /// Removes the folder.
    _temporary: Option<tempfile::TempDir>,
}

impl SimulatorLibraries {
    /// Lays out both libraries in a folder that ends with this value.
    pub fn lay_out() -> Result<Self> {
        let made =
            tempfile::Builder::new().prefix("windlass-sim-").tempdir().context("cannot make a folder")?;
        let laid_out = Self::lay_out_in(made.path().to_owned())?;
        Ok(Self { _temporary: Some(made), ..laid_out })
    }

    /// Lays out both libraries in a folder that stays. Links of an earlier call are replaced.
    pub fn lay_out_in(folder: PathBuf) -> Result<Self> {
        let build = "install Windlass again, or in a checkout run `cargo build -p sim-cuda -p sim-kernels -p sim-nccl`";
        let cuda = find("libsim_cuda.so", build)?;
        let nccl = find(SIMULATED_NCCL, build)?;
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        made.with_context(|| format!("cannot make {}", folder.display()))?;
        // Clients look for libcuda under both names, and a toolkit's stub may lie somewhere under the first.
        for (name, file) in [("libcuda.so", &cuda), ("libcuda.so.1", &cuda), (NCCL, &nccl)] {
            let link = folder.join(name);
            // Another process may use the link now: it is replaced in one step.
            let new = folder.join(format!("{name}.{}", std::process::id()));
            std::os::unix::fs::symlink(file, &new)
                .and_then(|()| std::fs::rename(&new, &link))
                .with_context(|| format!("cannot make {}", link.display()))?;
        }
        Ok(Self { folder, _temporary: None })
    }

    pub fn nccl(&self) -> PathBuf {
        self.folder.join(NCCL)
    }

    /// `LD_LIBRARY_PATH` for processes that shall find the simulators.
    pub fn library_path(&self) -> OsString {
        let mut path = self.folder.as_os_str().to_owned();
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
