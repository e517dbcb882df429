mod batch;
mod chosen;
mod flow;
mod uneven;

use std::collections::BTreeSet;

use super::kernel::Family;
use super::reduction::{
    AVERAGE, BFLOAT16, ELEMENT_BYTES, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, FLOAT64, SCALED_SUM, SUM,
};
use super::*;
use crate::collective::{
    CHANNEL_BYTES, COLLECTIVE_EVEN, COLLECTIVE_SAME, COLLECTIVE_SCALAR_AT, LL_COUNT_BYTES, LL_SLOT_BYTES,
    LL_SLOTS, LL128_SLOT_BYTES, ONE_SHOT_LAUNCHES, RANKS_MAX, WAITED_RESULT_DATA,
};

const INT8_SUM: Reduction = Reduction { datatype: 0, operation: SUM };
/// Where the buffers of every rank lie.
const SEND: u64 = 0x10_0000;
const RECEIVE: u64 = 0x90_0000;
const BLOCKS: [u32; 10] = [1, 2, 3, 4, 5, 7, 8, 24, 31, 32];

fn kinds(ranks: u32) -> Vec<Kind> {
    let rooted =
        [0, ranks - 1].into_iter().flat_map(|root| [Kind::Broadcast { root }, Kind::Reduce { root }]);
    [Kind::AllReduce, Kind::AllGather, Kind::ReduceScatter].into_iter().chain(rooted).collect()
}

/// Every kind by LL, by LL128 packets of two groups, of four, by Simple; a reduce also in two phases, even kinds also in one shot.
fn tunings() -> [Tuning; 5] {
    const NEVER: u64 = u64::MAX;
    let of =
        [(NEVER, 0, 0, NEVER), (0, 0, NEVER, NEVER), (0, 0, 0, NEVER), (0, 0, 0, 0), (0, NEVER, 0, NEVER)];
    of.map(|(ll_bytes_max, one_shot_bytes_max, two_groups_bytes_max, large_bytes_min)| {
        let every = Crossover { ll_bytes_max, one_shot_bytes_max, two_groups_bytes_max, large_bytes_min };
        Tuning {
            all_reduce: every,
            broadcast: every,
            reduce: every,
            all_gather: every,
            reduce_scatter: every,
        }
    })
}

fn collective(kind: Kind, count: u64) -> Collective {
    let reduction = Some(INT8_SUM);
    Collective { kind, count, element_bytes: 1, reduction, scalar: None, send: SEND, receive: RECEIVE }
}

fn regions(ranks: u32) -> Vec<u64> {
    (0..u64::from(ranks)).map(|rank| (rank + 1) << 40).collect()
}

struct Arranged {
    shape: Shape,
    launch: CollectiveLaunch,
}

fn arranged(collective: &Collective, geometry: &Geometry, tuning: &Tuning, limits: &Limits) -> Arranged {
    // Nothing of the launch before is left.
    let mut launch =
        CollectiveLaunch { scale: 99, flags: 99, send_bytes: [99; RANKS_MAX], ..Default::default() };
    let layout = Layout::of(geometry);
    let shape = arrange(collective, geometry, &layout, &regions(geometry.ranks), tuning, limits, &mut launch)
        .unwrap();
    Arranged { shape: shape.unwrap(), launch }
}

