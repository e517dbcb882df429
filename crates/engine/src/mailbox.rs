//! Sends and receives between ranks that can write each other's memory: one kernel for each group of one communicator on
//! one stream (`crates/kernels`), over rings in slices of the ranks' arenas, with no NCCL connection.
//!
//! Slices come and go elsewhere; here are addresses. A [`Supply`] per device has the loaded kernel and the budget of
//! blocks. At birth a rank lends a slice of [`Layout::bytes`] zeros, tells its peers, takes a [`Grant`] and makes its
//! [`Mailbox`]; all that can fail for want of something fails there. After that nothing allocates on the device and
//! nothing waits for it, except a group whose list of operations finds four lists before it still on their way.
//!
//! # Growing
//! The first rings are small. A larger one is a slice too, of [`Mailbox::growth_bytes`] at the receiver, mapped by
//! the sender; the ranks agree on it elsewhere, asked by [`Mailbox::wants_growth`] and [`Mailbox::asks_early`]. Then
//! [`Mailbox::grow_receive`] at the receiver, and only after it [`Mailbox::grow_send`] at the sender: both are a store, so
//! that kernels that run already see it, and graphs too. It stays as long as the first ones.
//!
//! # The end
//! NCCL's destroy waits for the work that was issued: [`Mailbox::wait_idle`], then drop the mailbox, then its slices.
//! A mailbox that is dropped with work in flight aborts it, so that the GPU gets free; its slices must then stay until
//! [`Mailbox::is_idle`] would have said so, or for ever. Graphs that captured the mailbox keep its word for the
//! kernel, its events, its blocks and, by [`Parts::hold`], its slices; they may run after the mailbox is gone, in order
//! with each other.

pub mod calls;

mod growing;

pub mod layout;

mod lists;

mod order;

pub mod refusal;

pub mod stuck;

pub mod supply;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use windlass_kernels::arrange::{self, Limits, Peer, arrange};
use windlass_kernels::launch::{
    BULK_WORD_STRIDE, CONTROL_ABORT, Geometry, LAUNCH_BULK_GREW, LINE_WORD_STRIDE, Launch,
    Operation as Listed,
};

pub use calls::Calls;
pub use growing::Wants;
pub use layout::Layout;
pub use refusal::Refusal;
pub use stuck::{Progress, Stuck, Wait};
pub use supply::{Grant, Supply};
/// A send or a receive of a group; the peer is a rank of the communicator, also this one.
pub use windlass_kernels::arrange::{Call as Operation, Direction};
/// What a lane carries: short messages go by lines, long ones by chunks.
pub use windlass_kernels::growth::Wire;

use crate::gpu::capture::Relaxed;
use crate::gpu::graph::Released;
use crate::gpu::module::{Shape, Start};
use crate::gpu::stream::{Capture, Ordering::Inside};
use crate::gpu::{Address, Driver, Failure, StreamHandle};
use calls::PEERS_MAX;
use lists::Run;
use order::{Lane, Order};
use supply::{EAGER_LISTS, Kit, Lent};

/// Lets the graph of a capture hold the communicator's slices; called by every operation in a capture.
pub type Hold = Box<dyn Fn(&Driver, Capture) -> Result<(), Failure> + Send + Sync>;

/// What a mailbox is made of.
pub struct Parts {
    /// This rank's device's.
    pub supply: Arc<Supply>,
    /// The blocks that its kernels may have.
    pub grant: Grant,
    /// What the ranks agreed on, and which of them this is.
    pub geometry: Geometry,
    /// Where each rank's slice begins for this rank's device, this rank's own too. They stay as long as the mailbox.
    pub slices: Vec<Address>,
    /// For slices that graphs still need.
    pub hold: Hold,
}

