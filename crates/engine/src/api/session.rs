//! Inits by id: the ranks meet in a session before NCCL makes the communicator from the same id. NCCL does not make a lazy communicator.

use std::cell::Cell;
use std::sync::Arc;

use nccl_sys::profiler::hash;
use nccl_sys::{Entry, ncclResult_t, ncclSuccess};

use crate::communicator::{self, Kept};
use crate::features::recycling;
use crate::features::recycling::cached::{self, Kind, Taken};
use crate::forward::configuration::{Given, Kept as Configuration};
use crate::forward::init::{self, InitCall, InitFunction};
use crate::forward::{device, known};
use crate::group::{self, Awaited};
use crate::lazy::{self, LazyCommunicator, first_launch};
use crate::peers::{self, ChildCall, InitOutcome, InitRequest, Laziness, Lineage};
use windlass_base::config::nccl;
use windlass_base::error::refuse;
use windlass_base::gpu::{Ordinal, context};
use windlass_base::stats::count;
use windlass_base::{guard, process, thread};
use windlass_bootstrap::outcome::FallbackReason;

use super::children;
use super::foreign_ids;
use super::handles::{is_taken, note};
use super::init_ends::{self, guard_first_launch, hand_out, settle};

/// The state of an init before NCCL is called.
enum Step {
    /// Its session is over, or there is none; and what it keeps for its children if it has no peer group.
    Decided(InitOutcome, Option<Arc<Lineage>>),
    /// Its session is over, and NCCL is not called. For `ncclCommInitAll` all ranks.
    Lazy(Vec<Arc<LazyCommunicator>>),
    /// Its ranks meet once NCCL has made it, at the call or behind it.
    AtRoster(Box<ChildCall>),
    /// In a group: the session runs at the group's end.
    Grouped(InitRequest),
    /// `ncclCommInitAll`, not lazy: this thread has all ranks, which get a peer group after NCCL has made them.
    All,
    /// NCCL will refuse it.
    Refused,
}

/// Makes communicators, after their sessions. Waits for other ranks, except in a group.
pub(super) fn init_with_session(entry: Entry, init: &InitCall) -> ncclResult_t {
    lazy::ask_of_groups(group::is_open);
    if init.parent.is_some() {
        return children::init_child(entry, init);
    }
    let met = Cell::new(ncclSuccess);
    let result = guard::around(
        || {
            thread::without_cancellation(|| {
                process::first_communicator();
                count::function(entry);
                let device = device::of_init(group::device_set());
                recycling::make_room(device.as_ref().ok().copied());
                let step = begin(init, device);
                windlass_bootstrap::leave_room_for_nccl();
                step
            })
        },
        |step| match step {
            Step::Decided(InitOutcome::Failed(failure), _) => {
                refuse(failure.code(), format_args!("no communicator: {failure}"))
            }
            Step::Lazy(_) => ncclSuccess,
            _ => init.run(),
        },
        |step, result| {
            if is_taken(result) {
                met.set(thread::without_cancellation(|| finish(step, init)));
            } else {
                // An error of `ncclCommInitAll` does not fail the group around it.
                if !matches!(step, Step::All) {
                    group::fail(result);
                }
                drop(step);
                peers::settle();
            }
        },
    );
    result.and(met.get())
}

