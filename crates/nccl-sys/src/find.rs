//! Finds the files that may be the real library, in the order of the search.
//!
//! 1. `WINDLASS_NCCL`, and then nothing else: a file that the user names is taken or refused, never replaced.
//! 2. A library already mapped under NCCL's name. Two copies in one process would split NCCL's thread-local state: a
//!    group opened in one is unknown to the other.
//! 3. The RPATH and RUNPATH of mapped objects that need `libnccl.so.2`: the loader would have searched there.
//! 4. `nvidia/nccl/lib` in the site-packages folders from which objects are mapped.
//! 5. `LD_LIBRARY_PATH`.
//! 6. The loader's cache, then its default folders.
//!
//! [`candidates`] is pure; [`Surroundings::of_this_process`] reads its input.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::cache;
use crate::objects::{self, Object};

/// The file name under which programs ask for NCCL.
pub const LIBRARY: &str = "libnccl.so.2";

/// The folders that the loader searches last.
pub const DEFAULT_FOLDERS: [&str; 4] =
    ["/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64"];

/// The input of the search.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// The value of `WINDLASS_NCCL`, if set and not empty.
    pub named: Option<OsString>,
    /// Every mapped object.
    pub mapped: Vec<Object>,
    /// The value of `LD_LIBRARY_PATH`, split.
    pub library_path: Vec<PathBuf>,
    /// The files that the loader's cache has for [`LIBRARY`].
    pub cached: Vec<PathBuf>,
}

/// Why a file is a candidate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// `WINDLASS_NCCL` names it.
    Named,
    /// It is mapped already.
    Mapped,
    /// It is in the search path of this object, which needs NCCL.
    SearchPath(PathBuf),
    /// It is in a site-packages folder.
    SitePackages,
    /// It is in `LD_LIBRARY_PATH`.
    LibraryPath,
    /// The loader's cache has it.
    Cache,
    /// It is in a default folder of the loader.
    DefaultFolder,
}

/// A file that may be the real library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The file, which may not exist.
    pub path: PathBuf,
    /// Why the file is a candidate.
    pub reason: Reason,
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Reason::Named => write!(f, "WINDLASS_NCCL"),
            Reason::Mapped => write!(f, "already mapped"),
            Reason::SearchPath(object) => write!(f, "search path of {}", object.display()),
            Reason::SitePackages => write!(f, "site-packages"),
            Reason::LibraryPath => write!(f, "LD_LIBRARY_PATH"),
            Reason::Cache => write!(f, "loader's cache"),
            Reason::DefaultFolder => write!(f, "default folder"),
        }
    }
}

impl Surroundings {
    /// Reads the environment, the loader's list of objects, and its cache.
    pub fn of_this_process() -> Surroundings {
        let path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        Surroundings {
            named: named(),
            mapped: objects::mapped(),
            library_path: objects::expand_search_path(&path, Path::new("")),
            cached: cache::look_up(Path::new("/etc/ld.so.cache"), LIBRARY),
        }
    }
}

/// The value of `WINDLASS_NCCL`. It is ignored in a process with more rights than its user, as the loader's own
/// variables are.
fn named() -> Option<OsString> {
    std::env::var_os("WINDLASS_NCCL").filter(|value| !is_privileged() && !value.is_empty())
}