/// Grids stay within their limits and blocks within what their kernels load with, at any size; every channel is served, by as
/// many warps as there are channels where the limits allow.
#[test]
fn grids_keep_their_limits() {
    let mut clustered = 0;
    for ranks in 2..=8 {
        for (kind, tuning) in kinds(ranks).into_iter().flat_map(|kind| tunings().map(|tuning| (kind, tuning)))
        {
            for (blocks_max, clusters) in
                BLOCKS.into_iter().flat_map(|blocks| [(blocks, false), (blocks, true)])
            {
                for bytes in (0..27).map(|log| (1u64 << log) + log % 3) {
                    let geometry = Geometry::recommended(32, ranks, ranks - 1, 1);
                    let limits = Limits { blocks_max, clusters };
                    let Arranged { shape, launch } =
                        arranged(&collective(kind, bytes), &geometry, &tuning, &limits);
                    let family = shape.kernel.family;
                    assert!((1..=blocks_max).contains(&shape.blocks), "{shape:?}");
                    assert!(shape.threads > 0 && shape.threads <= shape.kernel.threads_max(), "{shape:?}");
                    assert_eq!(shape.threads, 32 * family.warps(launch.role_warps));
                    assert!(shape.blocks.is_multiple_of(shape.cluster) && (clusters || shape.cluster == 1));
                    assert!((1..=geometry.channels_of(family)).contains(&launch.used_channels));
                    let warps = shape.blocks * launch.role_warps;
                    let full = shape.kernel.role_warps_max() == launch.role_warps;
                    assert!(warps >= launch.used_channels || full, "{shape:?}");
                    // No warp has a channel more than the others, and where there are packets none is idle.
                    let channels = launch.packets.min(geometry.channels_of(family).into()) as u32;
                    let is_even = launch.used_channels.is_multiple_of(warps);
                    assert!(is_even || warps > channels || family.sends_at_once(), "{shape:?}");
                    // In one shot a packet's place has one channel, whatever the launch's size.
                    assert!(!family.sends_at_once() || launch.used_channels == channels, "{shape:?}");
                    let is_one_shot = family.is_one_shot();
                    assert_eq!(launch.ring_slots, geometry.slots_of(family));
                    assert!(!is_one_shot || launch.packets <= launch.ring_slots.into(), "{shape:?}");
                    assert!(launch.used_channels > channels.saturating_sub(warps), "{shape:?}");
                    let parts = match kind {
                        Kind::AllReduce | Kind::Broadcast { .. } | Kind::Reduce { .. } => 1,
                        _ => u64::from(ranks),
                    };
                    assert_eq!(shape.early, bytes * parts <= 2 << 20);
                    clustered += u32::from(shape.cluster == 4);
                }
            }
        }
    }
    assert!(clustered > 1000, "{clustered}");
}

