//! Arranges several collectives of a group as one kernel. Their packets stand in a row, in call order: over LL if all are small, else over LL128.

use super::buffers::share;
use super::kernel::{Family, Kernel, Reducer};
use super::{Collective, Geometry, Kind, Layout, Limits, Refused, Shape, Tuning, blank, ranks_of};
use crate::collective::{
    BATCH_CALLS_MAX, BATCH_ENTRIES, BatchCall, BatchLaunch, COLLECTIVE_EVEN, LL_PAYLOAD_BYTES,
};

/// The most bytes of all collectives that one kernel runs over LL128, each counted by its larger buffer. Up to here NCCL's kernel for a whole
/// group is not faster than ours on 2 × H200, graph or eager (`docs/measurements/2026-11-23-groups`). More ranks were not measured.
pub const fn batch_bytes_max(kind: Kind, ranks: u32) -> u64 {
    let mib = match (kind, ranks) {
        (Kind::AllReduce, 2) => 32,
        (Kind::AllGather, 2) => 128,
        (Kind::ReduceScatter, 2) => 48,
        _ => 8,
    };
    mib << 20
}

/// LL packets of a collective in which each rank sends each other so many bytes. A batch has at most [`BATCH_ENTRIES`] of them.
pub fn packets(connection_bytes: u64) -> u64 {
    connection_bytes.div_ceil(LL_PAYLOAD_BYTES)
}

/// As [`arrange`](super::arrange), for at most [`BATCH_CALLS_MAX`] collectives in which every rank sends every other one as much. All ranks
/// must have them in the same order. Small ones may be of several kinds, if all move bytes, or all reduce in the same way. Others must all be
/// all-reduces, all-gathers, or reduce-scatters, of at most [`batch_bytes_max`] together. Floats of 8 bits and scaled sums have no kernels for
/// several.
///
/// # Errors
/// See [`Refused`]. Then, as with nothing to do, `batch` must not be launched.
pub fn arrange_batch(
    collectives: &[Collective],
    geometry: &Geometry,
    layout: &Layout,
    regions: &[u64],
    tuning: &Tuning,
    limits: &Limits,
    batch: &mut BatchLaunch,
) -> Result<Option<Shape>, Refused> {
    limits.check()?;
    let ranks = ranks_of(geometry, regions)?;
    let Some(first) = collectives.first() else { return Ok(None) };
    let Together { reducer, total_bytes, family } = together(collectives, first, ranks, tuning)?;

    let (mut first_packet, mut bits) = (0_u64, 0);
    for (collective, entry) in collectives.iter().zip(&mut batch.calls) {
        *entry = call(collective, family, ranks, first_packet as u32);
        bits |= entry.send | entry.receive | u64::from(entry.bytes);
        first_packet += largest_connection_bytes(collective, family, ranks).div_ceil(family.packet_bytes());
    }
    let all_packets = first_packet;
    if all_packets == 0 {
        return Ok(None);
    }
    batch.count = collectives.len() as u32;
    batch.packets_log2 = all_packets.div_ceil(BATCH_ENTRIES as u64).next_power_of_two().trailing_zeros();
    list(batch, all_packets);

    let mut launch = blank(geometry, regions);
    launch.wires = layout.wires(family);
    launch.flags = COLLECTIVE_EVEN;
    if let Some(reduction) = first.reduction.filter(|_| reducer != Reducer::Copy) {
        reduction.tell(None, &mut launch);
    }
    launch.packets = all_packets;
    let kernel = Kernel::of(family, reducer, ranks, bits.is_multiple_of(family.vector_bytes()));
    let limits = match family {
        Family::BatchLl => limits.modest(first.kind, total_bytes),
        // NCCL's kernel for a group is as wide. With a single collective's 16 blocks, all-gathers of 16 MiB took 1.5 times as long.
        _ => *limits,
    };
    let shape = Shape::of(kernel, launch.packets, geometry, total_bytes, &limits);
    shape.tell(&mut launch);
    batch.launch = launch;
    Ok(Some(shape))
}

