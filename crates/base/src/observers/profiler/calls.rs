//! Events of calls that Windlass runs, and the contexts of communicators whose calls these are. Times are the host's: what a call takes until
//! it is issued. Where a plugin asks for channels, a call that is not captured announces one, which comes with the [device's times](super::times).

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ffi::{c_char, c_void};
use std::mem::take;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use nccl_sys::profiler::{
    Coll, CollApi, Details, Event, GROUP_STATES, GroupApi, KERNEL_CH_STOP, KernelCh, P2p, P2pApi, hash, kind,
};
use nccl_sys::{CODES, NCCL_UNIQUE_ID_BYTES};

use super::super::{Observed, text};
use super::plugins::{Begun, LoadedPlugin};
use super::times::{self, ToldCall};
use super::{KNOWN, Profiled, all, log, record_state, start_each, stop_event};
use crate::call::{Call, Function, Shared};
use crate::gpu::{StreamHandle, driver};
use crate::path::Path;

/// NCCL's record of a communicator is smaller than this. The place of its context lies in the record, behind the handle.
const RECORD_MAX: usize = 4 << 20;

thread_local! {
    /// Events of this thread: its outermost group's, as versions from 5 on and as version 4 have it, and those of calls that are not issued.
    static OPEN: RefCell<([usize; 2], Vec<usize>)> = const { RefCell::new(([0; 2], Vec::new())) };
}

/// A lazy communicator is made: NCCL begins none.
pub fn made(communicator: &Observed) {
    let is_told = !all().is_empty() && communicator.ranks > 0;
    drop(is_told.then(|| profiled(communicator)));
}

/// NCCL is about to build a lazy communicator by an id of its own. Whether there are plugins that hear of it.
pub fn expect(id: &[u8; NCCL_UNIQUE_ID_BYTES], rank: i32, handle: usize) -> bool {
    KNOWN.lock().expected.insert((hash(id), rank), handle);
    !all().is_empty()
}

/// A communicator has ended.
pub fn ended(handle: usize) {
    let mut known = KNOWN.lock();
    known.expected.retain(|_, expecting| *expecting != handle);
    let ended = known.ours.remove(&handle);
    // Plugins may take long.
    drop(known);
    // Channels come before the end of their context.
    ended.iter().for_each(times::ended);
    drop(ended);
}

/// What plugins have of a communicator. NCCL's context of it has the first place behind its handle.
fn profiled(communicator: &Observed) -> Arc<Profiled> {
    let Observed { handle, is_lazy, name, rank, ranks } = *communicator;
    let before = KNOWN.lock();
    if let Some(ours) = before.ours.get(&handle) {
        return ours.clone();
    }
    let behind =
        |place: usize| place.checked_sub(handle).filter(|distance| !is_lazy && *distance < RECORD_MAX);
    let nccls = before.nccls.values().filter_map(|(place, profiled)| Some((behind(*place)?, profiled)));
    let nccls = nccls.min_by_key(|(distance, _)| *distance).map(|(_, profiled)| profiled.clone());
    let begun =
        Begun { id: name, name: null(), sizes: [1, ranks, rank], logger: before.logger.or(Some(log)) };
    // A plugin may take long, and wait for other ranks of this process.
    drop(before);
    let new = nccls.unwrap_or_else(|| Profiled::begin(begun));
    // Another thread may have been faster: then this one ends after the lock.
    KNOWN.lock().ours.entry(handle).or_insert_with(|| new.clone()).clone()
}

