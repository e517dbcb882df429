//! Calls of promises that NCCL is to run. What it would refuse is refused here, and what it would drop is dropped: neither is a
//! reason to wait for other ranks. In a group such a call is held until the outermost end, where all promises of the group are
//! honoured together, before NCCL runs it.

use std::sync::Arc;

use nccl_sys::{ncclInternalError, ncclInvalidUsage, ncclResult_t, ncclSuccess};

use crate::call::{Call, Function};
use crate::communicator;
use crate::error::refuse;
use crate::forward;
use crate::group::{self, Awaited, Promised, Work};
use crate::guard;
use crate::promise::Promise;
use crate::stats::{count, fabric};

use super::messages;

/// What becomes of a call.
enum Look {
    Answer(ncclResult_t),
    Honour,
    /// At once, though a group is open.
    HonourInGroup,
}

/// Runs a call, or holds it till its group ends.
pub fn take(call: &Call, promise: &Arc<Promise>) -> ncclResult_t {
    if promise.real().is_none() {
        let honoured = match guard::or_else(|| Look::Answer(ncclInternalError), || look(call, promise)) {
            Look::Answer(code) => return code,
            Look::Honour => honour(promise),
            Look::HonourInGroup => Promise::honour_together(std::slice::from_ref(promise)),
        };
        if honoured != ncclSuccess {
            return honoured;
        }
    }
    run(call, promise)
}

/// Honours a promise, outside groups.
pub fn honour(promise: &Arc<Promise>) -> ncclResult_t {
    let result = promise.honour();
    if result == ncclSuccess {
        note(promise);
    }
    result
}

fn note(promise: &Promise) {
    if let Some(communicator) = communicator::find(promise.handle()) {
        count::nccl(communicator.counters(), fabric::BUILT);
    }
}

fn look(call: &Call, promise: &Arc<Promise>) -> Look {
    if let Some(code) = refusal(call, promise) {
        if group::is_open() {
            // As NCCL has it, the group runs nothing.
            group::wait_for(Awaited::Failed(code));
        }
        return Look::Answer(code);
    }
    // NCCL drops collectives without elements.
    if call.shared.count == 0 && !matches!(call.shared.function, Function::Send | Function::Recv) {
        return Look::Answer(ncclSuccess);
    }
    if !group::is_open() {
        return Look::Honour;
    }
    // What a configuration points to need not last till the group ends.
    if !call.local.config.is_null() {
        return Look::HonourInGroup;
    }
    let operator = call.shared.operation.and_then(|operation| promise.operators().get(operation));
    let held = Promised { promise: promise.clone(), work: Work::Call(*call, operator) };
    match group::hold_promised(held) {
        true => Look::Answer(ncclSuccess),
        false => Look::Answer(refuse(ncclInternalError, format_args!("a group of a thread that is ending"))),
    }
}

fn refusal(call: &Call, promise: &Promise) -> Option<ncclResult_t> {
    if promise.is_revoked() {
        let name = call.shared.function.entry().description().name;
        return Some(refuse(ncclInvalidUsage, format_args!("{name}: the communicator was revoked")));
    }
    promise.refusal(call)
}

fn run(call: &Call, promise: &Promise) -> ncclResult_t {
    let translated = guard::or_else(
        || Err(ncclInternalError),
        || {
            if let Some(communicator) = communicator::find(call.local.communicator) {
                messages::before_forward(call, communicator);
            }
            promise.translated(call)
        },
    );
    match translated {
        Ok(call) => forward::forward(&call),
        Err(code) => code,
    }
}

/// Gives NCCL what a group held, in call order, within its own group: first the promises are honoured, all at once. What NCCL
/// refuses of it fails the group at its end.
pub fn run_held(held: Vec<Promised>) -> ncclResult_t {
    let mut promises: Vec<Arc<Promise>> = Vec::new();
    for one in &held {
        if !promises.iter().any(|known| Arc::ptr_eq(known, &one.promise)) {
            promises.push(one.promise.clone());
        }
    }
    promises.sort_by_key(|promise| (promise.fabric().contract().birth, promise.fabric().rank()));
    let honoured = Promise::honour_together(&promises);
    if honoured != ncclSuccess {
        return honoured;
    }
    promises.iter().for_each(|promise| note(promise));
    let mut answer = ncclSuccess;
    for Promised { promise, work } in held {
        let result = match work {
            Work::Call(call, operator) => match (operator, promise.real()) {
                (Some(operator), Some(real)) => match operator.real(real) {
                    Some(operation) => {
                        let mut call = call;
                        call.shared.operation = Some(operation);
                        call.local.communicator = promise.handle();
                        run_made(&call, &promise, real)
                    }
                    None => ncclInternalError,
                },
                _ => run(&call, &promise),
            },
            Work::Other(work) => promise.real().map_or(ncclInternalError, work),
        };
        if answer == ncclSuccess && result != ncclSuccess {
            answer = result;
        }
    }
    answer
}

/// A call whose reduction is NCCL's own already.
fn run_made(call: &Call, promise: &Promise, real: nccl_sys::ncclComm_t) -> ncclResult_t {
    if let Some(communicator) = communicator::find(promise.handle()) {
        messages::before_forward(call, communicator);
    }
    let mut call = *call;
    call.local.communicator = real;
    forward::forward(&call)
}
