//! The part of a group that kernels of Windlass run for one communicator.

use std::sync::Arc;

use nccl_sys::{ncclComm_t, ncclResult_t};

use crate::peers::PeerGroup;
use windlass_base::gpu::StreamHandle;
use windlass_transport::native::Task;
use windlass_transport::p2p::Operation;

/// The kernels of one communicator at the end of a group.
#[derive(Debug)]
pub struct Part {
    /// The communicator's handle.
    pub communicator: ncclComm_t,
    /// Its peer group.
    pub peer_group: Arc<PeerGroup>,
    /// Its collectives, in the order that [all ranks have](super::common_order); an error where one of them cannot be run.
    pub tasks: Result<Vec<Task>, ncclResult_t>,
    /// Its messages, in call order.
    pub operations: Vec<Operation>,
    /// The streams of these calls, each once, in call order.
    pub streams: Vec<StreamHandle>,
}
