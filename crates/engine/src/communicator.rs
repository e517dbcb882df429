//! The communicators we know, found by NCCL's own handle.
//!
//! The handle that applications hold is NCCL's pointer (of a lazy communicator, [ours](crate::lazy)), so what we know of it lies beside, in a table that is read
//! without locks on every call. Entries come from every function that makes a communicator, and from the first
//! call of a handle that we have not seen (made by a non-blocking split, or before we were there).

mod table;

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use nccl_sys::{cudaStream_t, ncclComm_t};

use crate::lazy::LazyCommunicator;
use crate::peers::{self, InitOutcome, ParentOnNccl, PeerGroup};
use windlass_base::gate::{Gate, Passed};
use windlass_base::gpu::stream::{Capture, Place};
use windlass_base::stats::count::{self, Identity};
use windlass_bootstrap::Canceller;
use windlass_bootstrap::outcome::FallbackReason;
use windlass_transport::tuning::{COLLECTIVES, Limits, Terms};

use table::CHANGING;
pub(crate) use table::{find, insert, remove};

/// What is kept with a communicator.
#[derive(Debug)]
pub enum Kept {
    /// Its peer group.
    PeerGroup(Arc<PeerGroup>),
    /// It is lazy, with its peer group.
    Lazy(Arc<LazyCommunicator>),
    /// Its session is not over: an abort ends this rank's wait.
    Waiting(Canceller),
    /// It has no peer group, and what is made from it may.
    OnNccl(Arc<ParentOnNccl>),
}

impl Kept {
    /// The peer group, if its session is over.
    pub fn peer_group(&self) -> Option<&Arc<PeerGroup>> {
        match self {
            Kept::PeerGroup(peer_group) => Some(peer_group),
            Kept::Lazy(lazy) => Some(lazy.peer_group()),
            Kept::Waiting(_) | Kept::OnNccl(_) => None,
        }
    }
}

/// What we know of a communicator. Records are reused, never freed: a thread that is inside a call while another
/// aborts its communicator still reads a record.
#[derive(Debug)]
pub struct Communicator {
    handle: AtomicUsize,
    counters: AtomicUsize,
    ranks: AtomicI32,
    known: AtomicBool,
    /// Whether a peer group is kept: what every call may look at.
    has_peer_group: AtomicBool,
    /// Whether the handle is ours.
    is_lazy: AtomicBool,
    has_run: AtomicBool,
    /// Ranks of its peer group, and what native collectives serve, as [`Limits`]: written before `has_peer_group`.
    members: AtomicUsize,
    native: [AtomicU64; COLLECTIVES],
    /// Whether its reductions that round are native at every size.
    fixed_order: AtomicBool,
    /// Whether this process asks for that, and whether it was said that it cannot be.
    order_is_asked_for: AtomicBool,
    order_is_said: AtomicBool,
    /// Whether a thread of ours may be in NCCL's communicator, too: then calls pass the gate.
    has_gate: AtomicBool,
    gate: Gate,
    /// Whether it has had a window that is kept.
    has_windows: AtomicBool,
    /// Whether its calls are told to other ranks.
    is_checked: AtomicBool,
    /// The stream of the last call that went to NCCL since the last eager one of ours, by its handle; of a communicator with
    /// a peer group only. [`NO_STREAM`]: none did, or [it is followed](Communicator::is_followed).
    forwarded_on: AtomicUsize,
    /// The id that the stream with this handle had at the first of these calls, for another may have the handle since. 0: not known.
    forwarded_id: AtomicU64,
    /// The capture, by its id, whose first operation of ours was ordered after that. 0: none's was.
    ordered_in: AtomicU64,
    /// Whether what goes to NCCL is to be followed.
    follows: AtomicBool,
    /// What its init left. Held for a few stores, after the lock of the table.
    kept: Mutex<Option<Kept>>,
}

const NO_STREAM: usize = usize::MAX;
/// `cudaStreamPerThread`: every thread's is another.
const PER_THREAD: usize = 2;

impl Communicator {
    /// It was not seen when it was made.
    pub fn count_as_child(&self) {
        if peers::is_on() {
            peers::tell(self.counters(), &InitOutcome::OnNccl(FallbackReason::Child));
        }
    }

    /// A record of nobody's.
    fn unused() -> Communicator {
        Communicator {
            handle: AtomicUsize::new(0),
            counters: AtomicUsize::new(0),
            ranks: AtomicI32::new(0),
            known: AtomicBool::new(false),
            has_peer_group: AtomicBool::new(false),
            is_lazy: AtomicBool::new(false),
            has_run: AtomicBool::new(false),
            members: AtomicUsize::new(0),
            native: [const { AtomicU64::new(0) }; COLLECTIVES],
            fixed_order: AtomicBool::new(false),
            order_is_asked_for: AtomicBool::new(false),
            order_is_said: AtomicBool::new(false),
            has_gate: AtomicBool::new(false),
            gate: Gate::new(),
            has_windows: AtomicBool::new(false),
            is_checked: AtomicBool::new(false),
            forwarded_on: AtomicUsize::new(NO_STREAM),
            forwarded_id: AtomicU64::new(0),
            ordered_in: AtomicU64::new(0),
            follows: AtomicBool::new(false),
            kept: Mutex::new(None),
        }
    }

