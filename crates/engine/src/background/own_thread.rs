//! Runs work on a thread of Windlass's while the calling thread waits, if that one has a small stack. An init needs more than some programs' threads
//! have, and so does the driver below it. NCCL builds communicators on threads of its own, too.
//!
//! Other threads do the work themselves: a new thread cannot start while the caller holds the loader's lock, as in a library's destructor.

use std::panic;

use windlass_base::gpu;
use windlass_base::thread;

/// An init takes some 50 KiB in a release build and 130 in a debug build; the rest is for the driver.
const ENOUGH_STACK: usize = 512 << 10;

/// Runs `act` with the calling thread's current context, and returns its result. A panic of `act` becomes the caller's.
pub(crate) fn run<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    if thread::stack_left().is_none_or(|left| left >= ENOUGH_STACK) {
        return act();
    }
    on_another(act)
}

fn on_another<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    let context = gpu::opened().and_then(|driver| Some((driver, driver.current_context().ok()?)));
    let mut act = Some(act);
    let taken = &mut act;
    let ran = std::thread::scope(|scope| {
        let begun = thread::spawn_scoped(scope, "windlass-init", move || {
            context.into_iter().for_each(|(driver, context)| driver.stay_current(context));
            taken.take().map(|act| act())
        });
        begun.ok().map(|thread| thread.join().unwrap_or_else(|panicked| panic::resume_unwind(panicked)))
    });
    match (ran.flatten(), act) {
        (Some(result), _) => result,
        (None, Some(act)) => act(),
        (None, None) => unreachable!("it was run"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With a small stack the work runs on another thread; its result and its panic are the caller's.
    #[test]
    fn results_and_panics() {
        let id = || std::thread::current().id();
        let within =
            |bytes| std::thread::Builder::new().stack_size(bytes).spawn(move || run(id) == id()).unwrap();
        assert!(!within(128 << 10).join().unwrap() && within(2 << 20).join().unwrap());
        let panicked = panic::catch_unwind(|| on_another(|| panic::resume_unwind(Box::new(7))));
        assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&7));
    }
}
