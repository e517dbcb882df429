//! Tests of collectives whose way the caller chooses.

use super::*;

/// The part of a launch that does not follow from its grid.
pub(super) fn without_grid(launch: CollectiveLaunch) -> CollectiveLaunch {
    CollectiveLaunch { used_channels: 0, role_warps: 0, ..launch }
}

/// By the family that the sizes choose, the launch is the one of the product.
#[test]
fn the_chosen_way_is_that_of_the_product() {
    let limits = Limits { blocks_max: 24, clusters: true };
    for (ranks, tuning) in (2..=8).flat_map(|ranks| tunings().map(|tuning| (ranks, tuning))) {
        for (kind, count) in
            kinds(ranks).into_iter().flat_map(|kind| [1, 960, 5000, 1 << 20].map(|count| (kind, count)))
        {
            let geometry = Geometry::recommended(24, ranks, ranks - 1, 1);
            let call = collective(kind, count);
            let Arranged { shape, launch } = arranged(&call, &geometry, &tuning, &limits);
            let family = shape.kernel.family;
            let mut chosen = CollectiveLaunch { scale: 99, flags: 99, ..Default::default() };
            arrange_by(&call, family, &geometry, &regions(ranks), &mut chosen).unwrap();
            assert_eq!(chosen, without_grid(launch), "{kind:?} of {count}");
            assert!(chosen.is_straight(family) || shape.kernel.is_for_any(), "{kind:?} of {count}");
            // Nothing to do is a launch without packets.
            let nothing = Collective { count: 0, ..call };
            arrange_by(&nothing, family, &geometry, &regions(ranks), &mut chosen).unwrap();
            assert_eq!((chosen.packets, chosen.send_bytes), (0, [0; RANKS_MAX]));
        }
    }
}

/// What is refused by the product is refused here, too.
#[test]
fn nonsense_is_refused() {
    let geometry = Geometry::recommended(24, 4, 0, 1);
    let answer = |call: &Collective, regions: &[u64]| {
        arrange_by(call, Family::Ll, &geometry, regions, &mut CollectiveLaunch::default())
    };
    let call = collective(Kind::Broadcast { root: 4 }, 1);
    assert_eq!(answer(&call, &regions(4)), Err(Refused::Root { root: 4, ranks: 4 }));
    let call = collective(Kind::AllGather, u64::MAX);
    assert_eq!(answer(&call, &regions(3)), Err(Refused::Regions { regions: 3, ranks: 4 }));
    assert!(matches!(answer(&call, &regions(4)), Err(Refused::Count { .. })));
}

/// Which reducer serves which type and operation.
#[test]
fn reducers_are_told() {
    let of = |datatype, operation| reducer_of(Reduction { datatype, operation });
    assert_eq!([SUM, AVERAGE].map(|by| of(FLOAT32, by)), [Some(Reducer::SumF32); 2]);
    assert_eq!([of(FLOAT16, SUM), of(BFLOAT16, AVERAGE)], [Some(Reducer::SumF16), Some(Reducer::SumBf16)]);
    assert_eq!([of(FLOAT32, 2), of(FLOAT64, SUM), of(0, SUM)], [Some(Reducer::Any); 3]);
    assert_eq!([of(FLOAT8_E4M3, 1), of(0, SCALED_SUM)], [Some(Reducer::Ordered); 2]);
    assert_eq!([of(5, AVERAGE), of(12, SUM), of(0, 6), of(-1, SUM)], [None; 4]);
}
