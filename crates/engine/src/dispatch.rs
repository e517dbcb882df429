//! Runs every collective, send and receive, on the caller's thread: finds its communicator, decides its path, counts it.

mod route;

mod common_order;

mod group_plan;

mod fusing;

mod batching;

pub mod group_planning;

pub mod messages;

pub mod collectives;

pub mod ordering;

pub mod lazy_calls;

pub mod registration;

mod fixed_order;

use nccl_sys::{ncclInProgress, ncclResult_t, ncclSuccess};

use crate::communicator::{self, Communicator};
use crate::forward::{self, known};
use crate::group;
use windlass_base::call::Call;
use windlass_base::path::Path;
use windlass_base::stats::count::{self, Identity};
use windlass_base::{guard, observers, process};

/// Who decides about a call.
enum Standing {
    /// NCCL: Windlass does not know the handle.
    Unseen,
    /// NCCL: the communicator has no peer group.
    OnNccl,
    /// Windlass: the communicator has a peer group.
    InPeerGroup(&'static Communicator),
    /// Nobody: the call fails with this code.
    Refused(ncclResult_t),
}

/// Runs a call.
#[inline]
pub fn call(call: &Call) -> ncclResult_t {
    guard::around(
        || find(call),
        |standing| match standing {
            Standing::Unseen | Standing::OnNccl => forward::forward(call),
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

/// Finds the communicator of a call. A call of a communicator without a peer group is counted here, to cost as little as possible.
#[inline]
fn find(call: &Call) -> Standing {
    let found = communicator::find(call.local.communicator);
    let Some(communicator) = found.or_else(|| fixed_order::see(call)) else { return Standing::Unseen };
    if !communicator.is_known()
        && let Err(code) = learn(call, communicator)
    {
        return Standing::Refused(code);
    }
    if communicator.has_peer_group() {
        return Standing::InPeerGroup(communicator);
    }
    match fixed_order::to_nccl(call, communicator) {
        Ok(()) => {
            count(call, communicator, Path::Forward);
            Standing::OnNccl
        }
        Err(code) => Standing::Refused(code),
    }
}

/// Counts a call, and tells profilers.
#[inline]
fn count(call: &Call, communicator: &Communicator, path: Path) {
    count::call(communicator.counters(), call, path, communicator.ranks());
    if observers::are_on() {
        tell(call, communicator, path);
    }
}

#[cold]
#[inline(never)]
fn tell(call: &Call, communicator: &Communicator, path: Path) {
    let depth = 1 + i32::from(group::is_open());
    observers::before(call, path, &communicator.observed(), depth);
}

/// After NCCL has judged a call on an unknown handle. If NCCL took the call, the communicator is real and gets an entry.
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
            (communicator.counters(), communicator.ranks())
        }
        None => (count::UNKNOWN, 0),
    };
    count::call(counters, call, Path::Forward, ranks);
}

/// Asks NCCL for rank, ranks and device of a communicator that was not ready when it got its entry. Inside a group it may
/// still not be ready; the next call asks again. Fails where NCCL would refuse the call as the one before is in progress, and while the
/// communicator sleeps.
#[cold]
#[inline(never)]
fn learn(call: &Call, communicator: &Communicator) -> Result<(), ncclResult_t> {
    let handle = call.local.communicator;
    if communicator.is_nonblocking() || communicator.sleeps() {
        return communicator.check_awake(handle).and_then(|()| communicator.check_ready(handle)).map_err(
            |code| {
                count(call, communicator, Path::Forward);
                group::fail(code)
            },
        );
    }
    if group::is_open() {
        return Ok(());
    }
    if let Some(identity) = known::identity(call.local.communicator) {
        let Identity { rank, ranks, device } = identity;
        log::debug!(
            "communicator {:p} is rank {rank} of {ranks} on device {device}",
            call.local.communicator
        );
        communicator.identify(identity);
    }
    Ok(())
}
