//! Why a p2p transport could not do what was asked.

use std::fmt;

use nccl_sys::{ncclInternalError, ncclInvalidArgument, ncclInvalidUsage, ncclResult_t, ncclSystemError};
use windlass_kernels::arrange;
use windlass_kernels::growth::Wire;

use crate::sequencer;
use windlass_base::error::refuse;
use windlass_base::gpu::Failure;

/// Why not, with the numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Refusal {
    /// The driver could not.
    Cuda(Failure),
    /// It is not this communicator's turn.
    Turn(sequencer::Refusal),
    /// No compiled kernel is for this device.
    NoImage { device: i32, capability: i32 },
    /// What the ranks agreed on is nothing that a p2p transport can run with.
    Strange { why: &'static str, ranks: usize, rank: u32 },
    /// The kernel cannot serve all channels of such a group with so much shared memory a block.
    Channels { shared_bytes_max: u32, why: arrange::Refusal },
    /// There is no such rank.
    NoRank { peer: u32, ranks: u32 },
    /// A send to itself without a receive, or the other way.
    Unmatched { rank: u32, sends: usize, receives: usize },
    /// Graphs hold all room for lists of operations, or one list is too long.
    NoRoom { operations: usize, most: usize },
    /// No channel can move into such a ring.
    NoGrowth { peer: u32, wire: Wire, why: &'static str },
}

impl Refusal {
    /// NCCL's code for it.
    pub fn result(&self) -> ncclResult_t {
        match self {
            Refusal::Cuda(failure) => failure.result(),
            Refusal::Turn(refusal) => refusal.result(),
            Refusal::NoRank { .. } => ncclInvalidArgument,
            // As NCCL at the end of a group.
            Refusal::Unmatched { .. } => ncclInvalidUsage,
            Refusal::NoImage { .. } | Refusal::NoRoom { .. } => ncclSystemError,
            Refusal::Strange { .. } | Refusal::Channels { .. } | Refusal::NoGrowth { .. } => {
                ncclInternalError
            }
        }
    }

    /// Logs it, once, where it is decided.
    pub(super) fn told(self) -> Refusal {
        refuse(self.result(), format_args!("{self}"));
        self
    }
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Refusal {
        Refusal::Cuda(failure)
    }
}

impl From<sequencer::Refusal> for Refusal {
    fn from(refusal: sequencer::Refusal) -> Refusal {
        match refusal {
            sequencer::Refusal::Cuda(failure) => Refusal::Cuda(failure),
            refusal => Refusal::Turn(refusal),
        }
    }
}

impl sequencer::Why for Refusal {
    fn is_of_driver(&self) -> bool {
        matches!(self, Refusal::Cuda(_))
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Cuda(failure) => failure.fmt(out),
            Refusal::Turn(refusal) => refusal.fmt(out),
            Refusal::NoImage { device, capability } => {
                write!(
                    out,
                    "no kernel of the p2p transport is for device {device} of capability {capability}"
                )
            }
            Refusal::Strange { why, ranks, rank } => {
                write!(out, "no p2p transport for rank {rank} of {ranks}: {why}")
            }
            Refusal::Channels { shared_bytes_max, why } => {
                write!(
                    out,
                    "a block of {shared_bytes_max} bytes of shared memory cannot serve a group: {why:?}"
                )
            }
            Refusal::NoRank { peer, ranks } => write!(out, "peer {peer} of {ranks} ranks"),
            Refusal::Unmatched { rank, sends, receives } => {
                write!(out, "rank {rank} sends {sends} messages to itself and receives {receives} of them")
            }
            Refusal::NoRoom { operations, most } => write!(
                out,
                "no room for a list of {operations} operations: {most} together, less what graphs hold"
            ),
            Refusal::NoGrowth { peer, wire, why } => {
                write!(out, "no larger ring of {wire:?} with peer {peer}: {why}")
            }
        }
    }
}

impl std::error::Error for Refusal {}
