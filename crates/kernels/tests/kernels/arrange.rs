//! Random groups, of any geometry and under any limits: what a launch must hold, whatever the group.

use windlass_kernels::arrange::{BulkSend, Call, Direction, Limits, Peer, Refusal, Shape, arrange};
use windlass_kernels::launch::{
    BLOCKS_SHIFT, BULK_SERVICE_WARPS, CONNECTION_ORDINARY_STORES, CONNECTION_RECEIVE, CONNECTION_WORDS,
    Connection, Geometry, INLINE_BYTES, LAUNCH_HEAD_BYTES, Launch, Operation, PACKET_PAYLOAD_BYTES,
    PACKETS_A_BLOCK, VIRTUAL_BLOCKS_MAX,
};

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// A random number with all orders of magnitude equally likely.
    fn size(&mut self) -> u64 {
        let limit = 1 << self.below(29);
        self.below(limit)
    }

    fn one_of(&mut self, values: &[u64]) -> u64 {
        values[self.below(values.len() as u64) as usize]
    }
}

struct Case {
    calls: Vec<Call>,
    peers: Vec<Peer>,
    geometry: Geometry,
    limits: Limits,
}

fn case(random: &mut Random) -> Case {
    let peer_count = 1 + random.below(8);
    let call_count = random.one_of(&[0, 1, 2, 7, 30, 300]);
    let calls = (0..call_count)
        .map(|_| Call {
            address: random.next() >> 20 & !random.one_of(&[0, 15, 15, 15]),
            bytes: random.size(),
            peer: random.below(peer_count) as u32,
            direction: if random.below(2) == 0 { Direction::Send } else { Direction::Receive },
        })
        .collect();
    let connection = |random: &mut Random| Connection {
        ll128_ring: random.next(),
        ll128_credit: random.next(),
        ll128_progress: random.next(),
        ll128_from: random.next(),
        bulk_ring: random.next(),
        bulk_posted: random.next(),
        bulk_credit: random.next(),
        bulk_progress: random.next(),
        growth: random.next(),
        peer: random.below(8) as u32,
        ..Connection::default()
    };
    let peers =
        (0..peer_count).map(|_| Peer { send: connection(random), receive: connection(random) }).collect();
    let bulk_channels = random.one_of(&[1, 5, 24, 32]) as u32;
    Case {
        calls,
        peers,
        geometry: Geometry {
            first_tag: random.next(),
            bulk_from_bytes: random.one_of(&[1, 4096, 1 << 20, 12 << 20, 1 << 40]),
            ll128_channels: bulk_channels * random.one_of(&[1, 3, 8]) as u32,
            ll128_slots: random.one_of(&[1, 8]) as u32,
            bulk_channels,
            bulk_slots: random.one_of(&[2, 32]) as u32,
            bulk_chunk_bytes: random.one_of(&[4096, 16384, 32768]) as u32,
            rank: random.below(8) as u32,
        },
        limits: Limits {
            bulk: match random.below(3) {
                0 => BulkSend::OrdinaryStores,
                _ => BulkSend::Copies { stages: 2 * (1 + random.below(4) as u16) },
            },
            shared_bytes_max: random.one_of(&[8 << 10, 48 << 10, 220 << 10]) as u32,
        },
    }
}

impl Case {
    /// This rank's calls with one peer that move anything.
    fn of(&self, peer: usize, direction: Direction) -> impl Iterator<Item = &Call> {
        let is_own = move |call: &&Call| call.peer as usize == peer && call.direction == direction;
        self.calls.iter().filter(is_own).filter(|call| call.bytes > 0)
    }

    /// Destination, source and bytes of each message of the rank to itself: the first send goes to the first receive, and so on.
    fn copies(&self) -> Vec<[u64; 3]> {
        let own = |direction| {
            let is_own = move |call: &&Call| call.peer == self.geometry.rank && call.direction == direction;
            self.calls.iter().filter(is_own)
        };
        own(Direction::Send)
            .zip(own(Direction::Receive))
            .map(|(from, to)| [to.address, from.address, from.bytes.min(to.bytes)])
            .filter(|[to, from, bytes]| *bytes > 0 && to != from)
            .collect()
    }
}

