//! Every collective, send and receive comes through here: found, decided, run, counted.

use nccl_sys::{ncclInProgress, ncclResult_t, ncclSuccess};

use crate::annotate;
use crate::call::Call;
use crate::communicator::{self, Communicator};
use crate::forward::{self, known};
use crate::group;
use crate::path::Path;
use crate::plan::plan;
use crate::process;
use crate::stats::count::{self, Identity};

/// Runs a call.
#[inline]
pub fn call(call: &Call) -> ncclResult_t {
    match communicator::find(call.local.communicator) {
        Some(communicator) => run(call, communicator),
        None => first_sight(call),
    }
}

#[inline]
fn run(call: &Call, communicator: &Communicator) -> ncclResult_t {
    if !communicator.is_known() {
        learn(call, communicator);
    }
    let path = plan(&call.shared);
    count::call(communicator.counters(), call.shared.function, path, call.shared.bytes(communicator.ranks()));
    let _range = annotate::range(call.shared.function.entry().description().name);
    match path {
        Path::Forward => forward::forward(call),
    }
}

/// A handle that we have not seen is NCCL's to judge. If it takes the call, the communicator is real.
#[cold]
fn first_sight(call: &Call) -> ncclResult_t {
    let result = forward::forward(call);
    let accepted = result == ncclSuccess || result == ncclInProgress;
    if accepted {
        process::first_communicator();
    }
    let identity = if accepted { known::identity(call.local.communicator) } else { None };
    let (counters, ranks) = match identity {
        Some(identity) => {
            let communicator = communicator::insert(call.local.communicator, identity);
            (communicator.counters(), communicator.ranks())
        }
        None => (count::UNKNOWN, 0),
    };
    count::call(counters, call.shared.function, Path::Forward, call.shared.bytes(ranks));
    result
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
