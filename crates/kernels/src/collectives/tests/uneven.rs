//! Tests of collectives whose ranks have parts of different sizes.

use super::*;

const LIMITS: Limits = Limits { blocks_max: 32, clusters: true };

/// Parts of these sizes, with gaps between them.
fn parts(base: u64, sizes: &[u64]) -> [Part; RANKS_MAX] {
    let mut parts = [Part::default(); RANKS_MAX];
    let mut address = base;
    for (part, bytes) in parts.iter_mut().zip(sizes) {
        *part = Part { address, bytes: *bytes };
        address = address.wrapping_add(*bytes).wrapping_add(3);
    }
    parts
}

pub(super) fn answer(
    uneven: &Uneven,
    geometry: &Geometry,
    tuning: &Tuning,
) -> Result<Option<(Shape, CollectiveLaunch)>, Refused> {
    let mut launch =
        CollectiveLaunch { scale: 99, flags: 99, send_bytes: [99; RANKS_MAX], ..Default::default() };
    let layout = Layout::of(geometry);
    let shape =
        arrange_uneven(uneven, geometry, &layout, &regions(geometry.ranks), tuning, &LIMITS, &mut launch)?;
    Ok(shape.map(|shape| (shape, launch)))
}

/// With equal, adjacent parts it is the even collective over LL128.
#[test]
fn even_parts_are_the_even_collective() {
    for (ranks, count) in (2..=8).flat_map(|ranks| [1, 960, 5000, 1 << 20].map(|count| (ranks, count))) {
        let geometry = Geometry::recommended(32, ranks, ranks - 1, 1);
        for kind in [Kind::AllGather, Kind::ReduceScatter] {
            let reduces = kind == Kind::ReduceScatter;
            let (base, own) = if reduces { (SEND, RECEIVE) } else { (RECEIVE, SEND) };
            let mut parts = [Part::default(); RANKS_MAX];
            for (rank, part) in (0..u64::from(ranks)).zip(&mut parts) {
                *part = Part { address: base + rank * count, bytes: count };
            }
            let uneven = Uneven { reduction: reduces.then_some(INT8_SUM), scalar: None, parts, own };
            for tuning in &tunings()[1..4] {
                let (shape, launch) = answer(&uneven, &geometry, tuning).unwrap().unwrap();
                let even = arranged(&collective(kind, count), &geometry, tuning, &LIMITS);
                assert_eq!((shape, launch), (even.shape, even.launch), "{kind:?} of {count}");
            }
        }
    }
}

/// All ranks have the same fields where they must, and each expects what the other sends. No call goes by LL, whatever the tuning.
#[test]
fn ranks_agree() {
    let sizes: [[u64; 4]; 5] =
        [[0, 1, 0, 0], [7, 0, 4000, 1], [1, 1, 1, 1], [0, 0, 0, 9_000_000], [3, 2, 1, 0]];
    for (sizes, tuning) in sizes.iter().flat_map(|sizes| tunings().map(|tuning| (sizes, tuning))) {
        for reduction in [None, Some(INT8_SUM)] {
            let of = |rank: u32| {
                let geometry = Geometry::recommended(32, 4, rank, 1);
                let parts = parts(SEND + u64::from(rank), sizes);
                let uneven = Uneven { reduction, scalar: None, parts, own: RECEIVE };
                answer(&uneven, &geometry, &tuning).unwrap().unwrap()
            };
            let all: Vec<(Shape, CollectiveLaunch)> = (0..4).map(of).collect();
            for (me, (shape, launch)) in all.iter().enumerate() {
                assert!(matches!(shape.kernel.family, Family::Ll128x2 | Family::Ll128x4));
                let agreed = |(shape, launch): &(Shape, CollectiveLaunch)| {
                    (shape.kernel.family, launch.used_channels, launch.packets, launch.flags)
                };
                assert_eq!(agreed(&all[me]), agreed(&all[0]));
                for (peer, (_, theirs)) in all.iter().enumerate() {
                    // A result of a reduction has as many bytes as its inputs.
                    let expected = theirs.receive_bytes[if reduction.is_some() { peer } else { me }];
                    assert_eq!(launch.send_bytes[peer], expected, "from {me} to {peer} of {sizes:?}");
                }
                assert_eq!(launch.receive_bytes[me], sizes[me]);
                let same = if reduction.is_some() { 0 } else { COLLECTIVE_SAME };
                let even = if sizes[1..].iter().all(|size| *size == sizes[0]) { COLLECTIVE_EVEN } else { 0 };
                assert_eq!(launch.flags, same | even);
            }
        }
    }
}

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