    /// It is nobody's from now on. Under the lock of the table. Gives what its init left.
    fn end(&self) -> Option<Kept> {
        self.handle.store(0, Ordering::Relaxed);
        self.has_peer_group.store(false, Ordering::Relaxed);
        self.is_lazy.store(false, Ordering::Relaxed);
        self.is_checked.store(false, Ordering::Relaxed);
        self.has_gate.store(false, Ordering::Relaxed);
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Keeps what its init left, until [`remove`] gives it back. If the communicator has ended meanwhile, gives it back
    /// at once.
    pub fn keep(&'static self, handle: ncclComm_t, kept: Kept) -> Option<Kept> {
        let _unchanging = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        if self.handle.load(Ordering::Relaxed) != handle as usize {
            return Some(kept);
        }
        self.forwarded_on.store(NO_STREAM, Ordering::Relaxed);
        self.follows.store(false, Ordering::Relaxed);
        self.has_run.store(false, Ordering::Relaxed);
        let without = Terms { ranks: 0, native: Limits::NONE, fixed_order: false };
        let Terms { ranks, native, fixed_order } = kept.peer_group().map_or(without, |own| own.terms());
        self.members.store(ranks, Ordering::Relaxed);
        self.native.iter().zip(native.0).for_each(|(place, limit)| place.store(limit, Ordering::Relaxed));
        self.fixed_order.store(fixed_order, Ordering::Relaxed);
        self.is_lazy.store(matches!(kept, Kept::Lazy(_)), Ordering::Relaxed);
        let registering = kept.peer_group().and_then(|peer_group| peer_group.registering());
        let windows = kept.peer_group().and_then(|peer_group| peer_group.windows());
        self.has_gate.store(registering.is_some() || windows.is_some(), Ordering::Relaxed);
        self.has_windows.store(false, Ordering::Relaxed);
        let checking = kept.peer_group().and_then(|peer_group| peer_group.checking());
        self.is_checked.store(checking.is_some(), Ordering::Relaxed);
        registering.into_iter().for_each(|registering| registering.guarded_by(&self.gate));
        windows.into_iter().for_each(|windows| windows.guarded_by(&self.gate));
        self.has_peer_group.store(kept.peer_group().is_some(), Ordering::Release);
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).replace(kept)
    }

    /// Whether it has a peer group, as long as nobody ends it. A lazy communicator has one.
    #[inline]
    pub fn has_peer_group(&self) -> bool {
        self.has_peer_group.load(Ordering::Acquire)
    }

    /// What its ranks have agreed on; while it has a peer group.
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

    /// Whether nobody has said yet that it cannot be had.
    pub fn says_order(&self) -> bool {
        !self.order_is_said.swap(true, Ordering::Relaxed)
    }

