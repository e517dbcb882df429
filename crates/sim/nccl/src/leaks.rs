//! The report of leaks at the process's end: communicators, registrations, windows, operators, memory and groups that were never ended.

use crate::refusal::lock;
use crate::{allocation, communicator, driver, group, import, lifecycle, strict};
use std::ffi::CStr;
use std::sync::Mutex;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::SeqCst;

/// The id of the process that used the library first, 0 before. In forked children nothing is reported.
static OWNER: AtomicI32 = AtomicI32::new(0);
/// The status that the process passed to exit.
static STATUS: AtomicI32 = AtomicI32::new(0);
static REMEMBERED: Mutex<Vec<String>> = Mutex::new(Vec::new());

unsafe extern "C" {
    fn on_exit(
        function: extern "C" fn(libc::c_int, *mut libc::c_void),
        argument: *mut libc::c_void,
    ) -> libc::c_int;
}

/// Runs after all atexit handlers and after the destructors of programs that depend on this library.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_END: extern "C" fn() = report;

/// Makes this process the owner and notes its exit status at exit; later calls do nothing.
pub fn watch_exit() {
    // SAFETY: getpid has no preconditions.
    let process = unsafe { libc::getpid() };
    if OWNER.compare_exchange(0, process, SeqCst, SeqCst).is_ok() {
        // SAFETY: the library is linked with nodelete: the function outlives all calls.
        unsafe { on_exit(note_status, std::ptr::null_mut()) };
    }
}

/// Whether this is a child forked after the library was used.
pub fn is_forked_child() -> bool {
    let owner = OWNER.load(SeqCst);
    // SAFETY: getpid has no preconditions.
    owner != 0 && owner != unsafe { libc::getpid() }
}

/// Keeps the line of a leak that was found before the process's end.
pub fn remember(line: String) {
    lock(&REMEMBERED).push(line);
}

extern "C" fn note_status(status: libc::c_int, _: *mut libc::c_void) {
    STATUS.store(status, SeqCst);
    if is_forked_child() {
        return;
    }
    // Before the driver counts leaks: its handler was registered earlier and runs later.
    import::wait_unmapped();
}

/// Frees the blocks of `ncclMemAlloc` if there are no more than Windlass's pool keeps: the program has freed those, so they are no leaks.
/// Runs after Windlass's own exit handlers.
pub extern "C" fn free_kept() {
    let _ = std::panic::catch_unwind(|| {
        if !is_forked_child() && allocation::live().len() as u64 <= windlass_has().pool_blocks {
            driver::go_on();
            allocation::free_all();
        }
    });
}

extern "C" fn report() {
    if OWNER.load(SeqCst) == 0 || is_forked_child() {
        return;
    }
    let _ = std::panic::catch_unwind(|| {
        if !strict::enabled() {
            return;
        }
        free_kept();
        let lines = lines();
        lines.iter().for_each(|line| strict::say(line));
        // A program that fails already keeps its own status.
        if !lines.is_empty() && STATUS.load(SeqCst) == 0 {
            strict::leave();
        }
    });
}

fn lines() -> Vec<String> {
    let mut lines = std::mem::take(&mut *lock(&REMEMBERED));
    let live = communicator::live();
    let kept = if live.len() as u64 <= windlass_has().cached { 0 } else { live.len() };
    for communicator in live.into_iter().take(kept) {
        lines.push(format!("{}: leak: never destroyed", communicator.name()));
        lines.extend(lifecycle::leftovers(&communicator));
    }
    for (address, bytes) in allocation::live() {
        lines.push(format!("leak: ncclMemAlloc of {bytes} bytes at {address:#x} never freed"));
    }
    let open = group::OPEN.load(SeqCst);
    if open > 0 {
        lines.push(format!("leak: {open} groups never ended"));
    }
    lines
}

/// The structure of `windlassGetStats` in `windlass.h`.
#[repr(C)]
#[derive(Default)]
struct Stats {
    size: usize,
    before: [u64; 5],
    cached: u64,
    between: [u64; 2],
    pool_blocks: u64,
}

/// Windlass's counts, zeros if it is not loaded. `cached` counts communicators that the program has ended and Windlass keeps,
/// `pool_blocks` memory that the program has freed.
fn windlass_has() -> Stats {
    type GetStats = unsafe extern "C" fn(*mut Stats) -> libc::c_int;
    let Some(found) = windlass(c"windlassGetStats") else { return Stats::default() };
    // SAFETY: a name that only Windlass exports, with the signature that its header says.
    let get = unsafe { std::mem::transmute::<*mut libc::c_void, GetStats>(found) };
    let mut stats = Stats { size: size_of::<Stats>(), ..Stats::default() };
    // SAFETY: the structure is a local, of the size that it says.
    if unsafe { get(&raw mut stats) } == 0 { stats } else { Stats::default() }
}

/// Finds an exported function of Windlass in any loaded library.
fn windlass(name: &CStr) -> Option<*mut libc::c_void> {
    struct Search<'a> {
        name: &'a CStr,
        found: *mut libc::c_void,
    }
    unsafe extern "C" fn look(
        object: *mut libc::dl_phdr_info,
        _: libc::size_t,
        search: *mut libc::c_void,
    ) -> libc::c_int {
        // SAFETY: the loader's description of an object, and the search of the caller.
        let (path, search) = unsafe { ((*object).dlpi_name, &mut *search.cast::<Search<'_>>()) };
        // SAFETY: an object that is loaded, by its own path; the handle is counted, and the process ends.
        let handle = unsafe { libc::dlopen(path, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if !handle.is_null() {
            // SAFETY: the object is loaded.
            search.found = unsafe { libc::dlsym(handle, search.name.as_ptr()) };
        }
        libc::c_int::from(!search.found.is_null())
    }
    let mut search = Search { name, found: std::ptr::null_mut() };
    // SAFETY: the function keeps none of its arguments.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut search).cast()) };
    (!search.found.is_null()).then_some(search.found)
}
