//! The communicators that Windlass knows, found by handle.
//!
//! The application's handle is NCCL's pointer (of a lazy communicator, [one of Windlass](crate::lazy)), so the records lie in a table of
//! their own, which every call reads without locks. Entries come from every function that makes a communicator, and from the first
//! call on an unknown handle (made by a non-blocking split, or before Windlass was loaded).

mod ongoing;
mod table;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};

use nccl_sys::{
    ncclComm_t, ncclInProgress, ncclInvalidArgument, ncclInvalidUsage, ncclResult_t, ncclSuccess,
};

use crate::forward::known;
use crate::lazy::LazyCommunicator;
use crate::peers::{self, InitOutcome, Lineage, PeerGroup};
use windlass_base::call::Function;
use windlass_base::error::refuse;
use windlass_base::gate::{Gate, Passed};
use windlass_base::lock::Mutex;
use windlass_base::observers::Observed;
use windlass_base::stats::count::{self, Identity};
use windlass_bootstrap::Canceller;
use windlass_bootstrap::outcome::FallbackReason;
use windlass_transport::tuning::{COLLECTIVES, Collective, Limits, Terms};

use ongoing::Ongoing;
use table::CHANGING;
pub(crate) use table::{find, insert, remove};

/// What the init of a communicator left in its record.
#[derive(Debug)]
pub enum Kept {
    /// Its peer group.
    PeerGroup(Arc<PeerGroup>),
    /// The lazy communicator, which holds its peer group.
    Lazy(Arc<LazyCommunicator>),
    /// The session of its init goes on; an abort ends this rank's wait by this.
    Waiting(Canceller),
    /// It has no peer group, but its children may get one.
    OnNccl(Arc<Lineage>),
}

impl Kept {
    /// The peer group, if there is one.
    pub fn peer_group(&self) -> Option<&Arc<PeerGroup>> {
        match self {
            Kept::PeerGroup(peer_group) => Some(peer_group),
            Kept::Lazy(lazy) => Some(&lazy.peer_group),
            Kept::Waiting(_) | Kept::OnNccl(_) => None,
        }
    }

    /// What all ranks of the communicator call it.
    fn name(&self) -> Option<u64> {
        match self {
            Kept::OnNccl(lineage) => Some(lineage.name()),
            kept => kept.peer_group().map(|peer_group| peer_group.negotiated().comm.number()),
        }
    }
}

/// The record of a communicator. Records are reused, never freed: a thread that is inside a call while another one
/// aborts its communicator still reads a valid record.
#[derive(Debug)]
pub struct Communicator {
    handle: AtomicUsize,
    counters: AtomicUsize,
    ranks: AtomicI32,
    known: AtomicBool,
    /// Whether `kept` has a peer group, readable without its lock.
    has_peer_group: AtomicBool,
    /// Whether the handle is one of Windlass, not NCCL's.
    is_lazy: AtomicBool,
    /// Ranks of its peer group, and the [`Limits`] of native collectives: written before `has_peer_group`.
    members: AtomicUsize,
    native: [AtomicU64; COLLECTIVES],
    /// Whether reductions that round are native at every size.
    fixed_order: AtomicBool,
    /// Whether this process asks for fixed order, and whether its lack was logged.
    order_is_asked_for: AtomicBool,
    order_is_said: AtomicBool,
    /// Whether threads of Windlass may use NCCL's communicator, too: then calls pass the gate.
    has_gate: AtomicBool,
    gate: Gate,
    /// Whether it has or had a kept window.
    has_windows: AtomicBool,
    /// Whether its calls do not wait (`blocking = 0`), and it may have a peer group. Then it counts as unknown, so that each call looks at it.
    is_nonblocking: AtomicBool,
    /// Whether it sleeps once the calls so far have run. Then it counts as unknown, too.
    sleeps: AtomicBool,
    /// Whether it was known before it slept.
    knew: AtomicBool,
    /// What goes on behind its calls. Locked for a few stores.
    ongoing: Mutex<Option<Arc<Ongoing>>>,
    /// What its init left. Lock order: after the table's lock. Held for a few stores.
    kept: Mutex<Option<Kept>>,
}

