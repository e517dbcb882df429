//! Holds that all-gather-v and reduce-scatter-v are arranged equally in Rust (the product) and in C++ (the programs that test the
//! kernels).

use super::host;

use std::io::{Read, Write};
use std::process::{Command, Stdio};

use windlass_kernels::collective::{CollectiveLaunch, RANKS_MAX};
use windlass_kernels::collectives::{
    Crossover, Geometry, Layout, Limits, Part, Reduction, Scalar, Tuning, Uneven, arrange_uneven,
};

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % limit
    }
}

struct Case {
    uneven: Uneven,
    geometry: Geometry,
    groups: u64,
}

fn case(random: &mut Random) -> Case {
    let ranks = 2 + random.below(7) as u32;
    let element = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1];
    let reduction = (random.below(2) == 0)
        .then(|| Reduction { datatype: random.below(12) as i32, operation: random.below(6) as i32 })
        // Integers have no averages.
        .filter(|Reduction { datatype, operation }| *datatype >= 6 || *operation != 4);
    let scalar =
        [Scalar::Bits(random.below(1 << 60)), Scalar::At(random.below(1 << 60))][random.below(2) as usize];
    let scalar = reduction.is_some_and(|reduction| reduction.operation == 5).then_some(scalar);
    let packet = reduction.map_or(1, |reduction| element[reduction.datatype as usize]);
    let mut parts = [Part::default(); RANKS_MAX];
    for part in parts.iter_mut().take(ranks as usize) {
        let limit = 1 << random.below(26);
        let bytes = if random.below(4) == 0 { 0 } else { random.below(limit) * packet };
        *part = Part { address: random.below(1 << 48), bytes };
    }
    let geometry = Geometry {
        first_tag: 1 + random.below(1 << 50),
        rank: random.below(ranks.into()) as u32,
        ranks,
        channels: 1 << random.below(9),
        slots: 2 << random.below(3),
    };
    // Floats of 8 bits and scaled sums have kernels for two ranks only.
    let is_ordered = reduction.is_some_and(|reduction| reduction.datatype >= 10 || reduction.operation == 5);
    let groups = if ranks > 4 || is_ordered { 2 } else { 2 + 2 * random.below(2) };
    Case { uneven: Uneven { reduction, scalar, parts, own: random.below(1 << 48) }, geometry, groups }
}

fn question(case: &Case) -> Vec<u8> {
    let Case { uneven, geometry, groups } = case;
    let Geometry { first_tag, rank, ranks, channels, slots } = *geometry;
    let (datatype, operation) =
        uneven.reduction.map_or((0, 0), |reduction| (reduction.datatype, reduction.operation));
    let small = [rank, ranks, channels, slots].map(u64::from);
    let reduction = [u64::from(uneven.reduction.is_some()), datatype as u64, operation as u64];
    let parts = uneven.parts.iter().flat_map(|part| [part.address, part.bytes]);
    let scalar = match uneven.scalar {
        None => [0, 0],
        Some(Scalar::Bits(bits)) => [bits, 0],
        Some(Scalar::At(address)) => [address, 1],
    };
    let numbers = [first_tag].into_iter().chain(small).chain([*groups]).chain(reduction);
    let numbers = numbers.chain(scalar).chain([uneven.own]);
    numbers.chain(parts).flat_map(u64::to_le_bytes).collect()
}

/// The launch field by field, in the order of `device/collective.h`, without the fields that callers set in C++.
fn told(launch: &CollectiveLaunch, layout: &Layout) -> Vec<u8> {
    let l = launch;
    let wires = [l.wires[0], layout.results].into_iter().flat_map(|wire| [wire.rings, wire.channels]);
    let front = [0; RANKS_MAX].into_iter().chain(wires).chain([0, 0, l.first_tag]);
    let buffers = [l.send, l.send_bytes, l.receive, l.receive_bytes].into_iter().flatten();
    let small = [l.rank, l.ranks, l.channels_log2, l.ring_slots, 0, 0, l.reduction, l.flags];
    let mut bytes: Vec<u8> = front.chain(buffers).flat_map(u64::to_le_bytes).collect();
    bytes.extend(small.into_iter().flat_map(u32::to_le_bytes));
    bytes.extend([l.packets, l.scale].into_iter().flat_map(u64::to_le_bytes));
    assert_eq!(bytes.len(), size_of::<CollectiveLaunch>());
    bytes
}

fn answer(case: &Case) -> Option<Vec<u8>> {
    let Case { uneven, geometry, groups } = case;
    let layout = Layout::of(geometry);
    let regions: Vec<u64> = (1..=u64::from(geometry.ranks)).map(|rank| rank << 40).collect();
    let two_groups_bytes_max = if *groups == 2 { u64::MAX } else { 0 };
    let crossover = Crossover { ll_bytes_max: 0, two_groups_bytes_max, large_bytes_min: u64::MAX };
    let tuning = Tuning { all_gather: crossover, reduce_scatter: crossover, ..Tuning::default() };
    let limits = Limits { blocks_max: 32, clusters: true };
    let mut launch = CollectiveLaunch::default();
    arrange_uneven(uneven, geometry, &layout, &regions, &tuning, &limits, &mut launch).unwrap()?;
    Some(told(&launch, &layout))
}

/// Random calls give the same launches in both languages.
#[test]
fn rust_and_cpp_arrange_alike() {
    let program = host::compiled("uneven_check.cpp", "uneven_check", &["-O1"]);
    let mut random = Random(7);
    let (mut questions, mut expected) = (Vec::new(), Vec::new());
    let mut asked = 0;
    for case in (0..600).map(|_| case(&mut random)) {
        // In Rust a call without any bytes has no launch.
        let Some(told) = answer(&case) else { continue };
        questions.extend(question(&case));
        expected.extend(told);
        asked += 1;
    }
    assert!(asked > 500, "{asked}");
    let mut child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || input.write_all(&questions).unwrap());
    let mut answers = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut answers).unwrap();
    writer.join().unwrap();
    assert!(child.wait().unwrap().success());
    let difference = answers.iter().zip(&expected).position(|(a, b)| a != b);
    let size = size_of::<CollectiveLaunch>();
    assert_eq!(
        difference.map(|at| (at / size, at % size)),
        None,
        "first different byte: of which, and where"
    );
    assert_eq!(answers.len(), expected.len());
}
