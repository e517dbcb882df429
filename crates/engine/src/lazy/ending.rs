//! Finalizes and destroys lazy communicators. NCCL's communicator behind one is cached if it is as good as new and its work is done.

use std::ptr::null_mut;
use std::sync::atomic::Ordering;

use once_cell::sync::OnceCell;

use nccl_sys::missing::is_missing;
use nccl_sys::{
    Entry, ncclComm_t, ncclInternalError, ncclInvalidArgument, ncclResult_t, ncclStatGpuMemTotal, ncclSuccess,
};

use crate::features::recycling::cached::{self, Built};
use crate::forward::known::{self, End};
use crate::forward::queries;
use windlass_base::error::refuse;
use windlass_base::gpu::stream::Stream;
use windlass_base::gpu::{self, Home};
use windlass_base::guard;
use windlass_base::lock::Mutex;
use windlass_base::thread;

use super::communicator::LazyCommunicator;
use super::usage::Unfit;

/// How NCCL's communicator ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Disposal {
    /// Cached, after waiting for its work.
    Cached,
    /// By NCCL's destroy, on all ranks.
    Destroyed,
    /// By NCCL's abort after waiting for its work, but not for other ranks: theirs may be cached.
    Left,
    /// By NCCL's abort, at once: its work does not end.
    Aborted,
}

/// The result of a wait for NCCL's work on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waited {
    /// The work is done; or a code that says why that is unknown.
    Over(ncclResult_t),
    /// Another thread has aborted NCCL's communicator, which is gone.
    Aborted,
}

/// What the [`Disposal`] depends on.
#[derive(Clone, Copy, Debug)]
struct Facts {
    caches: bool,
    unfit: Option<Unfit>,
    has_operators: bool,
    has_registrations: bool,
    has_failed: bool,
}

fn disposal(facts: Facts) -> Disposal {
    match facts {
        Facts { caches: false, .. } | Facts { unfit: Some(Unfit::Everywhere), .. } => Disposal::Destroyed,
        Facts { has_failed: true, .. } => Disposal::Aborted,
        Facts { unfit: Some(Unfit::Here), .. }
        | Facts { has_operators: true, .. }
        | Facts { has_registrations: true, .. } => Disposal::Left,
        _ => Disposal::Cached,
    }
}

impl LazyCommunicator {
    /// Whether NCCL's communicator may outlive this one, by what all ranks know.
    fn is_kept_apart(&self) -> bool {
        self.peer_group.negotiated().caches() && self.usage.unfit() != Some(Unfit::Everywhere)
    }

    /// Waits for all work in flight, as NCCL's finalize does. NCCL's own finalize would make its communicator unfit for the cache.
    pub(super) fn finalize(&self, real: ncclComm_t) -> ncclResult_t {
        if !self.is_kept_apart() {
            return known::end(End::Finalize, real);
        }
        let real = real as usize;
        let finish = || match self.wait_for_nccl(real as ncclComm_t) {
            Waited::Over(code) => {
                self.ends.leave();
                code
            }
            // Nothing of an aborted communicator is in flight.
            Waited::Aborted => ncclSuccess,
        };
        guard::call(|| beside(finish).unwrap_or(ncclInternalError))
    }

    pub(super) fn destroy(&self) -> ncclResult_t {
        if !guard::or_else(|| false, || self.ends.destroy()) {
            return ended();
        }
        let result = self.end_alone();
        self.ends.end();
        result
    }

    fn end_alone(&self) -> ncclResult_t {
        // A group may have failed, or still hold calls of it: the thread that materializes it then ends what NCCL builds.
        if self.prevent_building() {
            return ncclSuccess;
        }
        let built = self.built.lock().take();
        match (self.real(), built) {
            (Some(real), Some(built)) => self.end_of(real, built),
            (Some(real), None) => self.end_real(End::Destroy, real),
            // It was taken from the cache and never used.
            (None, Some(built)) => guard::call(|| beside(|| keep(built)).unwrap_or(ncclInternalError)),
            (None, None) => ncclSuccess,
        }
    }

    fn end_of(&self, real: ncclComm_t, built: Built) -> ncclResult_t {
        let facts = guard::or_else(|| None, || Some(self.facts(real)));
        // An abort loses all work in flight, so the result is an error.
        let abort_unknown = || {
            self.end_real(End::Abort, real);
            let why = format_args!(
                "NCCL's communicator behind a lazy one was aborted: nobody could wait for its work"
            );
            refuse(ncclInternalError, why)
        };
        let Some(facts) = facts else { return abort_unknown() };
        match disposal(facts) {
            Disposal::Destroyed => self.end_real(End::Destroy, real),
            Disposal::Aborted => self.end_real(End::Abort, real),
            quiet => {
                let handle = real as usize;
                let wait = || Some(self.wait_for_nccl(handle as ncclComm_t));
                let waited = guard::or_else(|| None, || beside(wait).flatten());
                match (quiet, waited) {
                    // An abort from another thread has ended NCCL's communicator.
                    (_, Some(Waited::Aborted)) => ncclSuccess,
                    (Disposal::Cached, Some(Waited::Over(code))) if code == ncclSuccess => {
                        guard::call(|| {
                            let finish = || {
                                let bytes = self.bytes(&built);
                                self.let_go();
                                keep(built.holding(bytes))
                            };
                            beside(finish).unwrap_or(ncclInternalError)
                        })
                    }
                    (_, None) if !self.ends.enter() => ncclSuccess,
                    (_, None) => abort_unknown(),
                    _ => self.end_real(End::Abort, real),
                }
            }
        }
    }

