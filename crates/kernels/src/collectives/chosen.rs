//! Arranges a collective that goes the way its caller chooses, and leaves the grid to the caller: for tests of the
//! kernels, which run every way at every size.

use super::kernel::{Family, Reducer};
use super::reduction::SCALED_SUM;
use super::{Collective, Geometry, Layout, Reduction, Refused, Scalar, Uneven, blank, ranks_of};
use crate::collective::CollectiveLaunch;

/// As [`arrange`](super::arrange), by a chosen family of one collective, of which there need be no kernel. The fields
/// that follow from the grid, `used_channels` and `role_warps`, are 0. A count of zero is written, too: a launch without
/// packets.
///
/// # Errors
/// See [`Refused`].
pub fn arrange_by(
    collective: &Collective,
    family: Family,
    geometry: &Geometry,
    regions: &[u64],
    launch: &mut CollectiveLaunch,
) -> Result<(), Refused> {
    let ranks = ranks_of(geometry, regions)?;
    let reducer = collective.reducer(ranks)?;
    collective.total_bytes(ranks)?;
    *launch = blank(geometry, regions);
    collective.write(reducer, family, geometry, &Layout::of(geometry), launch);
    Ok(())
}

/// As [`arrange_by`], for parts of different sizes.
///
/// # Errors
/// See [`Refused`].
pub fn arrange_uneven_by(
    uneven: &Uneven,
    family: Family,
    geometry: &Geometry,
    regions: &[u64],
    launch: &mut CollectiveLaunch,
) -> Result<(), Refused> {
    let ranks = ranks_of(geometry, regions)?;
    uneven.reducer()?;
    uneven.total_bytes(ranks)?;
    *launch = blank(geometry, regions);
    uneven.write(family, &Layout::of(geometry), launch);
    Ok(())
}

/// The reducer of a reduction; none if there are no kernels for it.
pub fn reducer_of(reduction: Reduction) -> Option<Reducer> {
    let scalar = (reduction.operation == SCALED_SUM).then_some(Scalar::Bits(0));
    reduction.element_bytes(scalar).is_ok().then(|| reduction.reducer())
}
