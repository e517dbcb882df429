//! [`Registering`]: decides which calls run over registered buffers, and gives NCCL their substitutes. See docs/registration.md.
//!
//! Candidates have numbers that are equal on all ranks, by which ranks [agree](crate::features::registration::agreed). In place of the
//! program's addresses, NCCL gets [aliases](crate::features::registration::aliases) or
//! [staging](crate::features::registration::staging) memory for a registered call. Nothing here waits for another rank.
//!
//! The program's threads have passed the communicator's gate when they come here. Threads of Windlass have closed it.

mod finding;
mod offering;
mod state;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use nccl_sys::{ncclComm_t, ncclInternalError, ncclResult_t, ncclSuccess, ncclUnhandledCudaError};
use once_cell::sync::OnceCell;

use crate::features::registration::agreed::{Number, RegistrationSlot};
use windlass_base::error::refuse;
use windlass_base::gate::Gate;
use windlass_base::gpu::stream::{self, Event};
use windlass_base::gpu::{self, Driver, Failure, Home, Ordinal, StreamHandle};
use windlass_base::lock::Mutex;
use windlass_base::range::Range;
use windlass_base::shared_page::SharedPage;

use crate::background::weak_list::WeakList;
use crate::features::registration::staging::Copy;

pub(crate) use crate::features::registration::substitutes::{Buffers, Substitutes};

pub(crate) use state::End;
pub(crate) use state::{Progress, State};

static REGISTERING: WeakList<Registering> = WeakList::new();

/// The live ones of this process.
pub(crate) fn alive() -> impl Iterator<Item = Arc<Registering>> {
    REGISTERING.alive()
}

/// All addresses.
pub(crate) const EVERYTHING: Range = Range { base: 0, bytes: u64::MAX };

/// One communicator's registrations on this rank, and the slot by which the ranks agree.
#[derive(Debug)]
pub struct Registering {
    agreed: RegistrationSlot<Arc<SharedPage>>,
    pub(crate) driver: &'static Driver,
    device: Ordinal,
    ranks: u32,
    /// The largest size that this rank could offer, as log2 of bytes.
    size_max: u8,
    /// Whether any buffer was ever registered. The background worker then looks more often.
    has_entries: AtomicBool,
    /// How many reasons there are to offer nothing: buffers and windows registered by the program, shared resources.
    vetoes: AtomicU32,
    /// Whether NCCL's calls of other communicators touch this one's resources. Then no other thread may deregister.
    is_shared: AtomicBool,
    gate: OnceCell<&'static Gate>,
    pub(crate) is_aborted: AtomicBool,
    /// Whether an abort has left everything as it is. A call or a deregistration that still runs must not go on.
    pub(crate) is_left: AtomicBool,
    /// Locked by a call for some stores or a registration, and by a deregistration.
    pub(crate) state: Mutex<State>,
}

/// A candidate with its number.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    number: Number,
    /// None if NCCL gets the call unchanged.
    pub substitutes: Option<Substitutes>,
}

/// The log2 of the least power of two that is not below `bytes`.
fn power(bytes: u64) -> u8 {
    bytes.checked_next_power_of_two().map_or(64, u64::trailing_zeros) as u8
}

impl Registering {
    /// The registrations of a rank whose peer group has this shared page. None if the driver or the slot refuses.
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

    /// Sets the gate that the program's calls pass.
    pub fn guarded_by(&self, gate: &'static Gate) {
        let _ = self.gate.set(gate);
    }

    /// Stops offers of this rank, until [`Registering::allow`] is called as often.
    pub fn veto(&self) {
        self.vetoes.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes back a veto.
    pub fn allow(&self) {
        let one_less = |vetoes: u32| vetoes.checked_sub(1);
        let _ = self.vetoes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
    }

    /// Notes that another communicator uses this one's NCCL resources, or that calls are not seen. No thread of Windlass may deregister then.
    pub fn share(&self) {
        self.is_shared.store(true, Ordering::Release);
        self.veto();
    }

    /// The communicator's gate. None until the communicator is known.
    pub(crate) fn gate(&self) -> Option<&'static Gate> {
        self.gate.get().copied()
    }

    /// Whether [`Registering::share`] was called.
    pub(crate) fn is_shared(&self) -> bool {
        self.is_shared.load(Ordering::Acquire)
    }

    /// Takes the state, for the end. An empty one takes its place.
    pub(crate) fn take_state(&mut self) -> State {
        let state = self.state.get_mut();
        let empty = State::new(state.home);
        std::mem::replace(state, empty)
    }

    /// Whether any buffer is or was registered.
    pub(crate) fn has_entries(&self) -> bool {
        self.has_entries.load(Ordering::Relaxed)
    }

    /// Gives a candidate its number, and decides with all ranks whether it is registered. An error concerns this rank alone, for example
    /// because it has no memory for staging. The other ranks do not learn of it.
    pub fn consider(&self, real: ncclComm_t, buffers: &Buffers) -> Result<Candidate, ncclResult_t> {
        let mut state = self.state.lock();
        let number = state.next;
        if state.end.is_some() {
            // The communicator has ended, so NCCL refuses the call.
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

    /// Called once NCCL has the call on this stream, outside any group. Copies staged results back, and marks the call's end.
    pub fn passed(&self, candidate: &Candidate, stream: StreamHandle) -> ncclResult_t {
        self.agreed.passed(candidate.number);
        let Some(substitutes) = &candidate.substitutes else { return ncclSuccess };
        let mut state = self.state.lock();
        state.pending = state.pending.saturating_sub(1);
        answer(Self::in_context(&mut state, |state| {
            let back = substitutes.after.map_or(Ok(()), |copy| copied(state.home.driver, copy, stream));
            // Marked even if the copy failed, because NCCL runs the call.
            back.and(state.mark(stream, substitutes.copies()))
        }))
    }

    /// Called if NCCL says that the call failed. It may have begun, so its buffers are in use until the stream has passed it.
    pub fn failed(&self, candidate: &Candidate, stream: StreamHandle) {
        if candidate.substitutes.is_some()
            && let Err(failure) = Self::in_context(&mut self.state.lock(), |state| state.mark_behind(stream))
        {
            log::warn!("a registered call that failed cannot be followed: {failure}");
        }
        self.refused(candidate);
    }

    /// Called if NCCL has not taken the call: the next call has its number.
    pub fn refused(&self, candidate: &Candidate) {
        let mut state = self.state.lock();
        state.next = candidate.number;
        state.pending = state.pending.saturating_sub(u32::from(candidate.substitutes.is_some()));
    }

    /// Called after a failed group, of which NCCL may have run any part: this rank offers nothing any more.
    pub fn doubt(&self) {
        self.veto();
        self.take_back(&mut self.state.lock());
    }

    /// Copies into staging memory what the call needs, on its stream before the call.
    pub fn before(&self, substitutes: &Substitutes, stream: StreamHandle) -> ncclResult_t {
        if !substitutes.copies() {
            return ncclSuccess;
        }
        let mut state = self.state.lock();
        answer(Self::in_context(&mut state, |state| {
            state.wait(stream)?;
            substitutes.before.map_or(Ok(()), |copy| copied(state.home.driver, copy, stream))?;
            // Marked even if NCCL then refuses the call.
            state.mark(stream, true)
        }))
    }

    /// Orders later work on `stream` behind the work that is on `other` now.
    pub fn join(&self, stream: StreamHandle, other: StreamHandle) -> ncclResult_t {
        let mut state = self.state.lock();
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