/// What a launch says of one connection, read from its words as C reads them.
fn connection_of(words: &[u64]) -> Connection {
    let low = |word: u64| word as u32;
    let high = |word: u64| (word >> 32) as u32;
    Connection {
        ll128_ring: words[0],
        ll128_credit: words[1],
        ll128_progress: words[2],
        ll128_from: words[3],
        bulk_ring: words[4],
        bulk_posted: words[5],
        bulk_credit: words[6],
        bulk_progress: words[7],
        growth: words[8],
        peer: low(words[9]),
        flags: high(words[9]) as u16,
        first_block: (words[9] >> 48) as u16,
        first_operation: low(words[10]),
        operations: high(words[10]),
        active_ll128_blocks: words[11] as u16,
        active_ll128_rounds: (words[11] >> 16) as u16,
        active_bulk_channels: high(words[11]),
    }
}

/// Holds that the blocks of a message by LL128 are one, two, whole clusters or all, have some 8 packets each, and no more are taken.
fn assert_few_blocks(bytes: u64, blocks: u64, geometry: &Geometry) {
    let all = u64::from(geometry.bulk_channels);
    let room = |blocks: u64| blocks * PACKETS_A_BLOCK * PACKET_PAYLOAD_BYTES;
    assert!((1..=2).contains(&blocks) || blocks.is_multiple_of(4) || blocks == all, "{blocks} blocks");
    assert!(blocks <= all && (room(blocks) >= bytes || blocks == all), "{blocks} blocks of {bytes} bytes");
    let fewer = if blocks > 2 { (blocks - 1) / 4 * 4 } else { blocks - 1 };
    assert!(room(fewer.max(blocks.min(3) - 1)) < bytes, "{blocks} blocks of {bytes} bytes are too many");
}

/// What the calls of one connection need, by README.md, "What both sides must agree on".
struct Need {
    ll128_blocks: u64,
    ll128_rounds: u64,
    bulk_channels: u64,
    aligned: bool,
}

/// Holds that the operations are these calls, in order.
fn assert_operations(calls: &[&Call], operations: &[Operation], geometry: &Geometry) -> Need {
    assert_eq!(calls.len(), operations.len());
    let mut need = Need { ll128_blocks: 0, ll128_rounds: 0, bulk_channels: 0, aligned: true };
    for (call, operation) in calls.iter().zip(operations) {
        let blocks = operation.bytes >> BLOCKS_SHIFT;
        assert_eq!(
            (operation.address, operation.bytes & ((1 << BLOCKS_SHIFT) - 1)),
            (call.address, call.bytes)
        );
        if call.bytes >= geometry.bulk_from_bytes {
            assert_eq!(blocks, 0);
            let chunks = call.bytes.div_ceil(geometry.bulk_chunk_bytes.into());
            need.bulk_channels = need.bulk_channels.max(chunks.min(geometry.bulk_channels.into()));
            need.aligned &= call.address.is_multiple_of(16);
        } else {
            assert_few_blocks(call.bytes, blocks, geometry);
            let rounds = call.bytes.div_ceil(PACKET_PAYLOAD_BYTES).div_ceil(blocks);
            let of_a_block = u64::from(geometry.ll128_channels / geometry.bulk_channels);
            need.ll128_blocks = need.ll128_blocks.max(blocks);
            need.ll128_rounds = need.ll128_rounds.max(rounds.min(of_a_block));
        }
    }
    need
}

/// Channels of each virtual block: LL128 and bulk, each of sends and of receives.
type Loads = [[u64; 4]; VIRTUAL_BLOCKS_MAX];

