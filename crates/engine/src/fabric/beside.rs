//! What is done beside the application's threads, on a thread of its own each time, because it may take long: it asks peers'
//! processes. The process's end waits for such threads a while, and lets none begin.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::thread;

/// As long as the end waits for what hangs.
const END_WITHIN: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_micros(200);

/// How many run.
#[derive(Debug)]
struct Running {
    count: AtomicU32,
    is_ending: AtomicBool,
}

static RUNNING: Running = Running::new();

/// One of them, until dropped.
#[derive(Debug)]
struct One<'a>(&'a Running);

impl Running {
    const fn new() -> Running {
        Running { count: AtomicU32::new(0), is_ending: AtomicBool::new(false) }
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
        self.is_ending.store(true, Ordering::SeqCst);
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

impl Drop for One<'_> {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Has this done, and waits for its answer so long, or not at all; none if that has not come, or the process ends.
pub(super) fn run<T: Send + 'static>(
    within: Option<Duration>,
    act: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let one = RUNNING.begin()?;
    let (tell, answer) = mpsc::sync_channel(1);
    let begun = thread::spawn("windlass-give", move || {
        let _one = one;
        // Who asked may have stopped waiting.
        let _ = tell.send(act());
    });
    if let Err(error) = begun {
        log::warn!("no thread to give registrations back on: {error}");
        return None;
    }
    answer.recv_timeout(within?).ok()
}

/// It goes on after all.
pub(super) fn begin_again() {
    RUNNING.is_ending.store(false, Ordering::SeqCst);
}

/// The process ends.
pub(super) fn end() {
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

    #[test]
    fn answers() {
        assert_eq!(run(Some(Duration::from_secs(60)), || 5), Some(5));
        assert_eq!(run(None, || 5), None);
        let (go, gone) = mpsc::channel::<()>();
        assert_eq!(run(Some(Duration::ZERO), move || gone.recv().is_ok()), None);
        drop(go);
    }
}
