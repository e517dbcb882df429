//! Splits and shrinks of a communicator with a peer group, before NCCL is called. The parent's ranks first tell each other in a round
//! where they go and what they want of NCCL. The ranks of a lazy child then meet, and NCCL is called only if other ranks need it.
//! A rank in a group cannot wait: it says so, and NCCL makes all children.
//!
//! A shrink never materializes a lazy parent, as the excluded ranks do not call: the child is made without the parent. So is every child
//! of a lazy communicator whose materializing failed on some ranks only.

mod way;

use std::sync::Arc;

use nccl_sys::missing::is_missing;
use nccl_sys::{Entry, ncclConfig_t, ncclInternalError, ncclRemoteError, ncclResult_t, ncclSuccess};

use crate::communicator;
use crate::forward::configuration::Kept as Configuration;
use crate::forward::init::{self, Handle, InitCall};
use crate::forward::known;
use crate::group;
use crate::lazy::{LazyCommunicator, on_device};
use crate::peers::{
    self, Asked, ChildCall, ChildInit, Configured, Course, InitOutcome, Laziness, NewCommunicator, Others,
    PeerGroup,
};
use windlass_base::error::refuse;
use windlass_base::stats::count::Identity;
use windlass_bootstrap::id_tag::Id;
use windlass_bootstrap::outcome::FallbackReason;

use super::handles::note;
use super::nccl_children::{self, Before, OfPeerGroup};
use super::queries;
use super::session::{self, settle};
use way::{CallFacts, Way, way};

/// What is left to do after the round.
pub(super) enum Step {
    /// NCCL's call, with the application's arguments; then a session, if there is to be one.
    Nccl(Option<Before>),
    /// The same, after a round.
    Begun(ChildInit, Configured),
    /// The ranks have met and have a peer group.
    Met(Arc<LazyCommunicator>, Others),
    /// The child has no peer group, or NCCL has no parent: NCCL makes it by an id.
    ById(ById),
    /// This rank is in no child, and no rank needs NCCL.
    Nothing,
    /// The call fails.
    Failed(ncclResult_t),
    /// The call fails on this rank; but ranks of other colors may wait for it in NCCL.
    Lost(ncclResult_t, Others),
}

/// A child that NCCL makes by an id of one of the parent's ranks.
pub(super) struct ById {
    parent: Arc<PeerGroup>,
    /// The rank of the parent that makes the id; none if this rank is the only one.
    of: Option<u32>,
    /// The number of the child, by which the id is asked for.
    number: u64,
    /// The id, if this rank has it already.
    id: Option<Id>,
    new_communicator: NewCommunicator,
    config: *mut ncclConfig_t,
    others: Others,
    reason: FallbackReason,
}

/// Runs the round, and the session of a lazy child. Waits for other ranks, except in a group.
pub(super) fn step(init: &InitCall, before: Option<Before>) -> Step {
    let (mut child_call, configured) = match before {
        Some(Before::OfPeerGroup(OfPeerGroup { child_call, configured })) => (child_call, configured),
        Some(Before::OfParentOnNccl(of_parent_on_nccl)) if of_parent_on_nccl.has_lost_parent() => {
            return Step::Failed(refuse(
                ncclInternalError,
                format_args!("a communicator from another that was ended meanwhile"),
            ));
        }
        other => return Step::Nccl(other),
    };
    let Some(parent) = parent_of(init) else { return Step::Nccl(None) };
    let device = match init.parent().and_then(queries::lazy_of) {
        Some(lazy) => Some(lazy.device()),
        None => init.parent().and_then(known::identity).map(|identity| identity.device),
    };
    let way = way(CallFacts {
        is_refused: init.refusal(parent.rank()).is_some(),
        has_round: child_call.has_round(),
        is_without_parent: child_call.is_without_parent(),
        has_lost_parent: child_call.has_lost_parent(),
        is_in_group: group::is_open(),
        has_device: device.is_some(),
        is_readable: !matches!(configured.configuration, Configuration::Unknown),
    });
    match (way, device) {
        (Way::Alone, Some(device)) => alone(init, parent, child_call, device),
        (Way::Round, Some(device)) => round(init, parent, child_call, configured, device),
        (Way::Nccl | Way::Alone | Way::Round, _) => Step::Nccl(None),
        (Way::Roster | Way::Hurry, _) => {
            if way == Way::Hurry {
                child_call.go_to_nccl();
            }
            child_call.enter();
            Step::Nccl(Some(Before::OfPeerGroup(OfPeerGroup { child_call, configured })))
        }
        (Way::Fail, _) => {
            child_call.begun().fail();
            let why = format_args!(
                "no communicator from another in a group: NCCL has built that on some ranks only"
            );
            Step::Failed(refuse(ncclRemoteError, why))
        }
    }
}

