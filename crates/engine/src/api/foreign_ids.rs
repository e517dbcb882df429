//! Inits without a session behind their ids: a process without Windlass made the id, or there are several. NCCL makes the communicator. Its
//! ranks meet after that, if all had entered a roster of their host before, as those of a child whose parent is on NCCL do.

use crate::forward::configuration::Kept as Configuration;
use crate::peers::{self, ChildCall, ChildRequest, InitRequest, Laziness, Parent};

/// Comes before NCCL's init, and waits for no rank: this rank enters the roster. None if the ranks have a session, or can have no peer group.
pub(super) fn enter(request: &InitRequest, configuration: &Configuration) -> Option<ChildCall> {
    let configuration = configuration.clone();
    // As a child of a communicator with this name, of a kind that no split or shrink makes: a rank that makes this init in a group may
    // already be in the first split of it.
    let above = request.name_of_roster().and_then(|_| peers::lineage_of(request, configuration.clone()))?;
    let child = ChildRequest {
        color: Some(0),
        excluded: vec![-1],
        key: 0,
        vote: Laziness::None.vote(),
        parent: Parent::Built,
        is_refused: false,
        is_in_group: false,
        device: request.device.as_ref().ok().copied(),
        waiting: request.waiting,
        ctas: Some(request.ctas),
        configuration,
        shares: false,
    };
    let mut call = ChildCall::of(&above, child)?;
    call.begin().ok()?;
    call.meets().then_some(call)
}
