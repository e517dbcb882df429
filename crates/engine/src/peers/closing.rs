//! Peer groups that this rank has closed, until the others have, too: then their memory goes back.
//!
//! Ranks tell each other by a bit each in the shared page, and the end of a process is seen by its pidfd. So no
//! process is needed for it but those that still have the memory: whoever hosted the init may be gone.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use windlass_base::descriptor::Ours;
use windlass_base::guard;
use windlass_base::process;
use windlass_base::shared_page::SharedPage;
use windlass_base::thread;
use windlass_transport::heap::{self, Event, Heap, Holds, LeaseId, Region};

use super::page_layout::CLOSED_AT;
use super::release_socket::ReleaseSocket;
use super::{draining, process_exit, side_thread, transports, worker};

/// Giving memory back takes milliseconds, on a machine that does nothing else.
const EXIT_WITHIN: Duration = Duration::from_secs(5);

/// A graph that the program has destroyed lets go on a thread of the driver's, soon.
const GRAPHS_WITHIN: Duration = Duration::from_millis(250);

/// How it is known which ranks have closed.
#[derive(Debug)]
pub(super) struct ClosedSignal {
    /// Where each rank sets its bit; none after an init that failed before there was one.
    page: Option<Arc<SharedPage>>,
    rank: u32,
    /// After an init that failed: who touches the region keeps the release socket open, or has said that it has a peer group, and a bit to set.
    release_socket: Option<ReleaseSocket>,
    /// Whether anybody came to know the region.
    is_known: bool,
}

impl ClosedSignal {
    /// Of a peer group.
    pub(super) fn shared(page: Arc<SharedPage>, rank: u32) -> ClosedSignal {
        ClosedSignal { page: Some(page), rank, release_socket: None, is_known: true }
    }

    /// After an init that failed. Without a release socket nobody came to know the region.
    pub(super) fn failed(
        page: Option<Arc<SharedPage>>,
        rank: u32,
        release_socket: Option<ReleaseSocket>,
    ) -> ClosedSignal {
        ClosedSignal { page, rank, is_known: release_socket.is_some(), release_socket }
    }

    /// This rank touches nothing of the others' any more.
    fn close(&self) {
        // What was read and written of theirs comes before.
        self.bits().map(|bits| bits.fetch_or(1 << self.rank, Ordering::AcqRel));
    }

    fn closed(&self) -> u64 {
        if !self.is_known {
            return u64::MAX;
        }
        let let_go = self.release_socket.as_ref().map_or(0, ReleaseSocket::let_go);
        self.bits().map_or(let_go, |bits| let_go | bits.load(Ordering::Acquire))
    }

    fn bits(&self) -> Option<&AtomicU64> {
        (**self.page.as_ref()?).as_ref().get(CLOSED_AT)
    }
}

/// Another rank.
#[derive(Debug)]
pub(super) struct Life {
    pub rank: u32,
    pub process: u64,
    /// Its process's pidfd, which is readable once that has ended; none for this process. One for all its ranks here.
    pub ends: Option<Arc<Ours>>,
}

/// The pidfds that are open, by process: a program may have hundreds of communicators, and few descriptors. Held for a look.
static ENDS: Mutex<BTreeMap<u64, Weak<Ours>>> = Mutex::new(BTreeMap::new());

impl Life {
    /// Its process is told by this pidfd, or by the one that there is already.
    pub(super) fn ends_with(&mut self, pidfd: Ours) {
        let mut all = ENDS.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, ends| ends.strong_count() > 0);
        let known = all.get(&self.process).and_then(Weak::upgrade);
        let ends = known.unwrap_or_else(|| Arc::new(pidfd));
        all.insert(self.process, Arc::downgrade(&ends));
        self.ends = Some(ends);
    }

    pub(super) fn is_over(&self) -> bool {
        let Some(ends) = &self.ends else { return false };
        let mut polled = [PollFd::new(ends.as_ref(), PollFlags::IN)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polled, Some(&at_once)).is_ok_and(|ready| ready > 0)
    }
}

/// A region of ours that others may still touch.
#[derive(Debug)]
pub(super) struct Closing {
    heap: Arc<Heap>,
    leases: Vec<LeaseId>,
    signal: ClosedSignal,
    open: Vec<Arc<Life>>,
    /// Graphs that captured this rank's kernels may still touch what is the others'.
    holds: Arc<Holds>,
    told: bool,
}

/// Held across driver calls of [`settle`], by whoever settles; comes before the locks of symmetric heaps and [`CLOSED`].
static SETTLING: Mutex<()> = Mutex::new(());
/// Held for a few stores and looks; the rendezvous' locks come after it.
static CLOSED: Mutex<Vec<Closing>> = Mutex::new(Vec::new());
static EXITING: AtomicBool = AtomicBool::new(false);

