//! The calls of the driver by native collectives beside [`windlass_base::gpu`]. All their `unsafe` is here.

#![allow(unsafe_code)]

use windlass_kernels::collective::{BatchLaunch, CollectiveLaunch};

use windlass_base::gpu::module::{Function, Shape};
use windlass_base::gpu::{Driver, Failure, StreamHandle};

/// A kernel's one parameter.
#[derive(Debug)]
pub(super) enum Parameter<'a> {
    /// The parameter of a kernel that runs one collective.
    One(&'a mut CollectiveLaunch),
    /// The parameter of a kernel that runs several.
    Several(&'a mut BatchLaunch),
}

impl Parameter<'_> {
    /// The part that both kinds have.
    pub(super) fn launch(&mut self) -> &mut CollectiveLaunch {
        match self {
            Parameter::One(launch) => launch,
            Parameter::Several(batch) => &mut batch.launch,
        }
    }
}

/// Launches a kernel with its parameter, which the driver copies.
pub(super) fn launch(
    driver: &Driver,
    function: Function,
    stream: StreamHandle,
    shape: &Shape,
    parameter: Parameter<'_>,
) -> Result<(), Failure> {
    let parameter = match parameter {
        Parameter::One(launch) => (&raw mut *launch).cast(),
        Parameter::Several(batch) => (&raw mut *batch).cast(),
    };
    // SAFETY: the kernels have this one parameter, of the kind that the caller has looked at. Regions, control word and report stay while a kernel
    // runs: the communicator's owner keeps the regions, the launch resources the word; the application vouches for its buffers.
    unsafe { driver.launch(function, stream, shape, &mut [parameter]) }
}
