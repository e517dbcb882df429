//! Lazy communicators: NCCL has not built them yet, and may never. Their ranks share a peer group, which runs what it can. The
//! application's handle is one of Windlass. To materialize a lazy communicator is to have NCCL build its own: only a call that all
//! ranks make does that. From then on calls for NCCL get NCCL's handle.
//!
//! As with NCCL, one thread at a time calls on a communicator; an abort, and the query of an asynchronous error, may come from another.

mod aborting;
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
mod usage;

use nccl_sys::ncclComm_t;

pub(crate) use communicator::LazyCommunicator;
pub(crate) use ending::ask_of_groups;
pub(crate) use materialize::Beside;
pub(crate) use on_device::on_device;
pub(crate) use operators::Operator;
pub(crate) use usage::Unfit;

/// Whether a handle is one of Windlass, in use or ended.
pub(crate) fn is_ours(communicator: ncclComm_t) -> bool {
    handle::is_ours(communicator as usize)
}
