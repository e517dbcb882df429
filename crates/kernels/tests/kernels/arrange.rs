//! Holds that a group is arranged equally in Rust (the product) and in C++ (the programs that test the kernel).

use super::host;

use std::io::{Read, Write};
use std::process::{Command, Stdio};

use windlass_kernels::arrange::{BulkSend, Call, Direction, Limits, Peer, Refusal, Shape, arrange};
use windlass_kernels::launch::{Connection, Geometry, LAUNCH_BYTES, Launch};

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

#[derive(Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn u32(&mut self, values: &[u32]) {
        self.0.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }

    fn u64(&mut self, values: &[u64]) {
        self.0.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }

    fn connection(&mut self, c: &Connection) {
        self.u64(&[
            c.ll128_ring,
            c.ll128_credit,
            c.ll128_progress,
            c.ll128_from,
            c.bulk_ring,
            c.bulk_posted,
            c.bulk_credit,
            c.bulk_progress,
            c.growth,
        ]);
        self.u32(&[
            c.peer,
            u32::from(c.flags) | u32::from(c.first_block) << 16,
            c.first_operation,
            c.operations,
            u32::from(c.active_ll128_blocks) | u32::from(c.active_ll128_rounds) << 16,
            c.active_bulk_channels,
        ]);
    }

    fn geometry(&mut self, g: &Geometry) {
        self.u64(&[g.first_tag, g.bulk_from_bytes]);
        self.u32(&[
            g.ll128_channels,
            g.ll128_slots,
            g.bulk_channels,
            g.bulk_slots,
            g.bulk_chunk_bytes,
            g.rank,
        ]);
    }

    fn case(&mut self, case: &Case) {
        self.u32(&[case.calls.len() as u32, case.peers.len() as u32]);
        for call in &case.calls {
            self.u64(&[call.address, call.bytes]);
            self.u32(&[call.peer, u32::from(call.direction == Direction::Receive)]);
        }
        for peer in &case.peers {
            self.connection(&peer.send);
            self.connection(&peer.receive);
        }
        self.geometry(&case.geometry);
        let (copies, stages) = match case.limits.bulk {
            BulkSend::Copies { stages } => (1, u32::from(stages)),
            BulkSend::OrdinaryStores => (0, 8),
        };
        self.u32(&[copies, stages, case.limits.shared_bytes_max]);
    }

    /// The launch field by field, in the order of `device/p2p.h`.
    fn launch(&mut self, l: &Launch) {
        self.geometry(&l.geometry);
        self.u64(&[l.control, l.report, l.operation_list, l.growth_requests]);
        self.u32(&[l.send_connections, l.receive_connections, l.used_blocks, l.bulk_tasks]);
        self.u32(&[l.ll128_send_warps, l.ll128_receive_warps]);
        let stages = u32::from(l.stages) | u32::from(l.copy_blocks) << 16;
        let jobs = u32::from(l.jobs_per_warp) | u32::from(l.ll128_rounds) << 16;
        self.u32(&[l.copy_warps, stages, jobs, l.flags, l.operations, l.copies]);
        self.u64(&l.storage);
    }

    fn answer(&mut self, case: &Case) -> (Shape, Launch) {
        let mut launch = Launch::default();
        let mut operations = Vec::new();
        let arranged =
            arrange(&case.calls, &case.peers, &case.geometry, &case.limits, &mut launch, &mut operations);
        let shape = match arranged {
            Ok(shape) => shape,
            // p2p_refused
            Err(refusal) => {
                assert_eq!(refusal, Refusal::TooManyChannels);
                Shape { blocks: u32::MAX, ..Shape::default() }
            }
        };
        self.u32(&[shape.blocks, shape.threads, shape.shared_bytes, shape.cluster, shape.parameter_bytes]);
        self.u32(&[u32::from(shape.lists_operations)]);
        let before = self.0.len();
        self.launch(&launch);
        assert_eq!(self.0.len() - before, LAUNCH_BYTES);
        self.u32(&[operations.len() as u32]);
        for operation in &operations {
            self.u64(&[operation.address, operation.bytes]);
        }
        (shape, launch)
    }
}

/// Random groups give the same launches and shapes in both languages.
#[test]
fn rust_and_cpp_arrange_alike() {
    let program = host::compiled("arrange_check.cpp", "arrange_check", &["-O1"]);
    let mut random = Random(7);
    let (mut listed, mut clusters, mut refused, mut copied, mut copied_alone) = (0, 0, 0, 0, 0);
    let (mut questions, mut expected) = (Bytes::default(), Bytes::default());
    for _ in 0..400 {
        let case = case(&mut random);
        questions.case(&case);
        let (shape, launch) = expected.answer(&case);
        copied += u32::from(launch.copies > 0 && shape.blocks > launch.copy_blocks.into());
        copied_alone += u32::from(launch.copies > 0 && shape.blocks == launch.copy_blocks.into());
        listed += u32::from(shape.lists_operations);
        clusters += u32::from(shape.cluster > 1);
        refused += u32::from(shape.blocks == u32::MAX);
    }
    assert!(listed > 10 && clusters > 50 && (1..200).contains(&refused), "{listed} {clusters} {refused}");
    assert!(copied > 30 && copied_alone > 0, "{copied} {copied_alone}");

    let mut child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || input.write_all(&questions.0).unwrap());
    let mut answers = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut answers).unwrap();
    writer.join().unwrap();
    assert!(child.wait().unwrap().success());
    let difference = answers.iter().zip(&expected.0).position(|(a, b)| a != b);
    assert_eq!(difference, None, "first different byte");
    assert_eq!(answers.len(), expected.0.len());
}