/// One rank's mailboxes of one communicator.
pub struct Mailbox {
    supply: Arc<Supply>,
    lent: Arc<Lent>,
    peers: Vec<Peer>,
    geometry: Geometry,
    /// With the blocks that there are in any case.
    limits: Limits,
    report: Address,
    list: Address,
    hold: Hold,
    aborted: AtomicBool,
    /// A group is being issued outside of captures.
    issuing: AtomicBool,
    /// A group was issued in part: what it left is never known to be done, and all that it may touch stays.
    doubtful: AtomicBool,
    /// Peers to whom a group sent chunks.
    sent_chunks: AtomicU64,
    /// Taken by operations, which NCCL has one thread at a time issue, and held across calls of the driver.
    work: Mutex<Work>,
}

/// What operations change and use again.
#[derive(Default)]
struct Work {
    order: Order,
    listed: Vec<Listed>,
    launch: Launch,
    /// Eager lists that may not have been copied yet, each with its event of the kit.
    copying: [Option<Run>; EAGER_LISTS],
    next_copy: usize,
    /// The capture that holds the kit already.
    held: Option<u64>,
}

/// A list that a graph copies whenever it runs, and the kit that it lies in.
struct Held {
    lent: Arc<Lent>,
    list: Option<Run>,
}

impl Released for Held {
    fn released(&self) {
        if let (Some(kit), Some(run)) = (self.lent.kit(), self.list) {
            kit.room.give_back_of_graph(run);
        }
    }
}

impl Mailbox {
    /// Makes this rank's side. Every rank's slice must hold zeros before any rank runs an operation.
    pub fn new(parts: Parts) -> Result<Mailbox, Refusal> {
        Mailbox::make(parts).map_err(Refusal::told)
    }

    fn make(parts: Parts) -> Result<Mailbox, Refusal> {
        let Parts { supply, grant, geometry, slices, hold } = parts;
        let strange = |why| Refusal::Strange { why, ranks: slices.len(), rank: geometry.rank };
        if !geometry.is_valid() {
            return Err(strange("the geometry is not one"));
        }
        if slices.len() > PEERS_MAX {
            return Err(strange("too many ranks"));
        }
        let ranks = slices.len() as u32;
        let own = *slices.get(geometry.rank as usize).ok_or_else(|| strange("there is no such rank"))?;
        if slices.iter().any(|slice| *slice == 0 || !slice.is_multiple_of(128)) {
            return Err(strange("a slice is not aligned to 128 bytes"));
        }
        let layout = Layout::of(ranks, &geometry);
        let mut peers: Vec<Peer> = (0..ranks)
            .zip(&slices)
            .map(|(peer, slice)| layout.peer(geometry.rank, own, peer, *slice))
            .collect();
        let limits = Limits {
            blocks_max: grant.least(),
            bulk: supply.bulk,
            shared_bytes_max: supply.shared_bytes_max,
        };
        try_largest_group(&peers, &geometry, &limits)?;
        let lent = {
            let _entered = supply.home().enter()?;
            Arc::new(supply.lend(grant)?)
        };
        growing::place_words(&mut peers, &lent);
        Ok(Mailbox {
            lent,
            peers,
            geometry,
            limits,
            report: own + layout.report,
            list: own + layout.list,
            hold,
            aborted: AtomicBool::new(false),
            issuing: AtomicBool::new(false),
            doubtful: AtomicBool::new(false),
            sent_chunks: AtomicU64::new(0),
            work: Mutex::default(),
            supply,
        })
    }

    /// Runs one group: its sends and receives, in call order, on one stream, after all that this mailbox ran before. Also
    /// into a capture of that stream.
    ///
    /// A failure of the driver leaves peers waiting: the communicator is then for its owner to abort.
    pub fn run(&self, operations: &[Operation], stream: StreamHandle) -> Result<(), Refusal> {
        self.run_joined(operations, stream, &[])
    }

    /// The same for a group that was called on other streams too: it runs after what they hold now, and what they get
    /// later runs after it, as in NCCL.
    pub fn run_joined(
        &self,
        operations: &[Operation],
        stream: StreamHandle,
        others: &[StreamHandle],
    ) -> Result<(), Refusal> {
        self.run_now(operations, stream, others).map_err(|refusal| {
            if self.issuing.swap(false, Ordering::Relaxed) {
                // What was issued may run, and nothing says when it is done.
                self.doubtful.store(true, Ordering::Relaxed);
                self.abort();
            }
            refusal.told()
        })
    }

