//! Turns a collective into a launch, by pure decisions about kernels, buffers, channels, blocks and warps.
//!
//! Peers must decide alike on the kernel, `used_channels`, the bytes of each connection and the grid. These follow from the collective, the
//! [`Geometry`], the [`Limits`] and the [`Tuning`], which all ranks share, and not from where a rank's buffers lie.

mod batch;
mod buffers;
#[cfg(any(test, feature = "test-support"))]
mod chosen;
mod geometry;
mod grid;
mod kernel;
mod marks;
mod reduction;
mod refused;
mod tuning;
mod uneven;

#[cfg(test)]
mod tests;

pub use batch::{arrange_batch, batch_bytes_max, packets};
#[cfg(any(test, feature = "test-support"))]
pub use chosen::{arrange_by, arrange_uneven_by, reducer_of};
pub use geometry::{Geometry, Layout};
pub use grid::{Limits, Shape};
pub use kernel::{Family, Kernel, Reducer};
pub use marks::Marks;
pub use reduction::{Reduction, SCALED_SUM, Scalar};
pub use refused::Refused;
pub use tuning::{Crossover, Tuning};
pub use uneven::{Part, Uneven, arrange_uneven};

use crate::collective::{COLLECTIVE_EVEN, CollectiveLaunch};

/// Which collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `ncclAllReduce`.
    AllReduce,
    /// `ncclBroadcast`.
    Broadcast {
        /// The rank whose buffer goes to all.
        root: u32,
    },
    /// `ncclReduce`.
    Reduce {
        /// The rank that gets the result.
        root: u32,
    },
    /// `ncclAllGather`.
    AllGather,
    /// `ncclReduceScatter`.
    ReduceScatter,
}

impl Kind {
    /// Whether every rank sends every other one as many packets.
    fn is_even(self) -> bool {
        match self {
            Kind::AllReduce | Kind::AllGather | Kind::ReduceScatter => true,
            Kind::Broadcast { .. } | Kind::Reduce { .. } => false,
        }
    }
}

/// One collective as this rank calls it. Only `send`, `receive` and the value of `scalar` may differ between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Collective {
    /// The kind of collective.
    pub kind: Kind,
    /// Number of elements, as NCCL counts them: of an all-gather those that each rank sends, of a reduce-scatter those that each rank receives.
    pub count: u64,
    /// Bytes of an element.
    pub element_bytes: u32,
    /// How to reduce, for kinds that do; others ignore it.
    pub reduction: Option<Reduction>,
    /// This rank's scalar, for a scaled sum alone.
    pub scalar: Option<Scalar>,
    /// The buffer that is read, of any alignment. A broadcast reads it on the root alone.
    pub send: u64,
    /// The buffer that is written, of any alignment. A reduce writes it on the root alone.
    pub receive: u64,
}

/// Writes `launch`, except the addresses `control` and `report`, and [`COLLECTIVE_EARLY_NEXT`] in `flags`, which the
/// caller sets afterwards. `regions`: the address here of each rank's part for collectives. None: there is nothing to do (a count of
/// zero), on all ranks alike.
///
/// # Errors
/// See [`Refused`]. Then, as with nothing to do, `launch` is untouched.
///
/// [`COLLECTIVE_EARLY_NEXT`]: crate::collective::COLLECTIVE_EARLY_NEXT
pub fn arrange(
    collective: &Collective,
    geometry: &Geometry,
    layout: &Layout,
    regions: &[u64],
    tuning: &Tuning,
    limits: &Limits,
    launch: &mut CollectiveLaunch,
) -> Result<Option<Shape>, Refused> {
    limits.check()?;
    let ranks = ranks_of(geometry, regions)?;
    let reducer = collective.reducer(ranks)?;
    let total_bytes = collective.total_bytes(ranks)?;
    if total_bytes == 0 {
        return Ok(None);
    }
    let connection_bytes = collective.connection_bytes();
    let family = tuning.family(collective.kind, reducer, total_bytes, connection_bytes, geometry);

    *launch = blank(geometry, regions);
    collective.write(reducer, family, geometry, layout, launch);
    let kernel = Kernel::of(family, reducer, ranks, launch.is_straight(family));
    let limits = limits.modest(collective.kind, total_bytes);
    let shape = Shape::of(kernel, launch.packets, geometry, total_bytes, &limits);
    shape.tell(launch);
    Ok(Some(shape))
}

