//! Tests of several collectives in one kernel.

use super::*;
use crate::collective::{BATCH_CALLS_MAX, BATCH_ENTRIES, BatchLaunch, LL_PAYLOAD_BYTES};

const LIMITS: Limits = Limits { blocks_max: 32, clusters: true };

fn answer_with(
    tuning: &Tuning,
    collectives: &[Collective],
    geometry: &Geometry,
) -> Result<Option<(Shape, Box<BatchLaunch>)>, Refused> {
    // The value 99 marks entries that were not written.
    let mut batch = Box::new(BatchLaunch { call_of_packet: [99; BATCH_ENTRIES], ..Default::default() });
    let (layout, regions) = (Layout::of(geometry), regions(geometry.ranks));
    let shape = arrange_batch(collectives, geometry, &layout, &regions, tuning, &LIMITS, &mut batch)?;
    Ok(shape.map(|shape| (shape, batch)))
}

/// Arranges a batch by the tuning with which all sizes go by LL, if they fit.
fn answer(
    collectives: &[Collective],
    geometry: &Geometry,
) -> Result<Option<(Shape, Box<BatchLaunch>)>, Refused> {
    answer_with(&tunings()[0], collectives, geometry)
}

/// The kernels of a batch of two such calls, by LL, and by LL128 if there is one.
pub(super) fn kernels_of(call: &Collective, geometry: &Geometry) -> Vec<Kernel> {
    let answers = [0, 2].map(|tuning| answer_with(&tunings()[tuning], &[*call, *call], geometry));
    answers.into_iter().flatten().map(|answer| answer.unwrap().0.kernel).collect()
}

fn geometry(ranks: u32) -> Geometry {
    Geometry::recommended(32, ranks, ranks - 1, 1)
}

/// The call of a packet, computed as in kernels.
fn call_of(batch: &BatchLaunch, packet: u64) -> usize {
    let mut place = usize::from(batch.call_of_packet[(packet >> batch.packets_log2) as usize]);
    while place + 1 < batch.count as usize && u64::from(batch.calls[place + 1].first_packet) <= packet {
        place += 1;
    }
    place
}

/// A batch moves the bytes that the single launches move over the same wire, in call order, and none twice.
#[test]
fn each_is_what_it_is_alone() {
    let maximum = Reduction { datatype: 0, operation: 2 };
    let (ll, ll128) = (&tunings()[0], &tunings()[2]);
    for ranks in 2..=8 {
        for (tuning, kinds, reduction) in [
            (ll, [Kind::AllReduce, Kind::ReduceScatter], INT8_SUM),
            (ll, [Kind::AllReduce, Kind::ReduceScatter], maximum),
            (ll, [Kind::AllGather; 2], INT8_SUM),
            (ll128, [Kind::AllReduce; 2], maximum),
            (ll128, [Kind::ReduceScatter; 2], INT8_SUM),
            (ll128, [Kind::AllGather; 2], INT8_SUM),
        ] {
            let geometry = geometry(ranks);
            let me = geometry.rank as usize;
            let of = |(place, count): (usize, u64)| {
                let reduction = Some(reduction);
                Collective { reduction, ..collective(kinds[place % 2], count) }
            };
            let larger = if tuning == ll128 { [0, 300_001, 0, 600_000, 0] } else { [0; 5] };
            let counts = [1, 256, 257, 0, 4096, 5, 300].into_iter().chain(larger);
            let calls: Vec<Collective> = counts.enumerate().map(of).collect();
            let (shape, batch) = answer_with(tuning, &calls, &geometry).unwrap().unwrap();
            let mut packet = 0;
            for (place, call) in calls.iter().enumerate() {
                let ours = &batch.calls[place];
                assert_eq!((u64::from(ours.first_packet), u64::from(ours.bytes)), (packet, call.count));
                if call.count == 0 {
                    continue;
                }
                let Arranged { shape: own_shape, launch: alone } = arranged(call, &geometry, tuning, &LIMITS);
                let packet_bytes = own_shape.kernel.family.packet_bytes();
                assert_eq!(packet_bytes, shape.kernel.family.packet_bytes());
                for own in 0..alone.packets {
                    assert_eq!(call_of(&batch, packet + own), place);
                }
                packet += alone.packets;
                let has_shares = shape.kernel.family.has_shares();
                for rank in 0..ranks as usize {
                    let at = |step: u32| rank as u64 * u64::from(step);
                    let part = |step: u32| match has_shares {
                        true => call.count.saturating_sub(at(step)).min(step.into()),
                        false => call.count,
                    };
                    assert_eq!(part(ours.send_step), alone.send_bytes[rank]);
                    // The address of an empty part does not matter.
                    if alone.send_bytes[rank] > 0 {
                        assert_eq!(ours.send + at(ours.send_step), alone.send[rank]);
                    }
                    match call.kind {
                        Kind::AllReduce | Kind::ReduceScatter if !has_shares => {
                            assert_eq!(ours.receive, alone.receive[me])
                        }
                        _ if alone.receive_bytes[rank] > 0 => {
                            assert_eq!(ours.receive + at(ours.receive_step), alone.receive[rank]);
                            assert_eq!(part(ours.receive_step), alone.receive_bytes[rank]);
                        }
                        _ => (),
                    }
                }
                let alike = |launch: &CollectiveLaunch| {
                    (launch.wires, launch.first_tag, launch.reduction, launch.scale, launch.channels_log2)
                };
                assert_eq!(alike(&batch.launch), alike(&alone));
            }
            assert_eq!(batch.launch.packets, packet);
            assert!((1..=packet.min(256)).contains(&batch.launch.used_channels.into()));
            let entries = packet.div_ceil(1 << batch.packets_log2) as usize;
            assert_eq!(batch.packets_log2 > 0, packet > BATCH_ENTRIES as u64);
            assert!(batch.call_of_packet[entries..].iter().all(|place| *place == 99));
            assert_eq!(shape.threads, 32 * batch.launch.role_warps * shape.kernel.family.roles());
            assert!(shape.kernel.runs_several() && shape.kernel.is_for_any());
        }
    }
}