impl Closing {
    pub(super) fn new(
        region: &Region,
        signal: ClosedSignal,
        open: Vec<Arc<Life>>,
        holds: Arc<Holds>,
    ) -> Closing {
        Closing {
            heap: region.heap().clone(),
            leases: vec![region.lease()],
            signal,
            open,
            holds,
            told: false,
        }
    }

    /// These were lent to the others later.
    pub(super) fn also(&mut self, leases: Vec<LeaseId>) {
        self.leases.extend(leases);
    }

    /// This rank has let go of all that is the others', but for graphs.
    pub(super) fn begin(mut self) {
        process_exit::go_on();
        self.tell();
        closed().push(self);
        // It looks after what waits for others, and may sleep: after an init that failed there may be no communicator.
        worker::wake();
    }

    /// Tells the others that this rank has closed, once it has.
    fn tell(&mut self) {
        if !self.told && self.holds.are_none() {
            self.told = true;
            self.signal.close();
        }
    }

    /// Looks who has closed or died; whether nobody is left, nor anything to tell.
    fn look(&mut self) -> bool {
        self.tell();
        let closed = self.signal.closed();
        self.open.retain(|life| {
            if closed & (1 << life.rank) != 0 {
                note_closed(&self.heap, &self.leases, life.rank);
            } else if life.is_over() {
                self.heap.note(Event::Died(life.process));
            } else {
                return true;
            }
            false
        });
        self.told && self.open.is_empty()
    }
}

fn note_closed(heap: &Heap, leases: &[LeaseId], rank: u32) {
    leases.iter().for_each(|lease| heap.note(Event::Closed(*lease, rank)));
}

fn closed() -> MutexGuard<'static, Vec<Closing>> {
    CLOSED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether something waits for others, or for graphs, to be given back.
pub(super) fn waits() -> bool {
    !closed().is_empty()
}

/// Gives back what nobody touches any more. Any thread, between calls; cheap while nothing waits.
pub fn settle() {
    if EXITING.load(Ordering::Relaxed) || closed().is_empty() {
        return;
    }
    guard::or_else(
        || (),
        || {
            let _alone = SETTLING.lock().unwrap_or_else(PoisonError::into_inner);
            if !EXITING.load(Ordering::Relaxed) {
                let over: Vec<Closing> = closed().extract_if(.., Closing::look).collect();
                // Their symmetric heaps may have no other owner.
                drop(over);
                heap::settle();
            }
        },
    );
}

/// At exit the memory of closed peer groups is given back whoever else has it mapped: a mapping keeps it for him.
pub(super) fn at_exit_too() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| process::on_exit(at_exit));
}

/// On a thread of its own: what this one had in thread-local storage is gone by now, the driver's part of it, too. Waited
/// for a moment only: the driver may be stuck.
pub(super) extern "C" fn at_exit() {
    static DONE: AtomicBool = AtomicBool::new(false);
    if windlass_bootstrap::is_in_child() {
        return;
    }
    DONE.store(false, Ordering::Relaxed);
    let finish = || {
        guard::or_else(|| (), give_back);
        DONE.store(true, Ordering::Release);
    };
    guard::or_else(
        || (),
        || {
            let begun = thread::spawn("windlass-exit", finish);
            let until = Instant::now() + EXIT_WITHIN;
            while begun.is_ok() && !DONE.load(Ordering::Acquire) && Instant::now() < until {
                std::thread::sleep(Duration::from_micros(200));
            }
            if DONE.load(Ordering::Acquire) {
                process_exit::is_over();
            }
        },
    );
}

/// What is closed from now on waits for the others again.
pub(super) fn begin_again() {
    EXITING.store(false, Ordering::Relaxed);
}

/// Whether graphs may still keep what closed peer groups had.
fn are_held_by_graphs() -> bool {
    let closed = closed();
    closed.iter().any(|closing| !closing.holds.are_none()) || !closed.is_empty() && !transports::are_unused()
}

fn give_back() {
    worker::end();
    side_thread::end();
    draining::look();
    draining::forget();
    let until = Instant::now() + GRAPHS_WITHIN;
    while are_held_by_graphs() && Instant::now() < until {
        std::thread::sleep(Duration::from_micros(200));
    }
    let _alone = SETTLING.lock().unwrap_or_else(PoisonError::into_inner);
    EXITING.store(true, Ordering::Relaxed);
    let left = std::mem::take(&mut *closed());
    for closing in &left {
        for life in &closing.open {
            note_closed(&closing.heap, &closing.leases, life.rank);
        }
    }
    drop(left);
    heap::settle();
    transports::give_back();
}