/// Sizes of the measured table, and grids that were measured.
#[test]
fn sizes_choose_kernels() {
    let f32_sum = Some(Reduction { datatype: FLOAT32, operation: SUM });
    let told = |kind, total_bytes: u64, ranks| {
        let whole = matches!(kind, Kind::AllReduce | Kind::Broadcast { .. } | Kind::Reduce { .. });
        let count = total_bytes / 4 / if whole { 1 } else { u64::from(ranks) };
        let call = Collective { element_bytes: 4, reduction: f32_sum, ..collective(kind, count) };
        let geometry = Geometry::recommended(24, ranks, 0, 1);
        let limits = Limits { blocks_max: 24, clusters: true };
        let Arranged { shape, launch } = arranged(&call, &geometry, &Tuning::default(), &limits);
        let name = shape.kernel.name().strip_prefix("ncclWindlass_").unwrap().trim_end_matches("_whole");
        (name, launch.used_channels, shape.blocks, shape.threads)
    };
    let (kib, mib) = (1 << 10, 1 << 20);
    assert_eq!(told(Kind::AllReduce, kib, 4), ("LL_SumF32_4", 4, 1, 128));
    assert_eq!(told(Kind::AllReduce, 16 * kib, 4), ("LL_SumF32_4", 64, 8, 256));
    assert_eq!(told(Kind::AllReduce, 64 * kib, 4).0, "LL_SumF32_4");
    assert_eq!(told(Kind::AllReduce, 64 * kib + 4, 4).0, "OneShot_SumF32_4");
    assert_eq!(told(Kind::AllReduce, 128 * kib, 2), ("OneShot_SumF32_2", 69, 24, 96));
    assert_eq!(told(Kind::AllReduce, 1536 * kib, 2), ("OneShot_SumF32_2", 576, 24, 768));
    assert_eq!(told(Kind::AllReduce, 1536 * kib + 4096, 2), ("AllReduce_SumF32_2", 192, 24, 768));
    assert_eq!(told(Kind::AllReduce, 512 * kib, 3), ("OneShot_SumF32_4", 274, 24, 384));
    assert_eq!(told(Kind::AllReduce, 256 * kib, 4), ("OneShot_SumF32_4", 137, 24, 192));
    assert_eq!(told(Kind::AllReduce, 260 * kib, 4).0, "AllReduce_SumF32_4");
    assert_eq!(told(Kind::AllReduce, 128 * kib, 8), ("OneShot_SumF32_8", 137, 24, 192));
    assert_eq!(told(Kind::AllReduce, 132 * kib, 5).0, "AllReduce_SumF32_8");
    assert_eq!(told(Kind::AllReduce, 4 * mib, 4), ("AllReduce_SumF32_4", 192, 24, 768));
    assert_eq!(told(Kind::AllReduce, 16 * mib, 8), ("AllReduce_SumF32_8", 240, 24, 480));
    assert_eq!(told(Kind::AllReduce, 16 * mib, 4), ("SimpleAllReduce_SumF32_4", 192, 24, 416));
    assert_eq!(told(Kind::ReduceScatter, 64 * mib, 2), ("Simple_SumF32_2", 192, 24, 544));
    assert_eq!(told(Kind::AllGather, 128 * kib, 4), ("LL_Copy_4", 128, 16, 256));
    assert_eq!(told(Kind::AllGather, 512 * kib, 4), ("OneShotParts_Copy_4", 69, 16, 160));
    assert_eq!(told(Kind::AllGather, mib, 4), ("OneShotParts_Copy_4", 137, 16, 288));
    assert_eq!(told(Kind::AllGather, mib, 8), ("OneShotParts_Copy_8", 137, 16, 288));
    assert_eq!(told(Kind::AllGather, 2 * mib, 2), ("OneShotParts_Copy_2", 547, 24, 736));
    assert_eq!(told(Kind::AllGather, 3 * mib, 2), ("LL128x4_Copy_2", 240, 24, 640));
    assert_eq!(told(Kind::ReduceScatter, 3 * mib, 2), ("OneShotParts_SumF32_2", 576, 24, 768));
    assert_eq!(told(Kind::AllGather, 2 * mib, 4), ("LL128x4_Copy_4", 192, 24, 512));
    assert_eq!(told(Kind::AllGather, 4 * mib, 2), ("LL128x4_Copy_2", 240, 24, 640));
    assert_eq!(told(Kind::AllGather, mib, 5), ("LL128x2_Copy_8", 128, 16, 512));
    assert_eq!(told(Kind::AllGather, 64 * kib, 2), ("LL_Copy_2", 128, 8, 512));
    assert_eq!([2, 5].map(|ranks| told(Kind::AllGather, mib, ranks).2), [16; 2]);
    assert_eq!([2, 5].map(|ranks| told(Kind::ReduceScatter, mib + 640, ranks).2), [24; 2]);
    assert_eq!(told(Kind::AllReduce, mib, 2).2, 24);
    assert_eq!(told(Kind::ReduceScatter, 128 * kib, 3).0, "LL_SumF32_4");
    assert_eq!(told(Kind::ReduceScatter, 4 * mib, 2).0, "LL128x4_SumF32_2");
    assert_eq!(told(Kind::Broadcast { root: 0 }, 64 * kib, 2).0, "LL128x2_Copy_2");
    assert_eq!(told(Kind::Broadcast { root: 1 }, 513 * kib, 2).0, "LL128x4_Copy_2");
    assert_eq!(told(Kind::Reduce { root: 1 }, 65 * kib, 2).0, "LL128x4_SumF32_2");
    let reduce = |bytes, ranks| told(Kind::Reduce { root: 1 }, bytes, ranks).0;
    assert_eq!([reduce(64 * mib, 2), reduce(1535 * kib, 4)], ["LL128x4_SumF32_2", "LL128x4_SumF32_4"]);
    assert_eq!([reduce(3 * mib, 3), reduce(512 * kib, 8)], ["AllReduce_SumF32_4", "AllReduce_SumF32_8"]);
}

