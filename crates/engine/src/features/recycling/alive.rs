//! Runs work that needs a device at rest while no communicator of this process lives. Nothing of NCCL's runs then, nor will before the
//! next communicator [begins].

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Duration;

use windlass_base::scoped::Flagged;
use windlass_base::stats::count;
use windlass_base::thread;

/// Whether such work runs. A new communicator waits for it.
static AT_WORK: AtomicBool = AtomicBool::new(false);

/// How long a new communicator waits.
const WAITS_FOR: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_micros(100);

/// Called when a communicator has been counted, before the program can use it. Waits for running work, up to [`WAITS_FOR`].
pub(crate) fn begins() {
    wait(&AT_WORK, WAITS_FOR);
}

/// Whether no communicator lives.
pub(crate) fn are_none() -> bool {
    count::living() == 0
}

/// Runs `act` if no communicator lives, and no other such work runs.
pub(crate) fn while_none(act: impl FnOnce()) {
    work(&AT_WORK, are_none, act);
}

fn wait(at_work: &AtomicBool, within: Duration) {
    // The communicator was counted before this fence. `work` sets its flag, then reads the count. So one of the two sees the other.
    fence(Ordering::SeqCst);
    thread::wait_while(within, LOOK_EVERY, || at_work.load(Ordering::Acquire));
}

fn work(at_work: &AtomicBool, are_none: impl FnOnce() -> bool, act: impl FnOnce()) {
    let Some(_at_work) = Flagged::by(at_work) else { return };
    fence(Ordering::SeqCst);
    if are_none() {
        act();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// No work runs beside a communicator, nor twice at once. A communicator that begins meanwhile waits, but not for ever.
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
