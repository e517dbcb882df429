//! Turns the calls of a group into a launch, by pure decisions about connections, blocks, warps and shared memory.
//!
//! The C++ tests call it through the crate `host-arrange`. `tests/kernels/arrange.rs` holds what a launch of any group has.
//! The peer must decide channels, chunks and their virtual blocks alike: they follow from a message's bytes, the pair of ranks and the
//! geometry. All else (warps, how data is loaded) each rank decides for itself.

use crate::launch::{
    BLOCKS_SHIFT, BULK_SERVICE_WARPS, CONNECTION_ORDINARY_STORES, CONNECTION_RECEIVE, CONNECTION_WORDS,
    Connection, Geometry, INLINE_BYTES, LAUNCH_HEAD_BYTES, Launch, Operation, PACKET_PAYLOAD_BYTES,
    PACKETS_A_BLOCK, VIRTUAL_BLOCKS_MAX,
};

/// A send or a receive of a group, in call order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// The user's buffer, of any alignment.
    pub address: u64,
    /// Any number; calls of 0 bytes are left out.
    pub bytes: u64,
    /// Index in the table of peers. The geometry's rank: a message to itself.
    pub peer: u32,
    /// Whether it is sent or received.
    pub direction: Direction,
}

/// Which way a message goes, seen from this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the peer.
    Send,
    /// From the peer.
    Receive,
}

/// The addresses of both directions' rings shared with one peer; flags and counts in them are ignored.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Peer {
    /// Where this rank sends.
    pub send: Connection,
    /// Where this rank receives.
    pub receive: Connection,
}

/// What this rank's device allows.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How large messages leave.
    pub bulk: BulkSend,
    /// Shared memory that a block may have, bytes.
    pub shared_bytes_max: u32,
}

/// Chunks in shared memory for [`Geometry::recommended`].
pub const RECOMMENDED_STAGES: u16 = 2;

/// How large messages leave this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BulkSend {
    /// By asynchronous copies (sm_90 and newer) through this many chunks of shared memory: even, 2 to 8.
    Copies {
        /// Chunks in shared memory.
        stages: u16,
    },
    /// By loads and stores.
    OrdinaryStores,
}

/// How to launch. No blocks: there is nothing to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Blocks of the grid.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Blocks of a cluster, where the device has clusters (9.0 and newer); 1: launch without the attribute.
    pub cluster: u32,
    /// Bytes of the launch to pass as parameter.
    pub parameter_bytes: u32,
    /// Whether some message leaves in chunks.
    pub sends_chunks: bool,
    /// Whether the operations did not fit: then place them in device-visible memory and set [`Launch::operation_list`].
    pub lists_operations: bool,
}

/// The most copy warps of a block: a kernel has at most 16 warps.
const COPY_WARPS_MAX: u32 = 16;
const BULK_COPY_WARPS: u32 = COPY_WARPS_MAX - BULK_SERVICE_WARPS;
/// A rank's messages to itself are copied by blocks of their own. Beside messages to others these have few threads.
const BYTES_A_COPYING_THREAD: u64 = 128;
const COPYING_THREADS: u64 = 16 * 512;
const COPY_BLOCKS_MAX: u64 = 64;
/// Blocks of a cluster. Without clusters the first blocks crowd on one part of the GPU and starve its links.
const CLUSTER: u32 = 4;

/// Why a group cannot be arranged. Neither happens in a communicator whose largest group was tried at init.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// More connections (41) than the launch holds: more peers than a host has.
    TooManyPeers,
    /// A block's shared memory cannot keep the state of all the channels that it must serve. With [`Geometry::recommended`] 16 ranks
    /// fit into 163 KiB.
    TooManyChannels,
}

/// Channels that a message of this many bytes uses, in pieces of a packet's or a chunk's size.
pub fn channels_of(bytes: u64, piece_bytes: u64, channels: u32) -> u32 {
    // At most `channels`, so it fits.
    bytes.div_ceil(piece_bytes).min(u64::from(channels)) as u32
}

