//! What waits for a device that is at rest may be done while no communicator of this process is alive: nothing of NCCL's runs then, nor will
//! before the next communicator [is known](begins).

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::{Duration, Instant};

use windlass_base::stats::count;

/// Something is done that a new communicator waits for.
static AT_WORK: AtomicBool = AtomicBool::new(false);

/// As long as a new communicator waits.
const WAITS_FOR: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_micros(100);

/// A communicator has been counted, and the application cannot use it yet.
pub(crate) fn begins() {
    wait(&AT_WORK, WAITS_FOR);
}

/// Whether none is alive.
pub(crate) fn are_none() -> bool {
    count::living() == 0
}

/// Does this if none is alive.
pub(crate) fn while_none(act: impl FnOnce()) {
    work(&AT_WORK, are_none, act);
}

fn wait(at_work: &AtomicBool, within: Duration) {
    // It was counted before, as `work` counts after it has said that it is at work: one of the two sees the other.
    fence(Ordering::SeqCst);
    let until = Instant::now() + within;
    while at_work.load(Ordering::Acquire) && Instant::now() < until {
        std::thread::sleep(LOOK_EVERY);
    }
}

fn work(at_work: &AtomicBool, are_none: impl FnOnce() -> bool, act: impl FnOnce()) {
    if at_work.swap(true, Ordering::AcqRel) {
        return;
    }
    let _until_dropped = Work(at_work);
    fence(Ordering::SeqCst);
    if are_none() {
        act();
    }
}

struct Work<'a>(&'a AtomicBool);

impl Drop for Work<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Nothing is done beside a communicator, nor twice at once; one that begins meanwhile waits, though not for ever.
    #[test]
    fn one_or_the_other() {
        static HERE: AtomicBool = AtomicBool::new(false);
        work(&HERE, || false, || unreachable!());
        wait(&HERE, Duration::from_secs(60));
        let (go, gone) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel::<()>();
        let act = move || {
            tell.send(()).unwrap();
            gone.recv().unwrap();
        };
        let works = std::thread::spawn(|| work(&HERE, || true, act));
        told.recv().unwrap();
        wait(&HERE, Duration::ZERO);
        let waits = std::thread::spawn(|| wait(&HERE, Duration::from_secs(60)));
        work(&HERE, || true, || unreachable!());
        go.send(()).unwrap();
        waits.join().unwrap();
        works.join().unwrap();
    }
}