/// The number of ranks. Fails if geometry or regions are not valid.
fn ranks_of(geometry: &Geometry, regions: &[u64]) -> Result<u32, Refused> {
    geometry.check()?;
    match regions.len() == geometry.ranks as usize {
        true => Ok(geometry.ranks),
        false => Err(Refused::Regions { regions: regions.len(), ranks: geometry.ranks }),
    }
}

/// A launch in which only the communicator's fields are set.
fn blank(geometry: &Geometry, regions: &[u64]) -> CollectiveLaunch {
    let mut launch = CollectiveLaunch {
        first_tag: geometry.first_tag,
        rank: geometry.rank,
        ranks: geometry.ranks,
        channels_log2: geometry.channels.ilog2(),
        ring_slots: geometry.slots,
        ..CollectiveLaunch::default()
    };
    launch.regions[..regions.len()].copy_from_slice(regions);
    launch
}

impl Collective {
    /// Writes all but the communicator's fields and those that follow from the grid.
    fn write(
        &self,
        reducer: Reducer,
        family: Family,
        geometry: &Geometry,
        layout: &Layout,
        launch: &mut CollectiveLaunch,
    ) {
        launch.wires = layout.wires(family);
        launch.ring_slots = geometry.slots_of(family);
        if let Some(reduction) = self.reduction.filter(|_| reducer != Reducer::Copy) {
            reduction.tell(self.scalar, launch);
        }
        let largest_connection_bytes = buffers::write(self, family, launch);
        launch.packets = largest_connection_bytes.div_ceil(family.packet_bytes());
        if self.kind.is_even() {
            launch.flags |= COLLECTIVE_EVEN;
        }
    }

    /// Bytes of the larger of its buffers, which NCCL's own measurements count, too.
    fn total_bytes(&self, ranks: u32) -> Result<u64, Refused> {
        let parts = match self.kind {
            Kind::AllReduce | Kind::Broadcast { .. } | Kind::Reduce { .. } => 1,
            Kind::AllGather | Kind::ReduceScatter => u64::from(ranks),
        };
        let part = self.count.checked_mul(self.element_bytes.into());
        part.and_then(|part| part.checked_mul(parts))
            .ok_or(Refused::Count { count: self.count, element_bytes: self.element_bytes })
    }

    /// Bytes from one rank to another, if nobody reduces in between. `total_bytes` has checked that the product fits.
    fn connection_bytes(&self) -> u64 {
        self.count * u64::from(self.element_bytes)
    }

    /// The reducer. Fails if anything in the call cannot be served.
    fn reducer(&self, ranks: u32) -> Result<Reducer, Refused> {
        if let Kind::Broadcast { root } | Kind::Reduce { root } = self.kind
            && root >= ranks
        {
            return Err(Refused::Root { root, ranks });
        }
        match self.kind {
            Kind::AllReduce | Kind::Reduce { .. } | Kind::ReduceScatter => {
                let reduction = self.reduction.ok_or(Refused::NoReduction { kind: self.kind })?;
                let element_bytes = reduction.element_bytes(self.scalar)?;
                if element_bytes != self.element_bytes {
                    let (element_bytes, datatype) = (self.element_bytes, reduction.datatype);
                    return Err(Refused::ElementBytes { element_bytes, datatype });
                }
                Ok(reduction.reducer())
            }
            Kind::Broadcast { .. } | Kind::AllGather => Ok(Reducer::Copy),
        }
    }
}