/// Wherever buffers lie on a rank, all ranks have the same packets on the same channels, in the same grid.
#[test]
fn alignment_is_nobodys_affair() {
    for (ranks, kind) in (2..=8).flat_map(|ranks| kinds(ranks).into_iter().map(move |kind| (ranks, kind))) {
        for bytes in (0..27).map(|log| 1u64 << log) {
            let geometry = Geometry::recommended(24, ranks, 0, 1);
            let limits = Limits { blocks_max: 24, clusters: true };
            let agreed = |by: u64| {
                let even = collective(kind, bytes);
                let call = Collective { send: even.send + by, receive: even.receive + by, ..even };
                let Arranged { shape, launch } = arranged(&call, &geometry, &Tuning::default(), &limits);
                let Shape { blocks, role_warps, used_channels, cluster, .. } = shape;
                assert_eq!((launch.used_channels, launch.role_warps), (used_channels, role_warps));
                (blocks, cluster, used_channels, role_warps, launch.packets)
            };
            assert_eq!(agreed(0), agreed(1), "{kind:?} of {ranks}");
        }
    }
}

/// Wires lie beside each other and are as large as what they hold; a region stays within what the design allows.
#[test]
fn wires_do_not_overlap() {
    for (ranks, blocks) in (2..=8).flat_map(|ranks| BLOCKS.map(|blocks| (ranks, blocks))) {
        let geometry = Geometry::recommended(blocks, ranks, 0, 1);
        let layout = Layout::of(&geometry);
        let (channels, sources) = (u64::from(geometry.channels), u64::from(ranks) - 1);
        let one_shot =
            ONE_SHOT_LAUNCHES * u64::from(geometry.one_shot_slots) * if ranks > 4 { 1024 } else { 2048 };
        let mut parts = vec![
            (layout.ll.rings, sources * channels * LL_SLOTS * LL_SLOT_BYTES),
            (layout.ll.channels, channels * LL_COUNT_BYTES),
            (layout.one_shot.rings, sources * one_shot),
            (layout.one_shot.channels, u64::from(geometry.one_shot_channels) * LL_COUNT_BYTES),
        ];
        for wire in [layout.ll128, layout.results] {
            let slots = sources * channels * u64::from(geometry.slots);
            parts.extend([(wire.rings, slots * LL128_SLOT_BYTES), (wire.channels, channels * CHANNEL_BYTES)]);
        }
        parts.sort();
        assert!(parts.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0), "{parts:?}");
        assert!(parts.iter().all(|(at, bytes)| at.is_multiple_of(128) && at + bytes <= layout.bytes));
        // No more than 0.3 MiB above what regions took that had a ring for the rank itself, and none for one-shot.
        let of_ranks =
            |sources: u64| channels * (1024 + 264 + 256 + 2 * sources * u64::from(geometry.slots) * 2048);
        assert!(layout.bytes <= of_ranks(u64::from(ranks)) + sources * channels * 1024 + (3 << 20) / 10);
        assert!(layout.bytes <= 34 << 20);
        for rank in 1..ranks {
            assert_eq!(Layout::of(&Geometry { rank, ..geometry }), layout);
        }
    }
}

