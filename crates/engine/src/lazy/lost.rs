//! Makes an attempt to materialize a lazy communicator fail on all ranks if it fails on one: a rank inside the attempt is told, and a rank
//! that comes later, too. The communicator stays lazy, and the next attempt has the same number on all ranks.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nccl_sys::{ncclRemoteError, ncclResult_t, ncclSuccess};

use crate::forward::known;
use windlass_base::error::refuse;
use windlass_base::guard;
use windlass_base::thread;

use super::communicator::{LazyCommunicator, Stage};

pub(super) const WHY: &str = "NCCL did not build the communicator behind a lazy one on another rank";

/// How long an abort waits for NCCL's init to end by itself. NCCL 2.28 frees memory in use if an init is aborted in the middle
/// (seen: double frees). An init that takes longer than this waits for a rank that does not come, and can be aborted.
pub(super) const INIT_WITHIN: Duration = Duration::from_secs(3);

/// How long a stopped init may take to leave NCCL. After that, its memory is never freed.
const OUT_WITHIN: Duration = Duration::from_secs(20);

/// How often to check whether NCCL's init has ended.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Makes a lazy communicator react to attempts that failed on other ranks.
pub(super) fn listen(lazy: &Arc<LazyCommunicator>) {
    let lazy_or_none = Arc::downgrade(lazy);
    lazy.peer_group.attempts.on_lost(move |attempt| {
        let lazy_or_none = lazy_or_none.clone();
        let give_up = move || {
            let end = || lazy_or_none.upgrade().into_iter().for_each(|lazy| lazy.give_up(attempt));
            guard::or_else(|| (), end);
        };
        // NCCL's abort may take long, and the thread that tells this must not wait.
        if let Err(error) = thread::spawn("windlass-give-up", give_up) {
            log::warn!("no thread to end an attempt on, which waits for a rank that has failed: {error}");
        }
    });
}

impl LazyCommunicator {
    /// The number of the next attempt. An error if another rank has already failed at it.
    pub(super) fn next_attempt(&self) -> Result<u64, ncclResult_t> {
        let attempt = self.attempts.fetch_add(1, Ordering::Relaxed);
        if self.peer_group.attempts.has_lost(attempt) {
            return Err(refuse(ncclRemoteError, format_args!("{WHY}")));
        }
        Ok(attempt)
    }

    /// Whether this attempt was aborted here, or has failed on another rank.
    pub(super) fn is_over(&self, attempt: u64) -> bool {
        self.aborted.load(Ordering::Acquire) || self.peer_group.attempts.has_lost(attempt)
    }

    /// Tells the other ranks if this rank's attempt failed, unless they already know. Returns `result`.
    pub(super) fn tell(&self, attempt: u64, result: ncclResult_t) -> ncclResult_t {
        if result != ncclSuccess && !self.peer_group.attempts.has_lost(attempt) {
            self.peer_group.attempts.lose(attempt);
        }
        result
    }

    /// Waits for the materializing thread, which has been told to stop. False if it has not left NCCL within [`OUT_WITHIN`].
    pub(super) fn is_out(&self) -> bool {
        thread::wait_while(OUT_WITHIN, LOOK_EVERY, || *self.stage.lock() == Stage::Aborting)
    }

    /// Ends this rank's part in an attempt at which another rank has failed, if it does not end by itself within [`INIT_WITHIN`].
    fn give_up(&self, attempt: u64) {
        let until = Instant::now() + INIT_WITHIN;
        loop {
            let mut stage = self.stage.lock();
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
