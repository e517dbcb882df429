//! Runs sends and receives between ranks that can write each other's memory, over rings in regions of their symmetric heaps. One kernel
//! (`crates/kernels`) runs each group of one communicator on one stream, with no NCCL connection.
//!
//! This module gets addresses; regions are lent and taken back elsewhere. A [`P2pDeviceResources`] per device has the loaded kernel. At init a
//! rank lends a region of [`Layout::bytes`] zeros, tells its peers, makes its [`Sequencer`] and its [`P2p`]; whatever may run short fails there.
//! Later nothing allocates on the device or waits for it, except a group whose list finds four earlier lists not copied yet. A captured group
//! with a list may allocate on the host.
//!
//! # Growing
//! The first rings are small. A larger ring is a region of [`P2p::growth_bytes`] at the receiver, mapped by the sender.
//! [`P2p::wants_growth`] and [`P2p::asks_early`] say who needs one, and the ranks agree on it elsewhere. The receiver calls
//! [`P2p::grow`], and only then the sender. Each stores one word, which running kernels and graphs see.

pub mod calls;

mod growing;

pub mod layout;

mod lists;

pub mod progress;

pub mod device_resources;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use windlass_kernels::arrange::{Limits, Peer, arrange};
use windlass_kernels::launch::{Geometry, LAUNCH_BULK_GREW, Launch, Operation as Listed};

pub use calls::HOST_BYTES;
pub use device_resources::P2pDeviceResources;
pub use growing::Wants;
pub use layout::Layout;
pub use progress::Progress;
/// A send or a receive of a group; the peer is a rank of the communicator, also this one.
pub use windlass_kernels::arrange::{Call as Operation, Direction};
/// What a channel carries: short messages go by LL128, long ones by chunks.
pub use windlass_kernels::growth::Wire;

use crate::error::TransportError;
use crate::sequencer::device_resources::MARKS;
use crate::sequencer::{Lent, Sequencer, Turn};
use calls::{PEERS_MAX, Words};
use lists::{Room, Run};
use windlass_base::gpu::Address;
use windlass_base::gpu::capture::Relaxed;
use windlass_base::gpu::graph::Released;
use windlass_base::gpu::module::{Shape, Start};
use windlass_base::gpu::stream::{Capture, Ordering::Inside};
use windlass_base::lock::Mutex;

/// What a p2p transport is made from.
pub struct P2pParts {
    /// The resources of this rank's device.
    pub device_resources: Arc<P2pDeviceResources>,
    /// The communicator's sequencer.
    pub sequencer: Arc<Sequencer>,
    /// What the ranks agreed on, and this rank's number.
    pub geometry: Geometry,
    /// The address of each rank's region for this rank's device, this rank's own too. They must stay as long as the p2p transport.
    pub regions: Vec<Address>,
}

/// One rank's p2p transport of one communicator.
pub struct P2p {
    device_resources: Arc<P2pDeviceResources>,
    sequencer: Arc<Sequencer>,
    peers: Vec<Peer>,
    geometry: Geometry,
    limits: Limits,
    list: Address,
    /// Room for lists of streams, in the launch resources' memory.
    room: Room,
    /// The peers to whom a group has sent chunks, a bit each.
    sent_chunks: AtomicU64,
    /// Locked in a turn only.
    work: Mutex<Work>,
}

/// Memory that operations use again.
#[derive(Default)]
struct Work {
    listed: Vec<Listed>,
    launch: Launch,
    /// Lists of eager groups that may not have been copied yet, by their mark of the launch resources.
    copying: [Option<Run>; MARKS],
    next_copy: usize,
}

/// A list that a graph copies whenever it runs. The launch resources, while they are lent, keep the slab.
struct HeldList {
    _lent: Arc<Lent>,
    room: Arc<Room>,
    list: Run,
}

impl Released for HeldList {
    fn released(&self) {
        self.room.give_back(self.list);
    }
}

impl P2p {
    /// Makes this rank's p2p transport. Every rank's region must hold zeros before any rank runs an operation.
    pub fn new(parts: P2pParts) -> Result<P2p, TransportError> {
        P2p::make(parts).map_err(TransportError::told)
    }

