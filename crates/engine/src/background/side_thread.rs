//! Runs work that may take long (it asks peers' processes, or the driver) on threads beside the application's. The end of the process
//! waits for such threads at most [`END_WITHIN`], and lets none begin.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, PoisonError, mpsc};
use std::time::Duration;

use windlass_base::lock::Mutex;
use windlass_base::scoped::Counted;
use windlass_base::thread;

/// How long the end of the process waits for running threads.
const END_WITHIN: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_micros(200);

/// The side threads that run.
#[derive(Debug)]
struct Running {
    count: AtomicUsize,
    is_ending: AtomicBool,
    /// Held while a thread decides to pause, and while the end is announced; `ends` then wakes the thread.
    pausing: Mutex<()>,
    ends: Condvar,
}

static RUNNING: Running = Running::new();

/// A running side thread.
#[derive(Debug)]
struct One<'a>(&'a Running, #[expect(dead_code, reason = "counts until it is dropped")] Counted<'a>);

impl Running {
    const fn new() -> Running {
        let (count, is_ending) = (AtomicUsize::new(0), AtomicBool::new(false));
        Running { count, is_ending, pausing: Mutex::new(()), ends: Condvar::new() }
    }

    /// Counts a new thread; none once the end has begun.
    fn begin(&self) -> Option<One<'_>> {
        // The count before the flag, while the end sets the flag before it reads the count: one of the two sees the other.
        let one = One(self, Counted::by(&self.count));
        (!self.is_ending.load(Ordering::SeqCst)).then_some(one)
    }

    /// Announces the end and waits for all threads, at most `within`. Returns whether none runs any more.
    fn end(&self, within: Duration) -> bool {
        let pausing = self.pausing.lock();
        self.is_ending.store(true, Ordering::SeqCst);
        drop(pausing);
        self.ends.notify_all();
        thread::wait_while(within, LOOK_EVERY, || self.count.load(Ordering::SeqCst) > 0)
    }
}

impl One<'_> {
    /// Pauses. Returns false if the end has begun.
    fn pause(&self, at_most: Duration) -> bool {
        let pausing = self.0.pausing.lock();
        let goes_on = |_: &mut ()| !self.0.is_ending.load(Ordering::SeqCst);
        let paused = self.0.ends.wait_timeout_while(pausing, at_most, goes_on);
        paused.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Calls `act` until it returns false, or the end begins.
    fn repeat(&self, each: Duration, mut act: impl FnMut() -> bool) {
        while act() && self.pause(each) {}
    }
}

/// Runs `act` on a side thread. Waits `within` for its result, or not at all. None if the result has not come, or the process ends.
pub(crate) fn run<T: Send + 'static>(
    within: Option<Duration>,
    act: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (tell, answer) = mpsc::sync_channel(1);
    begin(move |_| {
        // The caller may have stopped waiting.
        let _ = tell.send(act());
    })?;
    answer.recv_timeout(within?).ok()
}

/// Calls `act` on a side thread, now and after each `pause`, until it returns false or the process ends.
pub(crate) fn run_while(pause: Duration, act: impl FnMut() -> bool + Send + 'static) {
    begin(move |one| one.repeat(pause, act));
}

fn begin(act: impl FnOnce(&One) + Send + 'static) -> Option<()> {
    let one = RUNNING.begin()?;
    let begun = thread::spawn("windlass-side", move || act(&one));
    begun.map(drop).inspect_err(|error| log::warn!("no side thread: {error}")).ok()
}

/// Lets side threads begin again after [`end`].
pub(crate) fn begin_again() {
    RUNNING.is_ending.store(false, Ordering::SeqCst);
}

/// Ends all at the end of the process: waits for side threads, and lets none begin.
pub(crate) fn end() {
    if !RUNNING.end(END_WITHIN) {
        log::warn!("the process ends while a side thread works");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The end waits for a running thread, though not for ever, and no thread begins later.
    #[test]
    fn ends() {
        static HERE: Running = Running::new();
        let one = HERE.begin().unwrap();
        assert!(!HERE.end(Duration::ZERO));
        assert!(HERE.begin().is_none());
        let ends = std::thread::spawn(|| HERE.end(Duration::from_secs(60)));
        drop(one);
        assert!(ends.join().unwrap());
    }

    /// Repeated work stops when it returns false, and during a pause when the end begins.
    #[test]
    fn repeats() {
        static HERE: Running = Running::new();
        let one = HERE.begin().unwrap();
        let mut left = 3;
        one.repeat(Duration::ZERO, || {
            left -= 1;
            left > 0
        });
        assert_eq!(left, 0);
        let (tell, told) = mpsc::channel();
        let repeats =
            std::thread::spawn(move || one.repeat(Duration::from_secs(3600), || tell.send(()).is_ok()));
        told.recv().unwrap();
        assert!(HERE.end(Duration::from_secs(60)));
        repeats.join().unwrap();
        assert!(told.recv().is_err(), "once");
    }

    #[test]
    fn answers() {
        assert_eq!(run(Some(Duration::from_secs(60)), || 5), Some(5));
        assert_eq!(run(None, || 5), None);
        let (go, gone) = mpsc::channel::<()>();
        assert_eq!(run(Some(Duration::ZERO), move || gone.recv().is_ok()), None);
        drop(go);
    }
}
