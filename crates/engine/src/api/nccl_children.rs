//! Splits and shrinks that NCCL makes ([`super::children`] decides which). Afterwards, at the call or at the end of the
//! outermost group, the ranks of the child may meet and get a peer group.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::{Arc, Once};

use nccl_sys::{
    Entry, NCCL_SPLIT_NOCOLOR, ncclComm_t, ncclInProgress, ncclInvalidArgument, ncclInvalidUsage,
    ncclResult_t, ncclSuccess,
};

use crate::communicator::{self, Communicator, Kept};
use crate::features::recycling;
use crate::forward::configuration::{Given, Kept as Configuration};
use crate::forward::device;
use crate::forward::init::{Ctas, FromParent, Handle, InitCall, Which, hand_out};
use crate::forward::known;
use crate::group::{self, Awaited};
use crate::lazy;
use crate::lazy::Unfit;
use crate::peers::{
    self, Asked, ChildCall, ChildInit, Configured, InitOutcome, LocalWait, NewCommunicator, ParentOnNccl,
    Standing, Waiting, Wanted,
};
use windlass_base::error::refuse;
use windlass_base::guard;
use windlass_base::process;
use windlass_base::stats::count;
use windlass_bootstrap::negotiated;
use windlass_bootstrap::outcome::FallbackReason;

use super::handles::{UNKNOWN, note};
use super::session::{self, settle};
use super::{children, queries};

/// What is prepared before NCCL's call, for after it.
pub(super) enum Before {
    /// The parent has a peer group.
    OfPeerGroup(OfPeerGroup),
    /// The parent has no peer group.
    OfParentOnNccl(OfParentOnNccl),
}

/// A call whose parent has a peer group.
pub(super) struct OfPeerGroup {
    pub child_call: ChildCall,
    pub configured: Configured,
}

/// A call whose parent has no peer group.
pub(super) struct OfParentOnNccl {
    parent_on_nccl: Arc<ParentOnNccl>,
    wanted: Wanted,
    /// The host-local rendezvous; none where this rank's child cannot have a peer group.
    local_wait: Option<LocalWait>,
    configured: Configured,
}

impl OfParentOnNccl {
    /// Whether another thread has ended the parent while this rank waited: NCCL's parent may be gone.
    pub(super) fn has_lost_parent(&self) -> bool {
        self.local_wait.is_some() && self.parent_on_nccl.has_ended()
    }
}

/// Whether an init is a split or shrink.
pub(super) fn is_one(init: &InitCall) -> bool {
    matches!(init, InitCall::Split { .. } | InitCall::Shrink { .. })
}

/// Makes a child communicator, and has its ranks meet.
pub(super) fn init_child(entry: Entry, init: &InitCall) -> ncclResult_t {
    let met = Cell::new(ncclSuccess);
    let result = guard::around(
        || {
            process::first_communicator();
            count::function(entry);
            recycling::make_room(device::current().ok());
            if let Some(parent) = init.aborted_parent() {
                communicator::find(parent)
                    .and_then(|communicator| communicator.peer_group(parent))
                    .iter()
                    .for_each(|peer_group| peer_group.abort());
            }
            children::step(init, init.from_parent().and_then(before))
        },
        |step| children::act(step, init),
        |step, result| {
            if let Some((handle, _)) = init.new_communicators().next() {
                met.set(children::finish(step, handle, result));
            }
        },
    );
    if result == ncclSuccess { met.get() } else { result }
}

/// Has NCCL make a communicator; a lazy parent is materialized first, by all its ranks.
pub(super) fn run(init: &InitCall) -> ncclResult_t {
    match init.parent().and_then(queries::lazy_of) {
        None if init.parent().is_some_and(lazy::is_ours) => {
            refuse(ncclInvalidArgument, format_args!("a communicator from one that has been destroyed"))
        }
        None => init.run(),
        Some(lazy) => {
            // Checked even if the parent is materialized. After it refuses a configuration, NCCL's parent keeps a pointer to the child's
            // freed abort flag, and writes there when it is aborted (2.28.9, ncclCommInitChildComm), even by a later lazy communicator.
            if let Some(why) = init.refusal(lazy.peer_group().rank()) {
                return refuse(ncclInvalidArgument, format_args!("a communicator from another: {why}"));
            }
            // The child may use the parent's resources.
            lazy.mark(Unfit::Everywhere);
            let (init, given) = (*init, init.given());
            if let Some((place, _)) = init.new_communicators().next() {
                // As NCCL does until the communicator exists.
                hand_out(place, std::ptr::null_mut());
            }
            queries::with_real(&lazy, move |real| init.with(&given).of_parent(real).run())
        }
    }
}

