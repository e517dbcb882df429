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
use crate::stats::count::{self, Identity};

/// What is decided of a call before it runs.
struct Decided {
    /// What serves it on [`Path::Mailbox`]; none is [`Path::Forward`].
    fabric: Option<Arc<Fabric>>,
    /// Whether NCCL may have to build its communicator first.
    promised: bool,
    counted: bool,
    _range: Option<annotate::Range>,
}

/// Runs a call.
#[inline]
pub fn call(call: &Call) -> ncclResult_t {
    guard::around(
        || decide(call),
        |decided| match &decided.fabric {
            Some(fabric) => guard::call(|| messages::take(call, fabric)),
            None if decided.promised => promised::call(call),
            None => forward::forward(call),
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
        return Decided { fabric: None, promised: false, counted: false, _range: None };
    };
    if !communicator.is_known() {
        learn(call, communicator);
    }
    let (fabric, promised) =
        if communicator.has_fabric() { decide_in_fabric(call, communicator) } else { (None, false) };
    let path = if fabric.is_some() { Path::Mailbox } else { Path::Forward };
    count::call(communicator.counters(), call.shared.function, path, call.shared.bytes(communicator.ranks()));
    Decided { fabric, promised, counted: true, _range: annotate::range(call.shared.function) }
}

/// What serves a call whose communicator has a fabric; none: NCCL, and whether for a promise.
#[inline(never)]
fn decide_in_fabric(call: &Call, communicator: &Communicator) -> (Option<Arc<Fabric>>, bool) {
    let fabric = match plan(&call.shared, Standing::Fabric) {
        Path::Mailbox => messages::serves(call, communicator),
        Path::Forward => None,
    };
    let promised = fabric.is_none() && communicator.is_promise();
    if fabric.is_none() && !promised {
        messages::before_forward(call, communicator);
    }
    (fabric, promised)
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