    /// Has NCCL end its communicator. From now on an abort from another thread does not wait to do that.
    fn end_real(&self, how: End, real: ncclComm_t) -> ncclResult_t {
        self.ends.end();
        self.let_go();
        known::end(how, real)
    }

    /// Forgets NCCL's handle before NCCL's communicator ends or is cached, so that later calls do not reach it.
    pub(super) fn let_go(&self) {
        self.real.store(null_mut(), Ordering::Release);
    }

    fn facts(&self, real: ncclComm_t) -> Facts {
        let mut error = ncclSuccess;
        let asked = known::async_error(real, &raw mut error);
        let failed = [asked, error, self.peer_group.error()].iter().any(|code| *code != ncclSuccess);
        Facts {
            caches: self.peer_group.negotiated().caches(),
            unfit: self.usage.unfit(),
            has_operators: !self.operators.is_empty(),
            has_registrations: !self.registrations.is_empty(),
            has_failed: failed || self.is_revoked(),
        }
    }

    /// Waits for all work of NCCL's communicator, by a message of one byte that NCCL orders after it. An abort from another thread ends
    /// the wait.
    fn wait_for_nccl(&self, real: ncclComm_t) -> Waited {
        if !self.ends.enter() {
            return Waited::Aborted;
        }
        // Before a communicator sleeps all its work is done.
        if !self.usage.has_run() || self.peer_group.sleeps() {
            return Waited::Over(ncclSuccess);
        }
        let Some([from, to]) = self.peer_group.scratch() else { return Waited::Over(ncclInternalError) };
        let waited = gpu::driver().and_then(|driver| {
            let home = Home::of(driver, self.device)?;
            let _entered = home.enter()?;
            let stream = Stream::new(driver)?;
            let ordered = known::order(real, self.peer_group.rank(), from, to, stream.handle);
            self.ends.wait();
            stream.wait()?;
            Ok(ordered)
        });
        if !self.ends.enter() {
            return Waited::Aborted;
        }
        Waited::Over(match waited {
            Ok(code) if code == ncclSuccess => code,
            Ok(code) => refuse(code, format_args!("NCCL did not order its work before ours")),
            Err(failure) => refuse(ncclInternalError, format_args!("{failure}")),
        })
    }

    /// Bytes that NCCL says its communicator holds; where NCCL does not say, by how much the device's free memory fell.
    fn bytes(&self, built: &Built) -> u64 {
        let mut bytes = 0;
        let says = !is_missing(Entry::ncclCommMemStats)
            && queries::memory(built.handle(), ncclStatGpuMemTotal, &raw mut bytes) == ncclSuccess;
        if says { bytes } else { built.bytes() + self.usage.bytes() }
    }
}

pub(super) fn ended() -> ncclResult_t {
    refuse(
        ncclInvalidArgument,
        format_args!("a communicator that has been destroyed, or is ending within NCCL"),
    )
}

fn keep(built: Built) -> ncclResult_t {
    cached::cache(built);
    ncclSuccess
}

/// Asks whether this thread has a group open; set by [`ask_of_groups`].
static IS_GROUPED: OnceCell<fn() -> bool> = OnceCell::new();

/// Sets the function that says whether this thread has a group open. Only the first call counts.
pub(crate) fn ask_of_groups(is_grouped: fn() -> bool) {
    let _ = IS_GROUPED.set(is_grouped);
}

/// Runs `work` on another thread and waits for it: this thread may have a group open, and NCCL's groups are thread-local. Where no
/// thread can be started and no group is open, runs it here. None if it did not run, or panicked.
pub(super) fn beside<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    // A thread that does not start would drop `work`.
    let work = Mutex::new(Some(work));
    let take = || work.lock().take();
    std::thread::scope(|scope| {
        let run = || take().map(|work| work());
        let error = match thread::spawn_scoped(scope, "windlass-cache", run) {
            Ok(thread) => return thread.join().ok().flatten(),
            Err(error) => error,
        };
        if IS_GROUPED.get().is_some_and(|is_grouped| !is_grouped()) {
            return take().map(|work| work());
        }
        refuse(ncclInternalError, format_args!("no thread to end a lazy communicator on: {error}"));
        None
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Facts = Facts {
        caches: true,
        unfit: None,
        has_operators: false,
        has_registrations: false,
        has_failed: false,
    };

    /// Cached only if nothing speaks against it; NCCL's destroy only where all ranks decide for it.
    #[test]
    fn disposals() {
        let (here, everywhere) = (Some(Unfit::Here), Some(Unfit::Everywhere));
        for (facts, expected) in [
            (GOOD, Disposal::Cached),
            (Facts { caches: false, ..GOOD }, Disposal::Destroyed),
            (Facts { unfit: everywhere, has_operators: true, has_failed: true, ..GOOD }, Disposal::Destroyed),
            (Facts { unfit: here, ..GOOD }, Disposal::Left),
            (Facts { has_operators: true, ..GOOD }, Disposal::Left),
            (Facts { has_registrations: true, ..GOOD }, Disposal::Left),
            (Facts { has_failed: true, unfit: here, ..GOOD }, Disposal::Aborted),
        ] {
            assert_eq!(disposal(facts), expected, "{facts:?}");
        }
    }
}