/// The faster kernel is taken if every call has whole vectors only. Empty calls alone make no launch.
#[test]
fn straight_if_all_are() {
    let whole_with = |tuning: &Tuning, counts: &[u64]| {
        let calls: Vec<Collective> = counts.iter().map(|count| collective(Kind::AllGather, *count)).collect();
        let answer = answer_with(tuning, &calls, &geometry(4)).unwrap();
        answer.map(|(shape, _)| !shape.kernel.is_for_any())
    };
    let whole = |counts: &[u64]| whole_with(&tunings()[0], counts);
    assert_eq!(whole(&[8, 256, 0, 4000]), Some(true));
    assert_eq!(whole(&[8, 257]), Some(false));
    assert_eq!(whole(&[]), None);
    assert_eq!(whole(&[0, 0]), None);
    assert_eq!(whole_with(&tunings()[2], &[16, 0, 4000]), Some(false), "LL128 has one kernel for all");
    let beside = Collective { send: SEND + 4, ..collective(Kind::AllGather, 8) };
    let (shape, _) = answer(&[collective(Kind::AllGather, 8), beside], &geometry(4)).unwrap().unwrap();
    assert!(shape.kernel.is_for_any());
}

/// Small calls go by LL as long as they fit. If one does not fit or is not small, all go by LL128.
#[test]
fn wires() {
    let tuning = Tuning::default();
    let name = |calls: &[Collective], ranks| {
        let (shape, _) = answer_with(&tuning, calls, &geometry(ranks)).unwrap().unwrap();
        shape.kernel.name().strip_prefix("ncclWindlass_").unwrap().trim_end_matches("_whole")
    };
    let (kib, mib) = (1 << 10, 1 << 20);
    let all_reduce = |bytes| collective(Kind::AllReduce, bytes);
    assert_eq!(name(&[all_reduce(64 * kib), all_reduce(64 * kib)], 2), "LLBatch_Any_2");
    assert_eq!(name(&[all_reduce(64 * kib), all_reduce(64 * kib), all_reduce(1)], 2), "AllReduceBatch_Any_2");
    assert_eq!(name(&[all_reduce(64 * kib + 1), all_reduce(1)], 8), "AllReduceBatch_Any_8");
    assert_eq!(
        name(&[all_reduce(batch_bytes_max(Kind::AllReduce, 3) - 1), all_reduce(1)], 3),
        "AllReduceBatch_Any_4"
    );
    for kind in [Kind::AllGather, Kind::ReduceScatter] {
        let name = |ranks| name(&[collective(kind, mib / 2); 2], ranks);
        let reducer = if kind == Kind::AllGather { "Copy" } else { "Any" };
        assert_eq!([2, 4].map(name), [2, 4].map(|ranks| format!("LL128Batch_{reducer}_{ranks}")));
        assert_eq!(name(5), format!("LL128Batch_{reducer}_8"));
    }
}