/// Makes this rank's child by an id, without a round.
fn alone(init: &InitCall, parent: Arc<PeerGroup>, child_call: ChildCall, device: i32) -> Step {
    child_call.go_to_nccl();
    let mut child_init = child_call.begun();
    let Course::Apart { rank, ranks } = child_init.alone() else { return Step::Nccl(None) };
    let by_id = by_id(init, parent, &child_init, device, rank, &ranks);
    child_init.refuse(FallbackReason::Child);
    Step::ById(by_id)
}

/// Runs the round of all ranks of the call, and does what it decides.
fn round(
    init: &InitCall,
    parent: Arc<PeerGroup>,
    child_call: ChildCall,
    configured: Configured,
    device: i32,
) -> Step {
    let mut child_init = child_call.begun();
    let course = match child_init.round(init.key(), Laziness::AsConfigured.vote()) {
        Ok(course) => course,
        Err(failure) => {
            child_init.fail();
            let why = format_args!("no communicator from another: {failure}");
            return Step::Failed(refuse(failure.code(), why));
        }
    };
    let configuration = configured.configuration.clone();
    match course {
        Course::Nothing => Step::Nothing,
        Course::Nccl => Step::Begun(child_init, configured),
        Course::Apart { rank, ranks } => {
            let by_id = by_id(init, parent, &child_init, device, rank, &ranks);
            if by_id.of.is_none() {
                return Step::ById(ById { reason: FallbackReason::OneRank, ..by_id });
            }
            let asked = child_init.ask(by_id.new_communicator, configured);
            met(asked, child_init, configuration, by_id)
        }
        Course::Lazy { rank, ranks, others } => {
            let by_id = by_id(init, parent, &child_init, device, rank, &ranks);
            let asked = child_init.ask_lazy(by_id.new_communicator, configured);
            met(asked, child_init, configuration, ById { others, ..by_id })
        }
        Course::Torn => {
            child_init.fail();
            let why = format_args!(
                "no communicator from another, which NCCL has built on some ranks only: one of them made this call in a group"
            );
            Step::Failed(refuse(ncclRemoteError, why))
        }
    }
}

fn parent_of(init: &InitCall) -> Option<Arc<PeerGroup>> {
    let parent = init.parent()?;
    communicator::find(parent)?.peer_group(parent)
}

/// This rank's child, of these ranks of the parent.
fn by_id(
    init: &InitCall,
    parent: Arc<PeerGroup>,
    child_init: &ChildInit,
    device: i32,
    rank: u32,
    ranks: &[u32],
) -> ById {
    ById {
        parent,
        of: ranks.first().copied().filter(|_| ranks.len() > 1),
        number: child_init.child().number(),
        id: None,
        new_communicator: NewCommunicator { device, rank, ranks: ranks.len() as u32 },
        config: init.config_of_child(),
        others: Others::Nothing,
        reason: FallbackReason::Child,
    }
}

/// Waits for the session of the child's ranks. Without a peer group, NCCL makes the child by an id.
fn met(
    asked: Result<Asked, FallbackReason>,
    child_init: ChildInit,
    configuration: Configuration,
    by_id: ById,
) -> Step {
    let asked = match asked {
        Ok(asked) => asked,
        Err(reason) => return does_not_come(reason, child_init, by_id),
    };
    match peers::complete(vec![asked]).pop().unwrap_or(InitOutcome::OnNccl(FallbackReason::Child)) {
        InitOutcome::PeerGroup(peer_group) => {
            peer_group.keep_configuration(configuration);
            Step::Met(LazyCommunicator::new(peer_group, by_id.new_communicator.device, None), by_id.others)
        }
        InitOutcome::OnNccl(reason) => Step::ById(ById { reason, ..by_id }),
        InitOutcome::Failed(failure) => {
            Step::Failed(refuse(failure.code(), format_args!("no communicator: {failure}")))
        }
    }
}

