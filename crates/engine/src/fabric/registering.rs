//! Which of a communicator's buffers NCCL gets registered, and by what: see docs/registration.md.
//!
//! Candidates are numbered, alike on all ranks, and [agreed](crate::agreed) on. Of one that is registered this rank gives NCCL
//! [aliases](super::aliases) in place of the application's addresses, or its own [staging](super::staging) memory. Nothing
//! here waits for another rank.
//!
//! The application's thread is in here with the gate of its communicator passed; `windlass-watch` with that gate closed.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use nccl_sys::{ncclComm_t, ncclInternalError, ncclResult_t, ncclSuccess, ncclUnhandledCudaError};
use once_cell::sync::OnceCell;

use crate::agreed::{Number, Seat};
use crate::allocation::{Allocations, Kind};
use crate::config::config;
use crate::error::refuse;
use crate::gate::Gate;
use crate::gpu::stream::{self, Event};
use crate::gpu::{self, Address, Driver, Failure, Home, Ordinal, StreamHandle};
use crate::page::Page;
use crate::range::Range;
use crate::registration::{Cache, Key, Limits, Use, Why};
use crate::stats::count;
use crate::stats::registered::Registered;

use super::aliases::{Alias, Aliases};
pub use super::giving::End;
use super::staging::{self, Copy, Staging};
use super::willing::Willing;

pub use super::substitutes::{Buffers, Substitutes};

/// NCCL walks through all registrations for every buffer of every call.
const ENTRIES_MAX: usize = 64;
/// Allocations that cannot be registered, remembered.
const REFUSED_MAX: usize = 64;
/// Allocations of the process that are remembered.
const ALLOCATIONS_MAX: usize = 1024;
/// All addresses.
pub(super) const EVERYTHING: Range = Range { base: 0, bytes: u64::MAX };

/// What a communicator's ranks share of it, and this rank's own part.
#[derive(Debug)]
pub struct Registering {
    agreed: Seat<Arc<Page>>,
    driver: &'static Driver,
    device: Ordinal,
    ranks: u32,
    /// The largest size, as a power of two, that this rank could offer.
    size_max: u8,
    /// Whether anything was ever registered: then the watch thread looks more often.
    has_entries: AtomicBool,
    /// Reasons to offer nothing: buffers and windows that the application has registered, resources that are shared.
    vetoes: AtomicU32,
    /// NCCL's calls of other communicators touch what this one's do: ours must not come from another thread.
    is_shared: AtomicBool,
    gate: OnceCell<&'static Gate>,
    pub(super) is_aborted: AtomicBool,
    /// An abort has left all as it is, beside a call or what gives back: neither may go on.
    pub(super) is_left: AtomicBool,
    /// Held by a call for some stores, or for a registration; else for a deregistration.
    state: Mutex<State>,
}

#[derive(Debug)]
pub(super) struct State {
    pub home: Arc<Home>,
    /// NCCL's communicator, once it was asked for something.
    pub real: Option<usize>,
    pub cache: Cache<Alias>,
    pub staging: Staging,
    willing: Willing,
    /// Up to which size this rank has offered, as a power of two; 0 for nothing.
    offered: u8,
    /// There was no memory to offer that size.
    size_refused: u8,
    /// The number of the next candidate.
    next: Number,
    /// Calls that are registered.
    uses: Use,
    /// How many of them NCCL has not begun: those of open groups.
    pending: u32,
    /// Marks the end of the last that it has, and of what was copied; NCCL runs them in turn.
    last: Option<Event>,
    /// Whether that one copied, which NCCL knows nothing of.
    last_copied: bool,
    pub end: Option<End>,
}

/// How far the calls that were registered are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Over,
    Running,
    /// The driver answers nothing any more.
    Lost,
}

impl State {
    fn new(home: Arc<Home>) -> State {
        let limits = Limits { entries_max: ENTRIES_MAX, bytes_max: u64::MAX, refused_max: REFUSED_MAX };
        State {
            home,
            real: None,
            cache: Cache::new(limits),
            staging: Staging::new(config().staging_bytes_max),
            willing: Willing::new(),
            offered: 0,
            size_refused: u8::MAX,
            next: 1,
            uses: Use::default(),
            pending: 0,
            last: None,
            last_copied: false,
            end: None,
        }
    }

    /// Whether no kernel of this rank uses anything, whatever groups still hold.
    pub fn has_left(&self) -> bool {
        self.last
            .as_ref()
            .is_none_or(|last| self.home.enter().is_ok_and(|_entered| last.is_done().unwrap_or(false)))
    }

    /// Asks the driver.
    pub fn progress(&self) -> Progress {
        let done = self.last.as_ref().map_or(Ok(true), |last| {
            // Relaxed: another thread's capture forbids the question else.
            let _entered = self.home.enter()?;
            last.is_done()
        });
        match done {
            Ok(true) if self.pending == 0 => Progress::Over,
            Ok(_) => Progress::Running,
            Err(_) => Progress::Lost,
        }
    }

