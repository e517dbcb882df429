//! Why a collective could not run.

use std::fmt;

use nccl_sys::{ncclInternalError, ncclResult_t, ncclSystemError};
use windlass_kernels::collectives::Refused;

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
    /// No compiled kernels are for this device.
    NoImage { device: i32, capability: i32 },
    /// One that was not loaded at init.
    NoKernel { name: &'static str },
    /// Not one aligned region for each rank.
    Regions { regions: usize, ranks: u32 },
    /// It is no collective, or none that the kernels know.
    Arranged(Refused),
}

impl Refusal {
    /// NCCL's code for it.
    pub fn result(&self) -> ncclResult_t {
        match self {
            Refusal::Cuda(failure) => failure.result(),
            Refusal::Turn(refusal) => refusal.result(),
            Refusal::NoImage { .. } => ncclSystemError,
            Refusal::NoKernel { .. } | Refusal::Regions { .. } | Refusal::Arranged(_) => ncclInternalError,
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
                write!(out, "no kernels of collectives are for device {device} of capability {capability}")
            }
            Refusal::NoKernel { name } => write!(out, "kernel {name} was not loaded at init"),
            Refusal::Regions { regions, ranks } => {
                write!(out, "{regions} regions for {ranks} ranks, expected one aligned to 128 bytes for each")
            }
            Refusal::Arranged(refused) => write!(out, "a collective cannot be arranged: {refused}"),
        }
    }
}

impl std::error::Error for Refusal {}