/// Each kernel has a name and an index of its own, and every call finds one that its communicator loads.
#[test]
fn kernels_are_told_apart() {
    let names: BTreeSet<&str> = Kernel::all().map(|kernel| kernel.name()).collect();
    let indices: BTreeSet<usize> = Kernel::all().map(|kernel| kernel.index()).collect();
    assert_eq!((names.len(), indices.len(), Kernel::all().count()), (228, 228, 228));
    assert!(indices.iter().all(|index| *index < Kernel::INDICES));
    assert_eq!(Kernel::all_for(9).count(), 0);
    for ranks in 2..=8 {
        let loaded: Vec<Kernel> = Kernel::all_for(ranks).collect();
        for (kind, tuning) in kinds(ranks).into_iter().flat_map(|kind| tunings().map(|tuning| (kind, tuning)))
        {
            let reductions = (0..12).flat_map(|datatype| (0..6).map(move |operation| (datatype, operation)));
            let is_known = |(datatype, operation): &(i32, i32)| *datatype >= FLOAT16 || *operation != AVERAGE;
            for (datatype, operation) in reductions.filter(is_known) {
                let call = Collective {
                    element_bytes: ELEMENT_BYTES[datatype as usize],
                    reduction: Some(Reduction { datatype, operation }),
                    scalar: (operation == SCALED_SUM).then_some(Scalar::Bits(3)),
                    ..collective(kind, 1000)
                };
                let geometry = Geometry::recommended(4, ranks, 0, 1);
                let limits = Limits { blocks_max: 4, clusters: true };
                let kernel = arranged(&call, &geometry, &tuning, &limits).shape.kernel;
                assert!(loaded.contains(&kernel), "{kernel:?}");
                if kind.is_even() && (kind == Kind::AllGather || !is_ordered(datatype, operation)) {
                    let kernels = batch::kernels_of(&call, &geometry);
                    assert_eq!(kernels.len(), 2);
                    for kernel in kernels {
                        assert!(loaded.contains(&kernel) && kernel.runs_several(), "{kernel:?}");
                    }
                }
            }
        }
    }
}

/// What the kernels multiply by, and which of them.
#[test]
fn reductions_are_told() {
    let told = |datatype: i32, operation, ranks| {
        let call = Collective {
            element_bytes: ELEMENT_BYTES[datatype as usize],
            reduction: Some(Reduction { datatype, operation }),
            ..collective(Kind::ReduceScatter, 5)
        };
        let geometry = Geometry::recommended(32, ranks, 0, 1);
        let limits = Limits { blocks_max: 32, clusters: true };
        let Arranged { shape, launch } = arranged(&call, &geometry, &Tuning::default(), &limits);
        assert_eq!(launch.reduction, datatype as u32 | (operation as u32) << 8);
        (shape.kernel.name().trim_end_matches("_whole"), launch.scale)
    };
    let third = u64::from((1.0f32 / 3.0).to_bits());
    assert_eq!(told(FLOAT32, AVERAGE, 3), ("ncclWindlass_LL_SumF32_4", third));
    assert_eq!(told(FLOAT16, AVERAGE, 3), ("ncclWindlass_LL_SumF16_4", third));
    assert_eq!(told(BFLOAT16, SUM, 8), ("ncclWindlass_LL_SumBf16_8", 0x3f80_0000));
    assert_eq!(told(FLOAT64, AVERAGE, 5), ("ncclWindlass_LL_Any_8", 0.2f64.to_bits()));
    assert_eq!(told(FLOAT64, SUM, 2), ("ncclWindlass_LL_Any_2", 1.0f64.to_bits()));
    assert_eq!(told(FLOAT32, 2, 2), ("ncclWindlass_LL_Any_2", 0));
    assert_eq!(told(4, SUM, 7), ("ncclWindlass_LL_Any_8", 0));
    assert_eq!(told(FLOAT8_E4M3, AVERAGE, 3), ("ncclWindlass_LL128x2_Ordered_4", third));
    assert_eq!(told(FLOAT8_E5M2, SUM, 2), ("ncclWindlass_LL128x2_Ordered_2", 0x3f80_0000));
    assert_eq!(told(FLOAT8_E5M2, 2, 8), ("ncclWindlass_LL128x2_Ordered_8", 0));
    assert_eq!(WAITED_RESULT_DATA, 10);
}

