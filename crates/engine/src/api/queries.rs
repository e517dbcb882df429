//! All other functions that take a communicator. NCCL answers for a communicator that it has made. For a lazy one, calls that only one rank
//! makes are answered here; calls that all ranks make materialize it, in a group at the group's end.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use nccl_sys::missing::{is_missing, is_missing_at};
use nccl_sys::{
    Entry, cudaStream_t, ncclComm_t, ncclDataType_t, ncclInvalidArgument, ncclInvalidUsage, ncclRedOp_t,
    ncclResult_t, ncclScalarResidence_t, ncclSuccess,
};

use crate::communicator::{self, Communicator};
use crate::dispatch::lazy_calls;
use crate::dispatch::ordering::{self, Lane};
use crate::features::memory::pool;
use crate::features::registration::registering::Registering;
use crate::forward::known::put;
use crate::forward::{operators, queries, registration};
use crate::group::{self, LazyWork, Work};
use crate::lazy::{self, LazyCommunicator, Unfit};
use crate::peers::PeerGroup;
use windlass_base::error::refuse;
use windlass_base::guard;
use windlass_base::range::Range;
use windlass_base::stats::count;

use super::handles::{check_awake, ended, enter_by, in_peer_group, share};
use super::windows;

/// The lazy communicator with this handle.
pub fn lazy_of(handle: ncclComm_t) -> Option<Arc<LazyCommunicator>> {
    let communicator = communicator::find(handle)?;
    if communicator.is_lazy() { communicator.lazy(handle) } else { None }
}

/// Marks NCCL's communicator behind a lazy one as unfit for the cache.
pub(super) fn keep_apart(handle: ncclComm_t, unfit: Unfit) {
    guard::or_else(|| (), || lazy_of(handle).into_iter().for_each(|lazy| lazy.mark(unfit)));
}

/// The same, on this rank, if it is already materialized: before that, the call does not reach NCCL.
pub(super) fn keep_built_apart(handle: ncclComm_t) {
    let is_built = |lazy: &Arc<LazyCommunicator>| lazy.real().is_some();
    let mark = || lazy_of(handle).filter(is_built).into_iter().for_each(|lazy| lazy.mark(Unfit::Here));
    guard::or_else(|| (), mark);
}

/// Counts a call and runs `answer` with the lazy communicator of a handle, if it is one. `enters`: it passes the gate.
fn answer(
    entry: Entry,
    handle: ncclComm_t,
    enters: bool,
    answer: impl FnOnce(Option<&Arc<LazyCommunicator>>) -> ncclResult_t,
) -> ncclResult_t {
    let before = || {
        count::function(entry);
        let inside = if enters { enter_by(handle) } else { None };
        // A function that the real library lacks fails for lazy communicators, too, whatever the handle.
        (lazy_of(handle).filter(|_| !is_missing(entry)), inside)
    };
    guard::around(before, |(lazy, _inside)| answer(lazy.as_ref()), |_, _| ())
}

/// Runs a call that only this rank makes: by `here` for a lazy communicator that is not materialized, else by `real`.
pub(super) fn ask(
    entry: Entry,
    handle: ncclComm_t,
    here: impl FnOnce(&Arc<LazyCommunicator>) -> ncclResult_t,
    real: impl FnOnce(ncclComm_t) -> ncclResult_t,
) -> ncclResult_t {
    // NCCL allows these queries at any time, so they need not pass the gate.
    use Entry::{ncclCommCount, ncclCommCuDevice, ncclCommUserRank};
    let is_free = matches!(entry, ncclCommCount | ncclCommCuDevice | ncclCommUserRank);
    answer(entry, handle, !is_free, |lazy| match lazy.map(|lazy| (lazy, lazy.real())) {
        None => real(handle),
        Some((_, Some(built))) => real(built),
        Some((lazy, None)) => guard::call(|| here(lazy)),
    })
}

/// Runs a call that all ranks make, which materializes a lazy communicator.
pub(super) fn need(
    entry: Entry,
    handle: ncclComm_t,
    real: impl FnOnce(ncclComm_t) -> ncclResult_t + 'static,
) -> ncclResult_t {
    if let Err(code) = check_awake(entry, handle) {
        return code;
    }
    answer(entry, handle, true, |lazy| match lazy {
        None => real(handle),
        Some(lazy) => with_real(lazy, real),
    })
}

/// Runs `real` with NCCL's handle, after materializing: now, or at the end of the open group.
pub fn with_real(
    lazy: &Arc<LazyCommunicator>,
    real: impl FnOnce(ncclComm_t) -> ncclResult_t + 'static,
) -> ncclResult_t {
    if lazy.real().is_none() && group::is_open() {
        let held = LazyWork { lazy: lazy.clone(), work: Work::Other(Box::new(real)) };
        group::hold_lazy_work(held);
        return ncclSuccess;
    }
    if lazy.real().is_none() {
        let materialized = lazy_calls::materialize(lazy);
        if materialized != ncclSuccess {
            return materialized;
        }
    }
    lazy.with_nccl(real).unwrap_or_else(|code| code)
}

