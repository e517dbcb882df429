//! What is done beside the application's threads, on a thread of its own, because it may take long: it asks peers' processes,
//! or the driver. The process's end waits for such threads a while, and lets none begin.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use windlass_base::thread;

/// As long as the end waits for what hangs.
const END_WITHIN: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_micros(200);

/// How many run.
#[derive(Debug)]
struct Running {
    count: AtomicU32,
    is_ending: AtomicBool,
    /// Held while one decides to pause, and to say that the end has begun: with `ends` that wakes it.
    pausing: Mutex<()>,
    ends: Condvar,
}

static RUNNING: Running = Running::new();

/// One of them, until dropped.
#[derive(Debug)]
struct One<'a>(&'a Running);

impl Running {
    const fn new() -> Running {
        let (count, is_ending) = (AtomicU32::new(0), AtomicBool::new(false));
        Running { count, is_ending, pausing: Mutex::new(()), ends: Condvar::new() }
    }

    /// None once the end has begun.
    fn begin(&self) -> Option<One<'_>> {
        // Counted before it looks, as the end looks after it has said so: one of the two sees the other.
        self.count.fetch_add(1, Ordering::SeqCst);
        let one = One(self);
        (!self.is_ending.load(Ordering::SeqCst)).then_some(one)
    }

    /// Whether none runs any more.
    fn end(&self, within: Duration) -> bool {
        let pausing = self.pausing.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_ending.store(true, Ordering::SeqCst);
        drop(pausing);
        self.ends.notify_all();
        let until = Instant::now() + within;
        while self.count.load(Ordering::SeqCst) > 0 {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        true
    }
}

impl One<'_> {
    /// Pauses; whether the end has not begun.
    fn pause(&self, at_most: Duration) -> bool {
        let pausing = self.0.pausing.lock().unwrap_or_else(PoisonError::into_inner);
        let goes_on = |_: &mut ()| !self.0.is_ending.load(Ordering::SeqCst);
        let paused = self.0.ends.wait_timeout_while(pausing, at_most, goes_on);
        paused.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Does this until it says that it is over, or the end begins.
    fn repeat(&self, each: Duration, mut act: impl FnMut() -> bool) {
        while act() && self.pause(each) {}
    }
}

impl Drop for One<'_> {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Has this done, and waits for its answer so long, or not at all; none if that has not come, or the process ends.
pub(crate) fn run<T: Send + 'static>(
    within: Option<Duration>,
    act: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (tell, answer) = mpsc::sync_channel(1);
    begin(move |_| {
        // Who asked may have stopped waiting.
        let _ = tell.send(act());
    })?;
    answer.recv_timeout(within?).ok()
}

/// Has this done now and after each such pause, on one thread, until it says that it is over, or the process ends.
pub(crate) fn run_while(pause: Duration, act: impl FnMut() -> bool + Send + 'static) {
    begin(move |one| one.repeat(pause, act));
}

fn begin(act: impl FnOnce(&One) + Send + 'static) -> Option<()> {
    let one = RUNNING.begin()?;
    let begun = thread::spawn("windlass-give", move || act(&one));
    begun.map(drop).inspect_err(|error| log::warn!("no thread to give memory back on: {error}")).ok()
}

/// It goes on after all.
pub(crate) fn begin_again() {
    RUNNING.is_ending.store(false, Ordering::SeqCst);
}

/// The process ends.
pub(crate) fn end() {
    if !RUNNING.end(END_WITHIN) {
        log::warn!("the process ends while registrations are being given back");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The end waits for one that runs, though not for ever, and none begins after.
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

    /// What is repeated stops when it says so, and in the middle of a pause when the end begins.
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
