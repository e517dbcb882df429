//! The process's end, which may begin more than once: exit handlers that are older than ours run behind it, and whatever NCCL can do in
//! them, ours can. What our handler has ended, the worker above all, begins again at their first call that needs it, and our
//! handler is ordered again: it runs as soon as theirs has returned, still before the driver's.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;

use windlass_base::gpu;
use windlass_base::guard;
use windlass_base::process;
use windlass_base::thread;

/// How often it begins again: a thread for which the end does not wait may call and call.
const BEGINNINGS_MAX: u32 = 64;
/// Giving memory back takes milliseconds, on a machine that does nothing else.
const EXIT_WITHIN: Duration = Duration::from_secs(5);

/// What our handler does, and what begins all that again.
#[derive(Debug)]
struct Handler {
    end: fn(),
    begin_again: fn(),
}

static HANDLER: OnceCell<Handler> = OnceCell::new();
/// Whether our handler has run and nothing has begun again since.
static IS_OVER: AtomicBool = AtomicBool::new(false);

/// Has `end` done when the process ends, and `begin_again` at a call behind that. Once.
pub(crate) fn handle(end: fn(), begin_again: fn()) {
    HANDLER.get_or_init(|| {
        process::on_exit(at_exit);
        Handler { end, begin_again }
    });
}

/// On a thread of its own: what this one had in thread-local storage is gone by now, the driver's part of it, too. Waited
/// for a moment only: the driver may be stuck.
extern "C" fn at_exit() {
    static DONE: AtomicBool = AtomicBool::new(false);
    let Some(handler) = HANDLER.get() else { return };
    if windlass_bootstrap::is_in_child() {
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
            let until = Instant::now() + EXIT_WITHIN;
            while begun.is_ok() && !DONE.load(Ordering::Acquire) && Instant::now() < until {
                std::thread::sleep(Duration::from_micros(200));
            }
            if DONE.load(Ordering::Acquire) {
                is_over();
            }
        },
    );
}

/// Our handler has run.
fn is_over() {
    static ENDINGS: AtomicU32 = AtomicU32::new(0);
    let again = ENDINGS.fetch_add(1, Ordering::Relaxed) < BEGINNINGS_MAX;
    IS_OVER.store(again, Ordering::Release);
}

/// Something needs what our handler may have ended.
#[inline]
pub(crate) fn go_on() {
    if IS_OVER.load(Ordering::Relaxed) {
        begin_again();
    }
}

#[cold]
fn begin_again() {
    // The driver has gone: its memory must not be looked at any more, and nobody can use it.
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
