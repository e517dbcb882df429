//! Exports for tests, which count what this NCCL was asked for. The real NCCL has none of these names.

#![allow(non_snake_case)]

use crate::refusal::lock;
use crate::{allocation, communicator};
use nccl_sys::ncclComm_t;
use std::sync::atomic::Ordering::SeqCst;

/// The answer for a handle of no live communicator, such as that of a lazy one.
const UNKNOWN: u64 = u64::MAX;

/// How many eager collectives over registered buffers this rank has issued on a communicator. Any thread may call this at any time.
#[unsafe(no_mangle)]
extern "C" fn simRegisteredCollectives(comm: ncclComm_t) -> u64 {
    communicator::look_for(comm).map_or(UNKNOWN, |found| found.registered.load(SeqCst))
}

/// How many registrations this rank has in a communicator now. Any thread may call this at any time.
#[unsafe(no_mangle)]
extern "C" fn simRegistrations(comm: ncclComm_t) -> u64 {
    communicator::look_for(comm).map_or(UNKNOWN, |found| lock(&found.registrations).live().count() as u64)
}

/// How many windows this rank has ever made in a communicator. Any thread may call this at any time.
#[unsafe(no_mangle)]
extern "C" fn simWindowsMade(comm: ncclComm_t) -> u64 {
    communicator::look_for(comm).map_or(UNKNOWN, |found| lock(&found.windows).made())
}

/// How many windows this rank has in a communicator now. Any thread may call this at any time.
#[unsafe(no_mangle)]
extern "C" fn simWindows(comm: ncclComm_t) -> u64 {
    communicator::look_for(comm).map_or(UNKNOWN, |found| lock(&found.windows).live().count() as u64)
}

/// How often this process has allocated memory for `ncclMemAlloc`. Any thread may call this.
#[unsafe(no_mangle)]
extern "C" fn simAllocations() -> u64 {
    allocation::MADE.load(SeqCst)
}

/// How often this process has freed such memory for `ncclMemFree`. Any thread may call this.
#[unsafe(no_mangle)]
extern "C" fn simFrees() -> u64 {
    allocation::FREED.load(SeqCst)
}
