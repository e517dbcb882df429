//! Materializes lazy communicators: NCCL builds its communicator, or a cached one is used.

use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::thread::JoinHandle;

use nccl_sys::{ncclComm_t, ncclInternalError, ncclInvalidUsage, ncclRemoteError, ncclResult_t, ncclSuccess};

use crate::features::recycling;
use crate::features::recycling::cached::{Built, Kind};
use crate::forward::init;
use crate::forward::known::{self, End};
use windlass_base::config::nccl;
use windlass_base::error::refuse;
use windlass_base::gpu::context;
use windlass_base::{guard, observers, thread};

use super::communicator::{LazyCommunicator, Stage};
use super::lost;
use super::on_device::on_device;
use super::usage::{Unfit, free_bytes};

/// What is left to do to materialize it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Begun {
    /// Nothing: it has been materialized.
    Over,
    /// Use the cached communicator that was taken at init.
    Taken,
    /// NCCL builds a communicator, with the id of this attempt.
    Attempt(u64),
}

/// A lazy communicator that is being materialized on another thread.
#[derive(Debug)]
pub enum Beside {
    /// It is already materialized, or cannot be.
    Done(ncclResult_t),
    /// The thread that materializes it.
    Thread(JoinHandle<ncclResult_t>),
}

impl Beside {
    /// Whether [`wait`](Beside::wait) returns at once.
    pub fn is_over(&self) -> bool {
        match self {
            Beside::Done(_) => true,
            Beside::Thread(thread) => thread.is_finished(),
        }
    }

    /// Waits until it is materialized, or has failed.
    pub fn wait(self) -> ncclResult_t {
        match self {
            Beside::Done(result) => result,
            Beside::Thread(thread) => thread.join().unwrap_or(ncclInternalError),
        }
    }
}

impl LazyCommunicator {
    /// Materializes it, outside groups only. Waits for all other ranks, as NCCL's own init does. After an error of NCCL's it is lazy as
    /// before, and its peer group goes on.
    pub fn materialize(&self) -> ncclResult_t {
        let begun = guard::or_else(|| Err(ncclInternalError), || self.begin());
        match begun {
            Ok(Begun::Attempt(attempt)) => {
                let result = self.build(attempt);
                let result = guard::call(|| self.finish(result, self.peer_group.attempts.has_lost(attempt)));
                guard::call(|| self.tell(attempt, result))
            }
            Ok(Begun::Taken) => guard::call(|| self.finish(ncclSuccess, false)),
            Ok(Begun::Over) => ncclSuccess,
            Err(code) => code,
        }
    }

    /// Begins to materialize it on another thread: this one may have a group open, and NCCL's groups are thread-local. Does not wait.
    pub fn materialize_beside(self: &Arc<LazyCommunicator>) -> Beside {
        if self.real().is_some() {
            return Beside::Done(ncclSuccess);
        }
        let lazy = self.clone();
        match thread::spawn("windlass-lazy", move || lazy.materialize()) {
            Ok(thread) => Beside::Thread(thread),
            Err(error) => {
                let why = format_args!("no thread to materialize a lazy communicator on: {error}");
                Beside::Done(refuse(ncclInternalError, why))
            }
        }
    }

    fn begin(&self) -> Result<Begun, ncclResult_t> {
        let mut stage = self.stage.lock();
        match *stage {
            Stage::Materialized => return Ok(Begun::Over),
            // Divergence: NCCL says nothing of two threads at once.
            Stage::Materializing | Stage::Aborting => {
                return Err(refuse(ncclInvalidUsage, format_args!("two threads call on one communicator")));
            }
            Stage::Lazy if self.aborted.load(Ordering::Acquire) => return Err(ncclInvalidUsage),
            Stage::Lazy => {}
        }
        let taken = self.built.lock().as_ref().map(Built::handle);
        // All ranks have a cached communicator, or none has.
        let begun = match taken {
            Some(_) => Begun::Taken,
            None => Begun::Attempt(self.next_attempt()?),
        };
        *stage = Stage::Materializing;
        self.written.store(taken.unwrap_or(null_mut()), Ordering::Relaxed);
        Ok(begun)
    }

    /// Runs NCCL's own init. Panics are not caught here, so that an exception of NCCL's passes through.
    fn build(&self, attempt: u64) -> ncclResult_t {
        guard::or_else(|| (), || recycling::make_room(Some(self.device)));
        let id = match self.peer_group.ids.get(0, attempt, &|| self.is_over(attempt)) {
            Ok(id) => id,
            Err(code) => return code,
        };
        let (ranks, rank) = (self.peer_group.negotiated().members.len() as u32, self.peer_group.rank());
        let configuration = self.peer_group.lineage.configuration();
        let before = free_bytes(self.device);
        // A plugin's context ends with the program's communicator, and so must NCCL's, which tells of it.
        if observers::are_on() && observers::profiler::expect(&id, rank as i32, self.handle() as usize) {
            self.mark(Unfit::Here);
        }
        let result = on_device(self.device, || init::build(&self.written, ranks, &id, rank, configuration));
        if result == ncclSuccess {
            before.into_iter().for_each(|before| self.usage.measured(self.device, before));
            let words = configuration.words();
            if words.is_none() {
                self.mark(Unfit::Here);
            }
            let configuration = [words.unwrap_or_default(), nccl::of_this_init()].concat();
            let context = context::on(self.device);
            let kind = Kind { ranks, rank, device: self.device, context, configuration };
            *self.built.lock() = Some(Built::new(kind, &id, self.written.load(Ordering::Acquire)));
        }
        result
    }

    fn finish(&self, result: ncclResult_t, is_lost: bool) -> ncclResult_t {
        let stage = self.stage.lock();
        let written = self.written.load(Ordering::Acquire);
        let aborted = self.aborted.load(Ordering::Acquire);
        if aborted || is_lost || result != ncclSuccess {
            self.undo(stage, written);
            if is_lost && !aborted {
                return refuse(ncclRemoteError, format_args!("{}", lost::WHY));
            }
            if result == ncclSuccess {
                return ncclInternalError;
            }
            return refuse(result, format_args!("NCCL did not build the communicator behind a lazy one"));
        }
        drop(stage);
        if !self.registrations.is_empty() {
            self.mark(Unfit::Here);
        }
        self.registrations.replay(written);
        let mut stage = self.stage.lock();
        if self.aborted.load(Ordering::Acquire) {
            self.undo(stage, written);
            return ncclInternalError;
        }
        *stage = Stage::Materialized;
        self.real.store(written, Ordering::Release);
        ncclSuccess
    }

    /// Makes it lazy again. Aborts what NCCL has built, unless an abort that could not wait does that.
    fn undo(&self, mut stage: MutexGuard<'_, Stage>, written: ncclComm_t) {
        let is_ours = *stage == Stage::Materializing;
        *stage = Stage::Lazy;
        self.written.store(null_mut(), Ordering::Relaxed);
        self.built.lock().take();
        drop(stage);
        if is_ours && !written.is_null() {
            known::end(End::Abort, written);
        }
    }
}