fn begin(init: &InitCall, device: Result<Ordinal, String>) -> Step {
    if matches!(init.function, InitFunction::All { .. }) {
        // Without a known device this thread could not be left as NCCL leaves it.
        return if device.is_err() { Step::All } else { all(init) };
    }
    let Some(init::Asked { id, more_ids, ranks, rank, waiting, ctas }) = init.by_id() else {
        return Step::Refused;
    };
    let given = Given::of(init.config);
    let laziness = match given {
        // NCCL makes the communicators of a group at its end.
        _ if group::is_open() => Laziness::None,
        _ if !device.as_ref().is_ok_and(|device| first_launch::is_guarded(*device)) => Laziness::None,
        Given::Nothing | Given::Sound(_) => Laziness::AsConfigured,
        Given::Doubtful | Given::Wrong => Laziness::None,
    };
    let cached = Vec::new();
    let request = InitRequest { id, more_ids, ranks, rank, waiting, ctas, device, laziness, cached };
    let configuration = given.over(&Configuration::Nothing);
    if group::is_open() {
        return Step::Grouped(request);
    }
    if let Some(call) = foreign_ids::enter(&request, &configuration) {
        return Step::AtRoster(Box::new(call));
    }
    let taken = take(&request, &configuration);
    let request = InitRequest { cached: taken.tokens(), ..request };
    let outcome = peers::ask(&request).map_or_else(|outcome| outcome, peers::complete_one);
    if let InitOutcome::PeerGroup(peer_group) = &outcome {
        peer_group.lineage.keep_configuration(configuration.clone());
    }
    match outcome {
        InitOutcome::PeerGroup(peer_group) if peer_group.negotiated().is_lazy() => {
            let built = taken.choose(peers::common_offer(peer_group.negotiated()));
            Step::Lazy(vec![LazyCommunicator::new(peer_group, request.device.unwrap_or_default(), built)])
        }
        outcome => Step::Decided(outcome, peers::lineage_of(&request, configuration)),
    }
}

/// Takes the cached communicators that could materialize this one.
fn take(request: &InitRequest, configuration: &Configuration) -> Taken {
    match (request.laziness, &request.device, configuration.words()) {
        (Laziness::AsConfigured, Ok(device), Some(configuration)) => {
            let device = *device;
            let (ranks, rank) = (request.ranks as u32, request.rank as u32);
            let configuration = [configuration, nccl::of_this_init()].concat();
            cached::take(&Kind { ranks, rank, device, context: context::on(device), configuration })
        }
        _ => Taken::nothing(),
    }
}

/// Begins `ncclCommInitAll`: the ranks may be lazy; otherwise NCCL makes them first.
fn all(init: &InitCall) -> Step {
    let devices = init.devices().unwrap_or_default();
    let are_lazy =
        peers::would_be_lazy(devices.len()) && devices.iter().all(|device| first_launch::is_guarded(*device));
    // For no devices NCCL gives its own error.
    if group::is_open() || devices.is_empty() || !are_lazy {
        return Step::All;
    }
    let outcomes = peers::all_here(&devices, Laziness::AsConfigured);
    let lazy = outcomes.into_iter().zip(devices).map(|(outcome, device)| match outcome {
        InitOutcome::PeerGroup(peer_group) => {
            peer_group.lineage.keep_configuration(Configuration::Nothing);
            Some(LazyCommunicator::new(peer_group, device, None))
        }
        _ => None,
    });
    // Without a peer group NCCL is called, which may refuse these devices.
    lazy.collect::<Option<Vec<_>>>().map_or(Step::All, Step::Lazy)
}

/// Called after NCCL has taken the init, or instead of NCCL for lazy communicators: records the communicators.
fn finish(step: Step, init: &InitCall) -> ncclResult_t {
    let step = match (step, init.new_communicators().next()) {
        (Step::AtRoster(call), Some((place, identity))) if call.request.is_nonblocking => {
            foreign_ids::meet_behind(place, identity, *call);
            return ncclSuccess;
        }
        (Step::AtRoster(call), Some((place, _))) => return children::meet(vec![(place, *call)]),
        (step, _) => step,
    };
    if let Step::Lazy(lazy_communicators) = step {
        let name = init.by_id().map(|asked| hash(&asked.id));
        let made = init.new_communicators().zip(lazy_communicators);
        made.for_each(|((place, _), lazy)| hand_out(place, lazy, name));
        return ncclSuccess;
    }
    let new_communicators: Vec<_> =
        init.new_communicators().map(|(handle, identity)| note(handle, identity)).collect();
    let one = new_communicators.first().copied().flatten();
    if let (Some(asked), Some((_, communicator))) = (init.by_id(), one) {
        count::name(communicator.counters(), hash(&asked.id));
    }
    match (step, one) {
        (Step::All, _) => {
            if group::is_open() {
                let made = init.new_communicators().zip(&new_communicators);
                made.filter_map(|((place, _), new_communicator)| {
                    Some(Awaited::Made(place, new_communicator.as_ref()?.0))
                })
                .for_each(group::wait_for);
            }
            let outcomes = peers::all_here(&init.devices().unwrap_or_default(), Laziness::None);
            for (new_communicator, outcome) in new_communicators.into_iter().zip(outcomes) {
                if let Some((handle, communicator)) = new_communicator {
                    settle(handle, communicator, outcome, None);
                    if !group::is_open() {
                        guard_first_launch(handle);
                    }
                }
            }
        }
        (Step::Grouped(request), Some((handle, _))) => {
            let places = init.new_communicators().map(|(place, _)| place);
            places.for_each(|place| {
                group::wait_for(Awaited::Requested(place, handle, Box::new(request.clone())))
            });
        }
        (Step::Decided(outcome, lineage), Some((handle, communicator))) => {
            settle(handle, communicator, outcome, lineage);
            guard_first_launch(handle);
        }
        // The handle is not written yet, as in a group or after a non-blocking call.
        (_, _) => {}
    }
    ncclSuccess
}