/// What the collectives of a batch have in common.
struct Together {
    reducer: Reducer,
    total_bytes: u64,
    family: Family,
}

/// Finds what they have in common. Fails if one kernel cannot run them.
fn together(
    collectives: &[Collective],
    first: &Collective,
    ranks: u32,
    tuning: &Tuning,
) -> Result<Together, Refused> {
    let reducer = first.reducer(ranks)?;
    let (mut total_bytes, mut ll_packets) = (0_u64, 0_u64);
    let (mut may_be_ll, mut may_be_ll128) = (true, true);
    for collective in collectives {
        let is_alike = collective.reducer(ranks)? == reducer
            && (reducer == Reducer::Copy || collective.reduction == first.reduction);
        let bytes = collective.total_bytes(ranks)?;
        may_be_ll &=
            is_alike && collective.kind.is_even() && bytes <= tuning.crossover(collective.kind).ll_bytes_max;
        may_be_ll128 &= is_alike && collective.kind == first.kind;
        total_bytes = total_bytes.saturating_add(bytes);
        ll_packets = ll_packets.saturating_add(packets(collective.connection_bytes()));
    }
    let family = if may_be_ll && ll_packets <= BATCH_ENTRIES as u64 {
        Some(Family::BatchLl)
    } else if may_be_ll128 && total_bytes <= batch_bytes_max(first.kind, ranks) {
        over_ll128(first.kind, ranks)
    } else {
        None
    };
    let calls = collectives.len();
    let family = family.filter(|_| calls <= BATCH_CALLS_MAX && reducer != Reducer::Ordered);
    let family = family.ok_or(Refused::Batch { calls, bytes: total_bytes })?;
    Ok(Together { reducer, total_bytes, family })
}

fn over_ll128(kind: Kind, ranks: u32) -> Option<Family> {
    match kind {
        Kind::AllReduce => Some(Family::BatchAllReduce),
        Kind::AllGather | Kind::ReduceScatter if ranks > 4 => Some(Family::BatchLl128x2),
        Kind::AllGather | Kind::ReduceScatter => Some(Family::BatchLl128x4),
        Kind::Broadcast { .. } | Kind::Reduce { .. } => None,
    }
}

fn largest_connection_bytes(collective: &Collective, family: Family, ranks: u32) -> u64 {
    let bytes = collective.connection_bytes();
    if family.has_shares() { share(bytes, ranks).min(bytes) } else { bytes }
}

fn call(collective: &Collective, family: Family, ranks: u32, first_packet: u32) -> BatchCall {
    let Collective { send, receive, .. } = *collective;
    // A batch has few enough bytes for everything to fit.
    let bytes = collective.connection_bytes() as u32;
    let (send_step, receive_step) = match collective.kind {
        Kind::AllReduce if family.has_shares() => {
            let share = share(bytes.into(), ranks) as u32;
            (share, share)
        }
        Kind::AllReduce => (0, 0),
        Kind::AllGather => (0, bytes),
        Kind::ReduceScatter => (bytes, 0),
        // Never in a batch: not even.
        Kind::Broadcast { .. } | Kind::Reduce { .. } => (bytes, bytes),
    };
    BatchCall { send, receive, send_step, receive_step, bytes, first_packet }
}

/// Writes, for each entry of the list, the call of its first packet.
fn list(batch: &mut BatchLaunch, all_packets: u64) {
    let entry_of = |packet: u64| packet.div_ceil(1 << batch.packets_log2) as usize;
    for place in 0..batch.count as usize {
        let next = batch.calls[..batch.count as usize].get(place + 1);
        let end = next.map_or(all_packets, |next| next.first_packet.into());
        let entries = entry_of(batch.calls[place].first_packet.into())..entry_of(end);
        batch.call_of_packet[entries].fill(place as u8);
    }
}