/// Holds that the launch has a connection for each peer and direction with calls, in order, with all that these need.
fn assert_connections(case: &Case, launch: &Launch, operations: &[Operation]) -> Loads {
    let Case { peers, geometry, limits, .. } = case;
    let (ranks, blocks) = (peers.len() as u64, u64::from(geometry.bulk_channels));
    let (mut loads, mut counts, mut first, mut tma) = (Loads::default(), [0, 0], 0, false);
    let mut words = launch.storage.chunks_exact(CONNECTION_WORDS);
    for direction in [Direction::Send, Direction::Receive] {
        for (index, peer) in peers.iter().enumerate().filter(|(index, _)| *index != geometry.rank as usize) {
            let calls: Vec<&Call> = case.of(index, direction).collect();
            if calls.is_empty() {
                continue;
            }
            counts[direction as usize] += 1;
            let need = assert_operations(&calls, &operations[first..first + calls.len()], geometry);
            let receives = direction == Direction::Receive;
            let is_by_tma = !receives && need.bulk_channels > 0 && need.aligned && launch.stages > 0;
            let is_by_stores = !receives && need.bulk_channels > 0 && !is_by_tma;
            tma |= is_by_tma;
            let [me, other] = [u64::from(geometry.rank), index as u64];
            let [sender, receiver] = if receives { [other, me] } else { [me, other] };
            let between = (receiver % ranks + ranks - 1 - sender % ranks) % ranks;
            let first_block = between * (blocks / (ranks - 1).max(1)).max(1) % blocks;
            let expected = Connection {
                flags: if receives { CONNECTION_RECEIVE } else { 0 }
                    | if is_by_stores { CONNECTION_ORDINARY_STORES } else { 0 },
                first_block: first_block as u16,
                first_operation: first as u32,
                operations: calls.len() as u32,
                active_ll128_blocks: need.ll128_blocks as u16,
                active_ll128_rounds: need.ll128_rounds as u16,
                active_bulk_channels: need.bulk_channels as u32,
                ..if receives { peer.receive } else { peer.send }
            };
            assert_eq!(connection_of(words.next().unwrap()), expected);
            let way = direction as usize;
            for channel in 0..need.ll128_blocks {
                loads[((first_block + channel) % blocks) as usize][way] += need.ll128_rounds;
            }
            for channel in 0..need.bulk_channels {
                loads[((first_block + channel) % blocks) as usize][2 + way] += 1;
            }
            first += calls.len();
        }
    }
    assert_eq!([launch.send_connections, launch.receive_connections], counts);
    assert_eq!(launch.operations as usize, first);
    let stages = match limits.bulk {
        BulkSend::Copies { stages } if tma => stages,
        _ => 0,
    };
    assert_eq!(
        launch.stages, stages,
        "chunks in shared memory without a TMA producer, or a producer without"
    );
    loads
}

/// Holds that warps, blocks and clusters serve these channels, within the limits.
fn assert_grid(case: &Case, shape: &Shape, launch: &Launch, loads: &Loads) {
    let used = |load: &[u64; 4]| load.iter().any(|channels| *channels > 0);
    let used_blocks = loads.iter().rev().fold(0, |bits, load| bits << 1 | u32::from(used(load)));
    let most = |of: fn(&[u64; 4]) -> u64| loads.iter().map(of).max().unwrap();
    assert_eq!(launch.used_blocks, used_blocks);
    assert_eq!(u64::from(launch.bulk_tasks), most(|load| load[2] + load[3]));
    assert_eq!(shape.sends_chunks, most(|load| load[2]) > 0);
    let grid = shape.blocks - u32::from(launch.copy_blocks);
    let blocks = case.geometry.bulk_channels;
    assert!(grid >= used_blocks.count_ones() && grid <= blocks.next_multiple_of(shape.cluster), "{shape:?}");
    assert!(grid.is_multiple_of(shape.cluster) && grid < used_blocks.count_ones() + shape.cluster);
    let fits = used_blocks.count_ones().next_multiple_of(4) <= blocks;
    assert_eq!(shape.cluster, if used_blocks.count_ones() > 2 && fits { 4 } else { 1 });
    assert!(u32::from(launch.copy_blocks).is_multiple_of(shape.cluster));
    let warps = launch.copy_warps + if launch.bulk_tasks > 0 { BULK_SERVICE_WARPS } else { 0 };
    assert_eq!(shape.threads, 32 * if grid > 0 { warps } else { 16 });
    assert!(shape.threads <= 512 && shape.shared_bytes <= case.limits.shared_bytes_max);
    // Warps of both directions are others, each direction with channels has some, and none is without a channel.
    let [sends, receives] = [launch.ll128_send_warps, launch.ll128_receive_warps].map(u64::from);
    let [sent, received] = [most(|load| load[0]), most(|load| load[1])];
    assert!(sends + receives <= launch.copy_warps.into() && sends <= sent && receives <= received);
    assert!((sends > 0) == (sent > 0) && (receives > 0) == (received > 0));
    assert!(launch.bulk_tasks == 0 || launch.copy_warps == 16 - BULK_SERVICE_WARPS);
    // Each warp has room for its channels of LL128, and for its part in each bulk channel that copy warps serve.
    let by_stores = (0..launch.send_connections as usize).any(|at| {
        let words = &launch.storage[at * CONNECTION_WORDS..][..CONNECTION_WORDS];
        connection_of(words).flags & CONNECTION_ORDINARY_STORES != 0
    });
    let share = |channels: u64, warps: u64| if warps > 0 { channels.div_ceil(warps) } else { 0 };
    let jobs = loads.iter().map(|load| {
        let ll128 = share(load[0], sends).max(share(load[1], receives));
        ll128 + load[3] + if by_stores { load[2] } else { 0 }
    });
    let jobs = jobs.max().unwrap();
    let room = if jobs > 1 || launch.bulk_tasks > 0 { jobs } else { 0 };
    assert_eq!(u64::from(launch.jobs_per_warp), room);
}