/// The number of ranks.
pub fn count(handle: ncclComm_t, place: *mut c_int) -> ncclResult_t {
    let here = |lazy: &Arc<LazyCommunicator>| {
        put(place, lazy.peer_group.negotiated().members.len() as c_int, "ncclCommCount: count")
    };
    ask(Entry::ncclCommCount, handle, here, |real| queries::count(real, place))
}

/// This rank's device.
pub fn device(handle: ncclComm_t, place: *mut c_int) -> ncclResult_t {
    let here = |lazy: &Arc<LazyCommunicator>| put(place, lazy.device, "ncclCommCuDevice: device");
    ask(Entry::ncclCommCuDevice, handle, here, |real| queries::device(real, place))
}

/// This rank.
pub fn rank(handle: ncclComm_t, place: *mut c_int) -> ncclResult_t {
    let here =
        |lazy: &Arc<LazyCommunicator>| put(place, lazy.peer_group.rank() as c_int, "ncclCommUserRank: rank");
    ask(Entry::ncclCommUserRank, handle, here, |real| queries::rank(real, place))
}

/// The last error text of the process, NCCL's or Windlass's.
pub fn last_error(handle: ncclComm_t) -> *const c_char {
    count::function(Entry::ncclGetLastError);
    let real = lazy_of(handle).map_or(handle, |lazy| lazy.real().unwrap_or(std::ptr::null_mut()));
    queries::last_error(real)
}

/// An id for ranks that join by `ncclCommGrow`.
pub fn unique_id(handle: ncclComm_t, place: *mut nccl_sys::ncclUniqueId) -> ncclResult_t {
    keep_apart(handle, Unfit::Here);
    need(Entry::ncclCommGetUniqueId, handle, move |real| queries::unique_id(real, place))
}

/// Registers a buffer.
pub fn register(
    handle: ncclComm_t,
    address: *mut c_void,
    bytes: usize,
    place: *mut *mut c_void,
) -> ncclResult_t {
    let here = |lazy: &Arc<LazyCommunicator>| {
        if place.is_null() {
            return refuse(ncclInvalidArgument, format_args!("ncclCommRegister: handle is null"));
        }
        put(place, lazy.registrations.add(address as usize, bytes) as *mut c_void, "ncclCommRegister: handle")
    };
    if let Err(code) = check_awake(Entry::ncclCommRegister, handle) {
        return code;
    }
    keep_built_apart(handle);
    // NCCL would return the registration of a kept window.
    windows::meet(handle, address, bytes);
    let result =
        ask(Entry::ncclCommRegister, handle, here, |real| queries::register(real, address, bytes, place));
    if result == ncclSuccess {
        registering_of(handle, Registering::veto);
        note_registered(handle, address, bytes, place.cast());
    }
    result
}

/// Notes a registration of the application's: memory of the pool must not be recycled before it ends.
pub(super) fn note_registered(
    handle: ncclComm_t,
    address: *mut c_void,
    bytes: usize,
    place: *mut *mut c_void,
) {
    let note = || match registration::handle_at(place) {
        0 => {}
        given => pool::registered(
            Range { base: address as u64, bytes: bytes as u64 },
            pool::Registration { communicator: handle as usize, handle: given },
        ),
    };
    guard::or_else(|| (), note);
}

/// Ends a registration.
pub fn deregister(handle: ncclComm_t, registration: *mut c_void) -> ncclResult_t {
    let before = || {
        count::function(Entry::ncclCommDeregister);
        group::restore_device();
        let ended = pool::Registration { communicator: handle as usize, handle: registration as usize };
        // A kept window over this memory would keep the registration alive in NCCL.
        windows::meet_each(handle, || pool::registered_by(ended));
        (lazy_of(handle), enter_by(handle))
    };
    let answer = |(lazy, _inside): &(Option<Arc<LazyCommunicator>>, _)| {
        let Some(lazy) = lazy else { return queries::deregister(handle, registration) };
        let real = lazy.real();
        match lazy.registrations.remove(registration as usize, real) {
            Some(result) => result,
            None => match real {
                Some(real) => queries::deregister(real, registration),
                None if registration.is_null() => ncclSuccess,
                None => {
                    refuse(ncclInvalidUsage, format_args!("ncclCommDeregister: {registration:p} is unknown"))
                }
            },
        }
    };
    guard::around(before, answer, |_, result| {
        if result == ncclSuccess && !registration.is_null() {
            registering_of(handle, Registering::allow);
            note_deregistered(handle, registration as usize);
        }
    })
}

pub(super) fn note_deregistered(handle: ncclComm_t, registration: usize) {
    let ended = pool::Registration { communicator: handle as usize, handle: registration };
    guard::or_else(|| (), || pool::deregistered(ended));
}

/// Calls `act` with the registration state of a communicator, if it has one.
pub(super) fn registering_of(handle: ncclComm_t, act: impl Fn(&Registering)) {
    in_peer_group(handle, |peer_group| peer_group.features.registering.as_ref().map(|one| act(one)));
}