/// Only fixed order makes these native: they have kernels of their own, of two families.
fn is_ordered(datatype: i32, operation: i32) -> bool {
    operation == SCALED_SUM || [FLOAT8_E4M3, FLOAT8_E5M2].contains(&datatype)
}

/// Whatever the tuning, the size and where buffers lie.
#[test]
fn ordered_go_one_way() {
    let limits = Limits { blocks_max: 4, clusters: true };
    for (ranks, tuning) in (2..=8).flat_map(|ranks| tunings().map(|tuning| (ranks, tuning))) {
        let geometry = Geometry::recommended(4, ranks, 0, 1);
        let of_ranks = ranks.next_power_of_two();
        for (datatype, operation) in [(0, SCALED_SUM), (FLOAT32, SCALED_SUM), (FLOAT8_E5M2, 2)] {
            let element_bytes = ELEMENT_BYTES[datatype as usize];
            let reduction = Some(Reduction { datatype, operation });
            let scalar = (operation == SCALED_SUM).then_some(Scalar::Bits(3));
            for count in [1, 16, 100_000, 64 << 20] {
                let name = |kind| {
                    let call =
                        Collective { kind, count, element_bytes, reduction, scalar, ..collective(kind, 0) };
                    arranged(&call, &geometry, &tuning, &limits).shape.kernel.name()
                };
                let in_two_phases = format!("ncclWindlass_AllReduce_Ordered_{of_ranks}");
                assert_eq!(name(Kind::AllReduce), in_two_phases);
                let in_one = format!("ncclWindlass_LL128x2_Ordered_{of_ranks}");
                assert_eq!(name(Kind::ReduceScatter), in_one);
                let phases = if tuning.reduce.large_bytes_min == 0 { &in_two_phases } else { &in_one };
                assert_eq!(name(Kind::Reduce { root: 1 }), phases);
                let bytes = count * u64::from(element_bytes);
                let mut uneven = Uneven { reduction, scalar, parts: Default::default(), own: RECEIVE };
                uneven.parts[..ranks as usize].fill(Part { address: SEND, bytes });
                let (shape, _) = uneven::answer(&uneven, &geometry, &tuning).unwrap().unwrap();
                assert_eq!(shape.kernel.name(), in_one);
            }
        }
    }
}

/// A scaled sum has this rank's scalar, by its bits or by its address, alone and uneven; and one kernel for all types.
#[test]
fn scalars_are_told() {
    let reduction = Some(Reduction { datatype: FLOAT32, operation: SCALED_SUM });
    let (geometry, tuning) = (Geometry::recommended(32, 3, 1, 1), Tuning::default());
    let limits = Limits { blocks_max: 32, clusters: true };
    let answer = |scalar| {
        let of = collective(Kind::ReduceScatter, 100);
        let call = Collective { element_bytes: 4, reduction, scalar, ..of };
        let parts = [Part { address: SEND, bytes: 8 }; 3];
        let mut uneven = Uneven { reduction, scalar, parts: Default::default(), own: RECEIVE };
        uneven.parts[..3].copy_from_slice(&parts);
        let all = [
            arranged(&call, &geometry, &tuning, &limits).launch,
            uneven::answer(&uneven, &geometry, &tuning).unwrap().unwrap().1,
        ];
        all.map(|launch| (launch.reduction, launch.scale, launch.flags & COLLECTIVE_SCALAR_AT))
    };
    assert_eq!(answer(Some(Scalar::Bits(0x4040_0000))), [(7 | 5 << 8, 0x4040_0000, 0); 2]);
    assert_eq!(answer(Some(Scalar::At(0x1234_5678_9abc))), [(7 | 5 << 8, 0x1234_5678_9abc, 8); 2]);
}