/// Called after a group has failed that was to make communicators. NCCL aborts all inits of such a group, and does not say which were
/// made. Drops what their sessions left; the application must abort the handles that NCCL left.
pub(super) fn lose(awaited: &[Awaited], result: ncclResult_t) {
    for waited in awaited {
        let Awaited::Made(place, handle) = waited else { continue };
        let kept = match known::read_handle(*place) == *handle {
            true => communicator::find(*handle).and_then(|communicator| communicator.give_up(*handle)),
            false => communicator::remove(*handle),
        };
        // Another rank's communicator may live, and must not wait for this rank.
        if let Some(Kept::PeerGroup(peer_group)) = &kept {
            peer_group.fail(result);
        }
        drop(kept);
    }
    peers::settle();
}

/// Begins the sessions of a group and waits for them. Returns the entries of the group, first the failure that the group
/// returns. A group that NCCL will not run has no sessions, as not all ranks need to come.
///
/// NCCL makes all communicators of a group at once, but only after their sessions. A rank that makes them outside a group is in NCCL for
/// the first communicator before it comes to the second's session. So different communicators of one group have no session, and
/// their other ranks learn that from NCCL's connection.
#[cold]
#[inline(never)]
pub(super) fn run_all(awaited: Vec<Awaited>) -> Vec<Awaited> {
    let (mut rest, mut requested) = (Vec::new(), Vec::new());
    for waited in awaited {
        match waited {
            Awaited::Requested(place, handle, request) => {
                rest.push(Awaited::Made(place, handle));
                requested.push((handle, *request));
            }
            other => rest.push(other),
        }
    }
    // NCCL returns the last error of a group.
    if let Some(last) = rest.iter().rposition(|waited| matches!(waited, Awaited::Failed(_))) {
        rest.swap(0, last);
        return rest;
    }
    let together = peers::is_one_session(requested.iter().map(|(_, request)| request));
    let begun = requested.into_iter().filter(|(handle, _)| communicator::find(*handle).is_some());
    let begun = begun.map(|(handle, request)| {
        // Only NCCL knows which part of its configuration children inherit.
        let lineage = peers::lineage_of(&request, Configuration::Unknown);
        let grouped = InitOutcome::OnNccl(FallbackReason::Grouped);
        (handle, lineage, if together { peers::ask(&request) } else { Err(grouped) })
    });
    for (handle, lineage, outcome) in init_ends::meet(begun) {
        if let InitOutcome::Failed(failure) = &outcome {
            let code = refuse(failure.code(), format_args!("no communicator: {failure}"));
            if !matches!(rest.first(), Some(Awaited::Failed(_))) {
                rest.insert(0, Awaited::Failed(code));
            }
        }
        // Otherwise the communicator was aborted meanwhile.
        if let Some(communicator) = communicator::find(handle) {
            settle(handle, communicator, outcome, lineage);
        }
    }
    rest
}
