//! Which of a communicator's buffers NCCL gets registered, and by what: see docs/registration.md.
//!
//! Candidates are numbered, alike on all ranks, and [agreed](crate::features::registration::agreed) on. Of one that is registered this rank gives NCCL
//! [aliases](crate::features::registration::aliases) in place of the application's addresses, or its own [staging](crate::features::registration::staging) memory. Nothing
//! here waits for another rank.
//!
//! The application's thread is in here with the gate of its communicator passed; `windlass-worker` with that gate closed.

mod finding;
mod offering;
mod state;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use nccl_sys::{ncclComm_t, ncclInternalError, ncclResult_t, ncclSuccess, ncclUnhandledCudaError};
use once_cell::sync::OnceCell;

use crate::features::registration::agreed::{Number, RegistrationSlot};
use windlass_base::error::refuse;
use windlass_base::gate::Gate;
use windlass_base::gpu::stream::{self, Event};
use windlass_base::gpu::{self, Driver, Failure, Home, Ordinal, StreamHandle};
use windlass_base::range::Range;
use windlass_base::shared_page::SharedPage;

use crate::background::weak_list::WeakList;
use crate::features::registration::staging::Copy;

pub(crate) use crate::features::registration::substitutes::{Buffers, Substitutes};

pub(crate) use state::End;
pub(crate) use state::{Progress, State};

static REGISTERING: WeakList<Registering> = WeakList::new();

/// Those of this process that are alive.
pub(crate) fn alive() -> impl Iterator<Item = Arc<Registering>> {
    REGISTERING.alive()
}

/// All addresses.
pub(crate) const EVERYTHING: Range = Range { base: 0, bytes: u64::MAX };

/// What a communicator's ranks share of it, and this rank's own part.
#[derive(Debug)]
pub struct Registering {
    agreed: RegistrationSlot<Arc<SharedPage>>,
    driver: &'static Driver,
    device: Ordinal,
    ranks: u32,
    /// The largest size, as a power of two, that this rank could offer.
    size_max: u8,
    /// Whether anything was ever registered: then the background worker looks more often.
    has_entries: AtomicBool,
    /// Reasons to offer nothing: buffers and windows that the application has registered, resources that are shared.
    vetoes: AtomicU32,
    /// NCCL's calls of other communicators touch what this one's do: ours must not come from another thread.
    is_shared: AtomicBool,
    gate: OnceCell<&'static Gate>,
    pub(crate) is_aborted: AtomicBool,
    /// An abort has left all as it is, beside a call or what gives back: neither may go on.
    pub(crate) is_left: AtomicBool,
    /// Held by a call for some stores, or for a registration; else for a deregistration.
    state: Mutex<State>,
}

/// A candidate that has its number.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    number: Number,
    /// None: it goes to NCCL as it came.
    pub substitutes: Option<Substitutes>,
}

/// The least power of two that is not below.
fn power(bytes: u64) -> u8 {
    bytes.checked_next_power_of_two().map_or(64, u64::trailing_zeros) as u8
}

