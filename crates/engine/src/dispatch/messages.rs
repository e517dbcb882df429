//! Runs sends, receives, and collectives made of them (all-to-all, gather, scatter) over the p2p transport: checks arguments at the
//! call, runs at once or at the end of the group. The messages of one communicator in a group are one kernel. A call that NCCL
//! would refuse goes to NCCL, which says why and fails the group.

use std::ffi::c_int;
use std::sync::Arc;

use nccl_sys::{ncclInternalError, ncclResult_t, ncclSuccess};

use crate::communicator::Communicator;
use crate::group::{self, Ours};
use crate::peers::PeerGroup;
use windlass_base::call::{Call, Function};
use windlass_base::error::refuse;
use windlass_bootstrap::negotiated::RANKS_MAX;
use windlass_transport::p2p::{Direction, Operation};

use super::ordering::{self, Where, stream_of};

/// The peer group that runs this call. None if NCCL is to refuse the call, or if another thread has just ended the communicator. Without wires
/// a rank runs only what needs no other rank, as NCCL would have to wait for all of them to be built.
pub fn serves(call: &Call, communicator: &Communicator) -> Option<Arc<PeerGroup>> {
    let peer_group = ordering::peer_group_of(call, communicator)?;
    let messages = Messages::of(call, &peer_group)?;
    let is_alone = |one: &Operation| one.peer == peer_group.rank() || one.bytes == 0;
    (peer_group.has_wires() || messages.all().iter().all(is_alone)).then_some(peer_group)
}

/// Runs a call, or holds it until its group ends.
pub fn take(call: &Call, peer_group: &Arc<PeerGroup>) -> ncclResult_t {
    let Some(messages) = Messages::of(call, peer_group) else {
        return refuse(ncclInternalError, format_args!("a message without bytes or peer"));
    };
    // NCCL drops an all-to-all, gather or scatter without elements before it looks at its stream.
    if call.shared.count == 0 && !matches!(call.shared.function, Function::Send | Function::Recv) {
        return ncclSuccess;
    }
    if group::is_open() {
        return ordering::hold(call, peer_group, messages.all().iter().copied().map(Ours::Message));
    }
    ordering::run(call.local.communicator, peer_group, &[], messages.all(), &Where::on(stream_of(call)))
}

/// The sends and receives of a call, in NCCL's order.
struct Messages {
    operations: [Operation; 2 * RANKS_MAX],
    count: usize,
}

impl Messages {
    /// None if NCCL would refuse an argument.
    fn of(call: &Call, peer_group: &PeerGroup) -> Option<Messages> {
        let (shared, local) = (&call.shared, &call.local);
        let ranks = peer_group.negotiated().members.len() as u32;
        let bytes = (shared.count as u64).checked_mul(shared.datatype.size_bytes()? as u64)?;
        let send = |place: u32, peer| (local.send as u64, place, peer, Direction::Send);
        let receive = |place: u32, peer| (local.receive as u64, place, peer, Direction::Receive);
        let known = |rank: Option<c_int>| u32::try_from(rank?).ok().filter(|rank| *rank < ranks);
        let mut messages = Messages { operations: [NOTHING; 2 * RANKS_MAX], count: 0 };
        let mut add = |(base, place, peer, direction): (u64, u32, u32, Direction)| {
            let address = base.wrapping_add(u64::from(place).wrapping_mul(bytes));
            messages.operations[messages.count] = Operation { address, bytes, peer, direction };
            messages.count += 1;
        };
        match shared.function {
            Function::Send => add(send(0, known(local.peer)?)),
            Function::Recv => add(receive(0, known(local.peer)?)),
            Function::AlltoAll => (0..ranks).for_each(|peer| {
                add(send(peer, peer));
                add(receive(peer, peer));
            }),
            Function::Gather => {
                let root = known(shared.root)?;
                add(send(0, root));
                if root == peer_group.rank() {
                    (0..ranks).for_each(|peer| add(receive(peer, peer)));
                }
            }
            Function::Scatter => {
                let root = known(shared.root)?;
                if root == peer_group.rank() {
                    (0..ranks).for_each(|peer| add(send(peer, peer)));
                }
                add(receive(0, root));
            }
            _ => return None,
        }
        Some(messages)
    }

    fn all(&self) -> &[Operation] {
        &self.operations[..self.count]
    }
}

const NOTHING: Operation = Operation { address: 0, bytes: 0, peer: 0, direction: Direction::Send };
