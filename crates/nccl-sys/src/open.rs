//! Opens the real library: once, by absolute path, and never Windlass itself.

use std::ffi::{CStr, CString, c_int};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use libloading::os::unix::Library;
use once_cell::sync::OnceCell;

use crate::exported::MARK;
use crate::find::{self, Candidate, Surroundings};
use crate::missing;
use crate::objects::{self, Object};
use crate::slots::{self, Description, ENTRIES, Entry, SLOTS};

/// The opened library.
#[derive(Clone, Debug)]
pub struct RealLibrary {
    /// The file, absolute.
    pub path: PathBuf,
    /// Why this file was chosen.
    pub chosen: Candidate,
    /// Candidates that were refused before it.
    pub refused: Vec<Refusal>,
}

/// A candidate and why it was not taken.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// The refused candidate.
    pub candidate: Candidate,
    /// Why it was refused.
    pub why: String,
}

static OPENED: OnceCell<RealLibrary> = OnceCell::new();

/// The library, if it is open.
pub fn opened() -> Option<&'static RealLibrary> {
    OPENED.get()
}

/// A library that is open, but to which no call goes yet.
#[derive(Clone)]
struct Found {
    library: RealLibrary,
    /// The address of each entry point, in the order of [`ENTRIES`].
    cells: Vec<usize>,
    inside: [(usize, usize); 2],
}

/// The library that was opened when the program was loaded.
static AT_LOAD: OnceCell<Found> = OnceCell::new();

/// Opens the library and fills every cell, or returns all refused candidates. A failure is not remembered: a library
/// that a program maps later is found at the next call.
///
/// Holds no lock while the loader works. The library's constructors may call its public names, which reach Windlass
/// (NCCL 2.30.3 does so). A thread that waited here in a constructor would hold the loader's
/// lock, which the opening thread needs. So every thread searches for itself (the loader opens the file once), and
/// the first to finish fills the cells.
pub fn open() -> Result<&'static RealLibrary, Vec<Refusal>> {
    if let Some(library) = OPENED.get() {
        return Ok(library);
    }
    // Does not search again: options that the program has set since could lead to a second library.
    let found = AT_LOAD.get().cloned().map_or_else(search_and_open, Ok)?;
    Ok(OPENED.get_or_init(|| take(found)))
}

/// Opens the library at load time, without filling the cells, if the program or one of its libraries links NCCL. The loader
/// alone would have opened NCCL by now. The program's exit handlers then run before NCCL's destructors, while NCCL and its CUDA
/// runtime still work; if opened at the first call, NCCL's destructors would run first. A failure is reported at the first
/// call.
pub fn open_where_linked() {
    if objects::is_needed(c"libnccl.so") {
        search_and_open().into_iter().for_each(|found| drop(AT_LOAD.set(found)));
    }
}

/// The function for a call that the library's own constructors make while this thread opens it. The cells are not
/// filled yet, since other threads must not enter before the constructors have run.
pub fn address_while_opening(index: usize) -> Option<*const ()> {
    static CELLS: OnceCell<Vec<usize>> = OnceCell::new();
    if CELLS.get().is_none() {
        let cells = search_and_open().ok()?.cells;
        let _ = CELLS.set(cells);
    }
    CELLS.get().map(|cells| cells[index] as *const ())
}

fn search_and_open() -> Result<Found, Vec<Refusal>> {
    let around = Surroundings::of_this_process();
    let mut refused = Vec::new();
    for candidate in find::candidates(&around) {
        match open_candidate(&candidate, &around.mapped) {
            Ok((opened, path)) => {
                let cells = addresses(&opened);
                let inside = inside(&cells);
                // Never closed, since the cells point into it.
                std::mem::forget(opened);
                let library = RealLibrary { path, chosen: candidate, refused };
                return Ok(Found { library, cells, inside });
            }
            Err(why) => refused.push(Refusal { candidate, why }),
        }
    }
    Err(refused)
}