    fn make(parts: P2pParts) -> Result<P2p, TransportError> {
        let P2pParts { device_resources, sequencer, geometry, regions } = parts;
        let strange = |why| TransportError::Strange { why, ranks: regions.len(), rank: geometry.rank };
        if !geometry.is_valid() {
            return Err(strange("the geometry is not one"));
        }
        if regions.len() > PEERS_MAX {
            return Err(strange("too many ranks"));
        }
        let ranks = regions.len() as u32;
        let own = *regions.get(geometry.rank as usize).ok_or_else(|| strange("there is no such rank"))?;
        if regions.iter().any(|region| *region == 0 || !region.is_multiple_of(128)) {
            return Err(strange("a region is not aligned to 128 bytes"));
        }
        let layout = Layout::of(ranks, &geometry);
        let mut peers: Vec<Peer> = (0..ranks)
            .zip(&regions)
            .map(|(peer, region)| layout.peer(geometry.rank, own, peer, *region))
            .collect();
        let limits =
            Limits { bulk: device_resources.bulk, shared_bytes_max: device_resources.shared_bytes_max };
        try_largest_group(&peers, &geometry, &limits)?;
        let words = sequencer.lent.resources().and_then(Words::of);
        let words = words.ok_or_else(|| strange("its launch resources have no room for it"))?;
        words.reset();
        let room = Room::new(words.room());
        growing::place_words(&mut peers, words);
        Ok(P2p {
            sequencer,
            peers,
            geometry,
            limits,
            list: own + layout.list,
            room,
            sent_chunks: AtomicU64::new(0),
            work: Mutex::default(),
            device_resources,
        })
    }

    /// Launches one group in a turn. Returns whether it [asks early](P2p::asks_early) for a ring, as none before. Errors are not logged here.
    ///
    /// After a failure of the driver peers wait, and the owner must abort the communicator.
    pub fn launch(&self, turn: &mut Turn<'_>, operations: &[Operation]) -> Result<bool, TransportError> {
        let work = &mut *self.work.lock();
        self.check(operations)?;
        let asks_early = self.note_chunks(operations);
        let P2p { peers, geometry, limits, .. } = self;
        let shape = arrange(operations, peers, geometry, limits, &mut work.launch, &mut work.listed)
            .map_err(|why| self.channels(why))?;
        if shape.blocks == 0 {
            return Ok(asks_early);
        }
        let words = self.words().ok_or_else(|| self.ended())?;
        // Making room for a list queries events or allocates, which may break captures.
        let _relaxed = match shape.lists_operations {
            true => Some(Relaxed::enter(turn.sequencer.device_resources.home.driver)?),
            false => None,
        };
        let capture = turn.place()?;
        let list = match shape.lists_operations {
            true => Some(self.room_for_list(turn, capture, work)?),
            false => None,
        };
        turn.begin()?;
        let (driver, stream) = (turn.sequencer.device_resources.home.driver, turn.stream);
        if let Some(run) = list {
            calls::copy_list(driver, run, &work.listed, self.list, stream)?;
            work.launch.operation_list = self.list;
            if capture.is_none() {
                turn.resources.marks[work.next_copy].record(stream, Inside)?;
                work.next_copy = (work.next_copy + 1) % MARKS;
            }
        }
        work.launch.control = turn.resources.host.control_address();
        work.launch.growth_requests = words.growth_requests_address();
        work.launch.report = turn.sequencer.report;
        if shape.sends_chunks && self.grown_sends(Wire::Bulk) != 0 {
            work.launch.flags |= LAUNCH_BULK_GREW;
        }
        let shape = Shape {
            blocks: shape.blocks,
            threads: shape.threads,
            shared_bytes: shape.shared_bytes,
            cluster: turn.cluster(shape.cluster),
            domain: turn.sequencer.device_resources.domain,
            start: Start::AfterStream,
        };
        let (function, parameter) = (self.device_resources.function, &mut work.launch);
        turn.launch(None, || calls::launch(driver, function, stream, &shape, parameter))?;
        Ok(asks_early)
    }