/// What cannot be done is refused with its values; an empty collective launches nothing.
#[test]
fn nonsense_is_refused() {
    let geometry = Geometry::recommended(32, 4, 1, 1);
    let limits = Limits { blocks_max: 32, clusters: true };
    let answer = |call: &Collective, geometry: &Geometry, limits: &Limits, regions: &[u64]| {
        let layout = Layout::of(geometry);
        let tuning = Tuning::default();
        arrange(call, geometry, &layout, regions, &tuning, limits, &mut CollectiveLaunch::default())
    };
    let all_reduce = collective(Kind::AllReduce, 7);
    let on =
        |geometry: Geometry| answer(&all_reduce, &geometry, &limits, &regions(geometry.ranks)).unwrap_err();
    assert_eq!(on(Geometry { ranks: 9, ..geometry }), Refused::Ranks(9));
    assert_eq!(on(Geometry { ranks: 1, ..geometry }), Refused::Ranks(1));
    assert_eq!(on(Geometry { rank: 4, ..geometry }), Refused::Rank { rank: 4, ranks: 4 });
    for wrong in [
        Geometry { channels: 0, ..geometry },
        Geometry { slots: 1, ..geometry },
        Geometry { slots: 3, ..geometry },
        Geometry { first_tag: 0, ..geometry },
    ] {
        assert!(matches!(on(wrong), Refused::Geometry { .. }));
    }
    let none = Limits { blocks_max: 0, clusters: true };
    assert_eq!(answer(&all_reduce, &geometry, &none, &regions(4)), Err(Refused::Blocks(0)));
    let three = answer(&all_reduce, &geometry, &limits, &regions(3)).unwrap_err();
    assert_eq!(three.to_string(), "3 regions of 4 ranks");

    let of = |call: Collective| answer(&call, &geometry, &limits, &regions(4));
    let rooted = collective(Kind::Broadcast { root: 4 }, 0);
    assert_eq!(of(rooted), Err(Refused::Root { root: 4, ranks: 4 }));
    assert!(matches!(of(Collective { reduction: None, ..all_reduce }), Err(Refused::NoReduction { .. })));
    for (datatype, operation) in [(12, 0), (-1, 0), (0, 6), (0, -1), (0, AVERAGE), (5, AVERAGE)] {
        let reduction = Reduction { datatype, operation };
        let call = Collective { reduction: Some(reduction), ..all_reduce };
        assert_eq!(of(call), Err(Refused::Reduction(reduction)));
    }
    let scaled = Reduction { datatype: 0, operation: SCALED_SUM };
    for (reduction, scalar, told) in [
        (scaled, None, "operation 5 of type 0 without the scalar that it multiplies by"),
        (INT8_SUM, Some(Scalar::At(8)), "At(8) for operation 0 of type 0: only 5 has a scalar"),
    ] {
        let refused = of(Collective { reduction: Some(reduction), scalar, ..all_reduce }).unwrap_err();
        assert_eq!(refused, Refused::Scalar { reduction, scalar });
        assert_eq!(refused.to_string(), told);
    }
    // A collective that only moves data ignores the scalar, as it ignores the reduction.
    assert!(of(Collective { scalar: Some(Scalar::Bits(1)), ..collective(Kind::AllGather, 5) }).is_ok());
    let wide = Collective { element_bytes: 4, ..all_reduce };
    assert_eq!(of(wide), Err(Refused::ElementBytes { element_bytes: 4, datatype: 0 }));
    let huge = Collective { element_bytes: 8, ..collective(Kind::AllGather, u64::MAX / 16) };
    assert!(matches!(of(huge), Err(Refused::Count { .. })));
    assert!(of(collective(Kind::AllReduce, u64::MAX)).unwrap().is_some(), "buffers are not looked at");

    for kind in kinds(4) {
        assert_eq!(of(collective(kind, 0)), Ok(None));
    }
    assert_eq!(of(Collective { element_bytes: 0, ..collective(Kind::AllGather, 5) }), Ok(None));
}