/// A random call and its geometry.
fn any(random: &mut Random) -> (Uneven, Geometry) {
    let ranks = 2 + random.below(7) as u32;
    let reduction = Reduction { datatype: random.below(12) as i32, operation: random.below(6) as i32 };
    // Integers have no averages.
    let is_known = reduction.datatype >= FLOAT16 || reduction.operation != AVERAGE;
    let reduction = (random.below(2) == 0 && is_known).then_some(reduction);
    let scalar = [Scalar::Bits(random.below(1 << 60)), Scalar::At(random.below(1 << 60))];
    let scalar = scalar[random.below(2) as usize];
    let scalar = reduction.filter(|reduction| reduction.operation == SCALED_SUM).map(|_| scalar);
    let element_bytes = reduction.map_or(1, |reduction| ELEMENT_BYTES[reduction.datatype as usize].into());
    let mut parts = [Part::default(); RANKS_MAX];
    for part in parts.iter_mut().take(ranks as usize) {
        let limit = 1 << random.below(26);
        let bytes = if random.below(4) == 0 { 0 } else { random.below(limit) * element_bytes };
        *part = Part { address: random.below(1 << 48), bytes };
    }
    let geometry = Geometry {
        first_tag: 1 + random.below(1 << 50),
        rank: random.below(ranks.into()) as u32,
        ranks,
        channels: 1 << random.below(9),
        slots: 2 << random.below(3),
        one_shot_channels: 1 + random.below(400) as u32,
        one_shot_slots: random.below(1000) as u32,
    };
    (Uneven { reduction, scalar, parts, own: random.below(1 << 48) }, geometry)
}

/// The launch of a call, without packets, grid and the factor of an average.
fn expected(uneven: &Uneven, geometry: &Geometry) -> CollectiveLaunch {
    let (me, ranks) = (geometry.rank as usize, geometry.ranks as usize);
    let (addresses, bytes) = (uneven.parts.map(|part| part.address), uneven.parts.map(|part| part.bytes));
    let mut launch = CollectiveLaunch {
        wires: [Layout::of(geometry).ll128, Default::default()],
        first_tag: geometry.first_tag,
        rank: geometry.rank,
        ranks: geometry.ranks,
        channels_log2: geometry.channels.trailing_zeros(),
        ring_slots: geometry.slots,
        ..Default::default()
    };
    launch.regions[..ranks].copy_from_slice(&regions(geometry.ranks));
    if let Some(Reduction { datatype, operation }) = uneven.reduction {
        (launch.send, launch.send_bytes) = (addresses, bytes);
        (launch.receive[me], launch.receive_bytes[me]) = (uneven.own, bytes[me]);
        launch.reduction = (datatype | operation << 8) as u32;
    } else {
        launch.send[..ranks].fill(uneven.own);
        launch.send_bytes[..ranks].fill(bytes[me]);
        (launch.receive, launch.receive_bytes) = (addresses, bytes);
        launch.flags |= COLLECTIVE_SAME;
    }
    match uneven.scalar {
        Some(Scalar::Bits(bits)) => launch.scale = bits,
        Some(Scalar::At(address)) => {
            launch.scale = address;
            launch.flags |= COLLECTIVE_SCALAR_AT;
        }
        None => {}
    }
    if bytes[..ranks].iter().all(|part| *part == bytes[0]) {
        launch.flags |= COLLECTIVE_EVEN;
    }
    launch
}

/// Every field of the launch of a random call is what the call and the geometry say, and the chosen way is that of the product.
#[test]
fn random_calls_are_whole() {
    let mut random = Random(7);
    let mut asked = 0;
    for _ in 0..600 {
        let (uneven, geometry) = any(&mut random);
        // Packets of two groups, or of four.
        let tuning = &tunings()[1 + random.below(2) as usize];
        let Some((shape, launch)) = answer(&uneven, &geometry, tuning).unwrap() else {
            assert!(uneven.parts.iter().all(|part| part.bytes == 0));
            continue;
        };
        asked += 1;
        let mut expected = expected(&uneven, &geometry);
        if uneven.scalar.is_none() {
            // `reductions_are_told` holds it.
            expected.scale = launch.scale;
        }
        let family = shape.kernel.family;
        let packet_bytes = if family == Family::Ll128x4 { 1920 } else { 960 };
        let largest = uneven.parts.iter().map(|part| part.bytes).max().unwrap();
        expected.packets = largest.div_ceil(packet_bytes);
        assert_eq!(chosen::without_grid(launch), expected);
        let mut by_choice = CollectiveLaunch::default();
        arrange_uneven_by(&uneven, family, &geometry, &regions(geometry.ranks), &mut by_choice).unwrap();
        assert_eq!(by_choice, expected);
    }
    assert!(asked > 500, "{asked}");
}

/// A call without bytes makes no launch. Impossible calls are refused with their values.
#[test]
fn nonsense_is_refused() {
    let geometry = Geometry::recommended(32, 4, 1, 1);
    let of = |reduction, sizes: &[u64]| {
        let uneven = Uneven { reduction, scalar: None, parts: parts(SEND, sizes), own: RECEIVE };
        answer(&uneven, &geometry, &Tuning::default())
    };
    assert_eq!(of(None, &[0; 4]), Ok(None));
    assert_eq!(of(Some(INT8_SUM), &[]), Ok(None));
    assert_eq!(of(None, &[1, 1, 1, 1, 1]), Err(Refused::Root { root: 4, ranks: 4 }));
    let count = |count, element_bytes| Err(Refused::Count { count, element_bytes });
    assert_eq!(of(None, &[u64::MAX, 1]), count(1, 1));
    let floats = Some(Reduction { datatype: FLOAT32, operation: SUM });
    assert_eq!(of(floats, &[4, 6]), count(6, 4));
    let scaled = Reduction { datatype: FLOAT32, operation: SCALED_SUM };
    assert_eq!(of(Some(scaled), &[4]), Err(Refused::Scalar { reduction: scaled, scalar: None }));
    let unknown = Reduction { datatype: 77, operation: SUM };
    assert_eq!(of(Some(unknown), &[4]), Err(Refused::Reduction(unknown)));
}
