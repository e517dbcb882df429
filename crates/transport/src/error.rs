//! Why the sequencer, the p2p transport or native collectives could not do what was asked.

use nccl_sys::{ncclInternalError, ncclInvalidArgument, ncclInvalidUsage, ncclResult_t, ncclSystemError};
use thiserror::Error;
use windlass_kernels::growth::Wire;
use windlass_kernels::{arrange, collectives};

use windlass_base::error::refuse;
use windlass_base::gpu::Failure;

/// What failed, with the numbers.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum TransportError {
    /// A call of the driver failed.
    #[error(transparent)]
    Cuda(#[from] Failure),
    /// The communicator was aborted before.
    #[error("the communicator of rank {rank} was aborted")]
    Aborted { rank: u32 },
    /// Work is still in flight.
    #[error("the communicator of rank {rank} still has work in flight after {waited_ms} ms")]
    Busy { rank: u32, waited_ms: u64 },
    /// No compiled kernel of the p2p transport, or of collectives, is for this device.
    #[error("no kernel of {of} is for device {device} of capability {capability}")]
    NoImage { of: &'static str, device: i32, capability: i32 },
    /// The p2p transport cannot run with what the ranks agreed on.
    #[error("no p2p transport for rank {rank} of {ranks}: {why}")]
    Strange { why: &'static str, ranks: usize, rank: u32 },
    /// The kernel cannot serve all channels of such a group with so many bytes of shared memory a block.
    #[error("a block of {shared_bytes_max} bytes of shared memory cannot serve a group: {why:?}")]
    Channels { shared_bytes_max: u32, why: arrange::Refusal },
    /// The peer is no rank of the communicator.
    #[error("peer {peer} of {ranks} ranks")]
    NoRank { peer: u32, ranks: u32 },
    /// The rank does not receive as many messages from itself as it sends.
    #[error("rank {rank} sends {sends} messages to itself and receives {receives} of them")]
    Unmatched { rank: u32, sends: usize, receives: usize },
    /// A group has more operations than a list.
    #[error("a group has {operations} sends and receives, expected at most {most}")]
    NoRoom { operations: usize, most: usize },
    /// The channels cannot move into this larger ring.
    #[error("no larger ring of {wire:?} with peer {peer}: {why}")]
    NoGrowth { peer: u32, wire: Wire, why: &'static str },
    /// The kernel of a collective was not loaded at init.
    #[error("kernel {name} was not loaded at init")]
    NoKernel { name: &'static str },
    /// There is not one aligned region for each rank.
    #[error("{regions} regions for {ranks} ranks, expected one aligned to 128 bytes for each")]
    Regions { regions: usize, ranks: u32 },
    /// The kernels cannot run such a collective.
    #[error("a collective cannot be arranged: {0}")]
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