/// A flag says that one buffer is read for all ranks, and is set only then.
#[test]
fn one_buffer_for_all_is_told() {
    let geometry = Geometry::recommended(32, 4, 1, 1);
    let limits = Limits { blocks_max: 32, clusters: true };
    for (kind, tuning) in kinds(4).into_iter().flat_map(|kind| tunings().map(|tuning| (kind, tuning))) {
        let Arranged { shape, launch } = arranged(&collective(kind, 1 << 20), &geometry, &tuning, &limits);
        let same = match kind {
            Kind::AllReduce => matches!(shape.kernel.family, Family::Ll | Family::OneShotX4),
            Kind::AllGather => true,
            Kind::Broadcast { root } => root == 1,
            _ => false,
        };
        assert_eq!(launch.flags & COLLECTIVE_SAME != 0, same, "{kind:?}");
    }
}

/// Straight kernels are for even collectives whose data begins and ends at whole vectors. A connection of more than a packet a channel does
/// not go by LL.
#[test]
fn straight_kernels_take_what_is_whole() {
    let geometry = Geometry::recommended(32, 4, 1, 1);
    let limits = Limits { blocks_max: 32, clusters: true };
    let told = |call: &Collective, tuning| {
        let Arranged { shape, launch } = arranged(call, &geometry, tuning, &limits);
        assert_eq!(launch.flags & COLLECTIVE_EVEN != 0, call.kind.is_even());
        (shape.kernel.family == Family::Ll, !shape.kernel.is_for_any())
    };
    let [by_ll, by_ll128, ..] = tunings();
    let reduction = Some(Reduction { datatype: FLOAT32, operation: SUM });
    let of_floats = |kind, count| Collective { element_bytes: 4, reduction, ..collective(kind, count) };
    for kind in [Kind::AllReduce, Kind::AllGather, Kind::ReduceScatter] {
        let call = of_floats(kind, 200);
        assert_eq!(told(&call, &by_ll), (true, true), "{kind:?}");
        assert_eq!(told(&call, &by_ll128), (false, true), "{kind:?}");
        let displaced = |by, count| {
            let call = Collective { count, ..call };
            [Collective { send: SEND + by, ..call }, Collective { receive: RECEIVE + by, ..call }]
        };
        for call in displaced(8, 200).into_iter().chain([Collective { count: 202, ..call }]) {
            assert_eq!(told(&call, &by_ll), (true, true), "{call:?}");
            assert_eq!(told(&call, &by_ll128), (false, false), "{call:?}");
        }
        for call in displaced(4, 200).into_iter().chain([Collective { count: 201, ..call }]) {
            assert_eq!(told(&call, &by_ll), (true, false), "{call:?}");
            assert_eq!(told(&call, &by_ll128), (false, false), "{call:?}");
        }
        let most = 256 * 256 / 4;
        assert_eq!(told(&Collective { count: most, ..call }, &by_ll), (true, true), "{kind:?}");
        assert!(!told(&Collective { count: most + 4, ..call }, &by_ll).0, "{kind:?}");
    }
    // Of every type, for every number of ranks but in one shot of more than 4. What only fixed order makes native has none.
    for (ranks, tuning) in (2..=8).flat_map(|ranks| tunings().map(|tuning| (ranks, tuning))) {
        let geometry = Geometry::recommended(32, ranks, 1, 1);
        for datatype in [0, 4, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3] {
            let reduction = Some(Reduction { datatype, operation: SUM });
            let element_bytes = ELEMENT_BYTES[datatype as usize];
            for kind in [Kind::AllReduce, Kind::ReduceScatter] {
                let call = Collective { element_bytes, reduction, ..collective(kind, 800) };
                let kernel = arranged(&call, &geometry, &tuning, &limits).shape.kernel;
                let is_of_8 = kernel.family.is_one_shot() && ranks > 4;
                let has_one_form = datatype == FLOAT8_E4M3 || is_of_8;
                assert_eq!(kernel.is_for_any(), has_one_form, "{kernel:?}");
            }
        }
    }
    for kind in [Kind::Broadcast { root: 1 }, Kind::Reduce { root: 1 }] {
        assert_eq!(told(&collective(kind, 800), &by_ll), (false, false), "{kind:?}");
    }
}