    /// Lets what comes next on a stream run after all that this mailbox ran, in its captures too.
    pub fn order(&self, stream: StreamHandle) -> Result<(), Refusal> {
        let order = || -> Result<(), Refusal> {
            let work = &mut *self.lock();
            if work.order.is_all_on(stream) {
                return Ok(());
            }
            let kit = self.kit()?;
            let home = self.supply.home();
            let _current = home.be_current()?;
            let lane = Lane::of(home.driver, stream)?;
            self.hold_in(&mut work.held, lane)?;
            Ok(work.order.before(home.driver, kit, lane)?)
        };
        order().map_err(Refusal::told)
    }

    /// A capture that uses the mailbox keeps what that needs, as long as its graph lives.
    fn hold_in(&self, held: &mut Option<u64>, lane: Lane) -> Result<(), Failure> {
        let driver = self.supply.home().driver;
        if let Some(capture) = lane.capture()
            && *held != Some(capture.id)
        {
            (self.hold)(driver, capture)?;
            driver.retain_in_graph(capture.graph, Arc::new(Held { lent: self.lent.clone(), list: None }))?;
            *held = Some(capture.id);
        }
        Ok(())
    }

    fn run_now(
        &self,
        operations: &[Operation],
        stream: StreamHandle,
        others: &[StreamHandle],
    ) -> Result<(), Refusal> {
        if self.aborted.load(Ordering::Acquire) {
            return Err(Refusal::Aborted { rank: self.geometry.rank });
        }
        let work = &mut *self.lock();
        self.check(operations)?;
        self.note_chunks(operations);
        let blocks = self.lent.grant.share();
        let shape = arrange(
            operations,
            &self.peers,
            &self.geometry,
            &Limits { blocks_max: blocks, ..self.limits },
            &mut work.launch,
            &mut work.listed,
        )
        .map_err(|why| Refusal::Lanes { blocks, why })?;
        if shape.blocks == 0 {
            return Ok(());
        }
        let home = self.supply.home();
        let driver = home.driver;
        let kit = self.kit()?;
        let _current = home.be_current()?;
        // Lists are waited for by asking events, which may break others' captures.
        let _relaxed = if shape.lists_operations { Some(Relaxed::enter(driver)?) } else { None };
        let lane = Lane::of(home.driver, stream)?;
        self.hold_in(&mut work.held, lane)?;
        for other in others {
            kit.joined.record(*other, Inside)?;
            driver.wait(stream, &kit.joined, Inside)?;
        }
        let list = match shape.lists_operations {
            true => {
                Some(self.room_for_list(kit, lane, work.listed.len(), &mut work.copying, work.next_copy)?)
            }
            false => None,
        };
        self.issuing.store(lane.capture().is_none(), Ordering::Relaxed);
        work.order.before(driver, kit, lane)?;
        if let Some(run) = list {
            kit.host.copy_list(run.offset(), &work.listed, self.list, stream)?;
            work.launch.operation_list = self.list;
            if lane.capture().is_none() {
                kit.copied[work.next_copy].record(stream, Inside)?;
                work.next_copy = (work.next_copy + 1) % EAGER_LISTS;
            }
        }
        work.launch.control = kit.host.control_address();
        work.launch.wishes = kit.host.wishes_address();
        work.launch.report = self.report;
        if work.launch.bulk_send_lanes > 0 && self.grown_sends(Wire::Bulk) != 0 {
            work.launch.flags |= LAUNCH_BULK_GREW;
        }
        let shape = self.shape(&shape);
        calls::launch(driver, self.supply.function, stream, &shape, &mut work.launch)?;
        work.order.after(kit, lane)?;
        if !others.is_empty() {
            kit.joined.record(stream, Inside)?;
        }
        for other in others {
            driver.wait(*other, &kit.joined, Inside)?;
        }
        self.issuing.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Peers must be ranks, and as many messages come from this rank to itself as go.
    fn check(&self, operations: &[Operation]) -> Result<(), Refusal> {
        let (rank, ranks) = (self.geometry.rank, self.peers.len() as u32);
        if let Some(stray) = operations.iter().find(|operation| operation.peer >= ranks) {
            return Err(Refusal::NoRank { peer: stray.peer, ranks });
        }
        let own = |direction| {
            operations.iter().filter(|one| one.peer == rank && one.direction == direction).count()
        };
        let (sends, receives) = (own(Direction::Send), own(Direction::Receive));
        if sends == receives { Ok(()) } else { Err(Refusal::Unmatched { rank, sends, receives }) }
    }

    fn shape(&self, shape: &arrange::Shape) -> Shape {
        Shape {
            blocks: shape.blocks,
            threads: shape.threads,
            shared_bytes: shape.shared_bytes,
            cluster: shape.cluster,
            domain: self.supply.domain,
            start: Start::AfterStream,
        }
    }

    /// Host memory for the list of this group: for a graph until that is gone, else until it is copied. The list on the
    /// device is one for all, as operations come one after the other.
    fn room_for_list(
        &self,
        kit: &Kit,
        lane: Lane,
        operations: usize,
        copying: &mut [Option<Run>; EAGER_LISTS],
        next: usize,
    ) -> Result<Run, Refusal> {
        let no_room = || Refusal::NoRoom { operations, most: layout::LISTED_MAX };
        if let Some(capture) = lane.capture() {
            let run = kit.room.take_for_graph(operations).ok_or_else(no_room)?;
            // Given back when the graph is gone, also if this fails.
            let held = Held { lent: self.lent.clone(), list: Some(run) };
            self.supply.home().driver.retain_in_graph(capture.graph, Arc::new(held))?;
            return Ok(run);
        }
        // As NCCL's host waits when its queue of work is full. The copies wait for operations before them, and those for
        // peers; an abort ends it.
        for index in (0..EAGER_LISTS).map(|ahead| (next + ahead) % EAGER_LISTS) {
            let room = if index == next { None } else { kit.room.take(operations) };
            if let Some(run) = room {
                copying[next] = Some(run);
                return Ok(run);
            }
            while copying[index].is_some() && !kit.copied[index].is_done()? {
                if self.aborted.load(Ordering::Acquire) {
                    return Err(Refusal::Aborted { rank: self.geometry.rank });
                }
                std::thread::yield_now();
            }
            if let Some(run) = copying[index].take() {
                kit.room.give_back(run);
            }
        }
        let run = kit.room.take(operations).ok_or_else(no_room)?;
        copying[next] = Some(run);
        Ok(run)
    }

    /// Lets the kernel leave wherever it is, and refuses all that comes. From any thread; calls no driver and takes no lock.
    pub fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        if let Some(kit) = self.lent.kit() {
            kit.host.control().store(CONTROL_ABORT, Ordering::Release);
        }
    }