/// Over how many virtual blocks a message by LL128 goes, from its connection's first on: whole clusters, or all. It follows from bytes and
/// geometry, equal on both sides. Small messages have few, as a block that waits for a peer's block holds a multiprocessor.
fn blocks_of(bytes: u64, blocks: u32) -> u32 {
    let least = bytes.div_ceil(PACKETS_A_BLOCK * PACKET_PAYLOAD_BYTES).min(u64::from(blocks)) as u32;
    if least > 2 { least.next_multiple_of(CLUSTER).min(blocks) } else { least }
}

/// Writes `launch`, except control, report, operation list and flags, and writes `operations`. The operations are in the launch, too, unless
/// the shape says that they did not fit.
///
/// # Errors
/// See [`Refusal`].
pub fn arrange(
    calls: &[Call],
    peers: &[Peer],
    geometry: &Geometry,
    limits: &Limits,
    launch: &mut Launch,
    operations: &mut Vec<Operation>,
) -> Result<Shape, Refusal> {
    let ll128_rounds = (geometry.ll128_channels / geometry.bulk_channels) as u16;
    *launch = Launch { geometry: *geometry, ll128_rounds, ..Launch::default() };
    operations.clear();
    let mut connections = 0;
    let mut by_copies = false;
    let mut by_stores = false;
    let mut loads = Loads::default();
    for direction in [Direction::Send, Direction::Receive] {
        for (index, peer) in peers.iter().enumerate().filter(|(index, _)| *index != geometry.rank as usize) {
            let own = calls
                .iter()
                .filter(|call| call.peer as usize == index && call.direction == direction && call.bytes > 0);
            let Some(mut connection) = connection(own, peer, direction, geometry, operations) else {
                continue;
            };
            let sides = match direction {
                Direction::Send => [geometry.rank, index as u32],
                Direction::Receive => [index as u32, geometry.rank],
            };
            connection.connection.first_block =
                first_block(sides, peers.len() as u32, geometry.bulk_channels);
            loads.add(&connection.connection, direction, geometry.bulk_channels);
            if direction == Direction::Send && connection.connection.active_bulk_channels > 0 {
                if connection.aligned && matches!(limits.bulk, BulkSend::Copies { .. }) {
                    by_copies = true;
                } else {
                    connection.connection.flags |= CONNECTION_ORDINARY_STORES;
                    by_stores = true;
                }
            }
            add(launch, connections, &connection.connection, direction)?;
            connections += 1;
        }
    }
    launch.operations = operations.len() as u32;
    let copied = copies(calls, geometry.rank, operations);
    launch.copies = (operations.len() as u32 - launch.operations) / 2;
    if operations.is_empty() {
        return Ok(Shape::default());
    }

    let most = loads.most(geometry.bulk_channels);
    (launch.used_blocks, launch.bulk_tasks) = (most.used_blocks, most.bulk_tasks);
    let bulk = launch.bulk_tasks > 0;
    let (blocks, cluster) = grid(launch.used_blocks.count_ones(), geometry.bulk_channels);
    if blocks > 0 {
        let copy_warps_max = if bulk { BULK_COPY_WARPS } else { COPY_WARPS_MAX };
        let both = most.ll128.iter().all(|channels| *channels > 0);
        let warps_max = if both { copy_warps_max / 2 } else { copy_warps_max };
        launch.ll128_send_warps = most.ll128[0].min(warps_max);
        launch.ll128_receive_warps = most.ll128[1].min(warps_max);
        let ll128_warps = launch.ll128_send_warps + launch.ll128_receive_warps;
        launch.copy_warps = ll128_warps.max(if bulk { copy_warps_max } else { 0 });
        launch.stages = match limits.bulk {
            BulkSend::Copies { stages } if by_copies => stages,
            _ => 0,
        };
        launch.jobs_per_warp = loads.jobs_per_warp(launch, by_stores)?;
        if launch.stages > 0 && shared_bytes(launch) > limits.shared_bytes_max {
            launch.stages = 0;
            send_by_ordinary_stores(launch);
            launch.jobs_per_warp = loads.jobs_per_warp(launch, true)?;
        }
        if shared_bytes(launch) > limits.shared_bytes_max {
            return Err(Refusal::TooManyChannels);
        }
    }
    let warps = launch.copy_warps + if bulk { BULK_SERVICE_WARPS } else { 0 };
    let threads = 32 * if blocks > 0 { warps } else { COPY_WARPS_MAX };
    let most = if blocks > 0 { COPYING_THREADS / u64::from(threads) } else { COPY_BLOCKS_MAX };
    let copy_blocks = copied.div_ceil(BYTES_A_COPYING_THREAD * u64::from(threads));
    let copy_blocks = copy_blocks.min(most).min(COPY_BLOCKS_MAX) as u32;
    launch.copy_blocks = copy_blocks.next_multiple_of(cluster) as u16;

    let connection_words = connections * CONNECTION_WORDS;
    let operation_words = operations.len() * 2;
    let fits = (connection_words + operation_words) * 8 <= INLINE_BYTES;
    if fits {
        let room = &mut launch.storage[connection_words..];
        for (words, operation) in room.chunks_exact_mut(2).zip(operations.iter()) {
            words.copy_from_slice(&[operation.address, operation.bytes]);
        }
    }
    let words = connection_words + if fits { operation_words } else { 0 };
    Ok(Shape {
        blocks: blocks + u32::from(launch.copy_blocks),
        threads,
        shared_bytes: if blocks > 0 { shared_bytes(launch) } else { 0 },
        sends_chunks: loads.bulk[0] != [0; VIRTUAL_BLOCKS_MAX],
        cluster,
        parameter_bytes: (LAUNCH_HEAD_BYTES + words * 8) as u32,
        lists_operations: !fits,
    })
}

