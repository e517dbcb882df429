//! Keeps the memory of peer groups that this rank has closed until the other ranks have closed or died, and frees it then.
//!
//! Each rank sets a bit in the shared page when it closes, and the end of a process is seen (`background::life`). So only the processes that
//! still have the memory are needed: the init's host may be gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use windlass_base::guard;
use windlass_base::lock::Mutex;
use windlass_base::process;
use windlass_base::shared_page::SharedPage;
use windlass_base::thread;
use windlass_transport::heap::{self, Event, Heap, Holds, LeaseId, Region};

use crate::background::life::Life;
use crate::background::{process_exit, worker};
use crate::features::page_layout::{CLOSED_AT, LEFT_AT};
use crate::peers::setup::release_socket::ReleaseSocket;
use crate::peers::setup::transports;

/// How long graphs are waited for. A destroyed graph frees its resources soon, on a thread of the driver.
const GRAPHS_WITHIN: Duration = Duration::from_millis(250);

/// How this rank learns which ranks have closed.
#[derive(Debug)]
pub(in crate::peers) struct ClosedSignal {
    /// The page where each rank sets its bit. None after an init that failed before the page was there.
    page: Option<Arc<SharedPage>>,
    rank: u32,
    /// After a failed init: ranks that touch the region hold the socket's other ends, or have said that they have a peer group and will set a bit.
    release_socket: Option<ReleaseSocket>,
    /// Whether any other rank came to know the region.
    is_known: bool,
}

impl ClosedSignal {
    /// The signal of a peer group.
    pub(in crate::peers) fn shared(page: Arc<SharedPage>, rank: u32) -> ClosedSignal {
        ClosedSignal { page: Some(page), rank, release_socket: None, is_known: true }
    }

    /// The signal after a failed init. Without a release socket no other rank came to know the region.
    pub(in crate::peers) fn failed(
        page: Option<Arc<SharedPage>>,
        rank: u32,
        release_socket: Option<ReleaseSocket>,
    ) -> ClosedSignal {
        ClosedSignal { page, rank, is_known: release_socket.is_some(), release_socket }
    }

    /// Says that this rank does not touch the others' memory any more.
    fn close(&self) {
        // `AcqRel` orders all reads and writes of the others' memory before the bit.
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

/// A region of this rank that others may still touch.
#[derive(Debug)]
pub(in crate::peers) struct Closing {
    heap: Arc<Heap>,
    leases: Vec<LeaseId>,
    signal: ClosedSignal,
    open: Vec<Arc<Life>>,
    /// Graphs that captured this rank's kernels may still touch the others' memory.
    holds: Arc<Holds>,
    told: bool,
}

/// Locked across driver calls of [`settle`]. Comes before the locks of symmetric heaps and [`CLOSED`].
static SETTLING: Mutex<()> = Mutex::new(());
/// Locked for a few stores and looks. The bootstrap's locks come after it.
static CLOSED: Mutex<Vec<Closing>> = Mutex::new(Vec::new());
static EXITING: AtomicBool = AtomicBool::new(false);

impl Closing {
    pub(in crate::peers) fn new(
        region: &Region,
        signal: ClosedSignal,
        open: Vec<Arc<Life>>,
        holds: Arc<Holds>,
    ) -> Closing {
        Closing { heap: region.heap.clone(), leases: vec![region.lease], signal, open, holds, told: false }
    }

    /// The shared page of a peer group.
    pub(in crate::peers) fn page(&self) -> Option<&Arc<SharedPage>> {
        self.signal.page.as_ref()
    }

    /// Says that this rank has ended or aborted the communicator. A forked child says nothing of its parent's.
    pub(in crate::peers) fn leave(&self) {
        if process::is_forked() {
            return;
        }
        let ClosedSignal { page, rank, .. } = &self.signal;
        let word = page.as_ref().and_then(|page| (**page).as_ref().get(LEFT_AT));
        word.map(|word| word.fetch_or(1 << rank, Ordering::AcqRel));
    }

    /// Adds leases that were lent to the others after init.
    pub(in crate::peers) fn also(&mut self, leases: Vec<LeaseId>) {
        self.leases.extend(leases);
    }

    /// Begins to wait for the others. This rank has unmapped all of their memory, except what graphs hold.
    pub(in crate::peers) fn begin(mut self) {
        process_exit::go_on();
        self.tell();
        CLOSED.lock().push(self);
        // The worker looks after closed peer groups. It may sleep: after a failed init there may be no communicator.
        worker::wake();
    }

    /// Tells the others that this rank has closed, once no graph holds their memory.
    fn tell(&mut self) {
        if !self.told && self.holds.are_none() {
            self.told = true;
            self.signal.close();
        }
    }

    /// Notes which ranks have closed or died. Returns whether none is left, and the others have been told.
    fn look(&mut self) -> bool {
        self.tell();
        self.open.retain(|life| {
            // Looked at first: a rank closes before its process ends.
            let is_over = life.is_over();
            let closed = self.signal.closed();
            if closed & (1 << life.rank) != 0 {
                note_closed(&self.heap, &self.leases, life.rank);
            } else if is_over {
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

/// Whether closed peer groups wait for other ranks or for graphs.
pub(in crate::peers) fn waits() -> bool {
    !CLOSED.lock().is_empty()
}

/// Frees the memory of closed peer groups that no rank touches any more. Callable on any thread, between calls. Cheap if there are none.
pub fn settle() {
    if EXITING.load(Ordering::Relaxed) || CLOSED.lock().is_empty() {
        return;
    }
    guard::or_else(
        || (),
        || {
            let _alone = SETTLING.lock();
            if !EXITING.load(Ordering::Relaxed) {
                let over: Vec<Closing> = CLOSED.lock().extract_if(.., Closing::look).collect();
                // The last owner of a symmetric heap may be among these.
                drop(over);
                heap::settle();
            }
        },
    );
}

/// Lets peer groups that close from now on wait for other ranks again, after [`end`].
pub(in crate::peers) fn begin_again() {
    EXITING.store(false, Ordering::Relaxed);
}

/// Whether graphs may still hold resources of closed peer groups. A graph's destructors run one by one, so that the worker may have let go
/// of the last closed one before its launch resources are returned.
fn are_held_by_graphs() -> bool {
    CLOSED.lock().iter().any(|closing| !closing.holds.are_none()) || transports::are_held_by_graphs()
}

/// For the end of the process: frees all closed regions, even those that others have mapped. Waits for graphs up to [`GRAPHS_WITHIN`].
pub(in crate::peers) fn end() {
    thread::wait_while(GRAPHS_WITHIN, Duration::from_micros(200), are_held_by_graphs);
    let _alone = SETTLING.lock();
    EXITING.store(true, Ordering::Relaxed);
    let left = std::mem::take(&mut *CLOSED.lock());
    for closing in &left {
        for life in &closing.open {
            note_closed(&closing.heap, &closing.leases, life.rank);
        }
    }
    drop(left);
    heap::settle();
}
