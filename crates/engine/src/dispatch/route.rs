//! Decides, runs and counts calls of communicators with a peer group. All ranks decide alike.

use std::sync::Arc;

use nccl_sys::missing::is_missing;
use nccl_sys::{ncclInvalidArgument, ncclResult_t};

use crate::communicator::{self, Communicator};
use crate::forward;
use crate::group::{self, Awaited};
use crate::peers::PeerGroup;
use crate::plan::{Standing, Terms, may_be_fused, plan};
use windlass_base::call::Call;
use windlass_base::error::{panicked, refuse};
use windlass_base::gate::Passed;
use windlass_base::guard;
use windlass_base::observers;
use windlass_base::path::Path;

use super::collectives::{self, Served};
use super::ordering::{InOrder, Lane};
use super::registration::{self, Taken};
use super::{count, fixed_order, lazy_calls, messages, ordering};
use std::ffi::c_void;
use windlass_base::range::Range;

/// The decision on a call before it runs.
struct Decided {
    course: Course,
    /// How NCCL's call is ordered; none if NCCL does not get it.
    forwarded: Option<InOrder>,
    /// Keeps Windlass's threads out of NCCL's communicator until NCCL has returned; an open group holds another one until its end.
    _inside: Option<Passed<'static>>,
}

/// Who runs a call.
enum Course {
    /// NCCL, with the same arguments.
    Forward,
    /// The peer group's p2p transport.
    P2p(Arc<PeerGroup>),
    /// A kernel of Windlass.
    Native(Served),
    /// A kernel of Windlass or NCCL: decided at the group's end, by the other held calls.
    Perhaps(Served),
    /// NCCL, which may have to build the communicator first.
    Lazy,
    /// Nobody: the call fails with this code.
    Refused(ncclResult_t),
    /// NCCL, perhaps with registered buffers, as all ranks have decided. Boxed to keep [`Course`] small, as such calls are few.
    Taken(Box<Taken>),
}

/// Runs a call.
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
            Course::Lazy => lazy_calls::call(call, communicator),
            Course::Taken(taken) => registration::run(call, taken),
            Course::Refused(code) => *code,
        },
        |decided, result| {
            ordering::after_forward(decided.forwarded, result);
            if observers::are_on() {
                observers::after(group::is_open().into());
            }
        },
    )
}

/// Runs a held call on NCCL after all, just before its group ends; a refusal fails the group.
pub(super) fn forward_held(call: &Call) -> ncclResult_t {
    let handle = call.local.communicator;
    let decide = || match communicator::find(handle) {
        Some(communicator) => {
            let mut ordered = None;
            let course = forwarded(call, communicator, &communicator.terms(), &mut ordered);
            Ok((course, ordered, communicator))
        }
        // Another thread has ended the communicator: NCCL would read freed memory.
        None => {
            let why = format_args!("communicator {handle:p} has been destroyed within a group");
            Err(refuse(ncclInvalidArgument, why))
        }
    };
    guard::around(
        || {
            let course = guard::or_else(|| Err(panicked("a call that a group held")), decide);
            // The caller ignores this call's result, so the group must fail.
            course.inspect_err(|code| group::wait_for(Awaited::Failed(*code)))
        },
        |course| match course {
            Ok((Course::Lazy, _, communicator)) => lazy_calls::call(call, communicator),
            Ok((Course::Refused(code), ..)) => *code,
            Ok(_) => forward::forward(call),
            Err(code) => *code,
        },
        |course, result| {
            course.into_iter().for_each(|(_, ordered, _)| ordering::after_forward(ordered, result));
        },
    )
}

fn decide(call: &Call, communicator: &'static Communicator) -> Decided {
    let inside = group::enter(|| communicator.pass());
    let terms = communicator.terms();
    let path = plan(&call.shared, Standing::PeerGroup(&terms));
    let course = match path {
        Path::P2p => messages::serves(call, communicator).map(Course::P2p),
        // NCCL may run it if the group holds many. A call without elements is not held.
        Path::Native if group::is_open() && call.shared.count > 0 => {
            collectives::serves(call, communicator).map(Course::Perhaps)
        }
        Path::Native => collectives::serves(call, communicator).map(Course::Native),
        Path::Forward | Path::Registered if may_be_held(call, &terms) => {
            collectives::serves(call, communicator).map(Course::Perhaps)
        }
        Path::Forward | Path::Registered => None,
    };
    let mut forwarded = None;
    let course = match course {
        Some(course) => course,
        // The arguments are such that NCCL refuses the call.
        None if path == Path::Native => forwarded_now(call, communicator, &terms, &mut forwarded),
        None => match fixed_order::to_nccl(call, communicator) {
            Ok(()) => forwarded_now(call, communicator, &terms, &mut forwarded),
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
        Course::Taken(taken) => taken.path,
        // Held calls are counted at the group's end, when the path is known.
        Course::Refused(_) | Course::Perhaps(_) => return Decided { course, forwarded, _inside: inside },
    };
    count(call, communicator, path);
    Decided { course, forwarded, _inside: inside }
}

/// Whether a call that would go to NCCL by itself is held, as it may be fused with others.
fn may_be_held(call: &Call, terms: &Terms) -> bool {
    group::is_open() && may_be_fused(&call.shared, terms)
}

fn forwarded_now(
    call: &Call,
    communicator: &Communicator,
    terms: &Terms,
    ordered: &mut Option<InOrder>,
) -> Course {
    let course = forwarded(call, communicator, terms, ordered);
    if matches!(course, Course::Refused(_)) {
        count(call, communicator, Path::Forward);
    }
    course
}

fn forwarded(
    call: &Call,
    communicator: &Communicator,
    terms: &Terms,
    ordered: &mut Option<InOrder>,
) -> Course {
    // A function that this NCCL lacks is no call of the group.
    if !is_missing(call.shared.function.entry()) {
        match ordering::before_forward(Lane::of(call), communicator) {
            Ok(forwarded) => *ordered = forwarded,
            Err(code) => return Course::Refused(code),
        }
    }
    drop_windows(call, communicator);
    if communicator.is_lazy() {
        return Course::Lazy;
    }
    registration::take(call, communicator, terms)
        .map_or(Course::Forward, |taken| Course::Taken(Box::new(taken)))
}

/// Called before NCCL gets a call of a communicator with a peer group. This rank drops windows without asking others: NCCL then sees
/// what it would see without Windlass.
#[inline]
fn drop_windows(call: &Call, communicator: &Communicator) {
    if communicator.has_windows() {
        drop_what_it_meets(call, communicator);
    }
}

#[cold]
#[inline(never)]
fn drop_what_it_meets(call: &Call, communicator: &Communicator) {
    let Some(peer_group) = communicator.peer_group(call.local.communicator) else { return };
    let Some(windows) = peer_group.features.windows.as_ref() else { return };
    // Both ranges have the size of the larger buffer: a window that is dropped without need is registered again.
    let bytes = call.shared.bytes(peer_group.negotiated().members.len()).max(1);
    let range = |buffer: *const c_void| Range { base: buffer as u64, bytes };
    let (send, receive) = (range(call.local.send), range(call.local.receive.cast_const()));
    windows.meet(&[send, receive]);
}