/// Appends this rank's messages to itself as pairs: where a message goes, and where it comes from. The first send goes into the first
/// receive, and so on. Returns the bytes of all.
fn copies(calls: &[Call], rank: u32, operations: &mut Vec<Operation>) -> u64 {
    let own = |direction| calls.iter().filter(move |call| call.peer == rank && call.direction == direction);
    let mut copied = 0;
    for (from, to) in own(Direction::Send).zip(own(Direction::Receive)) {
        let bytes = from.bytes.min(to.bytes);
        if bytes > 0 && from.address != to.address {
            operations.extend([to.address, from.address].map(|address| Operation { address, bytes }));
            copied += bytes;
        }
    }
    copied
}

struct Found {
    connection: Connection,
    /// Whether all buffers of bulk messages begin at a multiple of 16.
    aligned: bool,
}

/// Makes the connection of these calls and appends their operations; none if there are no calls.
fn connection<'a>(
    calls: impl Iterator<Item = &'a Call>,
    peer: &Peer,
    direction: Direction,
    geometry: &Geometry,
    operations: &mut Vec<Operation>,
) -> Option<Found> {
    let (addresses, flags) = match direction {
        Direction::Send => (&peer.send, 0),
        Direction::Receive => (&peer.receive, CONNECTION_RECEIVE),
    };
    let first = operations.len();
    let mut found = Found {
        connection: Connection {
            flags,
            first_operation: first as u32,
            active_ll128_blocks: 0,
            active_ll128_rounds: 0,
            active_bulk_channels: 0,
            ..*addresses
        },
        aligned: true,
    };
    let connection = &mut found.connection;
    for call in calls {
        // No memory is larger; beyond it the kernel faults.
        let bytes = call.bytes.min((1 << BLOCKS_SHIFT) - 1);
        let mut operation = Operation { address: call.address, bytes };
        if call.bytes >= geometry.bulk_from_bytes {
            let channels =
                channels_of(call.bytes, u64::from(geometry.bulk_chunk_bytes), geometry.bulk_channels);
            connection.active_bulk_channels = connection.active_bulk_channels.max(channels);
            found.aligned &= call.address.is_multiple_of(16);
        } else {
            let blocks = blocks_of(call.bytes, geometry.bulk_channels);
            operation.bytes |= u64::from(blocks) << BLOCKS_SHIFT;
            let rounds = channels_of(
                call.bytes,
                u64::from(blocks) * PACKET_PAYLOAD_BYTES,
                geometry.ll128_channels / geometry.bulk_channels,
            );
            connection.active_ll128_blocks = connection.active_ll128_blocks.max(blocks as u16);
            connection.active_ll128_rounds = connection.active_ll128_rounds.max(rounds as u16);
        }
        operations.push(operation);
    }
    connection.operations = (operations.len() - first) as u32;
    (connection.operations > 0).then_some(found)
}