/// Makes an operation. A lazy communicator has operations of Windlass, materialized or not.
pub fn operator(
    place: *mut ncclRedOp_t,
    scalar: *mut c_void,
    datatype: ncclDataType_t,
    residence: ncclScalarResidence_t,
    handle: ncclComm_t,
) -> ncclResult_t {
    answer(Entry::ncclRedOpCreatePreMulSum, handle, false, |lazy| match lazy {
        None => create_operator(place, scalar, datatype, residence, handle),
        Some(lazy) => guard::call(|| {
            if place.is_null() || scalar.is_null() {
                let why = format_args!("ncclRedOpCreatePreMulSum: op or scalar is null");
                return refuse(ncclInvalidArgument, why);
            }
            match lazy.operators.create(scalar, datatype, residence) {
                Ok(made) => put(place, made, "ncclRedOpCreatePreMulSum: op"),
                Err(code) => code,
            }
        }),
    })
}

/// Has NCCL make an operation, and notes its scalar for native collectives in fixed order.
fn create_operator(
    place: *mut ncclRedOp_t,
    scalar: *mut c_void,
    datatype: ncclDataType_t,
    residence: ncclScalarResidence_t,
    handle: ncclComm_t,
) -> ncclResult_t {
    let result = operators::create_for(place, scalar, datatype, residence, handle);
    let note = || {
        let peer_group = in_fixed_order(handle)?;
        let scalar = operators::scalar(scalar, datatype, residence)?;
        peer_group.scalars.made(operators::made(place), datatype, scalar);
        Some(())
    };
    if result == ncclSuccess {
        guard::or_else(|| None, note);
    }
    result
}

/// The peer group of a communicator whose reductions are in fixed order.
fn in_fixed_order(handle: ncclComm_t) -> Option<Arc<PeerGroup>> {
    let is_fixed = |known: &&Communicator| known.has_peer_group() && known.terms().fixed_order;
    communicator::find(handle).filter(is_fixed)?.peer_group(handle)
}

/// Destroys an operation.
pub fn end_operator(operation: ncclRedOp_t, handle: ncclComm_t) -> ncclResult_t {
    answer(Entry::ncclRedOpDestroy, handle, false, |lazy| match lazy {
        None if lazy::is_ours(handle) => ended(handle),
        None => {
            if let Some(peer_group) = in_fixed_order(handle) {
                peer_group.scalars.ended(operation);
            }
            operators::destroy(operation, handle)
        }
        Some(lazy) => lazy.operators.destroy(operation, lazy.real()),
    })
}

/// Runs a one-sided call. It needs a window, whose registration has materialized a lazy communicator. NCCL runs it in order with the
/// communicator's other operations, so it is ordered against kernels of Windlass, too.
/// `sent` is memory that it reads, with its bytes.
pub fn one_sided(
    entry: Entry,
    handle: ncclComm_t,
    stream: cudaStream_t,
    sent: Option<(*const c_void, usize)>,
    forward: impl FnOnce(ncclComm_t) -> ncclResult_t,
) -> ncclResult_t {
    let here = |_: &Arc<LazyCommunicator>| {
        refuse(ncclInvalidUsage, format_args!("{entry:?}: the communicator has no window"))
    };
    if let Some((address, bytes)) = sent {
        windows::meet(handle, address, bytes);
    }
    let lane = Lane { communicator: handle, stream, is_empty: false };
    let find = || communicator::find(handle).filter(|known| known.has_peer_group() && !is_missing(entry));
    let communicator = guard::or_else(|| None, find);
    let before = || {
        check_awake(entry, handle)?;
        let before = communicator.map_or(Ok(None), |known| ordering::before_forward(lane, known));
        before.inspect_err(|_| count::function(entry))
    };
    let forwarded = match guard::or_else(|| Ok(None), before) {
        Ok(forwarded) => forwarded,
        Err(code) => return code,
    };
    let result = ask(entry, handle, here, forward);
    guard::or_else(|| (), || ordering::after_forward(forwarded, result));
    result
}

/// NCCL's handle, for a function whose arguments Windlass does not know. Materializes a lazy communicator, even while a group is open. None
/// if that fails, or the communicator has ended.
pub fn real_handle(entry: usize, handle: ncclComm_t) -> Option<ncclComm_t> {
    let found = guard::or_else(|| None, || lazy_of(handle));
    let Some(lazy) = found.filter(|_| !is_missing_at(entry)) else {
        // Windlass does not see when the function ends.
        share(handle);
        // Waits until Windlass's threads have left NCCL's communicator.
        drop(enter_by(handle));
        let is_lost = !is_missing_at(entry) && lazy::is_ours(handle);
        return if is_lost { None } else { Some(handle) };
    };
    lazy.mark(Unfit::Everywhere);
    if lazy.real().is_none() {
        let materialized = match group::is_open() {
            true => lazy_calls::materialize_in_group(&lazy),
            false => lazy_calls::materialize(&lazy),
        };
        if materialized != ncclSuccess {
            refuse(
                materialized,
                format_args!("the lazy communicator behind {handle:p} cannot be materialized"),
            );
        }
    }
    share(handle);
    drop(enter_by(handle));
    lazy.real()
}
