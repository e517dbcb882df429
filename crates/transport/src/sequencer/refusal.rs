//! Why an operation got no turn.

use std::fmt;

use nccl_sys::{ncclInternalError, ncclInvalidUsage, ncclResult_t};

use windlass_base::error::refuse;
use windlass_base::gpu::Failure;

/// Why not, with the numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Refusal {
    /// The driver could not.
    Cuda(Failure),
    /// It was aborted before.
    Aborted { rank: u32 },
    /// Work is still in flight.
    Busy { rank: u32, waited_ms: u64 },
}

impl Refusal {
    /// NCCL's code for it.
    pub fn result(&self) -> ncclResult_t {
        match self {
            Refusal::Cuda(failure) => failure.result(),
            Refusal::Aborted { .. } => ncclInvalidUsage,
            Refusal::Busy { .. } => ncclInternalError,
        }
    }

    /// Logs it, once, where it is decided.
    pub(super) fn told(self) -> Refusal {
        refuse(self.result(), format_args!("{self}"));
        self
    }
}

/// Why what was to be issued in a turn was not: refusals of whoever issues it.
pub trait Why: From<Refusal> {
    /// Whether the driver failed, so that nobody knows what it has taken.
    fn is_of_driver(&self) -> bool;
}

impl Why for Refusal {
    fn is_of_driver(&self) -> bool {
        matches!(self, Refusal::Cuda(_))
    }
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Refusal {
        Refusal::Cuda(failure)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Cuda(failure) => failure.fmt(out),
            Refusal::Aborted { rank } => write!(out, "the communicator of rank {rank} was aborted"),
            Refusal::Busy { rank, waited_ms } => {
                write!(out, "the communicator of rank {rank} still has work in flight after {waited_ms} ms")
            }
        }
    }
}

impl std::error::Error for Refusal {}
