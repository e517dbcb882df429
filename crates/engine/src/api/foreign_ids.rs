//! Inits without a session behind their ids: a process without Windlass made the id, there are several, or the init does not wait
//! (`blocking = 0`). NCCL makes the communicator. Its ranks meet after that, if all had entered a roster of their host before, as those of a
//! child whose parent is on NCCL do.
//!
//! An init that does not wait meets on a thread of Windlass's, which waits for NCCL first. The communicator is in progress until it is over.

use nccl_sys::{ncclComm_t, ncclResult_t, ncclSuccess};

use crate::communicator;
use crate::forward::configuration::Kept as Configuration;
use crate::forward::init::Handle;
use crate::forward::known;
use crate::peers::{self, ChildCall, ChildRequest, InitOutcome, InitRequest, Laziness, Parent, Waiting};
use windlass_base::error::refuse;
use windlass_base::stats::count::Identity;

use super::children;
use super::handles::note;
use super::init_ends::{self, guard_first_launch, settle};

/// Comes before NCCL's init, and waits for no rank: this rank enters the roster. None if the ranks have a session, or can have no peer group.
pub(super) fn enter(request: &InitRequest, configuration: &Configuration) -> Option<ChildCall> {
    let configuration = configuration.clone();
    // As a child of a communicator with this name, of a kind that no split or shrink makes: a rank that makes this init in a group may
    // already be in the first split of it.
    let above = peers::roster_of(request, configuration.clone())?;
    let child = ChildRequest {
        color: Some(0),
        excluded: vec![-1],
        key: 0,
        vote: Laziness::None.vote(),
        parent: Parent::Built,
        is_refused: false,
        is_in_group: false,
        device: request.device.as_ref().ok().copied(),
        waiting: Waiting::Blocking,
        is_nonblocking: request.is_nonblocking(),
        ctas: Some(request.ctas),
        configuration,
        shares: false,
    };
    let mut call = ChildCall::of(&above, child)?;
    call.begin().ok()?;
    call.meets().then_some(call)
}

/// Called after NCCL has taken an init that does not wait.
pub(super) fn meet_behind(place: Handle, identity: Identity, call: ChildCall) {
    let Some((handle, communicator)) = note(place, identity) else { return };
    communicator.identify_nonblocking(true, identity);
    let roster = call.lineage.clone();
    communicator::go_on_behind(vec![handle], Some(roster), move |is_made| {
        if is_made { meet(handle, call) } else { ncclSuccess }
    });
}

/// Has the ranks meet. Returns a failure that other ranks may not share; without a peer group the communicator is NCCL's.
fn meet(handle: ncclComm_t, call: ChildCall) -> ncclResult_t {
    let identity = known::identity(handle);
    let begun = [(handle, (), children::ask(identity, call))];
    let Some((_, (), outcome)) = init_ends::meet(begun.into_iter()).pop() else { return ncclSuccess };
    let Some(communicator) = communicator::find(handle) else { return ncclSuccess };
    let (has_peer_group, code) = match &outcome {
        InitOutcome::PeerGroup(_) => (true, ncclSuccess),
        InitOutcome::OnNccl(_) => (false, ncclSuccess),
        InitOutcome::Failed(failure) => {
            (true, refuse(failure.code(), format_args!("no communicator: {failure}")))
        }
    };
    settle(handle, communicator, outcome, None);
    guard_first_launch(handle);
    // Last: without a peer group an end no longer waits for this thread.
    identity.into_iter().for_each(|identity| communicator.identify_nonblocking(has_peer_group, identity));
    code
}
