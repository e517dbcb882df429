//! What tests ask the simulator to see what NCCL saw. No NCCL exports these names.

#![allow(non_snake_case)]

use crate::refusal::lock;
use crate::{allocation, communicator};
use nccl_sys::ncclComm_t;
use std::sync::atomic::Ordering::SeqCst;

/// For a handle that is none of a living communicator, such as a lazy one's.
const UNKNOWN: u64 = u64::MAX;

/// How many eager collectives this rank has issued on a communicator that run registered. Any thread, beside other calls.
#[unsafe(no_mangle)]
extern "C" fn simRegisteredCollectives(comm: ncclComm_t) -> u64 {
    communicator::look_for(comm).map_or(UNKNOWN, |found| found.registered.load(SeqCst))
}

/// How many records this rank's table of a communicator has now. Any thread, beside other calls.
#[unsafe(no_mangle)]
extern "C" fn simRegistrations(comm: ncclComm_t) -> u64 {
    communicator::look_for(comm).map_or(UNKNOWN, |found| lock(&found.registrations).live().count() as u64)
}

/// How many windows this rank has made on a communicator, ever. Any thread, beside other calls.
#[unsafe(no_mangle)]
extern "C" fn simWindowsMade(comm: ncclComm_t) -> u64 {
    communicator::look_for(comm).map_or(UNKNOWN, |found| lock(&found.windows).made())
}

/// How many of them live. Any thread, beside other calls.
#[unsafe(no_mangle)]
extern "C" fn simWindows(comm: ncclComm_t) -> u64 {
    communicator::look_for(comm).map_or(UNKNOWN, |found| lock(&found.windows).live().count() as u64)
}

/// How often memory was made for `ncclMemAlloc` in this process. Any thread.
#[unsafe(no_mangle)]
extern "C" fn simAllocations() -> u64 {
    allocation::MADE.load(SeqCst)
}

/// How often that was freed. Any thread.
#[unsafe(no_mangle)]
extern "C" fn simFrees() -> u64 {
    allocation::FREED.load(SeqCst)
}
