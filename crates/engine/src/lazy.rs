//! A communicator that NCCL has not built yet, and may never: its ranks share a peer group, which serves what it can. The handle
//! that the application holds is ours. To materialize it is to have NCCL build its communicator: only a call does
//! that which all ranks make; then this is where the two handles meet.
//!
//! One thread at a time calls on a communicator, as with NCCL; an abort, and the question for an error, may come from another.

mod aborting;
mod arguments;
mod communicator;
mod ending;
mod ends;
pub(crate) mod first_launch;
mod handle;
mod kept;
mod legacy;
mod lost;
mod materialize;
mod on_device;
mod operators;
mod stage;
mod usage;

use nccl_sys::ncclComm_t;

pub(crate) use communicator::LazyCommunicator;
pub(crate) use ending::ask_of_groups;
pub(crate) use materialize::Beside;
pub(crate) use on_device::on_device;
pub(crate) use operators::Operator;
pub(crate) use usage::Unfit;

/// Whether a handle is one of ours, in use or ended.
pub(crate) fn is_ours(communicator: ncclComm_t) -> bool {
    handle::is_ours(communicator as usize)
}
