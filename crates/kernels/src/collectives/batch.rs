//! Several small collectives of a group as one kernel, over pairs: their units in a row, in call order.

use super::kernel::{Family, Kernel, Reducer, Straight};
use super::{Collective, Geometry, Kind, Layout, Limits, Refused, Shape, blank, ranks_of};
use crate::collective::{
    BATCH_CALLS_MAX, BATCH_UNITS_MAX, BatchCall, BatchLaunch, COLLECTIVE_EVEN, PAIRS_PAYLOAD_BYTES,
};

/// What a collective takes of [`BATCH_UNITS_MAX`], if so much goes from each rank to each other.
pub fn units(pair_bytes: u64) -> u64 {
    pair_bytes.div_ceil(PAIRS_PAYLOAD_BYTES)
}

/// As [`arrange`](super::arrange), for collectives in which every rank sends every other one as much: of those that reduce all the
/// same way, or none that does; at most [`BATCH_CALLS_MAX`] of [`BATCH_UNITS_MAX`] units. Ranks must have them in the same order.
///
/// # Errors
/// See [`Refused`]. Then, as with nothing to do, nobody may launch what `batch` holds.
pub fn arrange_batch(
    collectives: &[Collective],
    geometry: &Geometry,
    layout: &Layout,
    slices: &[u64],
    limits: &Limits,
    batch: &mut BatchLaunch,
) -> Result<Option<Shape>, Refused> {
    let ranks = ranks_of(geometry, limits, slices)?;
    let Some(first) = collectives.first() else { return Ok(None) };
    let (reducer, total_bytes, all_units) = together(collectives, first, ranks)?;
    if all_units == 0 {
        return Ok(None);
    }

    let mut launch = blank(geometry, slices);
    launch.wires = [layout.pairs, Default::default()];
    launch.flags = COLLECTIVE_EVEN;
    if let Some(reduction) = first.reduction.filter(|_| reducer != Reducer::Copy) {
        (launch.reduction, launch.scale) = (reduction.word(), reduction.scale(ranks));
    }
    launch.units = all_units;
    // At most `lanes`, so it fits.
    launch.used_lanes = all_units.min(u64::from(geometry.lanes)) as u32;

    let (mut first_unit, mut bits) = (0, 0);
    for ((collective, entry), place) in collectives.iter().zip(&mut batch.calls).zip(0..) {
        *entry = call(collective, first_unit);
        bits |= entry.send | entry.receive | u64::from(entry.bytes);
        let end = first_unit + units(collective.pair_bytes()) as u32;
        batch.call_of_unit[first_unit as usize..end as usize].fill(place);
        first_unit = end;
    }
    let is_whole = bits.is_multiple_of(Family::Batch.vector_bytes());
    let kernel = Kernel::of(Family::Batch, reducer, ranks, Straight::of(is_whole));
    let limits = limits.modest(first.kind, ranks, total_bytes);
    let shape = Shape::of(kernel, launch.used_lanes, total_bytes, &limits);
    launch.role_warps = shape.role_warps;
    batch.launch = launch;
    Ok(Some(shape))
}

/// Who reduces, all bytes, and all units; refused if one kernel cannot.
fn together(
    collectives: &[Collective],
    first: &Collective,
    ranks: u32,
) -> Result<(Reducer, u64, u64), Refused> {
    let reducer = first.reducer(ranks)?;
    let (mut total_bytes, mut all_units, mut are_alike) = (0_u64, 0_u64, true);
    for collective in collectives {
        are_alike &= collective.kind.is_even()
            && collective.reducer(ranks)? == reducer
            && (reducer == Reducer::Copy || collective.reduction == first.reduction);
        total_bytes = total_bytes.saturating_add(collective.total_bytes(ranks)?);
        all_units = all_units.saturating_add(units(collective.pair_bytes()));
    }
    let calls = collectives.len();
    if !are_alike || calls > BATCH_CALLS_MAX || all_units > BATCH_UNITS_MAX as u64 {
        return Err(Refused::Batch { calls, units: all_units });
    }
    Ok((reducer, total_bytes, all_units))
}

fn call(collective: &Collective, first_unit: u32) -> BatchCall {
    let Collective { send, receive, .. } = *collective;
    // Few enough units that all of it fits.
    let bytes = collective.pair_bytes() as u32;
    let (send_step, receive_step) = match collective.kind {
        Kind::AllReduce => (0, 0),
        Kind::AllGather => (0, bytes),
        Kind::ReduceScatter => (bytes, 0),
        // Others are not even.
        Kind::AlltoAll | Kind::Broadcast { .. } | Kind::Reduce { .. } => (bytes, bytes),
    };
    BatchCall { send, receive, send_step, receive_step, bytes, first_unit }
}
