//! Splits, shrinks and grows. The ranks of a parent with a peer group may first tell each other where they go; those of a lazy child then
//! meet, and NCCL is called only if others need it. Otherwise NCCL makes the child. Its ranks meet after that, at the call or at the end
//! of the outermost group. What a rank does next is decided by the [plan](windlass_bootstrap::children::plan).
//!
//! A shrink never materializes a lazy parent, as the excluded ranks do not call: the child is made without the parent. So is every child
//! of a lazy communicator whose materializing failed on some ranks only.

use std::cell::Cell;
use std::sync::{Arc, Once};

use nccl_sys::missing::is_missing;
use nccl_sys::{
    Entry, ncclInternalError, ncclInvalidArgument, ncclInvalidUsage, ncclRemoteError, ncclResult_t,
    ncclSuccess,
};

use crate::communicator;
use crate::features::recycling;
use crate::forward::configuration::Given;
use crate::forward::init::{self, FromParent, Handle, InitCall};
use crate::forward::{device, known};
use crate::group::{self, Awaited};
use crate::lazy::{self, LazyCommunicator, Unfit, on_device};
use crate::peers::{self, ChildCall, ChildPlan, ChildRequest, InitOutcome, Laziness, Parent, PeerGroup};
use windlass_base::error::refuse;
use windlass_base::stats::count::{self, Identity};
use windlass_base::{guard, process, thread};
use windlass_bootstrap::id_tag::Id;
use windlass_bootstrap::negotiated;
use windlass_bootstrap::outcome::FallbackReason;

use super::handles::{UNKNOWN, is_taken, note};
use super::init_ends::{self, guard_first_launch, settle};
use super::queries;

/// What is left to do once a rank has heard from the others as far as it waits for them.
enum Step {
    /// NCCL's call as the program made it; then a session, if there is to be one.
    Nccl(Option<ChildCall>),
    /// The ranks have met and have a peer group.
    Met(Arc<LazyCommunicator>),
    /// The child has no peer group, or NCCL has no parent: NCCL makes it by an id.
    ById(ById),
    /// This rank is in no child, and no rank needs NCCL.
    Nothing,
    /// The call fails.
    Failed(ncclResult_t),
}

/// A step, and whether ranks of other children need NCCL's split before it: then this rank makes it without a color.
struct StepToNccl {
    step: Step,
    splits_too: bool,
}

/// A child that NCCL makes by an id of one of the parent's ranks.
struct ById {
    parent: Arc<PeerGroup>,
    /// The rank of the parent that makes the id; none if this rank is the only one.
    of: Option<u32>,
    /// The number of the child, by which the id is asked for.
    number: u64,
    /// The id, if this rank has it already.
    id: Option<Id>,
    identity: Identity,
    reason: FallbackReason,
}

/// Makes a child communicator, and has its ranks meet. Waits for other ranks, except in a group.
pub(super) fn init_child(entry: Entry, init: &InitCall) -> ncclResult_t {
    let met = Cell::new(ncclSuccess);
    let result = guard::around(
        || {
            thread::without_cancellation(|| {
                process::first_communicator();
                count::function(entry);
                recycling::make_room(device::current().ok());
                if let Some(parent) = init.aborted_parent() {
                    let known = communicator::find(parent);
                    known.and_then(|known| known.peer_group(parent)).iter().for_each(|one| one.abort());
                }
                let begun = begin(init);
                windlass_bootstrap::leave_room_for_nccl();
                begun
            })
        },
        |begun| act(begun, init),
        |begun, result| {
            met.set(thread::without_cancellation(|| finish(begun.step, Handle(init.place), result)));
        },
    );
    result.and(met.get())
}

