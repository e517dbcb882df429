//! Says what cannot be arranged, and why.

use thiserror::Error;

use super::reduction::SCALED_SUM;
use super::{Kind, Reduction, Scalar};
use crate::collective::RANKS_MAX;

/// Why a collective cannot be arranged. All ranks get the same error, except `Regions` and `Blocks`, which are found at init, and errors that
/// depend on a rank's own scalar. The fields are the values at fault.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Refused {
    /// Fewer than 2 ranks, or more than the kernels have.
    #[error("{0} ranks, not 2 to {RANKS_MAX}")]
    Ranks(u32),
    /// The rank is not below the number of ranks.
    #[error("rank {rank} of {ranks}")]
    Rank { rank: u32, ranks: u32 },
    /// Channels that are no power of two, slots that are no power of two from 2 on, or a first tag of 0, which is no tag.
    #[error("rings of {channels} channels, {slots} slots, first tag {first_tag}")]
    Geometry { channels: u32, slots: u32, first_tag: u64 },
    /// Not one region for each rank.
    #[error("{regions} regions of {ranks} ranks")]
    Regions { regions: usize, ranks: u32 },
    /// A grid of no blocks.
    #[error("a grid of {0} blocks")]
    Blocks(u32),
    /// The root is no rank of the communicator.
    #[error("root {root} of {ranks} ranks")]
    Root { root: u32, ranks: u32 },
    /// The kind reduces, but there is no reduction.
    #[error("{kind:?} without a reduction")]
    NoReduction { kind: Kind },
    /// A type or an operation that we do not reduce.
    #[error("operation {} of type {}", .0.operation, .0.datatype)]
    Reduction(Reduction),
    /// A scaled sum without a scalar, or a scalar for another operation.
    #[error("{}", scalar_text(*reduction, *scalar))]
    Scalar { reduction: Reduction, scalar: Option<Scalar> },
    /// Elements of another size than their type's.
    #[error("elements of {element_bytes} bytes for type {datatype}")]
    ElementBytes { element_bytes: u32, datatype: i32 },
    /// More bytes than there are addresses, or a part that is no whole number of elements.
    #[error("{count} elements of {element_bytes} bytes")]
    Count { count: u64, element_bytes: u32 },
    /// Collectives that one kernel cannot run together: too many, too large, or not alike.
    #[error("{calls} collectives of {bytes} bytes that are to be one kernel")]
    Batch { calls: usize, bytes: u64 },
}

fn scalar_text(Reduction { datatype, operation }: Reduction, scalar: Option<Scalar>) -> String {
    match scalar {
        None => format!("operation {operation} of type {datatype} without the scalar that it multiplies by"),
        Some(scalar) => {
            format!("{scalar:?} for operation {operation} of type {datatype}: only {SCALED_SUM} has a scalar")
        }
    }
}
