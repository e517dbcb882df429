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
            for tuning in &tunings()[1..] {
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
                assert!(matches!(shape.kernel.family(), Family::Ll128x2 | Family::Ll128x4));
                let agreed = |(shape, launch): &(Shape, CollectiveLaunch)| {
                    (shape.kernel.family(), launch.used_channels, launch.packets, launch.flags)
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
