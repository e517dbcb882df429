//! What fast collectives ask of the driver beside [`crate::gpu`]: all `unsafe` of theirs.

#![allow(unsafe_code)]

use windlass_kernels::collective::CollectiveLaunch;

use crate::gpu::module::{Function, Module, Shape};
use crate::gpu::{Driver, Failure, StreamHandle};

/// Loads code in the current context.
pub(super) fn load(driver: &'static Driver, image: &'static [u8]) -> Result<Module, Failure> {
    // SAFETY: images of the kernels crate are whole; tests pass whole ones.
    unsafe { Module::load(driver, image) }
}

/// Launches a kernel. The launch is copied by the driver.
pub(super) fn launch(
    driver: &Driver,
    function: Function,
    stream: StreamHandle,
    shape: &Shape,
    launch: &mut CollectiveLaunch,
) -> Result<(), Failure> {
    // SAFETY: the kernels have this one parameter. Slices, word and report stay while one runs: the communicator's owner
    // keeps the slices, the kit the word; the application vouches for its buffers.
    unsafe { driver.launch(function, stream, shape, &mut [(&raw mut *launch).cast()]) }
}
