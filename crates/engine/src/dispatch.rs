//! Every collective, send and receive comes through here: found, decided, run, counted.

mod route;

mod common_order;

mod group_part;
mod group_plan;

mod fusing;

mod batching;

pub mod group_planning;
mod group_step;

pub mod messages;

pub mod collectives;

pub mod ordering;

pub mod group_order;

pub mod lazy_calls;

pub mod registration;

mod window_guard;

mod check;

mod fixed_order;

use nccl_sys::{ncclInProgress, ncclResult_t, ncclSuccess};

use crate::communicator::{self, Communicator};
use crate::forward::{self, known};
use crate::group;
use windlass_base::annotate;
use windlass_base::call::Call;
use windlass_base::guard;
use windlass_base::path::Path;
use windlass_base::process;
use windlass_base::stats::count::{self, Identity};

/// Whose a call is.
enum Standing {
    /// NCCL's, on a handle that we have not seen.
    Unseen,
    /// NCCL's, on a communicator without a peer group.
    OnNccl { _range: Option<annotate::Range> },
    /// To be decided: the communicator has a peer group.
    InPeerGroup(&'static Communicator),
    /// Nobody's.
    Refused(ncclResult_t),
}

/// Runs a call.
#[inline]
pub fn call(call: &Call) -> ncclResult_t {
    guard::around(
        || find(call),
        |standing| match standing {
            Standing::Unseen | Standing::OnNccl { .. } => forward::forward(call),
            Standing::InPeerGroup(communicator) => route::call(call, communicator),
            Standing::Refused(code) => *code,
        },
        |standing, result| {
            if matches!(standing, Standing::Unseen) {
                first_sight(call, result);
            }
        },
    )
}

/// Finds the communicator; one without a peer group is all that is counted here, and costs a call as little as can be.
#[inline]
fn find(call: &Call) -> Standing {
    let Some(communicator) = communicator::find(call.local.communicator) else { return Standing::Unseen };
    if !communicator.is_known() {
        learn(call, communicator);
    }
    if communicator.has_peer_group() {
        return Standing::InPeerGroup(communicator);
    }
    let _range = count(call, communicator, Path::Forward);
    match fixed_order::to_nccl(call, communicator) {
        Ok(()) => Standing::OnNccl { _range },
        Err(code) => Standing::Refused(code),
    }
}

/// Counts a call, and shows it to a profiler until what this answers is dropped.
#[inline]
fn count(call: &Call, communicator: &Communicator, path: Path) -> Option<annotate::Range> {
    count::call(communicator.counters(), call.shared.function, path, call.shared.bytes(communicator.ranks()));
    annotate::range(call.shared.function)
}

/// A handle that we have not seen is NCCL's to judge. If it took the call, the communicator is real.
#[cold]
fn first_sight(call: &Call, result: ncclResult_t) {
    let accepted = result == ncclSuccess || result == ncclInProgress;
    if accepted {
        process::first_communicator();
    }
    let identity = if accepted { known::identity(call.local.communicator) } else { None };
    let (counters, ranks) = match identity {
        Some(identity) => {
            let communicator = communicator::insert(call.local.communicator, identity);
            communicator.count_as_child();
            // It has run.
            let _ = fixed_order::to_nccl(call, communicator);
            (communicator.counters(), communicator.ranks())
        }
        None => (count::UNKNOWN, 0),
    };
    count::call(counters, call.shared.function, Path::Forward, call.shared.bytes(ranks));
}

/// Rank, ranks and device of a communicator that was not ready when it was entered. Inside a group it may not be
/// ready still; the next call asks again.
#[cold]
fn learn(call: &Call, communicator: &Communicator) {
    if group::is_open() {
        return;
    }
    if let Some(identity) = known::identity(call.local.communicator) {
        let Identity { rank, ranks, device } = identity;
        log::debug!(
            "communicator {:p} is rank {rank} of {ranks} on device {device}",
            call.local.communicator
        );
        communicator.identify(identity);
    }
}
