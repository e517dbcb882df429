//! Arranges collectives whose ranks have parts of different sizes: all-gather-v and reduce-scatter-v.

use super::kernel::{Family, Kernel, Reducer};
use super::{Geometry, Kind, Layout, Limits, Reduction, Refused, Scalar, Shape, Tuning, blank, ranks_of};
use crate::collective::{COLLECTIVE_EVEN, COLLECTIVE_SAME, CollectiveLaunch, RANKS_MAX};

/// What one rank contributes, or gets, and its address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// A buffer of any alignment; ignored if there are no bytes.
    pub address: u64,
    /// Bytes of this part, equal on all ranks. 0: the rank has no part.
    pub bytes: u64,
}

/// An all-gather-v or a reduce-scatter-v, as this rank calls it. Only addresses and the value of `scalar` may differ between ranks.
///
/// Parts lie anywhere, apart from each other or side by side; this rank's own may be where `own` is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uneven {
    /// None for an all-gather-v. For a reduce-scatter-v: how it reduces.
    pub reduction: Option<Reduction>,
    /// This rank's scalar, for a scaled sum alone.
    pub scalar: Option<Scalar>,
    /// By rank; parts beyond the communicator's ranks are empty. For an all-gather-v: where each rank's part arrives. For a reduce-scatter-v: what
    /// goes into each rank's result.
    pub parts: [Part; RANKS_MAX],
    /// For an all-gather-v: what this rank gives to all. For a reduce-scatter-v: where its result goes. As many bytes as this rank's part.
    pub own: u64,
}

/// As [`arrange`](super::arrange), for parts of different sizes. Always over LL128: LL is for what every rank sends every other alike.
///
/// # Errors
/// See [`Refused`]. Then, as with nothing to do, `launch` is untouched.
pub fn arrange_uneven(
    uneven: &Uneven,
    geometry: &Geometry,
    layout: &Layout,
    regions: &[u64],
    tuning: &Tuning,
    limits: &Limits,
    launch: &mut CollectiveLaunch,
) -> Result<Option<Shape>, Refused> {
    limits.check()?;
    let ranks = ranks_of(geometry, regions)?;
    let reducer = uneven.reducer()?;
    let total_bytes = uneven.total_bytes(ranks)?;
    if total_bytes == 0 {
        return Ok(None);
    }
    let family = tuning.over_ll128(uneven.even_kind(), reducer, total_bytes, ranks);

    *launch = blank(geometry, regions);
    uneven.write(family, layout, launch);
    let kernel = Kernel::of(family, reducer, ranks, launch.is_straight(family));
    let limits = limits.modest(uneven.even_kind(), total_bytes);
    let shape = Shape::of(kernel, launch.packets, geometry, total_bytes, &limits);
    shape.tell(launch);
    Ok(Some(shape))
}

impl Uneven {
    pub(super) fn reducer(&self) -> Result<Reducer, Refused> {
        let Some(reduction) = self.reduction else { return Ok(Reducer::Copy) };
        let element_bytes = reduction.element_bytes(self.scalar)?;
        match self.parts.iter().find(|part| !part.bytes.is_multiple_of(element_bytes.into())) {
            Some(part) => Err(Refused::Count { count: part.bytes, element_bytes }),
            None => Ok(reduction.reducer()),
        }
    }

    /// Bytes of all parts.
    pub(super) fn total_bytes(&self, ranks: u32) -> Result<u64, Refused> {
        let mut total: u64 = 0;
        for (rank, part) in (0..).zip(&self.parts) {
            if rank >= ranks && part.bytes > 0 {
                return Err(Refused::Root { root: rank, ranks });
            }
            let sum = total.checked_add(part.bytes);
            total = sum.ok_or(Refused::Count { count: part.bytes, element_bytes: 1 })?;
        }
        Ok(total)
    }

    /// Whether every rank sends every other one as much after all.
    fn is_even(&self, ranks: u32) -> bool {
        self.parts.iter().take(ranks as usize).all(|part| part.bytes == self.parts[0].bytes)
    }

    /// The kind that it is with equal parts.
    fn even_kind(&self) -> Kind {
        if self.reduction.is_some() { Kind::ReduceScatter } else { Kind::AllGather }
    }

    /// Writes all but the communicator's fields and those that follow from the grid.
    pub(super) fn write(&self, family: Family, layout: &Layout, launch: &mut CollectiveLaunch) {
        launch.wires = layout.wires(family);
        if let Some(reduction) = self.reduction {
            reduction.tell(self.scalar, launch);
        }
        let largest_connection_bytes = self.write_buffers(launch);
        launch.packets = largest_connection_bytes.div_ceil(family.packet_bytes());
        if self.is_even(launch.ranks) {
            launch.flags |= COLLECTIVE_EVEN;
        }
    }

    /// Writes buffers and bytes. Returns the bytes of the largest connection among all ranks.
    fn write_buffers(&self, launch: &mut CollectiveLaunch) -> u64 {
        let (me, ranks) = (launch.rank as usize, launch.ranks as usize);
        let parts = &self.parts[..ranks];
        let own_bytes = parts[me].bytes;
        if self.reduction.is_some() {
            for (rank, part) in parts.iter().enumerate() {
                (launch.send[rank], launch.send_bytes[rank]) = (part.address, part.bytes);
            }
            (launch.receive[me], launch.receive_bytes[me]) = (self.own, own_bytes);
        } else {
            launch.flags |= COLLECTIVE_SAME;
            for (rank, part) in parts.iter().enumerate() {
                (launch.send[rank], launch.send_bytes[rank]) = (self.own, own_bytes);
                (launch.receive[rank], launch.receive_bytes[rank]) = (part.address, part.bytes);
            }
        }
        parts.iter().map(|part| part.bytes).max().unwrap_or_default()
    }
}