/// Does work behind calls that do not wait, once NCCL's part is over, which it is told to have succeeded or not. Until then these
/// communicators are in progress. `roster` is of an init.
pub(crate) fn go_on_behind(
    handles: Vec<ncclComm_t>,
    roster: Option<Arc<Lineage>>,
    work: impl FnOnce(bool) -> ncclResult_t + 'static,
) {
    let ongoing = Ongoing::new(roster);
    for known in handles.iter().filter_map(|handle| find(*handle)) {
        *known.ongoing.lock() = Some(ongoing.clone());
    }
    ongoing.begin(handles, work);
}

impl Communicator {
    /// Reports a communicator whose init Windlass did not see as on NCCL, with the reason `Child`.
    pub fn count_as_child(&self) {
        if peers::is_on() {
            peers::tell(self.counters(), &InitOutcome::OnNccl(FallbackReason::Child));
        }
    }

    /// A record without a communicator.
    fn unused() -> Communicator {
        Communicator {
            handle: AtomicUsize::new(0),
            counters: AtomicUsize::new(0),
            ranks: AtomicI32::new(0),
            known: AtomicBool::new(false),
            has_peer_group: AtomicBool::new(false),
            is_lazy: AtomicBool::new(false),
            members: AtomicUsize::new(0),
            native: [const { AtomicU64::new(0) }; COLLECTIVES],
            fixed_order: AtomicBool::new(false),
            order_is_asked_for: AtomicBool::new(false),
            order_is_said: AtomicBool::new(false),
            has_gate: AtomicBool::new(false),
            gate: Gate::new(),
            has_windows: AtomicBool::new(false),
            is_nonblocking: AtomicBool::new(false),
            sleeps: AtomicBool::new(false),
            knew: AtomicBool::new(false),
            ongoing: Mutex::new(None),
            kept: Mutex::new(None),
        }
    }

    /// Ends the record, under the table's lock. Returns what the init left.
    fn end(&self) -> Option<Kept> {
        self.handle.store(0, Ordering::Relaxed);
        self.has_peer_group.store(false, Ordering::Relaxed);
        self.is_lazy.store(false, Ordering::Relaxed);
        self.has_gate.store(false, Ordering::Relaxed);
        self.is_nonblocking.store(false, Ordering::Relaxed);
        self.sleeps.store(false, Ordering::Relaxed);
        count::memory(self.counters(), 0, false);
        self.ongoing.lock().take();
        self.kept.lock().take()
    }

    /// Stores what the init left, until [`remove`] takes it. Returns `kept` itself if the communicator has ended meanwhile, else the
    /// value that it replaces.
    pub fn keep(&'static self, handle: ncclComm_t, kept: Kept) -> Option<Kept> {
        let _unchanging = CHANGING.lock();
        if self.handle.load(Ordering::Relaxed) != handle as usize {
            return Some(kept);
        }
        let without = Terms { ranks: 0, native: Limits::NONE, fixed_order: false };
        let Terms { ranks, native, fixed_order } = kept.peer_group().map_or(without, |own| own.terms());
        self.members.store(ranks, Ordering::Relaxed);
        self.native.iter().zip(native.0).for_each(|(place, limit)| place.store(limit, Ordering::Relaxed));
        for function in Function::ALL {
            let limit = Collective::of(function).map_or(0, |collective| native.0[collective as usize]);
            count::native_below(self.counters(), function, limit);
        }
        self.fixed_order.store(fixed_order, Ordering::Relaxed);
        self.is_lazy.store(matches!(kept, Kept::Lazy(_)), Ordering::Relaxed);
        kept.name().into_iter().for_each(|name| count::name(self.counters(), name));
        let registering = kept.peer_group().and_then(|peer_group| peer_group.features.registering.as_ref());
        let windows = kept.peer_group().and_then(|peer_group| peer_group.features.windows.as_ref());
        self.has_gate.store(registering.is_some() || windows.is_some(), Ordering::Relaxed);
        self.has_windows.store(false, Ordering::Relaxed);
        registering.into_iter().for_each(|registering| registering.guarded_by(&self.gate));
        windows.into_iter().for_each(|windows| windows.guarded_by(&self.gate));
        kept.peer_group().into_iter().for_each(|one| {
            count::memory(self.counters(), one.memory_bytes(), false);
            count::token(self.counters(), one.negotiated().comm.number());
        });
        self.has_peer_group.store(kept.peer_group().is_some(), Ordering::Release);
        self.kept.lock().replace(kept)
    }

    /// Whether it has a peer group, until its end. Every lazy communicator has one.
    #[inline]
    pub fn has_peer_group(&self) -> bool {
        self.has_peer_group.load(Ordering::Acquire)
    }