/// Begins the events of a call.
pub(crate) fn before(call: &Call, path: Path, communicator: &Observed, depth: i32) {
    if all().is_empty() {
        return;
    }
    let profiled = profiled(communicator);
    let start = |kind: u64, of: Details, parents: [usize; 2]| {
        let mut event = Event { kind, parent: null_mut(), rank: communicator.rank, of };
        // SAFETY: the event is larger than any version's, and has the fields of its kind.
        unsafe { start_each(Some(&profiled), u32::MAX, &mut event, kind, parents) }
    };
    let (shared, local) = (&call.shared, &call.local);
    let stream: *mut c_void = local.stream.cast();
    let captured = driver().and_then(|driver| driver.capture_of(StreamHandle(stream as usize)));
    let is_captured = captured.is_ok_and(|captured| captured.is_some());
    let (named, function, datatype) = names(shared);
    let (count, root, none) = (shared.count, shared.root.unwrap_or(0), null_mut());
    let (group, nothing) = (none, Details { nothing: [0; 24] });
    let asks = |plugin: &LoadedPlugin| plugin.mask() & kind::KERNEL_CH != 0;
    let is_timed = !is_captured && count > 0 && all().iter().any(asks) && times::has_room();
    let channels = is_timed.into();
    // An ending thread may have none.
    let _ = OPEN.try_with(|here| {
        let (groups, open) = &mut *here.borrow_mut();
        if *groups == [0; 2] {
            groups[0] =
                start(kind::GROUP_API, Details { group_api: GroupApi { is_captured, depth } }, [0; 2]);
            groups[1] = start(kind::GROUP, nothing, [groups[0], 0]);
            let _ = GROUP_STATES.map(|state| record_state(groups[0] as *mut c_void, state, none));
        }
        let (api_kind, api, kind, of) = match local.peer {
            None => {
                let coll_api = CollApi { function, count, datatype, root, stream, is_captured };
                let coll = coll(call, [function, datatype], profiled.number(named), channels);
                (kind::COLL_API, Details { coll_api }, kind::COLL, Details { coll })
            }
            Some(peer) => {
                let p2p_api = P2pApi { function, count, datatype, stream, is_captured };
                let buffer = if local.send.is_null() { local.receive } else { local.send.cast_mut() };
                let p2p = P2p { function, buffer, datatype, count, peer, channels, group };
                (kind::P2P_API, Details { p2p_api }, kind::P2P, Details { p2p })
            }
        };
        let api = start(api_kind, api, [groups[0], 0]);
        stop_event(api as *mut c_void);
        let event = start(kind, of, [api, groups[1]]);
        open.push(event);
        if is_timed {
            let (handle, rank, is_message) = (communicator.handle, communicator.rank, path == Path::P2p);
            times::await_launch(ToldCall { profiled: profiled.clone(), handle, rank, event, is_message });
        }
    });
}

/// Tells of the channel of a call's event, which ran from one time to another, in nanoseconds.
pub(super) fn channel(ToldCall { profiled, rank, event, .. }: &ToldCall, times: [u64; 2]) {
    let kernel_ch = KernelCh { channel: 0, time: times[0] };
    let of = Details { kernel_ch };
    let mut channel = Event { kind: kind::KERNEL_CH, parent: null_mut(), rank: *rank, of };
    // SAFETY: as above.
    let channel = unsafe { start_each(Some(profiled), u32::MAX, &mut channel, kind::KERNEL_CH, [*event, 0]) };
    // Larger than any version's arguments of a state.
    let mut arguments = [times[1], 0, 0, 0];
    record_state(channel as *mut c_void, KERNEL_CH_STOP, arguments.as_mut_ptr().cast());
    stop_event(channel as *mut c_void);
}

fn coll(call: &Call, [function, datatype]: [*const c_char; 2], number: u64, channels: u8) -> Coll {
    let (send, receive, count) = (call.local.send, call.local.receive, call.shared.count);
    let (root, warps, group) = (call.shared.root.unwrap_or(0), 0, null_mut());
    let [algorithm, protocol] = [c"WINDLASS".as_ptr(); 2];
    Coll {
        number,
        function,
        send,
        receive,
        count,
        root,
        datatype,
        channels,
        warps,
        algorithm,
        protocol,
        group,
    }
}

/// The function under which NCCL would count a call, with NCCL's names of it and of the type.
fn names(shared: &Shared) -> (Function, *const c_char, *const c_char) {
    let function = match shared.function.plain() {
        Function::Bcast => Function::Broadcast,
        plain => plain,
    };
    let datatype = CODES[2].values.iter().find(|(_, value)| *value == shared.datatype.0);
    let name = &function.entry().description().name["nccl".len()..];
    (function, text(name), text(datatype.map_or("unknown", |(name, _)| name)))
}

/// Ends the events of this thread's calls, and of its outermost group if that has ended.
pub(crate) fn after(depth: i32) {
    let _ = OPEN.try_with(|here| {
        let (groups, open) = &mut *here.borrow_mut();
        if depth == 0 {
            times::forget_launches();
        }
        let groups = if depth == 0 { take(groups) } else { [0; 2] };
        let all = open.drain(..).chain([groups[1], groups[0]]);
        let _ = all.fold(0, |code, event| code | stop_event(event as *mut c_void));
    });
}