/// Runs the plan up to NCCL's call: the round, and the session of a child that is made without that call.
fn begin(init: &InitCall) -> StepToNccl {
    let alone = |step| StepToNccl { step, splits_too: false };
    let Some((parent, mut call)) = call_of(init) else { return alone(Step::Nccl(None)) };
    let plan = match call.begin() {
        Ok(plan) => plan,
        Err(failure) => {
            let why = format_args!("no communicator from another: {failure}");
            return alone(Step::Failed(refuse(failure.code(), why)));
        }
    };
    match (plan, parent) {
        (ChildPlan::Nccl, _) if call.has_lost_parent() => {
            let why = format_args!("a communicator from another that was ended meanwhile");
            alone(Step::Failed(refuse(ncclInternalError, why)))
        }
        (ChildPlan::Nccl, _) => alone(Step::Nccl(Some(call))),
        (ChildPlan::Meet { rank, ranks, is_lazy, splits_too }, Some(parent)) => {
            let laziness = if is_lazy { Laziness::AsConfigured } else { Laziness::None };
            let by_id = by_id(parent, &call, rank, &ranks);
            let step = meet_first(by_id, call, laziness);
            // The child's other ranks fail, too: they would not come to the split, and the parent may be gone.
            StepToNccl { splits_too: splits_too && !matches!(step, Step::Failed(_)), step }
        }
        (ChildPlan::StayAway { rank, ranks }, Some(parent)) => {
            let by_id = by_id(parent, &call, rank, &ranks);
            alone(stay_away(FallbackReason::Child, call, by_id))
        }
        (ChildPlan::Nothing, _) => alone(Step::Nothing),
        (ChildPlan::Torn, _) => {
            let why = format_args!(
                "no communicator from another, which NCCL has built on some ranks only, while a rank does not wait for the others, as in a group"
            );
            alone(Step::Failed(refuse(ncclRemoteError, why)))
        }
        _ => alone(Step::Nccl(None)),
    }
}

/// The parent's peer group, if it has one, and this rank's call. None if there can be no session.
fn call_of(init: &InitCall) -> Option<(Option<Arc<PeerGroup>>, ChildCall)> {
    let FromParent { color, excluded, key, waiting, ctas } = init.from_parent()?;
    let parent = init.parent?;
    // The others of a parent whose calls do not wait find that this rank has not entered the roster.
    let known = communicator::find(parent).filter(|known| !known.is_nonblocking())?;
    let (lineage, peer_group, lazy) = (known.lineage(parent)?, known.peer_group(parent), known.lazy(parent));
    let shares = lineage.configuration().may_share();
    peer_group.iter().filter(|_| shares).for_each(|one| one.share());
    let device = match (&lazy, &peer_group) {
        (Some(lazy), _) => Some(lazy.device),
        (None, Some(_)) => known::identity(parent).map(|identity| identity.device),
        (None, None) => None,
    };
    let standing = match lazy.map_or(Parent::Built, |lazy| lazy.standing()) {
        Parent::Built => Parent::Built,
        // The excluded ranks, or those that lack the parent, do not make the call, so NCCL cannot build it.
        _ if !excluded.is_empty() => Parent::Unbuildable,
        standing => standing,
    };
    let request = ChildRequest {
        color,
        excluded,
        key,
        vote: Laziness::AsConfigured.vote(),
        parent: standing,
        is_refused: init.refusal(lineage.rank).is_some(),
        is_in_group: group::is_open(),
        device,
        waiting: peers::waits(waiting),
        is_nonblocking: false,
        ctas,
        configuration: Given::of(init.config).over(lineage.configuration()),
        shares,
    };
    Some((peer_group, ChildCall::of(&lineage, request)?))
}

/// This rank's child, of these ranks of the parent.
fn by_id(parent: Arc<PeerGroup>, call: &ChildCall, rank: u32, ranks: &[u32]) -> ById {
    let device = call.request.device.unwrap_or_default();
    ById {
        parent,
        of: ranks.first().copied().filter(|_| ranks.len() > 1),
        number: call.invitation.child.number(),
        id: None,
        identity: Identity { rank: rank as i32, ranks: ranks.len() as i32, device },
        reason: FallbackReason::OneRank,
    }
}

/// Waits for the session of the child's ranks. Without a peer group, NCCL makes the child by an id.
fn meet_first(by_id: ById, mut call: ChildCall, laziness: Laziness) -> Step {
    if by_id.of.is_none() {
        return Step::ById(by_id);
    }
    let asked = match call.ask(by_id.identity, laziness) {
        Ok(asked) => asked,
        Err(reason) => return stay_away(reason, call, by_id),
    };
    match peers::complete_one(asked) {
        InitOutcome::PeerGroup(peer_group) => {
            peer_group.lineage.keep_configuration(call.request.configuration.clone());
            Step::Met(LazyCommunicator::new(peer_group, by_id.identity.device, None))
        }
        InitOutcome::OnNccl(reason) => Step::ById(ById { reason, ..by_id }),
        InitOutcome::Failed(failure) => {
            Step::Failed(refuse(failure.code(), format_args!("no communicator: {failure}")))
        }
    }
}

