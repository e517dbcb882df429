//! Opens the real library: once, by absolute path, never ourselves.

use std::ffi::{CStr, CString, c_int};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use libloading::os::unix::Library;
use once_cell::sync::OnceCell;

use crate::find::{self, Candidate, Surroundings};
use crate::missing;
use crate::objects::{self, Object};
use crate::slots::{ENTRIES, INSIDE, SLOTS};

/// A function that every Windlass library exports, and no NCCL: how we know ourselves and our copies.
pub const MARK: &CStr = c"windlassGetVersion";

/// The opened library.
#[derive(Debug)]
pub struct RealLibrary {
    /// The file, absolute.
    pub path: PathBuf,
    /// Why this one.
    pub chosen: Candidate,
    /// Whether its own calls of public names stay inside it.
    pub deep_bound: bool,
    /// Candidates that were refused before it.
    pub refused: Vec<Refusal>,
}

/// A candidate and why it was not taken.
#[derive(Debug)]
pub struct Refusal {
    /// The file and why it was looked at.
    pub candidate: Candidate,
    /// Why not.
    pub why: String,
}

static OPENED: OnceCell<RealLibrary> = OnceCell::new();

/// The library, if it is open.
pub fn opened() -> Option<&'static RealLibrary> {
    OPENED.get()
}

/// Opens the library and fills every cell, or tells all that was tried. A failure is not remembered: a library
/// that a program maps later is found then. Threads that come meanwhile wait.
pub fn open() -> Result<&'static RealLibrary, Vec<Refusal>> {
    OPENED.get_or_try_init(search_and_open)
}

fn search_and_open() -> Result<RealLibrary, Vec<Refusal>> {
    let around = Surroundings::of_this_process();
    let deep_bound = free_is_libcs(&around.mapped);
    let mut refused = Vec::new();
    for candidate in find::candidates(&around) {
        match open_candidate(&candidate, &around.mapped, deep_bound) {
            Ok((library, path)) => {
                fill_cells(&library);
                note_inside();
                // Never closed: the cells point into it.
                std::mem::forget(library);
                return Ok(RealLibrary { path, chosen: candidate, deep_bound, refused });
            }
            Err(why) => refused.push(Refusal { candidate, why }),
        }
    }
    Err(refused)
}

fn open_candidate(
    candidate: &Candidate,
    mapped: &[Object],
    deep_bound: bool,
) -> Result<(Library, PathBuf), String> {
    let path = std::fs::canonicalize(&candidate.path).map_err(|error| reason(&error))?;
    if is_this_library(&path, mapped) {
        return Err("it is Windlass itself".into());
    }
    let bind = if deep_bound { libc::RTLD_DEEPBIND } else { 0 };
    let library = load(&path, libc::RTLD_NOW | libc::RTLD_LOCAL | bind)?;
    if symbol(&library, MARK).is_some() {
        return Err("it is a copy of Windlass".into());
    }
    if symbol(&library, c"ncclGetVersion").is_none() {
        return Err("it has no ncclGetVersion".into());
    }
    // Never unmapped, even if others close it: NCCL's threads and CUDA callbacks outlive any close.
    std::mem::forget(load(&path, libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NODELETE | bind)?);
    Ok((library, path))
}

/// Keeps this very library mapped until the process ends, whoever closes it: exit handlers, thread-local
/// destructors and graphs may call into it later than any `dlclose`.
pub fn stay_mapped() {
    let mapped = objects::mapped();
    let Some(own) = objects::holding(&mapped, own_address()) else { return };
    if let Ok(library) = load(&own.path, libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE) {
        std::mem::forget(library);
    }
}

fn reason(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::NotFound => "no such file".into(),
        _ => error.to_string(),
    }
}

fn load(path: &Path, flags: c_int) -> Result<Library, String> {
    // SAFETY: opening runs the library's constructors; the file is what the user or the loader calls NCCL.
    unsafe { Library::open(Some(path), flags) }.map_err(|error| {
        std::error::Error::source(&error).map_or_else(|| error.to_string(), |cause| cause.to_string())
    })
}

fn symbol(library: &Library, name: &CStr) -> Option<*mut ()> {
    // SAFETY: only the address is taken here; who calls it knows the signature from the list of entry points.
    unsafe { library.get::<*mut ()>(name) }.ok().map(|address| *address).filter(|address| !address.is_null())
}

fn is_this_library(path: &Path, mapped: &[Object]) -> bool {
    let Some(own) = objects::holding(mapped, own_address()) else { return false };
    match (std::fs::metadata(path), std::fs::metadata(&own.path)) {
        (Ok(one), Ok(other)) => (one.dev(), one.ino()) == (other.dev(), other.ino()),
        _ => false,
    }
}

fn own_address() -> usize {
    open_candidate as *const () as usize
}

/// A deep-bound NCCL calls libc's `free` on what libc's own functions took from a preloaded allocator's `malloc`:
/// that aborts. So deep binding is only for processes whose `free` is libc's.
fn free_is_libcs(mapped: &[Object]) -> bool {
    let free = symbol(&Library::this(), c"free").map_or(0, |address| address as usize);
    let libc_text = libc::gnu_get_libc_version as *const () as usize;
    match (objects::holding(mapped, free), objects::holding(mapped, libc_text)) {
        (Some(one), Some(other)) => one.path == other.path,
        _ => false,
    }
}

fn fill_cells(library: &Library) {
    for (index, (entry, cell)) in ENTRIES.iter().zip(&SLOTS).enumerate() {
        let address = CString::new(entry.name).ok().and_then(|name| symbol(library, &name));
        cell.store(address.unwrap_or_else(|| missing::in_library(index)), Ordering::Release);
    }
}

fn note_inside() {
    if crate::slots::forwards_everything() {
        return;
    }
    let mapped = objects::mapped();
    let real = SLOTS[crate::slots::Entry::ncclGetVersion as usize].load(Ordering::Acquire) as usize;
    for (range, address) in [(0, real), (2, own_address())] {
        if let Some(object) = objects::holding(&mapped, address) {
            INSIDE[range].store(object.text.0, Ordering::Relaxed);
            INSIDE[range + 1].store(object.text.1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file that is not there, and one that is no library, are refused with what the system says.
    #[test]
    fn refusals() {
        let around = Surroundings { mapped: objects::mapped(), ..Surroundings::default() };
        let refuse = |path: &str| {
            let candidate = Candidate { path: path.into(), reason: find::Reason::Named };
            open_candidate(&candidate, &around.mapped, true).map(|_| ()).unwrap_err()
        };
        assert_eq!(refuse("/no/such/libnccl.so.2"), "no such file");
        assert!(refuse("/etc/passwd").contains("invalid ELF header"), "{}", refuse("/etc/passwd"));
        assert_eq!(refuse(&std::env::current_exe().unwrap().display().to_string()), "it is Windlass itself");
        assert!(refuse("/lib/x86_64-linux-gnu/libm.so.6").contains("no ncclGetVersion"));
    }

    /// In a plain process `free` is libc's.
    #[test]
    fn plain_allocator() {
        assert!(free_is_libcs(&objects::mapped()));
    }
}
