//! Why the sequencer, the p2p transport or native collectives could not do what was asked.

use std::fmt;

use nccl_sys::{ncclInternalError, ncclInvalidArgument, ncclInvalidUsage, ncclResult_t, ncclSystemError};
use windlass_kernels::growth::Wire;
use windlass_kernels::{arrange, collectives};

use windlass_base::error::refuse;
use windlass_base::gpu::Failure;

/// What failed, with the numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum TransportError {
    /// A call of the driver failed.
    Cuda(Failure),
    /// The communicator was aborted before.
    Aborted { rank: u32 },
    /// Work is still in flight.
    Busy { rank: u32, waited_ms: u64 },
    /// No compiled kernel of the p2p transport, or of collectives, is for this device.
    NoImage { of: &'static str, device: i32, capability: i32 },
    /// The p2p transport cannot run with what the ranks agreed on.
    Strange { why: &'static str, ranks: usize, rank: u32 },
    /// The kernel cannot serve all channels of such a group with so many bytes of shared memory a block.
    Channels { shared_bytes_max: u32, why: arrange::Refusal },
    /// The peer is no rank of the communicator.
    NoRank { peer: u32, ranks: u32 },
    /// The rank does not receive as many messages from itself as it sends.
    Unmatched { rank: u32, sends: usize, receives: usize },
    /// A group has more operations than a list.
    NoRoom { operations: usize, most: usize },
    /// The channels cannot move into this larger ring.
    NoGrowth { peer: u32, wire: Wire, why: &'static str },
    /// The kernel of a collective was not loaded at init.
    NoKernel { name: &'static str },
    /// There is not one aligned region for each rank.
    Regions { regions: usize, ranks: u32 },
    /// The kernels cannot run such a collective.
    Arranged(collectives::Refused),
}

impl TransportError {
    /// NCCL's code for it.
    pub fn result(&self) -> ncclResult_t {
        match self {
            TransportError::Cuda(failure) => failure.result(),
            TransportError::NoRank { .. } => ncclInvalidArgument,
            // NCCL returns the same for unmatched sends, at the end of a group.
            TransportError::Aborted { .. } | TransportError::Unmatched { .. } => ncclInvalidUsage,
            TransportError::NoImage { .. } | TransportError::NoRoom { .. } => ncclSystemError,
            TransportError::Busy { .. }
            | TransportError::Strange { .. }
            | TransportError::Channels { .. }
            | TransportError::NoGrowth { .. }
            | TransportError::NoKernel { .. }
            | TransportError::Regions { .. }
            | TransportError::Arranged(_) => ncclInternalError,
        }
    }

    /// Logs the error. Called once, where the error is decided.
    pub(crate) fn told(self) -> TransportError {
        refuse(self.result(), format_args!("{self}"));
        self
    }
}

impl From<Failure> for TransportError {
    fn from(failure: Failure) -> TransportError {
        TransportError::Cuda(failure)
    }
}

impl fmt::Display for TransportError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TransportError::Cuda(failure) => failure.fmt(out),
            TransportError::Aborted { rank } => write!(out, "the communicator of rank {rank} was aborted"),
            TransportError::Busy { rank, waited_ms } => {
                write!(out, "the communicator of rank {rank} still has work in flight after {waited_ms} ms")
            }
            TransportError::NoImage { of, device, capability } => {
                write!(out, "no kernel of {of} is for device {device} of capability {capability}")
            }
            TransportError::Strange { why, ranks, rank } => {
                write!(out, "no p2p transport for rank {rank} of {ranks}: {why}")
            }
            TransportError::Channels { shared_bytes_max, why } => write!(
                out,
                "a block of {shared_bytes_max} bytes of shared memory cannot serve a group: {why:?}"
            ),
            TransportError::NoRank { peer, ranks } => write!(out, "peer {peer} of {ranks} ranks"),
            TransportError::Unmatched { rank, sends, receives } => {
                write!(out, "rank {rank} sends {sends} messages to itself and receives {receives} of them")
            }
            TransportError::NoRoom { operations, most } => {
                write!(out, "a group has {operations} sends and receives, expected at most {most}")
            }
            TransportError::NoGrowth { peer, wire, why } => {
                write!(out, "no larger ring of {wire:?} with peer {peer}: {why}")
            }
            TransportError::NoKernel { name } => write!(out, "kernel {name} was not loaded at init"),
            TransportError::Regions { regions, ranks } => {
                write!(out, "{regions} regions for {ranks} ranks, expected one aligned to 128 bytes for each")
            }
            TransportError::Arranged(refused) => write!(out, "a collective cannot be arranged: {refused}"),
        }
    }
}

impl std::error::Error for TransportError {}