/// Holds all of it.
fn assert_arranged(case: &Case, shape: &Shape, launch: &Launch, operations: &[Operation]) {
    let copies = case.copies();
    if operations.is_empty() {
        assert_eq!(*shape, Shape::default());
        assert!(copies.is_empty() && launch.operations == 0);
        return;
    }
    assert_eq!(launch.geometry, case.geometry);
    assert_eq!(u32::from(launch.ll128_rounds), case.geometry.ll128_channels / case.geometry.bulk_channels);
    let loads = assert_connections(case, launch, operations);
    assert_grid(case, shape, launch, &loads);
    let copied: Vec<[u64; 3]> = operations[launch.operations as usize..]
        .chunks_exact(2)
        .map(|two| [two[0].address, two[1].address, two[0].bytes])
        .collect();
    assert_eq!((&copied, copies.len()), (&copies, launch.copies as usize));
    let bytes: u64 = copies.iter().map(|[.., bytes]| *bytes).sum();
    assert_eq!(launch.copy_blocks > 0, bytes > 0);

    // The operations follow the connections, if there is room for all of them.
    let connections = (launch.send_connections + launch.receive_connections) as usize;
    let listed = &launch.storage[connections * CONNECTION_WORDS..];
    let fits = connections * size_of::<Connection>() + size_of_val(operations) <= INLINE_BYTES;
    let inline = if fits { operations.len() } else { 0 };
    let words: Vec<u64> = operations[..inline].iter().flat_map(|one| [one.address, one.bytes]).collect();
    assert_eq!(listed[..words.len()], words);
    assert!(listed[words.len()..].iter().all(|word| *word == 0));
    let used = connections * size_of::<Connection>() + inline * size_of::<Operation>();
    assert_eq!((shape.lists_operations, shape.parameter_bytes as usize), (!fits, LAUNCH_HEAD_BYTES + used));
}

#[test]
fn random_groups_are_whole() {
    let mut random = Random(7);
    let (mut listed, mut clusters, mut refused, mut copied, mut copied_alone) = (0, 0, 0, 0, 0);
    for _ in 0..2000 {
        let case = case(&mut random);
        let (mut launch, mut operations) = (Launch::default(), Vec::new());
        let arranged =
            arrange(&case.calls, &case.peers, &case.geometry, &case.limits, &mut launch, &mut operations);
        match arranged {
            Ok(shape) => {
                assert_arranged(&case, &shape, &launch, &operations);
                copied += u32::from(launch.copies > 0 && shape.blocks > launch.copy_blocks.into());
                copied_alone += u32::from(launch.copies > 0 && shape.blocks == launch.copy_blocks.into());
                listed += u32::from(shape.lists_operations);
                clusters += u32::from(shape.cluster > 1);
            }
            Err(refusal) => {
                assert_eq!(refusal, Refusal::TooManyChannels);
                refused += 1;
            }
        }
    }
    assert!(listed > 50 && clusters > 250 && (1..1000).contains(&refused), "{listed} {clusters} {refused}");
    assert!(copied > 150 && copied_alone > 0, "{copied} {copied_alone}");
}
