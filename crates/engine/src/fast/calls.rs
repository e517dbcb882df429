//! What fast collectives ask of the driver beside [`crate::gpu`]: all `unsafe` of theirs.

#![allow(unsafe_code)]

use windlass_kernels::collective::CollectiveLaunch;
use windlass_kernels::images::Image;

use crate::gpu::module::{Function, Module, Shape};
use crate::gpu::{Driver, Failure, StreamHandle};

/// Loads code in the current context. It is unpacked meanwhile, and again for another device: kept, it would cost each process its size.
pub(super) fn load(driver: &'static Driver, image: &Image) -> Result<Module, Failure> {
    let damaged =
        |why| Failure::without_code("unpacking", "a damaged image", format!("{}: {why}", image.name));
    let code = image.unpack().map_err(damaged)?;
    // SAFETY: images of the kernels crate are whole.
    unsafe { Module::load(driver, &code) }
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