fn before(from: FromParent) -> Option<Before> {
    let FromParent { parent, which, configured, given } = from;
    let known = communicator::find(parent)?;
    let wanted = match which {
        Which::Color(NCCL_SPLIT_NOCOLOR) => Wanted::Split(None),
        Which::Color(color) => Wanted::Split(Some(color)),
        Which::AllBut(excluded) => Wanted::Shrink(excluded),
    };
    if let Some(parent_on_nccl) = known.parent_on_nccl(parent) {
        return Some(Before::OfParentOnNccl(before_of_parent_on_nccl(
            parent_on_nccl,
            wanted,
            configured,
            &given,
        )));
    }
    let child_call = |kept: &Kept| {
        let standing = match kept {
            Kept::Lazy(lazy) => lazy.standing(),
            _ => Standing::Built,
        };
        ChildCall::of(kept.peer_group()?.lineage(), &wanted, standing)
    };
    let child_call = known.look_at_kept(parent, child_call)??;
    let peer_group = known.peer_group(parent)?;
    let configuration = given.over(peer_group.configuration());
    let shares = peer_group.configuration().may_share();
    if shares {
        peer_group.registering().into_iter().for_each(|one| one.share());
        peer_group.windows().into_iter().for_each(|one| one.share());
    }
    let configured = match configured {
        // A parent with a peer group is blocking.
        None => Configured { waiting: Some(Waiting::Blocking), ctas: None, configuration, shares },
        Some((blocking, ctas)) => {
            Configured { configuration, shares, waiting: blocking.map(waiting), ctas: Some(ctas) }
        }
    };
    Some(Before::OfPeerGroup(OfPeerGroup { child_call, configured }))
}

/// Prepares a call whose parent has no peer group. A child that NCCL makes at the end of a group has no session: see [`before_group`].
fn before_of_parent_on_nccl(
    parent_on_nccl: Arc<ParentOnNccl>,
    wanted: Wanted,
    configured: Option<(Option<c_int>, Ctas)>,
    given: &Given,
) -> OfParentOnNccl {
    let configuration = given.over(parent_on_nccl.configuration());
    let (blocking, ctas) = configured.unzip();
    // The parent is blocking.
    let waiting = blocking.flatten().map_or(Waiting::Blocking, waiting);
    let local_wait = if group::is_open() { None } else { parent_on_nccl.enter_local(&wanted, waiting) };
    let shares = parent_on_nccl.configuration().may_share();
    let configured = Configured { waiting: Some(waiting), ctas, configuration, shares };
    OfParentOnNccl { parent_on_nccl, wanted, local_wait, configured }
}

fn waiting(blocking: c_int) -> Waiting {
    if blocking == 0 { Waiting::NonBlocking } else { Waiting::Blocking }
}

/// Called after NCCL's call: has the child's ranks meet now or at the end of the group, or records the child as on NCCL.
pub(super) fn after(before: Option<Before>, handle: Handle, result: ncclResult_t) -> ncclResult_t {
    // A call that NCCL refuses by its arguments does not count as a child of the parent; here neither.
    let begun = result != ncclInvalidArgument && result != ncclInvalidUsage;
    let before = before.filter(|_| begun);
    if let Some(Before::OfParentOnNccl(of_parent_on_nccl)) = before {
        return after_of_parent_on_nccl(of_parent_on_nccl, handle, result);
    }
    let Some(Before::OfPeerGroup(OfPeerGroup { child_call, configured })) = before else {
        if result == ncclSuccess || result == ncclInProgress {
            note_on_nccl(handle);
        } else {
            session::refused(result);
        }
        return ncclSuccess;
    };
    let child_init = child_call.begun();
    if result != ncclSuccess {
        session::refused(result);
        child_init.fail();
    } else if group::is_open() {
        group::wait_for(Awaited::Child(handle, configured, Box::new(child_init)));
    } else {
        return meet(vec![(handle, configured, child_init)]);
    }
    ncclSuccess
}

/// The same for a call whose parent has no peer group.
fn after_of_parent_on_nccl(
    of_parent_on_nccl: OfParentOnNccl,
    place: Handle,
    result: ncclResult_t,
) -> ncclResult_t {
    let OfParentOnNccl { parent_on_nccl, wanted, local_wait, configured } = of_parent_on_nccl;
    parent_on_nccl.begun(&wanted);
    if result != ncclSuccess && result != ncclInProgress {
        session::refused(result);
        return ncclSuccess;
    }
    let Some(local_wait) = local_wait.filter(|_| result == ncclSuccess) else {
        note_on_nccl(place);
        return ncclSuccess;
    };
    meet(vec![(place, configured, local_wait.child_init())])
}

/// Records a child that cannot have a peer group.
fn note_on_nccl(handle: Handle) {
    let Some((handle, communicator)) = note(handle, UNKNOWN) else { return };
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
            "a communicator of {ranks} ranks has no peer group: the communicator that it was made from has none"
        );
    });
}

