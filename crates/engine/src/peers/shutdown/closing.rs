//! Peer groups that this rank has closed, until the others have, too: then their memory goes back.
//!
//! Ranks tell each other by a bit each in the shared page, and the end of a process is seen by its pidfd. So no
//! process is needed for it but those that still have the memory: whoever hosted the init may be gone.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use windlass_base::guard;
use windlass_base::shared_page::SharedPage;
use windlass_transport::heap::{self, Event, Heap, Holds, LeaseId, Region};

use crate::background::life::Life;
use crate::background::{process_exit, worker};
use crate::features::page_layout::CLOSED_AT;
use crate::peers::setup::release_socket::ReleaseSocket;
use crate::peers::setup::transports;

/// A graph that the program has destroyed lets go on a thread of the driver's, soon.
const GRAPHS_WITHIN: Duration = Duration::from_millis(250);

/// How it is known which ranks have closed.
#[derive(Debug)]
pub(in crate::peers) struct ClosedSignal {
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
    pub(in crate::peers) fn shared(page: Arc<SharedPage>, rank: u32) -> ClosedSignal {
        ClosedSignal { page: Some(page), rank, release_socket: None, is_known: true }
    }

    /// After an init that failed. Without a release socket nobody came to know the region.
    pub(in crate::peers) fn failed(
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

/// A region of ours that others may still touch.
#[derive(Debug)]
pub(in crate::peers) struct Closing {
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
/// Held for a few stores and looks; the bootstrap's locks come after it.
static CLOSED: Mutex<Vec<Closing>> = Mutex::new(Vec::new());
static EXITING: AtomicBool = AtomicBool::new(false);

impl Closing {
    pub(in crate::peers) fn new(
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
    pub(in crate::peers) fn also(&mut self, leases: Vec<LeaseId>) {
        self.leases.extend(leases);
    }

    /// This rank has let go of all that is the others', but for graphs.
    pub(in crate::peers) fn begin(mut self) {
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
pub(in crate::peers) fn waits() -> bool {
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

/// What is closed from now on waits for the others again.
pub(in crate::peers) fn begin_again() {
    EXITING.store(false, Ordering::Relaxed);
}

/// Whether graphs may still keep what closed peer groups had.
fn are_held_by_graphs() -> bool {
    let closed = closed();
    closed.iter().any(|closing| !closing.holds.are_none()) || !closed.is_empty() && !transports::are_unused()
}

/// The process ends: all that this rank has let go of is given back, whoever else has it mapped.
pub(in crate::peers) fn end() {
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
}
