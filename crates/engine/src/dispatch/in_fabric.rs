//! Calls whose communicator has a fabric: decided as all its ranks decide, run, counted.

use std::sync::Arc;

use nccl_sys::ncclResult_t;

use crate::annotate;
use crate::call::Call;
use crate::communicator::Communicator;
use crate::fabric::Fabric;
use crate::forward;
use crate::gate::Passed;
use crate::guard;
use crate::lifecycle;
use crate::path::Path;
use crate::plan::{Standing, Terms, plan};

use super::collectives::{self, Served};
use super::registered::{self, Taken};
use super::{count, in_order, messages, promised};

/// What is decided of a call before it runs.
struct Decided {
    course: Course,
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
    /// A kernel of ours, over the fabric.
    Fast(Served),
    /// NCCL, which may have to build the communicator first.
    Promised,
    /// NCCL, as all ranks have decided. Few calls are: what every call carries stays small.
    Taken(Box<Taken>),
}

/// Runs one.
#[inline(never)]
pub fn call(call: &Call, communicator: &'static Communicator) -> ncclResult_t {
    guard::around(
        || decide(call, communicator),
        |decided| match &decided.course {
            Course::Forward => forward::forward(call),
            Course::Mailbox(fabric) => guard::call(|| messages::take(call, fabric)),
            Course::Fast(served) => guard::call(|| collectives::take(call, served)),
            Course::Promised => promised::call(call),
            Course::Taken(taken) => registered::run(call, taken),
        },
        |decided, result| {
            if !matches!(decided.course, Course::Mailbox(_) | Course::Fast(_)) {
                in_order::after_forward(call, result);
            }
        },
    )
}

fn decide(call: &Call, communicator: &'static Communicator) -> Decided {
    let inside = lifecycle::enter(communicator);
    let (ranks, fast) = communicator.terms();
    let terms = Terms { ranks, fast };
    let course = match plan(&call.shared, Standing::Fabric(terms)) {
        Path::Mailbox => messages::serves(call, communicator).map(Course::Mailbox),
        Path::Fast => collectives::serves(call, communicator).map(Course::Fast),
        Path::Forward | Path::Registered => None,
    };
    let course = course.unwrap_or_else(|| {
        if communicator.is_promise() {
            return Course::Promised;
        }
        in_order::before_forward(call, communicator);
        registered::take(call, communicator, terms)
            .map_or(Course::Forward, |taken| Course::Taken(Box::new(taken)))
    });
    let path = match &course {
        Course::Forward | Course::Promised => Path::Forward,
        Course::Mailbox(_) => Path::Mailbox,
        Course::Fast(_) => Path::Fast,
        Course::Taken(taken) => taken.path(),
    };
    Decided { course, _range: count(call, communicator, path), _inside: inside }
}