    fn is_over(&self) -> bool {
        self.progress() == Progress::Over
    }

    /// What comes next on a stream comes after what was copied last, whatever stream that was on.
    fn wait(&self, stream: StreamHandle) -> Result<(), Failure> {
        self.last
            .as_ref()
            .map_or(Ok(()), |last| self.home.driver.wait(stream, last, stream::Ordering::Inside))
    }

    /// Marks what a stream holds, and what was marked before.
    fn mark(&mut self, stream: StreamHandle, copied: bool) -> Result<(), Failure> {
        if self.last_copied {
            self.wait(stream)?;
        }
        let last = match self.last.take() {
            Some(last) => last,
            None => Event::new(self.home.driver)?,
        };
        self.last_copied = copied;
        self.last.insert(last).record(stream, stream::Ordering::Inside)
    }
}

/// A candidate that has its number.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    number: Number,
    /// None: it goes to NCCL as it came.
    pub substitutes: Option<Substitutes>,
}

fn allocations(driver: &'static Driver) -> &'static Allocations {
    static ALLOCATIONS: OnceCell<Allocations> = OnceCell::new();
    ALLOCATIONS.get_or_init(|| Allocations::new(driver, ALLOCATIONS_MAX))
}

/// The least power of two that is not below.
fn power(bytes: u64) -> u8 {
    bytes.checked_next_power_of_two().map_or(64, u64::trailing_zeros) as u8
}

impl Registering {
    /// For a rank of a fabric whose ranks share this page.
    pub(super) fn new(page: Arc<Page>, rank: u32, ranks: u32, device: Ordinal) -> Option<Arc<Registering>> {
        let driver = gpu::driver().ok()?;
        let home = Arc::new(Home::of(driver, device).ok()?);
        let state = State::new(home);
        let size_max = state.staging.size_max(ranks);
        Some(Arc::new(Registering {
            agreed: Seat::new(page, rank, ranks)?,
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
        }))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
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
    pub(super) fn gate(&self) -> Option<&'static Gate> {
        self.gate.get().copied()
    }

    /// As it says.
    pub(super) fn is_shared(&self) -> bool {
        self.is_shared.load(Ordering::Acquire)
    }

    pub(super) fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// For the end of it all: what is left here is empty.
    pub(super) fn take_state(&mut self) -> State {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let empty = State::new(state.home.clone());
        std::mem::replace(state, empty)
    }

    pub(super) fn try_state(&self) -> Option<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Whether anything is registered, or was.
    pub(super) fn has_entries(&self) -> bool {
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

    /// The application does by itself what this would, or nothing may run beside its calls: nothing is offered, and what
    /// nobody may ask for any more goes back, as the watch may not look at it.
    fn withdraw(&self, state: &mut State) {
        if !state.willing.has_offered() && state.cache.is_empty() {
            return;
        }
        self.take_back(state);
        let may_go = self.agreed.owes() == 0 && state.is_over();
        let State { home, real: Some(real), cache, staging, .. } = state else { return };
        let (driver, mut aliases) =
            (home.driver, Aliases::new(home, *real, staging.handle_types(), &self.is_left));
        match may_go {
            true => cache.freed(&mut aliases, EVERYTHING),
            false => cache.look(&mut aliases, |base| driver.buffer_id(base)),
        };
    }

    /// NCCL has it on this stream, not in a group any more.
    pub fn passed(&self, candidate: &Candidate, stream: StreamHandle) -> ncclResult_t {
        self.agreed.passed(candidate.number);
        let Some(substitutes) = &candidate.substitutes else { return ncclSuccess };
        let mut state = self.state();
        state.pending = state.pending.saturating_sub(1);
        answer(Self::in_context(&mut state, |state| {
            substitutes.after.map_or(Ok(()), |copy| copied(state.home.driver, copy, stream))?;
            state.mark(stream, substitutes.copies())
        }))
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
        let home = state.home.clone();
        let _current = home.be_current()?;
        act(state)
    }

    /// What this rank can say of its buffers, from one that is not registered.
    fn learn(&self, state: &mut State, buffers: &Buffers, size: u8) {
        if self.vetoes.load(Ordering::Relaxed) > 0 || size > self.size_max || size >= state.size_refused {
            return;
        }
        if state.willing.has_offered() {
            if size > state.offered && self.prepare(state, size) {
                self.offer(state, size);
            }
            return;
        }
        if !state.willing.looks() {
            return;
        }
        let fine = self.is_registrable(state, buffers.receive) && self.is_registrable(state, buffers.send);
        if !state.willing.saw(fine) {
            return;
        }
        if self.prepare(state, size) && self.has_types(state, buffers) {
            state.willing.offers();
            self.offer(state, size);
        } else {
            state.willing.takes_back();
        }
    }

    fn offer(&self, state: &mut State, size: u8) {
        state.offered = size;
        self.agreed.offer(size);
        log::debug!("rank offers to register up to 2^{size} bytes");
    }

    fn take_back(&self, state: &mut State) {
        if state.willing.has_offered() {
            state.willing.takes_back();
            self.offer(state, 0);
        }
    }

    /// Whether a buffer lies in one allocation of this device's that can be mapped again and exported.
    fn is_registrable(&self, state: &State, buffer: Range) -> bool {
        let found = allocations(state.home.driver).look(buffer.base);
        let fine = found.kind == Kind::Vmm { exportable: true }
            && found.device == self.device
            && found.range.contains(buffer);
        if !fine {
            count::registered(kind(found.kind), 1);
        }
        fine
    }

    /// Staging memory for one call of that size, which is there before it is offered for.
    fn prepare(&self, state: &mut State, size: u8) -> bool {
        let bytes = staging::needed(size, self.ranks);
        if state.staging.has_room_for(bytes) {
            return true;
        }
        let is_over = state.is_over();
        let State { home, real: Some(real), staging, .. } = state else { return false };
        if !is_over {
            return false;
        }
        let is_prepared = staging.prepare(home, *real, bytes);
        if !is_prepared {
            state.size_refused = size;
        }
        is_prepared
    }

    /// Whether NCCL can export the memory by the handles that it uses: those of its own.
    fn has_types(&self, state: &State, buffers: &Buffers) -> bool {
        let driver = state.home.driver;
        let wanted = state.staging.handle_types();
        [buffers.send, buffers.receive]
            .iter()
            .all(|buffer| driver.handle_types(buffer.base) & wanted == wanted)
    }

    fn substitutes(&self, state: &mut State, buffers: &Buffers) -> Result<Substitutes, ncclResult_t> {
        let number = Use(state.uses.0 + 1);
        state.uses = number;
        if state.cache.waits_for().is_some() && state.is_over() {
            state.cache.over(Use(number.0 - 1));
        }
        if state.pending == 0 {
            state.staging.begin();
        }
        let receives = self.alias(state, buffers.receive, number);
        let sends = if buffers.is_in_place() { None } else { self.alias(state, buffers.send, number) };
        let State { home, real: Some(real), staging, .. } = state else { return Err(ncclInternalError) };
        let substitutes = buffers.substitutes(sends, receives, |bytes| {
            staging.take(home, *real, bytes).ok_or_else(|| {
                let why = format_args!("no memory for {bytes} bytes of a registered call's buffer");
                refuse(ncclUnhandledCudaError, why)
            })
        })?;
        if substitutes.copies() {
            count::registered(Registered::Staged, 1);
            self.take_back(state);
        }
        Ok(substitutes)
    }

    /// Where NCCL finds a buffer registered; none if it cannot be.
    fn alias(&self, state: &mut State, buffer: Range, number: Use) -> Option<Address> {
        let State { home, real: Some(real), cache, staging, .. } = state else { return None };
        let found = allocations(home.driver).look(buffer.base);
        if found.kind != (Kind::Vmm { exportable: true }) || found.device != self.device {
            count::registered(kind(found.kind), 1);
            return None;
        }
        let key = Key { range: found.range, id: found.id };
        let mut aliases = Aliases::new(home, *real, staging.handle_types(), &self.is_left);
        match cache.want(&mut aliases, key, buffer, number) {
            Ok(alias) => {
                count::registered(Registered::Hits, 1);
                self.has_entries.store(true, Ordering::Relaxed);
                Some(alias.address() + (buffer.base - found.range.base))
            }
            Err(why) => {
                count::registered(counted(why), 1);
                log::debug!("address {:#x} is staged: {why:?}", buffer.base);
                None
            }
        }
    }
}

fn counted(why: Why) -> Registered {
    match why {
        Why::Straddles => Registered::Elsewhere,
        Why::Full => Registered::Full,
        Why::Refused | Why::Failed => Registered::Refused,
    }
}

/// What is counted of memory that cannot be registered.
fn kind(kind: Kind) -> Registered {
    match kind {
        Kind::Vmm { exportable: true } => Registered::Elsewhere,
        Kind::Vmm { exportable: false } | Kind::VmmParts { .. } => Registered::Segments,
        Kind::Cuda => Registered::CudaMalloc,
        Kind::Pool => Registered::Pool,
        Kind::Managed | Kind::Host => Registered::Host,
        Kind::Unknown => Registered::Unknown,
    }
}

fn copied(driver: &Driver, copy: Copy, stream: StreamHandle) -> Result<(), Failure> {
    driver.copy(copy.to, copy.from, copy.bytes, stream)
}

fn answer(result: Result<(), Failure>) -> ncclResult_t {
    result.map_or_else(|failure| refuse(ncclUnhandledCudaError, format_args!("{failure}")), |()| ncclSuccess)
}
