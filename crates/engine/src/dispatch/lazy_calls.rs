//! Runs calls of lazy communicators on NCCL, which first has to build the communicator. Calls that NCCL would refuse or drop are refused
//! or dropped here, without waiting for other ranks. In a group such a call is held until the outermost end, where all lazy communicators
//! of the group are materialized at once; then NCCL runs it, after NCCL's own part of the group.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_sys::missing::is_missing;
use nccl_sys::{
    ncclComm_t, ncclInternalError, ncclInvalidArgument, ncclInvalidUsage, ncclResult_t, ncclSuccess,
};

use crate::communicator::{self, Communicator};
use crate::forward::of_call::OfCall;
use crate::forward::{self, Carried, init};
use crate::group::{self, LazyWork, Work};
use crate::lazy::{Beside, LazyCommunicator};
use windlass_base::call::{Call, Function};
use windlass_base::error::refuse;
use windlass_base::guard;
use windlass_base::stats::{count, peer_group};
use windlass_base::thread;
use windlass_bootstrap::negotiated::Token;

use super::ordering;

/// What to do with a call.
enum Look {
    Answer(ncclResult_t),
    Materialize,
    /// Materialize now, though a group is open.
    MaterializeInGroup,
}

/// Runs a call of a lazy communicator, which was ordered; fails if another thread has just ended the communicator.
#[inline(never)]
pub fn call(call: &Call, communicator: &Communicator) -> ncclResult_t {
    let handle = call.local.communicator;
    match guard::or_else(|| None, || communicator.lazy(handle)) {
        Some(lazy) => take(call, &lazy),
        None => refuse(ncclInvalidArgument, format_args!("communicator {handle:p} has been destroyed")),
    }
}

/// Runs a call, or holds it until its group ends.
fn take(call: &Call, lazy: &Arc<LazyCommunicator>) -> ncclResult_t {
    if is_missing(call.shared.function.entry()) {
        // For functions that the real library lacks, the result does not depend on the handle.
        return forward::forward(call);
    }
    // All calls of a group are one operation of NCCL's, also if it builds the communicator in the middle.
    if lazy.real().is_none() || group::holds_lazy_work(lazy) {
        let materialized = match guard::or_else(|| Look::Answer(ncclInternalError), || look(call, lazy)) {
            Look::Answer(code) => return code,
            Look::Materialize => materialize(lazy),
            Look::MaterializeInGroup => materialize_in_group(lazy),
        };
        if materialized != ncclSuccess {
            return group::fail(materialized);
        }
    }
    run(call, lazy)
}

/// Materializes a lazy communicator, outside groups. Waits for all its ranks.
pub fn materialize(lazy: &Arc<LazyCommunicator>) -> ncclResult_t {
    noted(lazy, lazy.materialize())
}

/// Materializes a lazy communicator while this thread has a group open. Waits for all its ranks.
pub fn materialize_in_group(lazy: &Arc<LazyCommunicator>) -> ncclResult_t {
    noted(lazy, lazy.materialize_beside().wait())
}

fn noted(lazy: &LazyCommunicator, result: ncclResult_t) -> ncclResult_t {
    if result == ncclSuccess {
        note(lazy);
    }
    result
}

fn note(lazy: &LazyCommunicator) {
    if let Some(communicator) = communicator::find(lazy.handle()) {
        let number = if lazy.is_reused { peer_group::REUSED } else { peer_group::BUILT };
        count::nccl(communicator.counters(), number);
    }
}

fn look(call: &Call, lazy: &Arc<LazyCommunicator>) -> Look {
    if let Some(code) = refusal(call, lazy) {
        return Look::Answer(group::fail(code));
    }
    // NCCL drops collectives without elements.
    if call.shared.count == 0 && !matches!(call.shared.function, Function::Send | Function::Recv) {
        return Look::Answer(ncclSuccess);
    }
    if !group::is_open() {
        return Look::Materialize;
    }
    // The application may free its configuration before the group ends.
    let (mut call, mut configuration) = (*call, None);
    if !call.local.config.is_null() {
        let Some(copy) = OfCall::of(call.local.config) else { return Look::MaterializeInGroup };
        call.local.config = copy.as_ptr();
        configuration = Some(copy);
    }
    let operator = call.shared.operation.and_then(|operation| lazy.operators.get(operation));
    let held = LazyWork { lazy: lazy.clone(), work: Work::Call(call, operator, configuration) };
    group::hold_lazy_work(held);
    Look::Answer(ncclSuccess)
}

fn refusal(call: &Call, lazy: &LazyCommunicator) -> Option<ncclResult_t> {
    if lazy.is_revoked() {
        let name = call.local.called.entry().description().name;
        return Some(refuse(ncclInvalidUsage, format_args!("{name}: the communicator was revoked")));
    }
    lazy.refusal(call)
}

fn run(call: &Call, lazy: &LazyCommunicator) -> ncclResult_t {
    lazy.with_nccl(|real| run_with(call, lazy, real)).unwrap_or_else(group::fail)
}