    fn words(&self) -> Option<Words<'_>> {
        self.sequencer.lent.resources().and_then(Words::of)
    }

    fn channels(&self, why: windlass_kernels::arrange::Refusal) -> TransportError {
        TransportError::Channels { shared_bytes_max: self.limits.shared_bytes_max, why }
    }

    fn ended(&self) -> TransportError {
        TransportError::Aborted { rank: self.geometry.rank }
    }

    /// Checks that peers are ranks, and that this rank receives as many messages from itself as it sends.
    fn check(&self, operations: &[Operation]) -> Result<(), TransportError> {
        let (rank, ranks) = (self.geometry.rank, self.peers.len() as u32);
        if let Some(stray) = operations.iter().find(|operation| operation.peer >= ranks) {
            return Err(TransportError::NoRank { peer: stray.peer, ranks });
        }
        unmatched(operations, rank).map_or(Ok(()), Err)
    }

    /// Takes host memory for the group's list: until the graph is gone if there is a capture, otherwise until the list is copied. The device has
    /// one list for all groups, as operations come one after the other.
    fn room_for_list(
        &self,
        turn: &Turn<'_>,
        capture: Option<Capture>,
        work: &mut Work,
    ) -> Result<Run, TransportError> {
        let (operations, next) = (work.listed.len(), work.next_copy);
        let no_room = || TransportError::NoRoom { operations, most: layout::LISTED_MAX };
        if operations > layout::LISTED_MAX {
            return Err(no_room());
        }
        if let Some(capture) = capture {
            let driver = turn.sequencer.device_resources.home.driver;
            let taken = self.device_resources.lists.take(driver, operations)?;
            let (room, list) = taken.ok_or_else(no_room)?;
            // The graph's destructor gives it back, also if this fails.
            let held = HeldList { _lent: self.sequencer.lent.clone(), room, list };
            driver.retain_in_graph(capture.graph, Arc::new(held))?;
            return Ok(list);
        }
        // Wait as NCCL's host does when its queue of work is full. The copies wait for earlier operations, and these for peers. An abort ends
        // the wait.
        for index in (0..MARKS).map(|ahead| (next + ahead) % MARKS) {
            let room = if index == next { None } else { self.room.take(operations) };
            if let Some(run) = room {
                work.copying[next] = Some(run);
                return Ok(run);
            }
            while work.copying[index].is_some() && !turn.resources.marks[index].is_done()? {
                if self.sequencer.is_aborted() {
                    return Err(self.ended());
                }
                std::thread::yield_now();
            }
            if let Some(run) = work.copying[index].take() {
                self.room.give_back(run);
            }
        }
        let run = self.room.take(operations).ok_or_else(no_room)?;
        work.copying[next] = Some(run);
        Ok(run)
    }
}

/// The error of a group in which `rank` does not receive as many messages from itself as it sends. To be asked before anything of the group
/// runs.
pub fn unmatched(operations: &[Operation], rank: u32) -> Option<TransportError> {
    let own =
        |direction| operations.iter().filter(|one| one.peer == rank && one.direction == direction).count();
    let (sends, receives) = (own(Direction::Send), own(Direction::Receive));
    (sends != receives).then_some(TransportError::Unmatched { rank, sends, receives })
}

/// Refuses at init what could not be arranged later, by trying the largest group: all peers at once, both wires, both directions.
fn try_largest_group(peers: &[Peer], geometry: &Geometry, limits: &Limits) -> Result<(), TransportError> {
    let line = geometry.bulk_from_bytes - 1;
    let bulk = geometry.bulk_from_bytes.max(u64::from(geometry.bulk_channels * geometry.bulk_chunk_bytes));
    let others = (0..peers.len() as u32).filter(|peer| *peer != geometry.rank);
    let calls: Vec<Operation> = others
        .flat_map(|peer| {
            [Direction::Send, Direction::Receive].map(|direction| {
                // Unaligned, so it goes by ordinary stores, which need more state.
                [(line, 0), (bulk, 8)].map(|(bytes, address)| Operation { address, bytes, peer, direction })
            })
        })
        .flatten()
        .collect();
    arrange(&calls, peers, geometry, limits, &mut Launch::default(), &mut Vec::new())
        .map(drop)
        .map_err(|why| TransportError::Channels { shared_bytes_max: limits.shared_bytes_max, why })
}

impl fmt::Debug for P2p {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("P2p")
            .field("rank", &self.geometry.rank)
            .field("ranks", &self.peers.len())
            .finish_non_exhaustive()
    }
}

#[cfg(any(test, feature = "test-support"))]
mod test_support {
    use super::*;
    use crate::sequencer::Joins;
    use windlass_base::gpu::StreamHandle;

    impl P2p {
        /// The communicator's sequencer.
        pub fn sequencer(&self) -> &Arc<Sequencer> {
            &self.sequencer
        }

        /// Runs one group: its sends and receives, in call order, on one stream, in a turn of its own.
        pub fn run(&self, operations: &[Operation], stream: StreamHandle) -> Result<(), TransportError> {
            let launch = |turn: &mut Turn<'_>| self.launch(turn, operations).map(drop);
            let run = self.sequencer.take(stream, Joins::default(), launch);
            run.map_err(TransportError::told)
        }
    }
}
