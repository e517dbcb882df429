//! What cannot be arranged, and why.

use std::fmt;

use super::reduction::SCALED_SUM;
use super::{Kind, Reduction, Scalar};
use crate::collective::RANKS_MAX;

/// Why a collective cannot be arranged. All ranks get the same answer but for `Regions` and `Blocks`, which are found at
/// init, and for what hangs on scalars, which are each rank's own. The fields are the values at fault.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Fewer than 2 ranks, or more than the kernels have.
    Ranks(u32),
    /// No such rank.
    Rank { rank: u32, ranks: u32 },
    /// No channels, no power of two of slots that is at least 2, or a first tag of 0, which is none.
    Geometry { channels: u32, slots: u32, first_tag: u64 },
    /// Not one region of each rank.
    Regions { regions: usize, ranks: u32 },
    /// A grid of no blocks.
    Blocks(u32),
    /// The root is no rank.
    Root { root: u32, ranks: u32 },
    /// A kind that reduces, and no word of how.
    NoReduction { kind: Kind },
    /// A type or an operation that we do not reduce.
    Reduction(Reduction),
    /// A scaled sum without a scalar, or a scalar for what has none.
    Scalar { reduction: Reduction, scalar: Option<Scalar> },
    /// Elements of another size than their type's.
    ElementBytes { element_bytes: u32, datatype: i32 },
    /// More bytes than there are addresses.
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