/// For a rank that cannot come to the session: the others go to NCCL when they hear so. This rank gets the id first, as that may fail,
/// too; then the init fails on the others as well.
fn does_not_come(reason: FallbackReason, child_init: ChildInit, by_id: ById) -> Step {
    match id_of(&by_id) {
        Ok(id) => {
            child_init.refuse(reason.clone());
            Step::ById(ById { id: Some(id), reason, ..by_id })
        }
        Err(code) => {
            child_init.fail();
            Step::Lost(code, by_id.others)
        }
    }
}

/// Calls NCCL as far as the step needs it. Panics are not caught here, so that an exception of NCCL's passes through.
pub(super) fn act(step: &Step, init: &InitCall) -> ncclResult_t {
    match step {
        Step::Nccl(_) | Step::Begun(..) => nccl_children::run(init),
        Step::Nothing => ncclSuccess,
        Step::Failed(code) => *code,
        Step::Lost(code, others) => {
            for_others(*others, init);
            *code
        }
        Step::Met(lazy, others) => {
            let result = for_others(*others, init);
            if matches!(others, Others::Nothing) {
                stop_parent(init);
            }
            if result != ncclSuccess || lazy.peer_group().negotiated().is_lazy() {
                return result;
            }
            // Not all ranks wanted it lazy.
            lazy.materialize_beside().wait()
        }
        Step::ById(by_id) => {
            stop_parent(init);
            let result = for_others(by_id.others, init);
            if result == ncclSuccess { make(by_id, init) } else { result }
        }
    }
}

/// Revokes the parent of a shrink with `NCCL_SHRINK_ABORT` that is made without the parent.
fn stop_parent(init: &InitCall) {
    let Some(lazy) = init.aborted_parent().and_then(queries::lazy_of) else { return };
    // Where NCCL has no revoke (2.27.3 to 2.28.6), the parent's work goes on until its owner aborts it.
    if lazy.real().is_some() && !lazy.is_revoked() && !is_missing(Entry::ncclCommRevoke) {
        lazy.revoke(0);
    }
}

fn for_others(others: Others, init: &InitCall) -> ncclResult_t {
    match others {
        Others::Nccl => nccl_children::run(&init.without_color()),
        Others::Nothing => ncclSuccess,
    }
}

fn make(by_id: &ById, init: &InitCall) -> ncclResult_t {
    let Some((place, _)) = init.new_communicators().next() else { return ncclSuccess };
    let NewCommunicator { device, rank, ranks } = by_id.new_communicator;
    match by_id.id.map_or_else(|| id_of(by_id), Ok) {
        Ok(id) => on_device(device, || init::make(place, ranks, &id, rank, by_id.config)),
        Err(code) => code,
    }
}

fn id_of(by_id: &ById) -> Result<Id, ncclResult_t> {
    match by_id.of {
        None => init::make_id(),
        // The wait ends with the parent, as that for rounds and sessions does.
        Some(of) => by_id.parent.ids().get(of, by_id.number, &|| by_id.parent.lineage().has_ended()),
    }
}

/// Called after NCCL's call, or without one: meets if need be, and gives out the handle.
pub(super) fn finish(step: Step, place: Handle, result: ncclResult_t) -> ncclResult_t {
    match step {
        Step::Nccl(before) => return nccl_children::after(before, place, result),
        Step::Begun(child_init, _) if result != ncclSuccess => child_init.fail(),
        Step::Begun(child_init, configured) => {
            return nccl_children::meet(vec![(place, configured, child_init)]);
        }
        _ if result != ncclSuccess => session::refused(result),
        Step::Met(lazy, _) => session::hand_out(place, lazy),
        Step::Nothing => init::hand_out(place, std::ptr::null_mut()),
        Step::ById(ById { new_communicator, reason, .. }) => {
            let NewCommunicator { device, rank, ranks } = new_communicator;
            let identity = Identity { rank: rank as i32, ranks: ranks as i32, device };
            if let Some((handle, communicator)) = note(place, identity) {
                settle(handle, communicator, InitOutcome::OnNccl(reason));
            }
        }
        Step::Failed(_) | Step::Lost(..) => {}
    }
    ncclSuccess
}