/// A batch that one kernel cannot run is refused, with its size.
#[test]
fn too_many_or_unlike() {
    let one = collective(Kind::AllReduce, 1);
    let refused = |calls: &[Collective]| answer(calls, &geometry(2)).unwrap_err();
    let too_many = BATCH_CALLS_MAX + 1;
    assert_eq!(refused(&vec![one; too_many]), Refused::Batch { calls: too_many, bytes: too_many as u64 });
    let half_bytes = BATCH_ENTRIES as u64 / 2 * LL_PAYLOAD_BYTES;
    let half = collective(Kind::AllReduce, half_bytes);
    assert!(answer(&[half, half], &geometry(2)).unwrap().is_some());
    let scattered = collective(Kind::ReduceScatter, 1);
    let bytes = 2 * half_bytes + 2;
    assert_eq!(refused(&[half, half, scattered]), Refused::Batch { calls: 3, bytes }, "LL128 runs one kind");
    for (kind, most_bytes) in
        [(Kind::AllReduce, 32 << 20), (Kind::AllGather, 128 << 20), (Kind::ReduceScatter, 48 << 20)]
    {
        let [part, all] =
            [1, 2].map(|parts| if kind == Kind::AllReduce { most_bytes } else { most_bytes / 2 * parts });
        let (most, one) = (collective(kind, part), collective(kind, 1));
        let of_one = if kind == Kind::AllReduce { 1 } else { 2 };
        assert_eq!(refused(&[most, one]), Refused::Batch { calls: 2, bytes: all + of_one }, "{kind:?}");
        assert!(answer(&[most], &geometry(2)).unwrap().is_some(), "{kind:?}");
        let of_three = answer(&[most], &geometry(3)).unwrap_err();
        assert_eq!(
            of_three,
            Refused::Batch { calls: 1, bytes: if kind == Kind::AllReduce { part } else { 3 * part } }
        );
    }
    let unlike = [
        (collective(Kind::AllGather, 1), 3),
        (collective(Kind::Reduce { root: 0 }, 1), 2),
        (Collective { reduction: Some(Reduction { datatype: 0, operation: 2 }), ..one }, 2),
    ];
    for (other, bytes) in unlike {
        assert_eq!(refused(&[one, other]), Refused::Batch { calls: 2, bytes });
    }
    // The operation has no batch kernel, so a batch of even one such call is refused.
    let scaled = Reduction { datatype: 0, operation: SCALED_SUM };
    let scaled = Collective { reduction: Some(scaled), scalar: Some(Scalar::Bits(2)), ..one };
    let of_8_bits = Reduction { datatype: FLOAT8_E4M3, operation: SUM };
    let of_8_bits = Collective { reduction: Some(of_8_bits), ..one };
    for call in [scaled, of_8_bits] {
        assert_eq!(refused(&[call, call]), Refused::Batch { calls: 2, bytes: 2 });
        let large = Collective { count: 1 << 20, ..call };
        assert_eq!(refused(&[large]), Refused::Batch { calls: 1, bytes: 1 << 20 });
    }
    let moved = Collective { kind: Kind::AllGather, ..scaled };
    assert!(answer(&[moved, moved], &geometry(2)).unwrap().is_some(), "what only moves does not look at it");
    let endless = Collective { count: u64::MAX, element_bytes: 1, ..one };
    assert!(matches!(refused(&[one, endless]), Refused::Batch { .. }));
}
