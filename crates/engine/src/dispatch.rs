//! Every collective, send and receive comes through here: found, decided, run, counted.

pub mod messages;

pub mod promised;

pub mod registered;

use std::sync::Arc;

use nccl_sys::{ncclInProgress, ncclResult_t, ncclSuccess};

use crate::annotate;
use crate::call::Call;
use crate::communicator::{self, Communicator};
use crate::fabric::Fabric;
use crate::forward::{self, known};
use crate::gate::Passed;
use crate::group;
use crate::guard;
use crate::lifecycle;
use crate::path::Path;
use crate::plan::{Standing, plan};
use crate::process;
use crate::stats::count::{self, Identity};

use registered::Taken;

/// What is decided of a call before it runs.
struct Decided {
    course: Course,
    counted: bool,
    _range: Option<annotate::Range>,
    /// Dropped when NCCL has returned; a group's own stays till its end.
    _inside: Option<Passed<'static>>,
}

/// Who runs it.
enum Course {
    /// NCCL, as it came.
    Forward,
    /// The fabric's mailboxes.
    Mailbox(Arc<Fabric>),
    /// NCCL, which may have to build the communicator first.
    Promised,
    /// NCCL, as all ranks have decided. Few calls are: what every call carries stays small.
    Taken(Box<Taken>),
}

/// Runs a call.
#[inline]
pub fn call(call: &Call) -> ncclResult_t {
    guard::around(
        || decide(call),
        |decided| match &decided.course {
            Course::Forward => forward::forward(call),
            Course::Mailbox(fabric) => guard::call(|| messages::take(call, fabric)),
            Course::Promised => promised::call(call),
            Course::Taken(taken) => registered::run(call, taken),
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
        return Decided { course: Course::Forward, counted: false, _range: None, _inside: None };
    };
    if !communicator.is_known() {
        learn(call, communicator);
    }
    let (course, inside) = match communicator.has_fabric() {
        true => decide_in_fabric(call, communicator),
        false => (Course::Forward, None),
    };
    let path = match &course {
        Course::Forward | Course::Promised => Path::Forward,
        Course::Mailbox(_) => Path::Mailbox,
        Course::Taken(taken) => taken.path(),
    };
    count::call(communicator.counters(), call.shared.function, path, call.shared.bytes(communicator.ranks()));
    Decided { course, counted: true, _range: annotate::range(call.shared.function), _inside: inside }
}

/// Who runs a call whose communicator has a fabric.
#[inline(never)]
fn decide_in_fabric(call: &Call, communicator: &'static Communicator) -> (Course, Option<Passed<'static>>) {
    let inside = lifecycle::enter(communicator);
    let course = match plan(&call.shared, Standing::Fabric) {
        Path::Mailbox => messages::serves(call, communicator).map(Course::Mailbox),
        Path::Forward | Path::Registered => None,
    };
    let course = course.unwrap_or_else(|| {
        if communicator.is_promise() {
            return Course::Promised;
        }
        messages::before_forward(call, communicator);
        registered::take(call, communicator).map_or(Course::Forward, |taken| Course::Taken(Box::new(taken)))
    });
    (course, inside)
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
