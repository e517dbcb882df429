//! Calls whose communicator has a peer group: decided as all its ranks decide, run, counted.

use std::sync::Arc;

use nccl_sys::{ncclInvalidArgument, ncclResult_t};

use crate::communicator::{self, Communicator};
use crate::forward;
use crate::group::{self, Awaited};
use crate::peers::PeerGroup;
use crate::plan::{Standing, Terms, may_be_fused, plan};
use windlass_base::annotate;
use windlass_base::call::Call;
use windlass_base::error::{panicked, refuse};
use windlass_base::gate::Passed;
use windlass_base::guard;
use windlass_base::path::Path;

use super::collectives::{self, Served};
use super::group_order::Order;
use super::ordering::Lane;
use super::registration::{self, Taken};
use super::{check, count, fixed_order, lazy_calls, messages, ordering, window_guard};

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
    /// The peer group's p2p transport.
    P2p(Arc<PeerGroup>),
    /// A kernel of ours, over the peer group.
    Native(Served),
    /// The same or NCCL: what else its group holds will tell.
    Perhaps(Served),
    /// NCCL, which may have to build the communicator first.
    Lazy,
    /// Nobody.
    Refused(ncclResult_t),
    /// NCCL, as all ranks have decided. Few calls are: what every call carries stays small.
    Taken(Box<Taken>),
}

/// Runs one.
#[inline(never)]
pub(super) fn call(call: &Call, communicator: &'static Communicator) -> ncclResult_t {
    guard::around(
        || decide(call, communicator),
        |decided| match &decided.course {
            Course::Forward => forward::forward(call),
            Course::P2p(peer_group) => guard::call(|| messages::take(call, peer_group)),
            Course::Native(served) | Course::Perhaps(served) => {
                guard::call(|| collectives::take(call, served))
            }
            Course::Lazy => lazy_calls::call(call),
            Course::Taken(taken) => registration::run(call, taken),
            Course::Refused(code) => *code,
        },
        |decided, result| {
            use Course::{Native, P2p, Perhaps, Refused};
            if !matches!(decided.course, P2p(_) | Native(_) | Perhaps(_) | Refused(_)) {
                ordering::after_forward(Lane::of(call), communicator, result);
            }
        },
    )
}

/// Runs one that its group held, and that is NCCL's after all. The group is about to end; a refusal fails it. `is_ordered`: another of
/// its stream has just gone to NCCL.
pub(super) fn forward_held(call: &Call, is_ordered: bool) -> ncclResult_t {
    let handle = call.local.communicator;
    let decide = || match communicator::find(handle) {
        Some(communicator) => Ok(forwarded(call, communicator, &communicator.terms(), is_ordered)),
        // Another thread has ended it: NCCL would look into what it has freed.
        None => {
            let why = format_args!("communicator {handle:p} has been destroyed within a group");
            Err(refuse(ncclInvalidArgument, why))
        }
    };
    guard::around(
        || {
            let course = guard::or_else(|| Err(panicked("a call that a group held")), decide);
            // Nobody asks what the call came to.
            course.inspect_err(|code| group::wait_for(Awaited::Failed(*code)))
        },
        |course| match course {
            Ok(Course::Lazy) => lazy_calls::call(call),
            Ok(_) => forward::forward(call),
            Err(code) => *code,
        },
        |_, result| {
            if let Some(communicator) = communicator::find(handle) {
                ordering::after_forward(Lane::of(call), communicator, result);
            }
        },
    )
}

fn decide(call: &Call, communicator: &'static Communicator) -> Decided {
    let inside = group::enter(|| communicator.pass());
    check::tell(call, communicator);
    let terms = communicator.terms();
    let path = plan(&call.shared, Standing::PeerGroup(terms));
    let course = match path {
        Path::P2p => messages::serves(call, communicator).map(Course::P2p),
        // Many of a group are NCCL's. What has no elements is not held.
        Path::Native if group::is_open() && call.shared.count > 0 => {
            collectives::serves(call, communicator).map(Course::Perhaps)
        }
        Path::Native => collectives::serves(call, communicator).map(Course::Native),
        Path::Forward | Path::Registered if may_be_held(call, &terms) => {
            collectives::serves(call, communicator).map(Course::Perhaps)
        }
        Path::Forward | Path::Registered => None,
    };
    let course = match course {
        Some(course) => course,
        // NCCL refuses it.
        None if path == Path::Native => forwarded(call, communicator, &terms, false),
        None => match fixed_order::to_nccl(call, communicator) {
            Ok(()) => forwarded(call, communicator, &terms, false),
            Err(code) => Course::Refused(code),
        },
    };
    let path = match &course {
        Course::Forward | Course::Lazy => Path::Forward,
        Course::P2p(_) => Path::P2p,
        Course::Native(_) => {
            fixed_order::kept(&call.shared, communicator.counters(), &terms);
            Path::Native
        }
        Course::Taken(taken) => taken.path(),
        Course::Refused(_) => return Decided { course, _range: None, _inside: inside },
        // Counted when it is known.
        Course::Perhaps(_) => {
            let range = annotate::range(call.shared.function);
            return Decided { course, _range: range, _inside: inside };
        }
    };
    Decided { course, _range: count(call, communicator, path), _inside: inside }
}

/// Whether a call that is NCCL's by itself waits for its group's end, as it may be ours beside others. Before 2.26 NCCL then runs it behind
/// what other communicators have in the group (see [`group_planning::plan`](super::group_planning::plan)): large ones do not wait there.
fn may_be_held(call: &Call, terms: &Terms) -> bool {
    group::is_open() && may_be_fused(&call.shared, ordering::order() == Order::Names, terms)
}

fn forwarded(call: &Call, communicator: &Communicator, terms: &Terms, is_ordered: bool) -> Course {
    window_guard::before_forward(call, communicator);
    if communicator.is_lazy() {
        return Course::Lazy;
    }
    ordering::before_forward(Lane::of(call), communicator, is_ordered);
    registration::take(call, communicator, *terms)
        .map_or(Course::Forward, |taken| Course::Taken(Box::new(taken)))
}