/// For a rank that cannot come to the session: the others go to NCCL when they hear so. This rank gets the id first, as that may fail,
/// too; then the init fails on the others as well.
fn stay_away(reason: FallbackReason, call: ChildCall, by_id: ById) -> Step {
    match id_of(&by_id) {
        Ok(id) => {
            call.refuse(reason.clone());
            Step::ById(ById { id: Some(id), reason, ..by_id })
        }
        Err(code) => Step::Failed(code),
    }
}

/// Calls NCCL as far as the step needs it. Panics are not caught here, so that an exception of NCCL's passes through.
fn act(begun: &StepToNccl, init: &InitCall) -> ncclResult_t {
    if matches!(begun.step, Step::Met(_) | Step::ById(_)) {
        stop_parent(init);
    }
    let others = if begun.splits_too { run(&init.without_color()) } else { ncclSuccess };
    match &begun.step {
        Step::Failed(code) => *code,
        _ if others != ncclSuccess => others,
        Step::Nccl(_) => run(init),
        Step::Nothing => ncclSuccess,
        Step::Met(lazy) if lazy.peer_group.negotiated().is_lazy() => ncclSuccess,
        // Not all ranks wanted it lazy.
        Step::Met(lazy) => lazy.materialize_beside().wait(),
        Step::ById(by_id) => make(by_id, init),
    }
}

