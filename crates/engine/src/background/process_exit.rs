//! Ends Windlass's work at the end of the process, perhaps more than once. Exit handlers that were registered before Windlass's run after
//! it, and may still use communicators. At their first call that needs it, the ended work (above all the worker) begins again,
//! and Windlass's handler is registered again: it runs as soon as theirs has returned, still before the driver's.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use once_cell::sync::OnceCell;

use windlass_base::{gpu, guard, process, thread};

/// How often the work may begin again: other threads may go on making calls.
const BEGINNINGS_MAX: u32 = 64;
/// How long exit waits for the handler's thread. Freeing memory takes milliseconds on an idle machine.
const EXIT_WITHIN: Duration = Duration::from_secs(5);

/// The functions that end the work, and begin it again.
#[derive(Debug)]
struct Handler {
    end: fn(),
    begin_again: fn(),
}

static HANDLER: OnceCell<Handler> = OnceCell::new();
/// Whether the handler has run, and the work may begin again.
static IS_OVER: AtomicBool = AtomicBool::new(false);

/// Registers `end` for the end of the process, and `begin_again` for a later call. Only the first call counts.
pub(crate) fn handle(end: fn(), begin_again: fn()) {
    HANDLER.get_or_init(|| {
        process::on_exit(at_exit);
        Handler { end, begin_again }
    });
}

/// Runs the end on another thread, as the thread-local values of this one are already dropped, the driver's, too. Waits at most
/// [`EXIT_WITHIN`], as the driver may be stuck.
extern "C" fn at_exit() {
    static DONE: AtomicBool = AtomicBool::new(false);
    let Some(handler) = HANDLER.get() else { return };
    if process::is_forked() {
        return;
    }
    DONE.store(false, Ordering::Relaxed);
    let finish = || {
        guard::or_else(|| (), handler.end);
        DONE.store(true, Ordering::Release);
    };
    guard::or_else(
        || (),
        || {
            let begun = thread::spawn("windlass-exit", finish);
            let waits = || !DONE.load(Ordering::Acquire);
            if begun.is_ok() && thread::wait_while(EXIT_WITHIN, Duration::from_micros(200), waits) {
                is_over();
            }
        },
    );
}

/// Notes that the handler has run.
fn is_over() {
    static ENDINGS: AtomicU32 = AtomicU32::new(0);
    let again = ENDINGS.fetch_add(1, Ordering::Relaxed) < BEGINNINGS_MAX;
    IS_OVER.store(again, Ordering::Release);
}

/// Called before anything that needs work which the handler may have ended: begins that again.
#[inline]
pub(crate) fn go_on() {
    if IS_OVER.load(Ordering::Relaxed) {
        begin_again();
    }
}

#[cold]
fn begin_again() {
    // The driver has shut down: device memory is unusable, and its mappings must not be read.
    if gpu::opened().is_none_or(|driver| driver.current_device().is_err()) {
        return;
    }
    if IS_OVER.swap(false, Ordering::AcqRel)
        && let Some(handler) = HANDLER.get()
    {
        log::debug!("a call after the exit handler: the worker begins again");
        process::on_exit(at_exit);
        (handler.begin_again)();
    }
}