fn add(
    launch: &mut Launch,
    index: usize,
    connection: &Connection,
    direction: Direction,
) -> Result<(), Refusal> {
    let at = index * CONNECTION_WORDS;
    launch
        .storage
        .get_mut(at..at + CONNECTION_WORDS)
        .ok_or(Refusal::TooManyPeers)?
        .copy_from_slice(&connection.words());
    match direction {
        Direction::Send => launch.send_connections += 1,
        Direction::Receive => launch.receive_connections += 1,
    }
    Ok(())
}

/// The virtual block that serves channel 0 from the first rank to the second. Pairs of ranks at the same distance share it, so that a rank's
/// messages to all others, and from them, spread over all blocks.
fn first_block([sender, receiver]: [u32; 2], ranks: u32, blocks: u32) -> u16 {
    let between = (receiver % ranks + ranks - sender % ranks - 1) % ranks;
    let each = blocks / ranks.saturating_sub(1).max(1);
    (between * each.max(1) % blocks) as u16
}

/// How many channels each virtual block serves: of sends, then of receives.
#[derive(Default)]
struct Loads {
    ll128: [[u32; VIRTUAL_BLOCKS_MAX]; 2],
    bulk: [[u32; VIRTUAL_BLOCKS_MAX]; 2],
}

/// The most that a block in use needs.
struct Most {
    used_blocks: u32,
    ll128: [u32; 2],
    bulk_tasks: u32,
}

impl Loads {
    /// Adds a connection's channels to virtual blocks, in the way in which `blocks_behind` of `device/job.cuh` finds them.
    fn add(&mut self, connection: &Connection, direction: Direction, blocks: u32) {
        let way = direction as usize;
        let deal = |loads: &mut [u32], of_blocks: u32, each: u32| {
            let (before, from_first) = loads[..blocks as usize].split_at_mut(connection.first_block.into());
            from_first.iter_mut().chain(before).take(of_blocks as usize).for_each(|load| *load += each);
        };
        deal(
            &mut self.ll128[way],
            connection.active_ll128_blocks.into(),
            connection.active_ll128_rounds.into(),
        );
        deal(&mut self.bulk[way], connection.active_bulk_channels, 1);
    }

    fn most(&self, blocks: u32) -> Most {
        let mut most = Most { used_blocks: 0, ll128: [0; 2], bulk_tasks: 0 };
        for block in 0..blocks as usize {
            let ll128 = [self.ll128[0][block], self.ll128[1][block]];
            let tasks = self.bulk[0][block] + self.bulk[1][block];
            most.used_blocks |= u32::from(ll128 != [0; 2] || tasks > 0) << block;
            most.ll128 = [most.ll128[0].max(ll128[0]), most.ll128[1].max(ll128[1])];
            most.bulk_tasks = most.bulk_tasks.max(tasks);
        }
        most
    }

    /// The most jobs of a copy warp: its LL128 channels of one direction, and its part in the block's bulk channels. 0 if each warp has at most
    /// one LL128 channel, which needs no room.
    fn jobs_per_warp(&self, launch: &Launch, by_stores: bool) -> Result<u16, Refusal> {
        let share = |channels: u32, warps: u32| if warps > 0 { channels.div_ceil(warps) } else { 0 };
        let jobs = |block: usize| {
            let ll128 = share(self.ll128[0][block], launch.ll128_send_warps)
                .max(share(self.ll128[1][block], launch.ll128_receive_warps));
            ll128 + self.bulk[1][block] + if by_stores { self.bulk[0][block] } else { 0 }
        };
        let most = (0..VIRTUAL_BLOCKS_MAX).map(jobs).max().unwrap_or_default();
        let most = if most > 1 || launch.bulk_tasks > 0 { most } else { 0 };
        u16::try_from(most).map_err(|_| Refusal::TooManyChannels)
    }
}