/// Called before NCCL runs a group: refuses sessions of its children. Another rank may make the same calls outside a group: it waits for
/// this rank's session between them, while NCCL here waits for all calls. Only if all children are of one call, with several
/// ranks in this thread, do they have a session, as they need a group.
pub(super) fn before_group(awaited: Vec<Awaited>) -> Vec<Awaited> {
    let is_child = |waited: &&Awaited| matches!(waited, Awaited::Child(..));
    let calls: Vec<_> = awaited
        .iter()
        .filter_map(|waited| match waited {
            Awaited::Child(_, _, child_init) => Some(child_init.call()),
            _ => None,
        })
        .collect();
    let together = calls.len() > 1 && calls.iter().all(|call| *call == calls[0]);
    if together || awaited.iter().find(is_child).is_none() {
        return awaited;
    }
    let refused = |waited| match waited {
        Awaited::Child(handle, _, child_init) => {
            child_init.refuse(FallbackReason::Grouped);
            Awaited::Grouped(handle)
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
            Awaited::Child(handle, configured, child_init) => {
                children.push((handle, configured, *child_init))
            }
            other => rest.push(other),
        }
    }
    if result != ncclSuccess {
        children.into_iter().for_each(|(_, _, child_init)| child_init.fail());
        return (rest, result);
    }
    let met = if children.is_empty() { ncclSuccess } else { meet(children) };
    (rest, met)
}

/// A child that NCCL has made, during its session.
struct ChildSession {
    place: Handle,
    handle: ncclComm_t,
    communicator: &'static Communicator,
    configuration: Configuration,
    /// Whether NCCL's child may use its parent's resources.
    shares: bool,
    /// What it keeps for its own children, if it gets no peer group.
    parent_on_nccl: Option<Arc<ParentOnNccl>>,
}

/// Runs the sessions of children that NCCL has made, all at once, and waits for them. Returns the first failure.
pub(super) fn meet(made: Vec<(Handle, Configured, ChildInit)>) -> ncclResult_t {
    let (mut sessions, mut asked): (Vec<ChildSession>, Vec<Asked>) = (Vec::new(), Vec::new());
    for (place, configured, child_init) in made {
        let Some((handle, communicator)) = note(place, UNKNOWN) else {
            child_init.fail();
            continue;
        };
        let parent_on_nccl = known::identity(handle)
            // A child of two ranks has no children with peers.
            .filter(|identity| identity.ranks > 2)
            .map(|identity| ParentOnNccl::of_child(&child_init, identity.rank.max(0) as u32, &configured));
        let (configuration, shares) = (configured.configuration.clone(), configured.shares);
        match ask(handle, configured, child_init) {
            Ok(one) => {
                let waiting = one.canceller().map(Kept::Waiting);
                waiting.into_iter().for_each(|waiting| drop(communicator.keep(handle, waiting)));
                sessions.push(ChildSession {
                    place,
                    handle,
                    communicator,
                    configuration,
                    shares,
                    parent_on_nccl,
                });
                asked.push(one);
            }
            Err(reason) => {
                settle(handle, communicator, InitOutcome::OnNccl(reason));
                session::keep_parent_on_nccl(handle, communicator, parent_on_nccl);
            }
        }
    }
    let mut first = ncclSuccess;
    for (session, outcome) in sessions.into_iter().zip(peers::complete(asked)) {
        let ChildSession { place, handle, communicator, configuration, shares, parent_on_nccl } = session;
        let parent_on_nccl = parent_on_nccl.filter(|_| matches!(outcome, InitOutcome::OnNccl(_)));
        if let InitOutcome::PeerGroup(peer_group) = &outcome {
            peer_group.keep_configuration(configuration);
            peer_group.registering().filter(|_| shares).into_iter().for_each(|one| one.share());
            peer_group.windows().filter(|_| shares).into_iter().for_each(|one| one.share());
        }
        let failed = match &outcome {
            InitOutcome::Failed(failure) => {
                refuse(failure.code(), format_args!("no communicator: {failure}"))
            }
            _ => ncclSuccess,
        };
        if failed == ncclSuccess {
            settle(handle, communicator, outcome);
            session::keep_parent_on_nccl(handle, communicator, parent_on_nccl);
            session::guard_first_launch(handle);
            continue;
        }
        // If the communicator is gone, an abort has ended it meanwhile.
        if communicator::remove(handle).is_some() {
            known::take_back(place, handle);
        }
        if first == ncclSuccess {
            first = failed;
        }
    }
    first
}

fn ask(
    handle: ncclComm_t,
    configured: Configured,
    mut child_init: ChildInit,
) -> Result<Asked, FallbackReason> {
    let asked = match known::identity(handle) {
        Some(identity) if identity.rank >= 0 && identity.ranks > identity.rank => {
            let (rank, ranks) = (identity.rank as u32, identity.ranks as u32);
            child_init.ask(NewCommunicator { device: identity.device, rank, ranks }, configured)
        }
        _ => Err(FallbackReason::NoIdentity { words: "NCCL does not say which rank this is".into() }),
    };
    asked.inspect_err(|reason| child_init.refuse(reason.clone()))
}