    /// To be held while NCCL runs anything of this communicator.
    #[inline]
    pub fn pass(&'static self) -> Option<Passed<'static>> {
        if self.has_gate.load(Ordering::Relaxed) { Some(self.gate.pass()) } else { None }
    }

    /// Whether NCCL may meet a window that is kept.
    #[inline]
    pub fn has_windows(&self) -> bool {
        self.has_windows.load(Ordering::Relaxed)
    }

    /// From now on it may.
    pub fn gets_windows(&self) {
        self.has_windows.store(true, Ordering::Relaxed);
    }

    /// Whether other ranks are told of its calls.
    #[inline]
    pub fn is_checked(&self) -> bool {
        self.is_checked.load(Ordering::Relaxed)
    }

    /// Whether its handle is ours, so that NCCL must not get it.
    #[inline]
    pub fn is_lazy(&self) -> bool {
        self.is_lazy.load(Ordering::Relaxed)
    }

    /// The lazy communicator, if it is one and nobody has ended it.
    pub fn lazy(&self, handle: ncclComm_t) -> Option<Arc<LazyCommunicator>> {
        let kept = |kept: &Kept| match kept {
            Kept::Lazy(lazy) => Some(lazy.clone()),
            _ => None,
        };
        if self.is_lazy() { self.look_at_kept(handle, kept)? } else { None }
    }

    /// Its peer group, which stays while this is held, also if another thread ends the communicator; none if this record is
    /// another communicator's by now.
    pub fn peer_group(&self, handle: ncclComm_t) -> Option<Arc<PeerGroup>> {
        self.look_at_kept(handle, |kept| kept.peer_group().cloned())?
    }

    /// What it keeps for those made from it, where it has no peer group.
    pub fn parent_on_nccl(&self, handle: ncclComm_t) -> Option<Arc<ParentOnNccl>> {
        let kept = |kept: &Kept| match kept {
            Kept::OnNccl(parent_on_nccl) => Some(parent_on_nccl.clone()),
            _ => None,
        };
        self.look_at_kept(handle, kept)?
    }

    /// Ends this rank's wait in the session of its init, if it is there, and of what is made from one without a peer group.
    pub fn cancel_session(&self, handle: ncclComm_t) {
        self.look_at_kept(handle, |kept| match kept {
            Kept::Waiting(canceller) => canceller.abort(),
            Kept::OnNccl(parent_on_nccl) => parent_on_nccl.end(),
            Kept::PeerGroup(_) | Kept::Lazy(_) => {}
        });
    }

    /// Gives what its init left: there is no communicator, but NCCL's handle stays until its owner aborts it.
    pub fn give_up(&self, handle: ncclComm_t) -> Option<Kept> {
        let _unchanging = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        if self.handle.load(Ordering::Relaxed) != handle as usize {
            return None;
        }
        self.has_peer_group.store(false, Ordering::Relaxed);
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// All that comes is NCCL's to answer from now on.
    pub fn give_up_peer_group(&self) {
        self.has_peer_group.store(false, Ordering::Relaxed);
    }

    /// Whether its peer group has run anything.
    #[inline]
    pub fn has_run(&self) -> bool {
        self.has_run.load(Ordering::Relaxed)
    }

    /// Its peer group runs something.
    pub fn runs(&self) {
        self.has_run.store(true, Ordering::Relaxed);
    }

    /// A call goes to NCCL on this stream. Where that is, is asked at the first of several on one handle.
    #[inline]
    pub fn forwards_on(&self, stream: cudaStream_t, place: impl FnOnce() -> Option<Place>) {
        let stream = stream as usize;
        if self.forwarded_on.load(Ordering::Relaxed) != stream || stream == PER_THREAD {
            let id = match place() {
                Some(Place::Eager(id)) => id,
                _ => 0,
            };
            self.forwarded_id.store(id, Ordering::Relaxed);
            self.forwarded_on.store(stream, Ordering::Relaxed);
        }
        self.ordered_in.store(0, Ordering::Relaxed);
    }

    /// One of ours comes here, which is asked only if there is need: whether NCCL has work of the communicator that it is not ordered
    /// after. Asks once, and once in each capture: nobody knows where its graph is launched, nor whether before eager ones that are yet to
    /// come.
    pub fn has_forwarded_elsewhere(&self, place: impl FnOnce() -> Option<Place>) -> bool {
        if self.forwarded_on.load(Ordering::Relaxed) == NO_STREAM {
            return false;
        }
        let place = place();
        if let Some(Place::Captured(Capture { id, .. })) = place {
            return self.ordered_in.swap(id, Ordering::Relaxed) != id;
        }
        self.forwarded_on.store(NO_STREAM, Ordering::Relaxed);
        place != Some(Place::Eager(self.forwarded_id.load(Ordering::Relaxed)))
    }

    /// Graphs have operations of ours, or may have: what goes to NCCL is followed from now on.
    pub fn follows(&self) {
        self.follows.store(true, Ordering::Relaxed);
    }

    /// Whether it is.
    #[inline]
    pub fn has_to_follow(&self) -> bool {
        self.follows.load(Ordering::Relaxed)
    }

    /// What went to NCCL has been followed: all that comes of ours is ordered after it.
    pub fn is_followed(&self) {
        self.forwarded_on.store(NO_STREAM, Ordering::Relaxed);
    }

    /// Looks at what its init left, if it is still this communicator. `look` must be quick.
    pub fn look_at_kept<T>(&self, handle: ncclComm_t, look: impl FnOnce(&Kept) -> T) -> Option<T> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if self.handle.load(Ordering::Relaxed) != handle as usize {
            return None;
        }
        kept.as_ref().map(look)
    }

    /// Where its calls are counted.
    pub fn counters(&self) -> usize {
        self.counters.load(Ordering::Relaxed)
    }

    /// How many ranks it has; 0 while that is not known.
    pub fn ranks(&self) -> usize {
        self.ranks.load(Ordering::Relaxed) as usize
    }

    /// Whether rank, ranks and device are all known.
    pub fn is_known(&self) -> bool {
        self.known.load(Ordering::Relaxed)
    }

    /// Notes what has become known.
    pub fn identify(&self, identity: Identity) {
        self.ranks.store(identity.ranks.max(0), Ordering::Relaxed);
        let known = identity.rank >= 0 && identity.ranks > 0 && identity.device >= 0;
        self.known.store(known, Ordering::Relaxed);
        count::identify(self.counters(), identity);
    }
}
