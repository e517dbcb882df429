//! Says what cannot be arranged, and why.

use std::fmt;

use super::reduction::SCALED_SUM;
use super::{Kind, Reduction, Scalar};
use crate::collective::RANKS_MAX;

/// Why a collective cannot be arranged. All ranks get the same error, except `Regions` and `Blocks`, which are found at init, and errors that
/// depend on a rank's own scalar. The fields are the values at fault.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Fewer than 2 ranks, or more than the kernels have.
    Ranks(u32),
    /// The rank is not below the number of ranks.
    Rank { rank: u32, ranks: u32 },
    /// Channels that are no power of two, slots that are no power of two from 2 on, or a first tag of 0, which is no tag.
    Geometry { channels: u32, slots: u32, first_tag: u64 },
    /// Not one region for each rank.
    Regions { regions: usize, ranks: u32 },
    /// A grid of no blocks.
    Blocks(u32),
    /// The root is no rank of the communicator.
    Root { root: u32, ranks: u32 },
    /// The kind reduces, but there is no reduction.
    NoReduction { kind: Kind },
    /// A type or an operation that we do not reduce.
    Reduction(Reduction),
    /// A scaled sum without a scalar, or a scalar for another operation.
    Scalar { reduction: Reduction, scalar: Option<Scalar> },
    /// Elements of another size than their type's.
    ElementBytes { element_bytes: u32, datatype: i32 },
    /// More bytes than there are addresses, or a part that is no whole number of elements.
    Count { count: u64, element_bytes: u32 },
    /// Collectives that one kernel cannot run together: too many, too large, or not alike.
    Batch { calls: usize, bytes: u64 },
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::Ranks(ranks) => write!(f, "{ranks} ranks, not 2 to {RANKS_MAX}"),
            Refused::Rank { rank, ranks } => write!(f, "rank {rank} of {ranks}"),
            Refused::Geometry { channels, slots, first_tag } => {
                write!(f, "rings of {channels} channels, {slots} slots, first tag {first_tag}")
            }
            Refused::Regions { regions, ranks } => write!(f, "{regions} regions of {ranks} ranks"),
            Refused::Blocks(blocks) => write!(f, "a grid of {blocks} blocks"),
            Refused::Root { root, ranks } => write!(f, "root {root} of {ranks} ranks"),
            Refused::NoReduction { kind } => write!(f, "{kind:?} without a reduction"),
            Refused::Reduction(Reduction { datatype, operation }) => {
                write!(f, "operation {operation} of type {datatype}")
            }
            Refused::Scalar { reduction: Reduction { datatype, operation }, scalar: None } => {
                write!(f, "operation {operation} of type {datatype} without the scalar that it multiplies by")
            }
            Refused::Scalar { reduction: Reduction { datatype, operation }, scalar: Some(scalar) } => {
                write!(
                    f,
                    "{scalar:?} for operation {operation} of type {datatype}: only {SCALED_SUM} has a scalar"
                )
            }
            Refused::ElementBytes { element_bytes, datatype } => {
                write!(f, "elements of {element_bytes} bytes for type {datatype}")
            }
            Refused::Count { count, element_bytes } => {
                write!(f, "{count} elements of {element_bytes} bytes")
            }
            Refused::Batch { calls, bytes } => {
                write!(f, "{calls} collectives of {bytes} bytes that are to be one kernel")
            }
        }
    }
}

impl std::error::Error for Refused {}
