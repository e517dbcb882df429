//! The ends of inits: the ranks of communicators that NCCL makes have met, or a communicator got its handle. Below the inits by id and
//! those of children.

use std::sync::Arc;

use nccl_sys::ncclComm_t;

use crate::communicator::{self, Communicator, Kept};
use crate::forward::init::{self, Handle};
use crate::forward::known;
use crate::lazy::{LazyCommunicator, first_launch};
use crate::peers::{self, Asked, InitOutcome, Lineage};
use windlass_base::observers;
use windlass_base::stats::count::{self, Identity};
use windlass_base::stats::peer_group::{BUILT, UNBUILT};

/// Begins the sessions of communicators that have their handles, and waits for all of them. An abort of a communicator ends its wait.
/// Gives each outcome with what belongs to the communicator.
pub(super) fn meet<T>(
    begun: impl Iterator<Item = (ncclComm_t, T, Result<Asked, InitOutcome>)>,
) -> Vec<(ncclComm_t, T, InitOutcome)> {
    let (mut waiting, mut asked, mut over) = (Vec::new(), Vec::new(), Vec::new());
    for (handle, own, one) in begun {
        match one {
            Ok(one) => {
                let waiting_here = Kept::Waiting(one.canceller());
                drop(communicator::find(handle).and_then(|known| known.keep(handle, waiting_here)));
                waiting.push((handle, own));
                asked.push(one);
            }
            Err(outcome) => over.push((handle, own, outcome)),
        }
    }
    if !asked.is_empty() {
        let met = waiting.into_iter().zip(peers::complete(asked));
        over.extend(met.map(|((handle, own), outcome)| (handle, own, outcome)));
    }
    over
}

/// Reports the outcome of an init. Keeps the peer group with the communicator, or what a communicator without one has for its children.
pub(super) fn settle(
    handle: ncclComm_t,
    communicator: &'static Communicator,
    outcome: InitOutcome,
    lineage: Option<Arc<Lineage>>,
) {
    peers::tell(communicator.counters(), &outcome);
    let kept = match outcome {
        InitOutcome::PeerGroup(peer_group) => Some(Kept::PeerGroup(peer_group)),
        InitOutcome::OnNccl(_) => lineage.map(Kept::OnNccl),
        InitOutcome::Failed(_) => None,
    };
    drop(kept.and_then(|kept| communicator.keep(handle, kept)));
}

/// Records a lazy communicator, and gives its handle to the application. `name`: what NCCL would call it, by its id.
pub(super) fn hand_out(place: Handle, lazy: Arc<LazyCommunicator>, name: Option<u64>) {
    let (handle, peer_group) = (lazy.handle(), lazy.peer_group.clone());
    let ranks = peer_group.negotiated().members.len() as i32;
    let identity = Identity { rank: peer_group.rank() as i32, ranks, device: lazy.device };
    let communicator = communicator::insert(handle, identity);
    let standing = if lazy.real().is_some() { BUILT } else { UNBUILT };
    name.into_iter().for_each(|name| count::name(communicator.counters(), name));
    drop(communicator.keep(handle, Kept::Lazy(lazy)));
    if observers::are_on() {
        observers::profiler::made(&communicator.observed());
    }
    count::nccl(communicator.counters(), standing);
    peers::tell(communicator.counters(), &InitOutcome::PeerGroup(peer_group));
    init::hand_out(place, handle);
}

/// Called after NCCL has run the group that made this communicator: notes its rank and device.
pub(super) fn made(handle: ncclComm_t) {
    if let (Some(communicator), Some(identity)) = (communicator::find(handle), known::identity(handle)) {
        communicator.identify(identity);
    }
    guard_first_launch(handle);
}

/// Runs the first-launch guard for a communicator that NCCL has made and that has a peer group.
pub(super) fn guard_first_launch(handle: ncclComm_t) {
    if let Some(communicator) = communicator::find(handle)
        && !communicator.is_lazy()
        && let Some(peer_group) = communicator.peer_group(handle)
    {
        first_launch::guard(&peer_group, handle);
    }
}
