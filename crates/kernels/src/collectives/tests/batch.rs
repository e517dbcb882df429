//! Several small collectives as one kernel.

use super::*;
use crate::collective::{BATCH_CALLS_MAX, BATCH_UNITS_MAX, BatchLaunch, PAIRS_PAYLOAD_BYTES};

const LIMITS: Limits = Limits { blocks_max: 32, clusters: true };

fn answer(
    collectives: &[Collective],
    geometry: &Geometry,
) -> Result<Option<(Shape, Box<BatchLaunch>)>, Refused> {
    // What lies there before is told apart from what is written.
    let mut batch = Box::new(BatchLaunch { call_of_unit: [99; BATCH_UNITS_MAX], ..Default::default() });
    let layout = Layout::of(geometry);
    let shape = arrange_batch(collectives, geometry, &layout, &slices(geometry.ranks), &LIMITS, &mut batch)?;
    Ok(shape.map(|shape| (shape, batch)))
}

/// Of two of them together.
pub(super) fn kernel_of(call: &Collective, geometry: &Geometry) -> Kernel {
    answer(&[*call, *call], geometry).unwrap().unwrap().0.kernel
}

fn geometry(ranks: u32) -> Geometry {
    Geometry::recommended(32, ranks, ranks - 1, 1)
}

/// For each thread's 8 bytes the batch says what the launches by themselves say, in call order, and nothing twice.
#[test]
fn each_is_what_it_is_alone() {
    let average = Reduction { datatype: 0, operation: AVERAGE };
    for ranks in 2..=8 {
        for (kinds, reduction) in [
            ([Kind::AllReduce, Kind::ReduceScatter], INT8_SUM),
            ([Kind::AllReduce, Kind::ReduceScatter], average),
            ([Kind::AllGather, Kind::AlltoAll], INT8_SUM),
        ] {
            let geometry = geometry(ranks);
            let me = geometry.rank as usize;
            let of = |(place, count): (usize, u64)| {
                let reduction = Some(reduction);
                Collective { reduction, ..collective(kinds[place % 2], count) }
            };
            let calls: Vec<Collective> =
                [1, 256, 257, 0, 4096, 5, 300].into_iter().enumerate().map(of).collect();
            let (shape, batch) = answer(&calls, &geometry).unwrap().unwrap();
            let mut unit = 0;
            for (place, call) in calls.iter().enumerate().filter(|(_, call)| call.count > 0) {
                let alone = arranged(call, &geometry, &tunings()[0], &LIMITS).launch;
                let ours = &batch.calls[place];
                assert_eq!((u64::from(ours.first_unit), u64::from(ours.bytes)), (unit, call.count));
                for own in 0..alone.units {
                    assert_eq!(batch.call_of_unit[(unit + own) as usize], place as u8);
                }
                unit += alone.units;
                for rank in 0..ranks as usize {
                    let step = |step: u32| rank as u64 * u64::from(step);
                    assert_eq!(ours.send + step(ours.send_step), alone.send[rank]);
                    assert_eq!(alone.send_bytes[rank], call.count);
                    match call.kind {
                        Kind::AllReduce | Kind::ReduceScatter => assert_eq!(ours.receive, alone.receive[me]),
                        _ => assert_eq!(ours.receive + step(ours.receive_step), alone.receive[rank]),
                    }
                }
                let alike = |launch: &CollectiveLaunch| {
                    (launch.wires, launch.first_tag, launch.reduction, launch.scale, launch.lanes_log2)
                };
                assert_eq!(alike(&batch.launch), alike(&alone));
            }
            assert_eq!((batch.launch.units, u64::from(batch.launch.used_lanes)), (unit, unit.min(256)));
            assert!(batch.call_of_unit[unit as usize..].iter().all(|place| *place == 99));
            assert_eq!(shape.threads, 32 * batch.launch.role_warps);
            assert!(shape.kernel.runs_several() && shape.kernel.is_for_any());
        }
    }
}

/// Whole vectors in every call are what the quicker kernel needs; nothing at all is no launch.
#[test]
fn straight_if_all_are() {
    let whole = |counts: &[u64]| {
        let calls: Vec<Collective> = counts.iter().map(|count| collective(Kind::AllGather, *count)).collect();
        answer(&calls, &geometry(4)).unwrap().map(|(shape, _)| !shape.kernel.is_for_any())
    };
    assert_eq!(whole(&[8, 256, 0, 4000]), Some(true));
    assert_eq!(whole(&[8, 257]), Some(false));
    assert_eq!(whole(&[]), None);
    assert_eq!(whole(&[0, 0]), None);
    let beside = Collective { send: SEND + 4, ..collective(Kind::AllGather, 8) };
    let (shape, _) = answer(&[collective(Kind::AllGather, 8), beside], &geometry(4)).unwrap().unwrap();
    assert!(shape.kernel.is_for_any());
}

/// What one kernel cannot run together is refused, with its size.
#[test]
fn too_many_or_unlike() {
    let one = collective(Kind::AllReduce, 1);
    let refused = |calls: &[Collective]| answer(calls, &geometry(2)).unwrap_err();
    assert_eq!(
        refused(&vec![one; BATCH_CALLS_MAX + 1]),
        Refused::Batch { calls: BATCH_CALLS_MAX + 1, units: BATCH_CALLS_MAX as u64 + 1 }
    );
    let half = collective(Kind::AllReduce, BATCH_UNITS_MAX as u64 / 2 * PAIRS_PAYLOAD_BYTES);
    assert!(answer(&[half, half], &geometry(2)).unwrap().is_some());
    assert_eq!(refused(&[half, half, one]), Refused::Batch { calls: 3, units: BATCH_UNITS_MAX as u64 + 1 });
    let unlike = [
        collective(Kind::AllGather, 1),
        collective(Kind::Reduce { root: 0 }, 1),
        Collective { reduction: Some(Reduction { datatype: 0, operation: AVERAGE }), ..one },
    ];
    for other in unlike {
        assert_eq!(refused(&[one, other]), Refused::Batch { calls: 2, units: 2 });
    }
    let endless = Collective { count: u64::MAX, element_bytes: 1, ..one };
    assert!(matches!(refused(&[one, endless]), Refused::Batch { .. }));
}
