//! Why a symmetric heap could not do what was asked.

use nccl_sys::{ncclInternalError, ncclResult_t, ncclSystemError, ncclUnhandledCudaError};
use thiserror::Error;

use crate::heap::place::Place;
use windlass_base::error::refuse;
use windlass_base::gpu::{Address, Failure};

/// What failed, with the numbers.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum HeapError {
    /// The limit does not allow it, or the holes between regions are too small.
    #[error(
        "the symmetric heap of device {device} cannot lend {asked_bytes} bytes: mapped {mapped_bytes}, WINDLASS_HEAP_MAX {mapped_bytes_limit}"
    )]
    Full { device: i32, asked_bytes: u64, mapped_bytes: u64, mapped_bytes_limit: u64 },
    /// A call of the driver failed.
    #[error(transparent)]
    Cuda(#[from] Failure),
    /// The region does not hold zeros yet, so no rank may be told of it.
    #[error("a region of {bytes} bytes is not zeroed after {waited_ms} ms")]
    NotZeroed { bytes: u64, waited_ms: u64 },
    /// The device has not done the symmetric heap's own work in time.
    #[error("device {device} did none of the symmetric heap's work in {waited_ms} ms")]
    Late { device: i32, waited_ms: u64 },
    /// A peer announced a place that cannot be.
    #[error("a peer announced {place:?}: {why}")]
    Strange { place: Place, why: &'static str },
    /// A load returned another word than was stored.
    #[error("the word at {address:#x} should be {expected:#x} and is {loaded:#x}")]
    Deaf { address: Address, expected: u32, loaded: u32 },
    /// The region's memory is not mapped.
    #[error("a region's memory is not mapped")]
    Gone,
    /// This process was forked off one that uses CUDA.
    #[error("this process was forked off one that uses CUDA")]
    ForkedChild,
}

impl HeapError {
    /// NCCL's code for it.
    pub fn result(&self) -> ncclResult_t {
        match self {
            HeapError::Cuda(failure) => failure.result(),
            HeapError::Full { .. }
            | HeapError::NotZeroed { .. }
            | HeapError::Late { .. }
            | HeapError::Deaf { .. } => ncclUnhandledCudaError,
            HeapError::ForkedChild => ncclSystemError,
            HeapError::Strange { .. } | HeapError::Gone => ncclInternalError,
        }
    }

    /// Logs the error. Called once, where the error is decided.
    pub(super) fn told(self) -> HeapError {
        refuse(self.result(), format_args!("{self}"));
        self
    }
}
