//! An attempt to materialize a lazy communicator that fails on one rank fails on all: who is at it hears of it, and so does who comes to it later.
//! The lazy communicator stays, and the next attempt is the next one of all.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nccl_sys::{ncclRemoteError, ncclResult_t, ncclSuccess};

use crate::forward::known;
use windlass_base::error::refuse;
use windlass_base::guard;
use windlass_base::thread;

use super::communicator::LazyCommunicator;
use super::stage::{INIT_WITHIN, Stage};

pub(super) const WHY: &str = "NCCL did not build the communicator behind a lazy one on another rank";

/// How long an init takes to stop, at most: then what it has stays.
const OUT_WITHIN: Duration = Duration::from_secs(20);

/// How often it is looked whether NCCL's init has come to its end.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// From now on it hears of other ranks' attempts.
pub(super) fn listen(lazy: &Arc<LazyCommunicator>) {
    let lazy_or_none = Arc::downgrade(lazy);
    lazy.peer_group.attempts().on_lost(move |attempt| {
        let lazy_or_none = lazy_or_none.clone();
        let give_up = move || {
            let end = || lazy_or_none.upgrade().into_iter().for_each(|lazy| lazy.give_up(attempt));
            guard::or_else(|| (), end);
        };
        // NCCL's abort may take its time, and who told this must not wait.
        if let Err(error) = thread::spawn("windlass-give-up", give_up) {
            log::warn!("no thread to end an attempt on, which waits for a rank that has failed: {error}");
        }
    });
}

impl LazyCommunicator {
    /// The number of the next attempt, unless it is lost already.
    pub(super) fn next_attempt(&self) -> Result<u64, ncclResult_t> {
        let attempt = self.attempts.fetch_add(1, Ordering::Relaxed);
        if self.peer_group.attempts().has_lost(attempt) {
            return Err(refuse(ncclRemoteError, format_args!("{WHY}")));
        }
        Ok(attempt)
    }

    /// Whether nobody waits for what this attempt needs any more.
    pub(super) fn is_over(&self, attempt: u64) -> bool {
        self.aborted.load(Ordering::Acquire) || self.peer_group.attempts().has_lost(attempt)
    }

    /// Tells the others what this rank's attempt came to, unless they have told it.
    pub(super) fn tell(&self, attempt: u64, result: ncclResult_t) -> ncclResult_t {
        if result != ncclSuccess && !self.peer_group.attempts().has_lost(attempt) {
            self.peer_group.attempts().lose(attempt);
        }
        result
    }

    /// Waits for the thread that materializes, which has been told to stop. False: it does not.
    pub(super) fn is_out(&self) -> bool {
        let until = Instant::now() + OUT_WITHIN;
        while *self.stage() == Stage::Aborting && Instant::now() < until {
            std::thread::sleep(LOOK_EVERY);
        }
        *self.stage() != Stage::Aborting
    }

    /// Ends this rank's part in an attempt that another rank has failed at, if it does not end by itself.
    fn give_up(&self, attempt: u64) {
        let until = Instant::now() + INIT_WITHIN;
        loop {
            let mut stage = self.stage();
            let is_at_it = *stage == Stage::Materializing
                && self.attempts.load(Ordering::Relaxed) == attempt.saturating_add(1);
            let written = self.written.load(Ordering::Acquire);
            if !is_at_it {
                return;
            }
            if Instant::now() >= until && !written.is_null() {
                *stage = Stage::Aborting;
                drop(stage);
                known::abort_init(written, || self.is_out());
                return;
            }
            drop(stage);
            std::thread::sleep(LOOK_EVERY);
        }
    }
}
