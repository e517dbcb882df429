//! Events of calls that Windlass runs, and the contexts of communicators whose calls these are. Times are the host's: what a call takes until
//! it is issued. Kernels tell no times, so calls announce no channels.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ffi::c_int;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use nccl_sys::NCCL_UNIQUE_ID_BYTES;
use nccl_sys::profiler::{Coll, CollApi, Details, Event, GROUP_STATES, GroupApi, P2p, P2pApi, hash, kind};

use super::super::{Observed, function_name, type_name};
use super::plugins::Begun;
use super::{Context, Known, all, record_state, stop, with_known};
use crate::call::{Call, Function};
use crate::gpu::{StreamHandle, driver};

/// NCCL's record of a communicator is smaller than this. The place of its context lies in the record, behind the handle.
const RECORD_MAX: usize = 4 << 20;

/// The events of this thread's calls that have not been issued.
#[derive(Default)]
struct Open {
    group_api: usize,
    group: usize,
    calls: Vec<usize>,
}

thread_local! {
    static OPEN: RefCell<Open> = RefCell::default();
}

/// A lazy communicator is made: NCCL begins none.
pub fn made(communicator: &Observed) {
    if !all().is_empty() {
        with_known(|known| drop(context(known, communicator)));
    }
}

/// NCCL is about to build a lazy communicator by an id of its own. Whether there are plugins that hear of it.
pub fn expect(id: &[u8; NCCL_UNIQUE_ID_BYTES], rank: i32, handle: usize) -> bool {
    with_known(|known| known.expected.insert((hash(id), rank), handle));
    !all().is_empty()
}

/// A communicator has ended.
pub fn ended(handle: usize) {
    drop(with_known(|known| known.ours.remove(&handle)));
}

/// The context that NCCL keeps in the record of its communicator: its place is the first one behind the handle.
fn place_of(known: &Known, nccls: usize) -> Option<usize> {
    let behind = |place: usize| place.checked_sub(nccls).filter(|distance| *distance < RECORD_MAX);
    let places =
        known.nccls.iter().enumerate().filter_map(|(index, given)| Some((behind(given.place)?, index)));
    places.min().map(|(_, index)| index)
}

fn context(known: &mut Known, communicator: &Observed) -> Arc<Context> {
    let Observed { handle, is_lazy, name, rank, ranks } = *communicator;
    if let Some(context) = known.ours.get(&handle) {
        return context.clone();
    }
    let nccls = if is_lazy { None } else { place_of(known, handle) };
    let nccls = nccls.and_then(|index| known.nccls[index].context.clone());
    let begin =
        || Context::begin(Begun { id: name, name: null(), sizes: [1, ranks, rank], logger: known.logger });
    let context = nccls.unwrap_or_else(begin);
    known.ours.insert(handle, context.clone());
    context
}

/// Begins the events of a call.
pub(crate) fn before(call: &Call, communicator: &Observed, depth: i32) {
    if all().is_empty() {
        return;
    }
    let context = with_known(|known| context(known, communicator));
    let start = |kind: u64, of: Details, [parent, group]: [usize; 2]| {
        let mut event = Event { kind, parent: null_mut(), rank: communicator.rank, of };
        // SAFETY: the event is larger than any version's, and has the fields of its kind.
        unsafe { Context::start(Some(&context), &mut event, kind, [parent, group], |_| true) }
    };
    let (shared, local) = (&call.shared, &call.local);
    let stream = local.stream.cast();
    let captured = driver().and_then(|driver| driver.capture_of(StreamHandle(local.stream as usize)));
    let is_captured = captured.is_ok_and(|captured| captured.is_some());
    OPEN.with_borrow_mut(|open| {
        if open.group_api == 0 && open.group == 0 {
            let group_api = GroupApi { is_captured, depth: depth as c_int };
            open.group_api = start(kind::GROUP_API, Details { group_api }, [0; 2]);
            open.group = start(kind::GROUP, Details { nothing: [0; 24] }, [open.group_api, 0]);
            for state in GROUP_STATES {
                record_state(open.group_api as *mut _, state, null_mut());
            }
        }
        let function = match shared.function.plain() {
            Function::Bcast => Function::Broadcast,
            plain => plain,
        };
        // Behind NCCL's prefix.
        let name = function_name(function).wrapping_add("nccl".len());
        let (count, datatype, root) = (shared.count, type_name(shared.datatype), shared.root.unwrap_or(0));
        let (api, kind, of) = match local.peer {
            None => {
                let coll_api = CollApi { function: name, count, datatype, root, stream, is_captured };
                let api = start(kind::COLL_API, Details { coll_api }, [open.group_api, 0]);
                let coll = Coll {
                    number: context.numbers[function as usize]
                        .fetch_add(1, std::sync::atomic::Ordering::Relaxed),
                    function: name,
                    send: local.send,
                    receive: local.receive,
                    count,
                    root,
                    datatype,
                    channels: 0,
                    warps: 0,
                    algorithm: c"WINDLASS".as_ptr(),
                    protocol: c"WINDLASS".as_ptr(),
                    group: null_mut(),
                };
                (api, kind::COLL, Details { coll })
            }
            Some(peer) => {
                let p2p_api = P2pApi { function: name, count, datatype, stream, is_captured };
                let api = start(kind::P2P_API, Details { p2p_api }, [open.group_api, 0]);
                let buffer = if local.send.is_null() { local.receive } else { local.send.cast_mut() };
                let p2p =
                    P2p { function: name, buffer, datatype, count, peer, channels: 0, group: null_mut() };
                (api, kind::P2P, Details { p2p })
            }
        };
        stop(api);
        open.calls.push(start(kind, of, [api, open.group]));
    });
}

/// Ends the events of this thread's calls, and of its outermost group if that has ended.
pub(crate) fn after(depth: i32) {
    OPEN.with_borrow_mut(|open| {
        open.calls.drain(..).for_each(stop);
        if depth == 0 {
            let Open { group, group_api, .. } = std::mem::take(open);
            [group, group_api].into_iter().for_each(stop);
        }
    });
}
