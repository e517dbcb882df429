//! Aborts a lazy communicator, from any thread: also while another thread is in NCCL to materialize it.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nccl_sys::{ncclComm_t, ncclInternalError, ncclResult_t, ncclSuccess};

use crate::forward::known::{self, End};
use windlass_base::guard;

use super::communicator::{LazyCommunicator, Stage};
use super::ending;
use super::lost::INIT_WITHIN;

/// How long an abort waits for calls that are on their way into NCCL. One that is in NCCL may wait for a rank that does not come, which
/// NCCL's abort ends.
const CALLS_WITHIN: Duration = Duration::from_millis(100);

/// What of NCCL's an abort still has to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Aborted {
    Nothing,
    /// NCCL's communicator.
    Real(ncclComm_t),
    /// NCCL's communicator, whose init is under way on another thread.
    Init(ncclComm_t),
}

impl LazyCommunicator {
    /// Aborts the communicator, from any thread. Waits at most [`INIT_WITHIN`] for another thread in NCCL, then aborts NCCL's init. Returns
    /// NCCL's result.
    pub fn abort(&self) -> ncclResult_t {
        if !guard::or_else(|| false, || self.ends.abort(INIT_WITHIN)) {
            return ending::ended();
        }
        match self.aborted_real() {
            Aborted::Nothing => ncclSuccess,
            Aborted::Real(real) => {
                self.let_go();
                known::end(End::Abort, real)
            }
            Aborted::Init(real) => {
                let real = real as usize;
                let end = || known::abort_init(real as ncclComm_t, || self.is_out());
                guard::call(|| ending::beside(end).unwrap_or(ncclInternalError))
            }
        }
    }

    fn aborted_real(&self) -> Aborted {
        let now = Instant::now();
        let (until, calls_until) = (now + INIT_WITHIN, now + CALLS_WITHIN);
        loop {
            let mut stage = self.stage.lock();
            self.aborted.store(true, Ordering::SeqCst);
            let written = self.written.load(Ordering::Acquire);
            match (*stage, self.real()) {
                (_, Some(_)) if self.calls.load(Ordering::SeqCst) > 0 && Instant::now() < calls_until => {}
                (_, Some(real)) => return Aborted::Real(real),
                (Stage::Materializing, None) if Instant::now() < until => {}
                (Stage::Materializing, None) if !written.is_null() => {
                    *stage = Stage::Aborting;
                    return Aborted::Init(written);
                }
                (Stage::Lazy, None) => {
                    let taken = self.built.lock().take();
                    return taken.map_or(Aborted::Nothing, |built| Aborted::Real(built.handle()));
                }
                _ => return Aborted::Nothing,
            }
            drop(stage);
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Prevents that it is materialized from now on. Returns whether a thread is materializing it: that thread then ends what NCCL has built.
    pub(super) fn prevent_building(&self) -> bool {
        let stage = self.stage.lock();
        self.aborted.store(true, Ordering::SeqCst);
        *stage == Stage::Materializing
    }
}