/// Whether this process has more rights than its user, as by set-user-id.
pub fn is_privileged() -> bool {
    // SAFETY: no pointers.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// Every file to try, best first, each once. Files that do not exist and Windlass itself are among them: the code
/// that opens them says why they are refused.
pub fn candidates(around: &Surroundings) -> Vec<Candidate> {
    if let Some(named) = &around.named {
        let mut path = PathBuf::from(named);
        if path.is_dir() {
            path.push(LIBRARY);
        }
        return vec![Candidate { path, reason: Reason::Named }];
    }
    let mut found = Vec::new();
    found.extend(
        around
            .mapped
            .iter()
            .filter(|object| is_nccl(object))
            .map(|object| candidate(&object.path, Reason::Mapped)),
    );
    for object in around.mapped.iter().filter(|object| object.needed.iter().any(|name| name == LIBRARY)) {
        let reason = || Reason::SearchPath(object.path.clone());
        found.extend(object.search_path.iter().map(|folder| candidate(&folder.join(LIBRARY), reason())));
    }
    found.extend(
        around
            .mapped
            .iter()
            .filter_map(|object| site_packages(&object.path))
            .map(|folder| candidate(&folder.join("nvidia/nccl/lib").join(LIBRARY), Reason::SitePackages)),
    );
    found.extend(
        around.library_path.iter().map(|folder| candidate(&folder.join(LIBRARY), Reason::LibraryPath)),
    );
    found.extend(around.cached.iter().map(|file| candidate(file, Reason::Cache)));
    found.extend(
        DEFAULT_FOLDERS
            .iter()
            .map(|folder| candidate(&Path::new(folder).join(LIBRARY), Reason::DefaultFolder)),
    );
    let mut seen = std::collections::HashSet::new();
    found.retain(|candidate| seen.insert(candidate.path.clone()));
    found
}

fn candidate(path: &Path, reason: Reason) -> Candidate {
    Candidate { path: path.to_owned(), reason }
}

fn is_nccl(object: &Object) -> bool {
    let named = object.path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"libnccl.so"));
    named || object.soname.as_deref() == Some(OsStr::new(LIBRARY))
}

/// The folder of Python packages that holds `path`.
fn site_packages(path: &Path) -> Option<&Path> {
    path.ancestors().find(|folder| {
        folder.file_name().is_some_and(|name| name == "site-packages" || name == "dist-packages")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(path: &str, soname: &str, needed: &[&str], search: &[&str]) -> Object {
        Object {
            path: path.into(),
            soname: Some(soname.into()),
            needed: needed.iter().map(OsString::from).collect(),
            search_path: search.iter().map(PathBuf::from).collect(),
            ..Object::default()
        }
    }

    fn around() -> Surroundings {
        Surroundings {
            named: None,
            mapped: vec![
                object("/usr/bin/python3", "", &["libc.so.6"], &[]),
                object(
                    "/v/site-packages/torch/lib/libtorch_cuda.so",
                    "libtorch_cuda.so",
                    &[LIBRARY],
                    &["/v/site-packages/torch/lib/../../nvidia/nccl/lib"],
                ),
                object("/else/libnccl.so.2.28.9", LIBRARY, &[], &[]),
            ],
            library_path: vec!["/l".into()],
            cached: vec!["/lib/x86_64-linux-gnu/libnccl.so.2".into()],
        }
    }

    /// The order of the search, each file once.
    #[test]
    fn order() {
        let found: Vec<_> = candidates(&around()).into_iter().map(|c| c.path.display().to_string()).collect();
        assert_eq!(
            found,
            [
                "/else/libnccl.so.2.28.9",
                "/v/site-packages/torch/lib/../../nvidia/nccl/lib/libnccl.so.2",
                "/v/site-packages/nvidia/nccl/lib/libnccl.so.2",
                "/l/libnccl.so.2",
                "/lib/x86_64-linux-gnu/libnccl.so.2",
                "/usr/lib/x86_64-linux-gnu/libnccl.so.2",
                "/lib64/libnccl.so.2",
                "/usr/lib64/libnccl.so.2",
            ]
        );
    }

    /// A named library is the only candidate; a named folder means the library in it.
    #[test]
    fn named_alone() {
        let named = |value: &str| candidates(&Surroundings { named: Some(value.into()), ..around() });
        assert_eq!(named("/x/libnccl.so.2"), [candidate(Path::new("/x/libnccl.so.2"), Reason::Named)]);
        assert_eq!(named("/usr")[0].path, Path::new("/usr/libnccl.so.2"));
    }
}
