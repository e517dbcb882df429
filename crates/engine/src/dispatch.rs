//! Every collective, send and receive comes through here: found, decided, run, counted.

pub mod messages;

pub mod promised;

use std::sync::Arc;

use nccl_sys::{ncclInProgress, ncclResult_t, ncclSuccess};

use crate::annotate;
use crate::call::Call;
use crate::communicator::{self, Communicator};
use crate::fabric::Fabric;
use crate::forward::{self, known};
use crate::group;
use crate::guard;
use crate::lifecycle;
use crate::path::Path;
use crate::plan::{Standing, plan};
use crate::process;
use crate::promise::Promise;
use crate::stats::count::{self, Identity};

/// What is decided of a call before it runs.
struct Decided {
    way: Way,
    counted: bool,
    _range: Option<annotate::Range>,
}

/// Who runs a call.
enum Way {
    /// NCCL, by the application's own handle.
    Real,
    /// A fabric.
    Mailbox(Arc<Fabric>),
    /// NCCL, which may have to build its communicator first.
    Promise(Arc<Promise>),
}

/// Runs a call.
#[inline]
pub fn call(call: &Call) -> ncclResult_t {
    guard::around(
        || decide(call),
        |decided| match &decided.way {
            Way::Real => forward::forward(call),
            Way::Mailbox(fabric) => guard::call(|| messages::take(call, fabric)),
            Way::Promise(promise) => promised::take(call, promise),
        },
        |decided, result| {
            if !decided.counted {
                first_sight(call, result);
            }
        },
    )
}

#[inline]
fn decide(call: &Call) -> Decided {
    let Some(communicator) = communicator::find(call.local.communicator) else {
        return Decided { way: Way::Real, counted: false, _range: None };
    };
    if !communicator.is_known() {
        learn(call, communicator);
    }
    let way = if communicator.has_fabric() { decide_in_fabric(call, communicator) } else { Way::Real };
    let path = if matches!(way, Way::Mailbox(_)) { Path::Mailbox } else { Path::Forward };
    count::call(communicator.counters(), call.shared.function, path, call.shared.bytes(communicator.ranks()));
    Decided { way, counted: true, _range: annotate::range(call.shared.function) }
}

/// Who runs a call whose communicator has a fabric.
#[inline(never)]
fn decide_in_fabric(call: &Call, communicator: &Communicator) -> Way {
    let fabric = match plan(&call.shared, Standing::Fabric) {
        Path::Mailbox => messages::serves(call, communicator),
        Path::Forward => None,
    };
    if let Some(fabric) = fabric {
        return Way::Mailbox(fabric);
    }
    match communicator.promise(call.local.communicator) {
        Some(promise) => Way::Promise(promise),
        None => {
            messages::before_forward(call, communicator);
            Way::Real
        }
    }
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
            lifecycle::unasked(communicator);
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