fn run_with(call: &Call, lazy: &LazyCommunicator, real: ncclComm_t) -> ncclResult_t {
    let translated = guard::or_else(
        || Err(ncclInternalError),
        || {
            let before = if group::is_open() { None } else { lazy.measure() };
            lazy.runs_on(ordering::stream_of(call));
            Ok((lazy.translated(call, real).map_err(group::fail)?, before))
        },
    );
    match translated {
        Ok((call, before)) => {
            let result = forward::forward(&call);
            guard::or_else(|| (), || lazy.measured(before));
            result
        }
        Err(code) => code,
    }
}

/// The lazy work of a group, by communicator.
pub struct Held(Vec<Unit>);

struct Unit {
    comm: Token,
    lazy_communicators: Vec<(Arc<LazyCommunicator>, Beside)>,
    work: Vec<LazyWork>,
}

/// Begins to materialize the lazy communicators of a group, each on its own thread: another rank may make the same calls outside
/// groups, one communicator after the other. Does not wait.
pub(crate) fn begin(held: Vec<LazyWork>) -> Held {
    let mut units: Vec<Unit> = Vec::new();
    for one in held {
        let comm = one.lazy.peer_group.negotiated().comm;
        let index = units.iter().position(|unit| unit.comm == comm).unwrap_or_else(|| {
            units.push(Unit { comm, lazy_communicators: Vec::new(), work: Vec::new() });
            units.len() - 1
        });
        let unit = &mut units[index];
        if !unit.lazy_communicators.iter().any(|(known, _)| Arc::ptr_eq(known, &one.lazy)) {
            unit.lazy_communicators.push((one.lazy.clone(), one.lazy.materialize_beside()));
        }
        unit.work.push(one);
    }
    Held(units)
}

/// How long a materialized communicator waits for one that comes before it in the common order.
const OUT_OF_TURN: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_micros(100);

/// Gives NCCL the lazy work of a group, after NCCL's own part has run: one NCCL group for each communicator, in the order of
/// the communicators' tokens, which all ranks see alike. Another rank may make the calls outside groups and be in one communicator's
/// first call before it comes to the others. Then, after `OUT_OF_TURN`, a ready communicator runs out of order on its own thread.
/// Returns the first failure; the others run all the same, as their peers wait.
pub fn finish(held: Held) -> ncclResult_t {
    let mut units = held.0;
    units.sort_by_key(|unit| unit.comm);
    let (mut answers, mut beside, mut waiting) = (Vec::new(), Vec::new(), None);
    while !units.is_empty() {
        match units.iter().position(Unit::is_ready) {
            Some(0) => {
                waiting = None;
                answers.push(units.remove(0).run());
            }
            Some(other) if waiting.get_or_insert_with(Instant::now).elapsed() > OUT_OF_TURN => {
                // On a thread of its own: NCCL makes its connections there, and the first unit may become ready meanwhile.
                let unit = Carried::new(units.remove(other));
                let run = move || unit.take().run();
                match thread::spawn("windlass-group", run) {
                    Ok(thread) => beside.push(thread),
                    Err(error) => {
                        let why = format_args!("no thread for a part of a group: {error}");
                        answers.push(refuse(ncclInternalError, why));
                    }
                }
            }
            _ => std::thread::sleep(LOOK_EVERY),
        }
    }
    answers.extend(beside.into_iter().map(|thread| thread.join().unwrap_or(ncclInternalError)));
    answers.into_iter().find(|answer| *answer != ncclSuccess).unwrap_or(ncclSuccess)
}

impl Unit {
    fn is_ready(&self) -> bool {
        self.lazy_communicators.iter().all(|(_, materializing)| materializing.is_over())
    }

    fn run(self) -> ncclResult_t {
        let mut result = ncclSuccess;
        let mut measured = Vec::new();
        for (lazy, materializing) in self.lazy_communicators {
            let materialized = materializing.wait();
            match materialized == ncclSuccess {
                true => note(&lazy),
                false if result == ncclSuccess => result = materialized,
                false => {}
            }
            measured.push((lazy.measure(), lazy));
        }
        if result == ncclSuccess {
            result = run_unit(self.work);
        }
        measured.into_iter().for_each(|(before, lazy)| lazy.measured(before));
        result
    }
}

fn run_unit(work: Vec<LazyWork>) -> ncclResult_t {
    // They live until NCCL has ended its group.
    let mut configurations = Vec::new();
    init::in_group(|| {
        work.into_iter().fold(ncclSuccess, |before, one| {
            let (result, configuration) = run_one(one);
            configurations.push(configuration);
            before.and(result)
        })
    })
}

fn run_one(LazyWork { lazy, work }: LazyWork) -> (ncclResult_t, Option<OfCall>) {
    let ran = lazy.with_nccl(|real| match work {
        Work::Other(work) => (work(real), None),
        Work::Call(call, None, configuration) => (run_with(&call, &lazy, real), configuration),
        Work::Call(mut call, Some(operator), configuration) => match operator.real(real) {
            Some(operation) => {
                call.shared.operation = Some(operation);
                let result = run_made(&call, &lazy, real);
                operator.let_go(real);
                (result, configuration)
            }
            None => (ncclInternalError, None),
        },
    });
    ran.unwrap_or_else(|code| (code, None))
}

/// Runs a call whose operation is already NCCL's own number.
fn run_made(call: &Call, lazy: &LazyCommunicator, real: ncclComm_t) -> ncclResult_t {
    lazy.runs_on(ordering::stream_of(call));
    let mut call = *call;
    call.local.communicator = real;
    forward::forward(&call)
}
