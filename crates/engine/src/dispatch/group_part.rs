//! What a group holds of one communicator.

use std::sync::Arc;

use nccl_sys::{ncclComm_t, ncclResult_t};

use crate::peers::PeerGroup;
use windlass_base::gpu::StreamHandle;
use windlass_transport::native::Task;
use windlass_transport::p2p::Operation;

use super::group_order::Nccls;

/// What one communicator runs within its peer group at the end of a group.
#[derive(Debug)]
pub struct Part {
    /// Whose.
    pub communicator: ncclComm_t,
    /// Its peer group.
    pub peer_group: Arc<PeerGroup>,
    /// Its collectives, in the order that [all ranks have](common_order); an error where one cannot be run.
    pub tasks: Result<Vec<Task>, ncclResult_t>,
    /// Its messages, in call order.
    pub operations: Vec<Operation>,
    /// The place of the first of these calls among all that the group held.
    pub place: usize,
    /// What NCCL had of the group by then, with what it gets now of what was held.
    pub called_after: Nccls,
    /// The stream of the first of these calls.
    pub stream: StreamHandle,
    /// Those of the others.
    pub others: Vec<StreamHandle>,
}