/// Blocks of the grid for messages, filled up to whole clusters, and blocks of a cluster. Never more than there are virtual blocks.
fn grid(used: u32, virtual_blocks: u32) -> (u32, u32) {
    let whole = used.next_multiple_of(CLUSTER);
    if used > 2 && whole <= virtual_blocks { (whole, CLUSTER) } else { (used, 1) }
}

fn send_by_ordinary_stores(launch: &mut Launch) {
    for connection in launch.storage.chunks_exact_mut(CONNECTION_WORDS).take(launch.send_connections as usize)
    {
        let active_bulk_channels = connection[CONNECTION_WORDS - 1] >> 32;
        if active_bulk_channels > 0 {
            connection[CONNECTION_WORDS - 3] |= u64::from(CONNECTION_ORDINARY_STORES) << 32;
        }
    }
}

/// Bytes of shared memory of a block, as `windlass_shared_layout` of `device/p2p.h` has them: `shared_memory` of `host/p2p_test.cpp`
/// compares them.
fn shared_bytes(launch: &Launch) -> u32 {
    let tasks = launch.bulk_tasks;
    let stage_count = u32::from(launch.stages);
    let stages = stage_count * launch.geometry.bulk_chunk_bytes;
    let barriers = (stage_count * 8).next_multiple_of(16);
    let orders = stage_count * 16;
    let told = (tasks * launch.copy_warps * 4).next_multiple_of(16);
    stages + barriers + orders + tasks * 64 + told + launch.copy_warps * u32::from(launch.jobs_per_warp) * 64
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry {
        first_tag: 1,
        bulk_from_bytes: 8 << 20,
        ll128_channels: 256,
        ll128_slots: 8,
        bulk_channels: 32,
        bulk_slots: 32,
        bulk_chunk_bytes: 16384,
        rank: 0,
    };
    const LIMITS: Limits = Limits { bulk: BulkSend::Copies { stages: 8 }, shared_bytes_max: 220 << 10 };

    fn call(bytes: u64, peer: u32, direction: Direction) -> Call {
        Call { address: 1 << 20, bytes, peer, direction }
    }

    fn arranged(calls: &[Call], limits: &Limits) -> (Shape, Launch) {
        let mut launch = Launch::default();
        let peers = vec![Peer::default(); 8];
        let shape = arrange(calls, &peers, &GEOMETRY, limits, &mut launch, &mut Vec::new()).unwrap();
        (shape, launch)
    }

    /// Zero bytes launch nothing.
    #[test]
    fn nothing_to_do() {
        assert!(GEOMETRY.is_valid());
        assert_eq!(arranged(&[], &LIMITS).0.blocks, 0);
        assert_eq!(arranged(&[call(0, 1, Direction::Send)], &LIMITS).0.blocks, 0);
    }

    /// A small send is one warp, without shared memory, with few bytes of parameters.
    #[test]
    fn small_send() {
        let (shape, launch) = arranged(&[call(8, 1, Direction::Send)], &LIMITS);
        let expected =
            Shape { blocks: 1, threads: 32, cluster: 1, parameter_bytes: 120 + 96 + 16, ..Shape::default() };
        assert_eq!(shape, expected);
        assert_eq!((launch.ll128_send_warps, launch.copy_warps), (1, 1));
    }

    /// Middle sizes spread over whole clusters, large ones over all blocks with 16 warps.
    #[test]
    fn larger_messages() {
        let (shape, _) =
            arranged(&[call(65536, 1, Direction::Send), call(65536, 1, Direction::Receive)], &LIMITS);
        assert_eq!((shape.blocks, shape.cluster, shape.threads), (16, 4, 320));
        let (shape, launch) = arranged(&[call(64 << 20, 1, Direction::Send)], &LIMITS);
        assert_eq!((shape.blocks, shape.cluster, shape.threads), (32, 4, 512));
        assert!(shape.shared_bytes > 8 * 16384 && shape.shared_bytes < 140 << 10);
        assert_eq!(launch.stages, 8);
    }

    /// Buffers at odd addresses, and GPUs without bulk copies, send by ordinary stores.
    #[test]
    fn ordinary_stores() {
        let odd = Call { address: 8, ..call(64 << 20, 1, Direction::Send) };
        let old = Limits { bulk: BulkSend::OrdinaryStores, ..LIMITS };
        let small = Limits { shared_bytes_max: 64 << 10, ..LIMITS };
        for (calls, limits) in [
            ([odd], &LIMITS),
            ([call(64 << 20, 1, Direction::Send)], &old),
            ([call(64 << 20, 1, Direction::Send)], &small),
        ] {
            let (shape, launch) = arranged(&calls, limits);
            assert_eq!(launch.stages, 0);
            assert_eq!((launch.storage[CONNECTION_WORDS - 3] >> 32) as u16, CONNECTION_ORDINARY_STORES);
            assert!(shape.shared_bytes < 4096);
        }
    }

    /// A message to itself gets blocks of its own, after the others and in whole clusters; it needs no launch of its own.
    #[test]
    fn own_messages() {
        let own = |bytes, address, direction| Call { address, ..call(bytes, 0, direction) };
        let (send, receive) = (own(100_000, 64, Direction::Send), own(120_000, 4096, Direction::Receive));
        let (shape, launch) = arranged(&[send, receive], &LIMITS);
        let expected =
            Shape { blocks: 2, threads: 512, cluster: 1, parameter_bytes: 120 + 32, ..Shape::default() };
        assert_eq!((shape, launch.copies, launch.copy_blocks, launch.operations), (expected, 1, 2, 0));
        assert_eq!(launch.storage[..4], [4096, 100_000, 64, 100_000]);
        let (shape, launch) = arranged(&[send, call(65536, 1, Direction::Send), receive], &LIMITS);
        assert_eq!((shape.blocks, shape.cluster, launch.copy_blocks), (16, 4, 8));
        assert_eq!(launch.storage[CONNECTION_WORDS + 2..][..2], [4096, 100_000]);
        // In place, or nothing, or no partner: nothing to do.
        for calls in
            [[send, Call { address: 64, ..receive }], [send, Call { bytes: 0, ..receive }], [send, send]]
        {
            assert_eq!(arranged(&calls, &LIMITS).0.blocks, 0);
        }
    }

    /// What a rank sends to the others begins as far apart as can be: each peer's part of the blocks is its own. Both sides find the same.
    #[test]
    fn peers_share_the_blocks_evenly() {
        for (ranks, blocks) in [(2, 24), (3, 24), (4, 24), (4, 32), (7, 24), (8, 24)] {
            let each = blocks / (ranks - 1);
            for rank in 0..ranks {
                let peers = (1..ranks).map(|distance| (rank + distance) % ranks);
                let begins: Vec<u32> =
                    peers.map(|peer| first_block([rank, peer], ranks, blocks).into()).collect();
                let expected: Vec<u32> = (0..ranks - 1).map(|place| place * each).collect();
                assert_eq!(begins, expected, "rank {rank} of {ranks}");
            }
        }
    }

    /// The grid has no more blocks than there are virtual ones, in whole clusters where these fit.
    #[test]
    fn grids_keep_to_the_limit() {
        let calls: Vec<Call> = (1..8)
            .flat_map(|p| [call(1 << 20, p, Direction::Send), call(32 << 20, p, Direction::Receive)])
            .collect();
        for blocks in 1..=32 {
            let geometry = Geometry { bulk_channels: blocks, ll128_channels: 8 * blocks, ..GEOMETRY };
            let (mut launch, peers) = (Launch::default(), [Peer::default(); 8]);
            let shape = arrange(&calls, &peers, &geometry, &LIMITS, &mut launch, &mut Vec::new()).unwrap();
            assert_eq!(shape.blocks, blocks, "{shape:?}");
            assert_eq!(shape.cluster, if blocks > 3 && blocks.is_multiple_of(4) { 4 } else { 1 });
            assert!(shape.threads <= 512);
            assert!(launch.ll128_send_warps + launch.ll128_receive_warps <= launch.copy_warps);
        }
        assert_eq!(
            [1, 3, 5, 7, 18, 31, 32, 99].map(|blocks| Geometry::recommended(blocks, 0).bulk_channels),
            [1, 3, 4, 4, 16, 28, 32, 32]
        );
    }

    /// Both sides of a connection have a channel in the same virtual block, whatever else their groups hold.
    #[test]
    fn both_sides_serve_a_channel_in_one_block() {
        let connection = |rank: u32, calls: &[Call], receives: bool| {
            let (geometry, peers) = (Geometry { rank, ..GEOMETRY }, [Peer::default(); 5]);
            let mut launch = Launch::default();
            arrange(calls, &peers, &geometry, &LIMITS, &mut launch, &mut Vec::new()).unwrap();
            let first = if receives { launch.send_connections as usize } else { 0 };
            let flags = launch.storage[(first + 1) * CONNECTION_WORDS - 3] >> 32;
            (flags >> 16, launch.used_blocks)
        };
        for (sender, receiver) in (0..5).flat_map(|one| (0..5).map(move |other| (one, other))) {
            let third = (0..5).find(|rank| ![sender, receiver].contains(rank)).unwrap();
            let sends = [call(64 << 10, receiver, Direction::Send), call(1 << 20, third, Direction::Receive)];
            if sender != receiver {
                let there = connection(sender, &sends, false);
                let here = connection(receiver, &[call(64 << 10, sender, Direction::Receive)], true);
                assert_eq!(there.0, here.0);
                // 35 packets are over 8 blocks, and the other message has all of them.
                assert_eq!((here.1.count_ones(), there.1), (8, u32::MAX));
            }
        }
    }

    /// Few operations travel inside the parameters, many in a list.
    #[test]
    fn many_operations() {
        let calls = vec![call(100, 1, Direction::Send); 242];
        let (shape, _) = arranged(&calls, &LIMITS);
        assert_eq!((shape.lists_operations, shape.parameter_bytes), (false, 4088));
        let (shape, _) = arranged(&[calls, vec![call(1, 2, Direction::Send)]].concat(), &LIMITS);
        assert_eq!((shape.lists_operations, shape.parameter_bytes), (true, 120 + 2 * 96));
    }

    /// The largest group of 16 ranks fits, whatever the number of blocks.
    #[test]
    fn largest_groups() {
        let both = |bytes: u64, p: u32| [call(bytes, p, Direction::Send), call(bytes, p, Direction::Receive)];
        let calls: Vec<Call> = (1..16).flat_map(|p| [both(4 << 20, p), both(64 << 20, p)].concat()).collect();
        // An A100 lacks bulk copies, so that copy warps have more jobs, and has 163 KiB.
        let a100 = Limits { bulk: BulkSend::OrdinaryStores, shared_bytes_max: 163 << 10 };
        let hopper = Limits { bulk: BulkSend::Copies { stages: RECOMMENDED_STAGES }, ..LIMITS };
        for (blocks, limits) in (1..=32).flat_map(|blocks| [(blocks, a100), (blocks, hopper)]) {
            let (geometry, mut launch) = (Geometry::recommended(blocks, 0), Launch::default());
            let peers = [Peer::default(); 16];
            let shape = arrange(&calls, &peers, &geometry, &limits, &mut launch, &mut Vec::new());
            assert!(shape.is_ok(), "{blocks} blocks: {shape:?}");
        }
        let small = Limits { shared_bytes_max: 16 << 10, ..a100 };
        let peers = [Peer::default(); 16];
        let refused =
            arrange(&calls, &peers, &GEOMETRY, &small, &mut Launch::default(), &mut Vec::new()).err();
        assert_eq!(refused, Some(Refusal::TooManyChannels));
    }

    /// More peers than fit are refused.
    #[test]
    fn too_many_peers() {
        let peers = vec![Peer::default(); 61];
        let calls: Vec<Call> = (1..61).map(|peer| call(1, peer, Direction::Send)).collect();
        let answer = arrange(&calls, &peers, &GEOMETRY, &LIMITS, &mut Launch::default(), &mut Vec::new());
        assert_eq!(answer, Err(Refusal::TooManyPeers));
    }
}