/// Has NCCL make a communicator; a lazy parent is materialized first, by all its ranks.
fn run(init: &InitCall) -> ncclResult_t {
    match init.parent.and_then(queries::lazy_of) {
        None if init.parent.is_some_and(lazy::is_ours) => {
            refuse(ncclInvalidArgument, format_args!("a communicator from one that has been destroyed"))
        }
        None => init.run(),
        Some(lazy) => {
            // Checked even if the parent is materialized. After it refuses a configuration, NCCL's parent keeps a pointer to the child's
            // freed abort flag, and writes there when it is aborted (2.28.9, ncclCommInitChildComm), even by a later lazy communicator.
            if let Some(why) = init.refusal(lazy.peer_group.rank()) {
                return refuse(ncclInvalidArgument, format_args!("a communicator from another: {why}"));
            }
            // The child may use the parent's resources.
            lazy.mark(Unfit::Everywhere);
            let (init, given) = (*init, Given::of(init.config));
            // As NCCL does until the communicator exists.
            init::hand_out(Handle(init.place), std::ptr::null_mut());
            queries::with_real(&lazy, move |real| InitCall { parent: Some(real), ..init.with(&given) }.run())
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

fn make(by_id: &ById, init: &InitCall) -> ncclResult_t {
    let Identity { device, rank, ranks } = by_id.identity;
    match by_id.id.map_or_else(|| id_of(by_id), Ok) {
        Ok(id) => on_device(device, || init.instead(ranks as u32, &id, rank as u32).run()),
        Err(code) => code,
    }
}

fn id_of(by_id: &ById) -> Result<Id, ncclResult_t> {
    match by_id.of {
        None => init::make_id(),
        // The wait ends with the parent, as that for rounds and sessions does.
        Some(of) => by_id.parent.ids.get(of, by_id.number, &|| by_id.parent.lineage.has_ended()),
    }
}

/// Called after NCCL's call, or without one: has the ranks meet if need be, and gives out the handle.
fn finish(step: Step, place: Handle, result: ncclResult_t) -> ncclResult_t {
    match step {
        Step::Nccl(call) => return after_nccl(call, place, result),
        _ if result != ncclSuccess => drop(group::fail(result)),
        Step::Met(lazy) => init_ends::hand_out(place, lazy, None),
        Step::Nothing => init::hand_out(place, std::ptr::null_mut()),
        Step::ById(ById { identity, reason, .. }) => {
            if let Some((handle, communicator)) = note(place, identity) {
                settle(handle, communicator, InitOutcome::OnNccl(reason), None);
            }
        }
        Step::Failed(_) => {}
    }
    ncclSuccess
}

/// Has the child's ranks meet now or at the end of the group, or records the child as on NCCL.
fn after_nccl(call: Option<ChildCall>, place: Handle, result: ncclResult_t) -> ncclResult_t {
    // A call that NCCL refuses by its arguments does not count as a child of the parent; here neither.
    let counts =
        |call: &ChildCall| call.is_begun || result != ncclInvalidArgument && result != ncclInvalidUsage;
    let mut call = call.filter(counts);
    call.iter_mut().for_each(|call| call.begun());
    match call {
        Some(call) if result == ncclSuccess && call.meets() => {
            if !group::is_open() {
                return meet(vec![(place, call)]);
            }
            group::wait_for(Awaited::Child(place, Box::new(call)));
        }
        _ if is_taken(result) => note_on_nccl(place),
        _ => drop(group::fail(result)),
    }
    ncclSuccess
}

/// Records a child that cannot have a peer group.
fn note_on_nccl(place: Handle) {
    let Some((handle, communicator)) = note(place, UNKNOWN) else { return };
    communicator.count_as_child();
    let ranks = known::identity(handle).map_or(0, |identity| identity.ranks);
    if peers::is_on() && (2..=negotiated::RANKS_MAX as i32).contains(&ranks) {
        say_once(ranks);
    }
}

/// Warns once of a child without a peer group, as programs that split a world of several hosts would not notice.
fn say_once(ranks: i32) {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        ::log::warn!(
            "a communicator of {ranks} ranks has no peer group: it was grown, or made from a communicator on NCCL"
        );
    });
}

/// Called before NCCL runs a group: refuses sessions of its children. Another rank may make the same calls outside a group: it waits for
/// this rank's session between them, while NCCL here waits for all calls. Only if all children are of one call, with several
/// ranks in this thread, do they have a session, as they need a group.
pub(super) fn before_group(awaited: Vec<Awaited>) -> Vec<Awaited> {
    let call = |waited: &Awaited| match waited {
        Awaited::Child(_, call) => Some(call.invitation.call),
        _ => None,
    };
    let calls: Vec<_> = awaited.iter().filter_map(call).collect();
    if calls.len() > 1 && calls.iter().all(|call| *call == calls[0]) {
        return awaited;
    }
    let refused = |waited| match waited {
        Awaited::Child(place, call) => {
            call.refuse(FallbackReason::Grouped);
            Awaited::Handle(place, FallbackReason::Grouped)
        }
        other => other,
    };
    awaited.into_iter().map(refused).collect()
}

/// Called after NCCL has run a group: has the ranks of its children meet. Returns the other entries, and the first failure.
pub(super) fn after_group(awaited: Vec<Awaited>, result: ncclResult_t) -> (Vec<Awaited>, ncclResult_t) {
    let (mut rest, mut children) = (Vec::new(), Vec::new());
    for waited in awaited {
        match waited {
            Awaited::Child(place, call) => children.push((place, *call)),
            other => rest.push(other),
        }
    }
    let met = if result == ncclSuccess { meet(children) } else { result };
    (rest, met)
}

/// Runs the sessions of communicators that NCCL has made, all at once, and waits for them. Returns the first failure.
pub(super) fn meet(made: Vec<(Handle, ChildCall)>) -> ncclResult_t {
    let begun = made.into_iter().filter_map(|(place, call)| {
        let (handle, _) = note(place, UNKNOWN)?;
        let identity = known::identity(handle);
        let parts = identity.filter(|identity| identity.ranks > 1);
        let lineage = parts.map(|identity| call.lineage_of_child(identity.rank.max(0) as u32));
        let request = call.request.clone();
        Some((handle, (place, request, lineage), ask(identity, call)))
    });
    let mut first = ncclSuccess;
    for (handle, (place, request, lineage), outcome) in init_ends::meet(begun) {
        match &outcome {
            InitOutcome::PeerGroup(peer_group) => {
                peer_group.lineage.keep_configuration(request.configuration);
                if request.shares {
                    peer_group.share();
                }
            }
            InitOutcome::OnNccl(_) => {}
            InitOutcome::Failed(failure) => {
                let code = refuse(failure.code(), format_args!("no communicator: {failure}"));
                first = first.and(code);
                // If the communicator is gone, an abort has ended it meanwhile.
                if communicator::remove(handle).is_some() {
                    known::take_back(place, handle);
                }
            }
        }
        if let Some(communicator) = communicator::find(handle) {
            settle(handle, communicator, outcome, lineage);
            guard_first_launch(handle);
        }
    }
    first
}

pub(super) fn ask(identity: Option<Identity>, mut call: ChildCall) -> Result<peers::Asked, InitOutcome> {
    let asked = match identity {
        Some(identity) if identity.rank >= 0 && identity.ranks > identity.rank => {
            call.ask(identity, Laziness::None)
        }
        _ => Err(FallbackReason::NoIdentity { words: "NCCL does not say which rank this is".into() }),
    };
    asked.map_err(|reason| {
        call.refuse(reason.clone());
        InitOutcome::OnNccl(reason)
    })
}