    /// Whether all that was issued is done. Waits for nothing.
    pub fn is_idle(&self) -> Result<bool, Refusal> {
        if self.doubtful.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let kit = self.kit()?;
        let _entered = self.supply.home().enter()?;
        Ok(kit.done.is_done()?)
    }

    /// Waits until all that was issued is done, at most so long, as NCCL's destroy does. Blocks no stream.
    pub fn wait_idle(&self, at_most: Duration) -> Result<(), Refusal> {
        let began = Instant::now();
        while !self.is_idle().map_err(Refusal::told)? {
            if began.elapsed() >= at_most {
                let waited_ms = began.elapsed().as_millis() as u64;
                return Err(Refusal::Busy { rank: self.geometry.rank, waited_ms }.told());
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    /// What the kernel waited for when it left on an abort; nothing was stuck if there are no waits. Complete once the
    /// mailbox [is idle](Mailbox::is_idle).
    pub fn stuck(&self) -> Result<Stuck, Refusal> {
        let home = self.supply.home();
        let read = || -> Result<Stuck, Failure> {
            let _entered = home.enter()?;
            let report = calls::report(home.driver, self.report, &self.supply.stream)?;
            Ok(Stuck::of(&report, self.geometry.rank))
        };
        read().map_err(|failure| Refusal::from(failure).told())
    }

    /// How far every directed pair of this rank came. For reports and for who watches over stuck operations: it allocates
    /// and waits for copies of ours.
    pub fn progress(&self) -> Result<Vec<Progress>, Refusal> {
        let read = || -> Result<Vec<Progress>, Failure> {
            let _entered = self.supply.home().enter()?;
            let mut all = Vec::new();
            for (peer, channels) in (0..).zip(&self.peers) {
                if peer == self.geometry.rank {
                    continue;
                }
                for (direction, channel) in
                    [(Direction::Send, &channels.send), (Direction::Receive, &channels.receive)]
                {
                    let geometry = &self.geometry;
                    let units = self.sum(channel.line_credit, geometry.line_lanes, LINE_WORD_STRIDE)?;
                    let chunks = self.sum(channel.bulk_credit, geometry.bulk_lanes, BULK_WORD_STRIDE)?;
                    let [lines_grown, bulk_grown] =
                        [Wire::Lines, Wire::Bulk].map(|wire| self.has_grown(direction, peer, wire));
                    all.push(Progress { peer, direction, units, chunks, lines_grown, bulk_grown });
                }
            }
            Ok(all)
        };
        read().map_err(|failure| Refusal::from(failure).told())
    }

    /// The sum of the words of all lanes.
    fn sum(&self, at: Address, lanes: u32, stride: u32) -> Result<u64, Failure> {
        let step = stride as usize / size_of::<u64>();
        let mut words = vec![0; lanes as usize * step];
        calls::words(self.supply.home().driver, at, &mut words, &self.supply.stream)?;
        Ok(words.iter().step_by(step).fold(0, |sum, word| sum.wrapping_add(*word)))
    }

    /// There is a kit until this is dropped.
    fn kit(&self) -> Result<&Kit, Refusal> {
        self.lent.kit().ok_or(Refusal::Aborted { rank: self.geometry.rank })
    }

    /// A panic elsewhere leaves order and lists whole; what else is in it is written before it is read.
    fn lock(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Refuses at birth what could not be arranged later: all mailboxes at once, both wires, both ways.
fn try_largest_group(peers: &[Peer], geometry: &Geometry, limits: &Limits) -> Result<(), Refusal> {
    let line = geometry.bulk_from_bytes - 1;
    let bulk = geometry.bulk_from_bytes.max(u64::from(geometry.bulk_lanes * geometry.bulk_chunk_bytes));
    let others = (0..peers.len() as u32).filter(|peer| *peer != geometry.rank);
    let calls: Vec<Operation> = others
        .flat_map(|peer| {
            [Direction::Send, Direction::Receive].map(|direction| {
                // An odd address: by ordinary stores, which need more state.
                [(line, 0), (bulk, 8)].map(|(bytes, address)| Operation { address, bytes, peer, direction })
            })
        })
        .flatten()
        .collect();
    arrange(&calls, peers, geometry, limits, &mut Launch::default(), &mut Vec::new())
        .map(drop)
        .map_err(|why| Refusal::Lanes { blocks: limits.blocks_max, why })
}

impl Drop for Mailbox {
    /// See the module's "The end". Work in flight is aborted, also a graph's; a graph that runs later is not touched.
    fn drop(&mut self) {
        if self.supply.home().driver.is_in_forked_child() {
            return;
        }
        if !matches!(self.is_idle(), Ok(true)) {
            self.abort();
        }
    }
}

impl fmt::Debug for Mailbox {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Mailbox")
            .field("rank", &self.geometry.rank)
            .field("ranks", &self.peers.len())
            .field("blocks", &self.limits.blocks_max)
            .finish_non_exhaustive()
    }
}
