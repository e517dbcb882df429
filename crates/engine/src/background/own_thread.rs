//! Runs work on a thread of Windlass's while the calling thread waits. An init needs more stack than some programs' threads have, and so does the
//! driver below it. NCCL builds communicators on threads of its own, too.

use std::panic;

use windlass_base::gpu;
use windlass_base::thread;

/// Runs `act` with the calling thread's current context, and returns its result. A panic of `act` becomes the caller's.
pub(crate) fn run<T: Send>(act: impl FnOnce() -> T + Send) -> T {
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

    /// The work runs on another thread; its result and its panic are the caller's.
    #[test]
    fn results_and_panics() {
        let here = std::thread::current().id();
        assert_ne!(run(|| std::thread::current().id()), here);
        let panicked = panic::catch_unwind(|| run(|| panic::resume_unwind(Box::new(7))));
        assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&7));
    }
}