    /// What its ranks have agreed on; valid while it has a peer group.
    #[inline]
    pub fn terms(&self) -> Terms {
        Terms {
            ranks: self.members.load(Ordering::Relaxed),
            native: Limits(std::array::from_fn(|index| self.native[index].load(Ordering::Relaxed))),
            fixed_order: self.fixed_order.load(Ordering::Relaxed),
        }
    }

    /// Whether the program asks for fixed order.
    #[inline]
    pub fn order_is_asked_for(&self) -> bool {
        self.order_is_asked_for.load(Ordering::Relaxed)
    }

    /// Whether the lack of fixed order is still to be logged; true once.
    pub fn says_order(&self) -> bool {
        !self.order_is_said.swap(true, Ordering::Relaxed)
    }

    /// Passes the gate, if there is one. The result is to be held while NCCL runs anything of this communicator.
    #[inline]
    pub fn pass(&'static self) -> Option<Passed<'static>> {
        if self.has_gate.load(Ordering::Relaxed) { Some(self.gate.pass()) } else { None }
    }

    /// Whether NCCL may have a kept window.
    #[inline]
    pub fn has_windows(&self) -> bool {
        self.has_windows.load(Ordering::Relaxed)
    }

    /// From now on NCCL may have a kept window.
    pub fn gets_windows(&self) {
        self.has_windows.store(true, Ordering::Relaxed);
    }

    /// Whether its handle is one of Windlass, which NCCL must not get.
    #[inline]
    pub fn is_lazy(&self) -> bool {
        self.is_lazy.load(Ordering::Relaxed)
    }

    /// The lazy communicator, if it is one and has not ended.
    pub fn lazy(&self, handle: ncclComm_t) -> Option<Arc<LazyCommunicator>> {
        let kept = |kept: &Kept| match kept {
            Kept::Lazy(lazy) => Some(lazy.clone()),
            _ => None,
        };
        if self.is_lazy() { self.look_at_kept(handle, kept)? } else { None }
    }

    /// Its peer group, which lives as long as this reference, also if another thread ends the communicator. None if the record
    /// belongs to another communicator by now.
    pub fn peer_group(&self, handle: ncclComm_t) -> Option<Arc<PeerGroup>> {
        self.look_at_kept(handle, |kept| kept.peer_group().cloned())?
    }

    /// What it keeps for its children. None where no child of it can have a peer group.
    pub fn lineage(&self, handle: ncclComm_t) -> Option<Arc<Lineage>> {
        let kept = |kept: &Kept| match kept {
            Kept::OnNccl(lineage) => Some(lineage.clone()),
            kept => kept.peer_group().map(|peer_group| peer_group.lineage.clone()),
        };
        self.look_at_kept(handle, kept)?
    }

    /// Ends this rank's wait in the session of the init, and in those of children of a communicator without a peer group.
    pub fn cancel_session(&self, handle: ncclComm_t) {
        self.look_at_kept(handle, |kept| match kept {
            Kept::Waiting(canceller) => canceller.abort(),
            Kept::OnNccl(lineage) => lineage.end(),
            Kept::PeerGroup(_) | Kept::Lazy(_) => {}
        });
    }

    /// Takes what the init of a communicator left that was not made. NCCL's handle stays known until its owner aborts it.
    pub fn give_up(&self, handle: ncclComm_t) -> Option<Kept> {
        let _unchanging = CHANGING.lock();
        if self.handle.load(Ordering::Relaxed) != handle as usize {
            return None;
        }
        self.has_peer_group.store(false, Ordering::Relaxed);
        self.kept.lock().take()
    }

    /// From now on all calls go to NCCL.
    pub fn give_up_peer_group(&self) {
        self.has_peer_group.store(false, Ordering::Relaxed);
    }

    /// Calls `look` with what the init left, if the record still has this handle. `look` runs under a lock and must be quick.
    pub fn look_at_kept<T>(&self, handle: ncclComm_t, look: impl FnOnce(&Kept) -> T) -> Option<T> {
        let kept = self.kept.lock();
        if self.handle.load(Ordering::Relaxed) != handle as usize {
            return None;
        }
        kept.as_ref().map(look)
    }

    /// Whether its calls do not wait, and it has a peer group or its ranks meet.
    #[inline]
    pub fn is_nonblocking(&self) -> bool {
        self.is_nonblocking.load(Ordering::Relaxed)
    }

    /// Notes whether its calls do not wait, and what it is known to be.
    pub fn identify_nonblocking(&self, is_nonblocking: bool, identity: Identity) {
        self.is_nonblocking.store(is_nonblocking, Ordering::Relaxed);
        self.identify(identity);
    }

    /// What goes on or went on last behind its calls. None where they wait.
    fn ongoing(&self, handle: ncclComm_t) -> Option<Arc<Ongoing>> {
        if !self.is_nonblocking() || self.handle.load(Ordering::Relaxed) != handle as usize {
            return None;
        }
        self.ongoing.lock().clone()
    }

    /// What Windlass says of its state in NCCL's place: `ncclInProgress`, or a failure behind its calls.
    pub fn state(&self, handle: ncclComm_t) -> Option<ncclResult_t> {
        let ongoing = self.ongoing(handle)?;
        Some(ongoing.state()).filter(|state| *state != ncclSuccess)
    }

    /// Fails while an earlier call is in progress, as NCCL's calls then do, or with that call's failure.
    pub fn check_ready(&self, handle: ncclComm_t) -> Result<(), ncclResult_t> {
        let state = self.state(handle).unwrap_or_else(|| known::state(handle));
        if state == ncclInProgress {
            let why = "is in use: call when ncclCommGetAsyncError no longer answers ncclInProgress";
            return Err(refuse(ncclInvalidArgument, format_args!("communicator {handle:p} {why}")));
        }
        state.ok()
    }

    /// Whether it sleeps once the calls so far have run.
    pub fn sleeps(&self) -> bool {
        self.sleeps.load(Ordering::Relaxed)
    }

    /// Notes whether it sleeps once the calls so far have run.
    pub fn set_sleeps(&self, sleeps: bool) {
        if self.sleeps.swap(sleeps, Ordering::Relaxed) != sleeps {
            let was_known = self.known.swap(!sleeps && self.knew.load(Ordering::Relaxed), Ordering::Relaxed);
            self.knew.store(was_known, Ordering::Relaxed);
        }
    }

    /// Fails if it sleeps: its kernels would find no memory.
    // Divergence: NCCL does not look, and its kernels fail.
    pub fn check_awake(&self, handle: ncclComm_t) -> Result<(), ncclResult_t> {
        match self.sleeps() {
            true => {
                let why = format_args!("communicator {handle:p} sleeps: call ncclCommResume first");
                Err(refuse(ncclInvalidUsage, why))
            }
            false => Ok(()),
        }
    }

    /// Whether what goes on behind a call forbids all ends but an abort.
    pub fn refuses_ends(&self, handle: ncclComm_t) -> bool {
        self.ongoing(handle).is_some_and(|ongoing| ongoing.refuses_ends())
    }

    /// Comes before its end: waits until nothing goes on behind its calls. An abort stops that.
    pub fn leave_ongoing(&self, handle: ncclComm_t, aborts: bool) {
        let Some(ongoing) = self.ongoing(handle) else { return };
        if aborts {
            self.peer_group(handle).iter().for_each(|peer_group| peer_group.abort());
        }
        ongoing.leave(aborts);
    }

    /// The index of its counters.
    pub fn counters(&self) -> usize {
        self.counters.load(Ordering::Relaxed)
    }

    /// How many ranks it has; 0 while that is not known.
    pub fn ranks(&self) -> usize {
        self.ranks.load(Ordering::Relaxed) as usize
    }

    /// The communicator, as profilers know it.
    pub fn observed(&self) -> Observed {
        let (handle, is_lazy) = (self.handle.load(Ordering::Relaxed), self.is_lazy());
        let Identity { rank, ranks, .. } = count::identity(self.counters());
        Observed { handle, is_lazy, name: count::name_of(self.counters()), rank, ranks }
    }

    /// Whether rank, ranks and device are all known, and calls need not look at its state.
    pub fn is_known(&self) -> bool {
        self.known.load(Ordering::Relaxed)
    }

    /// Notes rank, ranks and device.
    pub fn identify(&self, identity: Identity) {
        self.ranks.store(identity.ranks.max(0), Ordering::Relaxed);
        let known = identity.rank >= 0 && identity.ranks > 0 && identity.device >= 0;
        self.known.store(known && !self.is_nonblocking(), Ordering::Relaxed);
        count::identify(self.counters(), identity);
    }
}