/// Opened as the loader opens a program's libraries. RTLD_DEEPBIND would keep NCCL's calls of its own public names away from Windlass, which
/// [knows them](crate::slots::note_inside) anyway. But it would also keep from NCCL what a preload answers in libc's place: memory, host names, quotas.
fn open_candidate(candidate: &Candidate, mapped: &[Object]) -> Result<(Library, PathBuf), String> {
    let path = std::fs::canonicalize(&candidate.path).map_err(|error| reason(&error))?;
    if is_this_library(&path, mapped) {
        return Err("it is Windlass itself".into());
    }
    let library = load(&path, libc::RTLD_NOW | libc::RTLD_LOCAL)?;
    if symbol(&library, MARK).is_some() {
        return Err("it is a copy of Windlass".into());
    }
    if symbol(&library, c"ncclGetVersion").is_none() {
        return Err("it has no ncclGetVersion".into());
    }
    // Never unmapped, even if others close it: NCCL's threads and CUDA callbacks go on after any close.
    std::mem::forget(load(&path, libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NODELETE)?);
    Ok((library, path))
}

/// Keeps this library mapped until the process ends, even after a `dlclose`. Exit handlers, thread-local destructors
/// and graphs may call into it later.
pub fn stay_mapped() {
    let mapped = objects::mapped();
    let Some(own) = objects::holding(&mapped, own_address()) else { return };
    if let Ok(library) = load(&own.path, libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE) {
        std::mem::forget(library);
    }
}

/// The device that the real library's CUDA runtime has for this thread, or CUDA's error code. None where that runtime is linked into the
/// library, as in NVIDIA's builds: then nobody else can ask it.
pub fn device_of_runtime() -> Option<Result<c_int, c_int>> {
    let library = load(&opened()?.path, libc::RTLD_LAZY | libc::RTLD_NOLOAD).ok()?;
    // Found in the library or in what it needs, in nothing else.
    let found = symbol(&library, c"cudaGetDevice")?;
    // SAFETY: the signature is that of CUDA's runtime for this name in every release; the output is a local.
    unsafe {
        let ask: unsafe extern "C" fn(*mut c_int) -> c_int = std::mem::transmute(found);
        let mut device = 0;
        match ask(&mut device) {
            0 => Some(Ok(device)),
            code => Some(Err(code)),
        }
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
    // SAFETY: only the address is taken here; callers know the signature from the list of entry points.
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

fn addresses(library: &Library) -> Vec<usize> {
    let find = |(index, entry): (usize, &Description)| {
        let address = CString::new(entry.name).ok().and_then(|name| symbol(library, &name));
        address.unwrap_or_else(|| missing::in_library(index)) as usize
    };
    ENTRIES.iter().enumerate().map(find).collect()
}

/// The first address and length of the real library's text and of this library's.
fn inside(cells: &[usize]) -> [(usize, usize); 2] {
    let mapped = objects::mapped();
    [cells[Entry::ncclGetVersion as usize], own_address()]
        .map(|address| objects::holding(&mapped, address).map_or((0, 0), |object| object.text))
}

/// Fills the cells. Only stores: other threads wait for it meanwhile.
fn take(found: Found) -> RealLibrary {
    for (cell, address) in SLOTS.iter().zip(found.cells) {
        cell.store(address as *mut (), Ordering::Release);
    }
    slots::note_inside(found.inside);
    found.library
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A missing file and a file that is no library are refused with the system's reason.
    #[test]
    fn refusals() {
        let around = Surroundings { mapped: objects::mapped(), ..Surroundings::default() };
        let refuse = |path: &str| {
            let candidate = Candidate { path: path.into(), reason: find::Reason::Named };
            open_candidate(&candidate, &around.mapped).map(|_| ()).unwrap_err()
        };
        assert_eq!(refuse("/no/such/libnccl.so.2"), "no such file");
        assert!(refuse("/etc/passwd").contains("invalid ELF header"), "{}", refuse("/etc/passwd"));
        assert_eq!(refuse(&std::env::current_exe().unwrap().display().to_string()), "it is Windlass itself");
        assert!(refuse("/lib/x86_64-linux-gnu/libm.so.6").contains("no ncclGetVersion"));
    }
}
