//! The process's end, which may begin more than once: exit handlers that are older than ours run behind it, and whatever NCCL can do in
//! them, ours can. What our handler has ended, the worker above all, begins again at their first call that needs it, and our
//! handler is ordered again: it runs as soon as theirs has returned, still before the driver's.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use windlass_base::gpu;
use windlass_base::process;

use super::{closing, side_thread, worker};

/// How often it begins again: a thread for which the end does not wait may call and call.
const BEGINNINGS_MAX: u32 = 64;

/// Whether our handler has run and nothing has begun again since.
static IS_OVER: AtomicBool = AtomicBool::new(false);

/// Our handler has run.
pub(super) fn is_over() {
    static ENDINGS: AtomicU32 = AtomicU32::new(0);
    let again = ENDINGS.fetch_add(1, Ordering::Relaxed) < BEGINNINGS_MAX;
    IS_OVER.store(again, Ordering::Release);
}

/// Something needs what our handler may have ended.
#[inline]
pub(super) fn go_on() {
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
    if IS_OVER.swap(false, Ordering::AcqRel) {
        log::debug!("a call after the exit handler: the worker begins again");
        process::on_exit(closing::at_exit);
        closing::begin_again();
        side_thread::begin_again();
        worker::begin_again();
    }
}