impl Registering {
    /// For a rank of a peer group whose ranks have this shared page.
    pub(crate) fn new(
        page: Arc<SharedPage>,
        rank: u32,
        ranks: u32,
        device: Ordinal,
    ) -> Option<Arc<Registering>> {
        let driver = gpu::driver().ok()?;
        let home = Home::of(driver, device).ok()?;
        let state = State::new(home);
        let size_max = state.staging.size_max(ranks);
        let registering = Arc::new(Registering {
            agreed: RegistrationSlot::new(page, rank, ranks)?,
            driver,
            device,
            ranks,
            size_max,
            has_entries: AtomicBool::new(false),
            vetoes: AtomicU32::new(0),
            is_shared: AtomicBool::new(false),
            gate: OnceCell::new(),
            is_aborted: AtomicBool::new(false),
            is_left: AtomicBool::new(false),
            state: Mutex::new(state),
        });
        REGISTERING.push(&registering);
        Some(registering)
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the application's calls pass.
    pub fn guarded_by(&self, gate: &'static Gate) {
        let _ = self.gate.set(gate);
    }

    /// From now on this rank offers nothing, until it is [allowed](Registering::allow) as often.
    pub fn veto(&self) {
        self.vetoes.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes a veto back.
    pub fn allow(&self) {
        let one_less = |vetoes: u32| vetoes.checked_sub(1);
        let _ = self.vetoes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
    }

    /// Another communicator uses NCCL's resources of this one, or calls of it are not seen: nothing of ours may run beside.
    pub fn share(&self) {
        self.is_shared.store(true, Ordering::Release);
        self.veto();
    }

    /// The gate, once the communicator is known, unless another thread may not be in it at all.
    pub(crate) fn gate(&self) -> Option<&'static Gate> {
        self.gate.get().copied()
    }

    /// As it says.
    pub(crate) fn is_shared(&self) -> bool {
        self.is_shared.load(Ordering::Acquire)
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// For the end of it all: what is left here is empty.
    pub(crate) fn take_state(&mut self) -> State {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let empty = State::new(state.home);
        std::mem::replace(state, empty)
    }

    pub(crate) fn try_state(&self) -> Option<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Whether anything is registered, or was.
    pub(crate) fn has_entries(&self) -> bool {
        self.has_entries.load(Ordering::Relaxed)
    }

    /// Gives a candidate its number and looks what all ranks do with it. An error is one of this rank alone, which others cannot
    /// know of: it had no memory for what its part takes.
    pub fn consider(&self, real: ncclComm_t, buffers: &Buffers) -> Result<Candidate, ncclResult_t> {
        let mut state = self.state();
        let number = state.next;
        if state.end.is_some() {
            // NCCL refuses it.
            return Ok(Candidate { number, substitutes: None });
        }
        state.real = Some(real as usize);
        if state.staging.is_grown() && state.is_over() && !self.is_left.load(Ordering::Acquire) {
            let State { home, staging, .. } = &mut *state;
            staging.shrink(home, real as usize);
        }
        let size = power(buffers.receive.bytes);
        let limit = self.agreed.ask(number).map_err(|refusal| {
            refuse(ncclInternalError, format_args!("a collective that is to be decided: {refusal}"))
        })?;
        if self.vetoes.load(Ordering::Relaxed) > 0 {
            self.withdraw(&mut state);
        }
        let substitutes = match size > limit {
            true => {
                self.learn(&mut state, buffers, size);
                None
            }
            false => Some(self.substitutes(&mut state, buffers)?),
        };
        if self.is_left.load(Ordering::Acquire) {
            let why = format_args!("a collective of a communicator that was aborted meanwhile");
            return Err(refuse(ncclInternalError, why));
        }
        state.next = number + 1;
        state.pending += u32::from(substitutes.is_some());
        Ok(Candidate { number, substitutes })
    }

    /// NCCL has it on this stream, not in a group any more.
    pub fn passed(&self, candidate: &Candidate, stream: StreamHandle) -> ncclResult_t {
        self.agreed.passed(candidate.number);
        let Some(substitutes) = &candidate.substitutes else { return ncclSuccess };
        let mut state = self.state();
        state.pending = state.pending.saturating_sub(1);
        answer(Self::in_context(&mut state, |state| {
            let back = substitutes.after.map_or(Ok(()), |copy| copied(state.home.driver, copy, stream));
            // Also where that failed: NCCL runs it.
            back.and(state.mark(stream, substitutes.copies()))
        }))
    }

    /// NCCL says that it has failed, and may have begun it: what it uses is over when the stream comes past it.
    pub fn failed(&self, candidate: &Candidate, stream: StreamHandle) {
        if candidate.substitutes.is_some()
            && let Err(failure) = Self::in_context(&mut self.state(), |state| state.mark_behind(stream))
        {
            log::warn!("a registered call that failed cannot be followed: {failure}");
        }
        self.refused(candidate);
    }

    /// NCCL has not: the next call has its number.
    pub fn refused(&self, candidate: &Candidate) {
        let mut state = self.state();
        state.next = candidate.number;
        state.pending = state.pending.saturating_sub(u32::from(candidate.substitutes.is_some()));
    }

    /// A group has failed, and what NCCL has run of it nobody knows: this rank offers nothing any more.
    pub fn doubt(&self) {
        self.veto();
        self.take_back(&mut self.state());
    }

    /// Copies what is to be copied before the call on its stream.
    pub fn before(&self, substitutes: &Substitutes, stream: StreamHandle) -> ncclResult_t {
        if !substitutes.copies() {
            return ncclSuccess;
        }
        let mut state = self.state();
        answer(Self::in_context(&mut state, |state| {
            state.wait(stream)?;
            substitutes.before.map_or(Ok(()), |copy| copied(state.home.driver, copy, stream))?;
            // Also where NCCL then refuses the call.
            state.mark(stream, true)
        }))
    }

    /// What comes next on the first stream comes after what the second holds now.
    pub fn join(&self, stream: StreamHandle, other: StreamHandle) -> ncclResult_t {
        let mut state = self.state();
        answer(Self::in_context(&mut state, |state| {
            let event = Event::new(state.home.driver)?;
            event.record(other, stream::Ordering::Inside)?;
            state.home.driver.wait(stream, &event, stream::Ordering::Inside)
        }))
    }

    fn in_context(
        state: &mut State,
        act: impl FnOnce(&mut State) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let home = state.home;
        let _current = home.be_current().inspect_err(|_| state.is_lost = true)?;
        act(state)
    }
}

fn copied(driver: &Driver, copy: Copy, stream: StreamHandle) -> Result<(), Failure> {
    driver.copy(copy.to, copy.from, copy.bytes, stream)
}

fn answer(result: Result<(), Failure>) -> ncclResult_t {
    result.map_or_else(|failure| refuse(ncclUnhandledCudaError, format_args!("{failure}")), |()| ncclSuccess)
}
