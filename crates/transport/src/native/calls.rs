//! What native collectives ask of the driver beside [`windlass_base::gpu`]: all `unsafe` of theirs.

#![allow(unsafe_code)]

use windlass_kernels::collective::{BatchLaunch, CollectiveLaunch};

use windlass_base::gpu::module::{Function, Shape};
use windlass_base::gpu::{Driver, Failure, StreamHandle};

/// A kernel's one parameter.
#[derive(Debug)]
pub(super) enum Parameter<'a> {
    /// Of those that run one collective.
    One(&'a mut CollectiveLaunch),
    /// Of those that run several.
    Several(&'a mut BatchLaunch),
}

impl Parameter<'_> {
    /// What all of them have.
    pub(super) fn launch(&mut self) -> &mut CollectiveLaunch {
        match self {
            Parameter::One(launch) => launch,
            Parameter::Several(batch) => &mut batch.launch,
        }
    }
}

/// Launches a kernel that takes such a parameter, which is copied by the driver.
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
    // SAFETY: the kernels have this one parameter, of the kind that the caller has looked at. Regions, word and report stay while one runs: the communicator's owner
    // keeps the regions, the launch resources the word; the application vouches for its buffers.
    unsafe { driver.launch(function, stream, shape, &mut [parameter]) }
}
