//! Registers and deregisters windows. On a communicator with kept windows the ranks first agree on each registration, and may reuse a kept
//! window. On other communicators NCCL makes and ends every window.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use nccl_sys::{
    Entry, ncclComm_t, ncclInternalError, ncclInvalidArgument, ncclResult_t, ncclSuccess, ncclWindow_t,
};

use crate::features::memory::pool;
use crate::features::registration::registering::Registering;
use crate::features::windows::list::Ended;
use crate::features::windows::{Course, Making, WindowRequest, Windows};
use crate::forward::known::put;
use crate::forward::queries;
use crate::lazy::{LazyCommunicator, Unfit};
use crate::{communicator, group};
use windlass_base::config::nccl;
use windlass_base::error::refuse;
use windlass_base::guard;
use windlass_base::range::Range;

use super::handles::{check_awake, enter_by, in_peer_group};
use super::queries::{ask, keep_apart, need, note_deregistered, note_registered, registering_of};

/// The version code of the first release that writes a null window where it makes none.
const SAYS_NONE_SINCE: i32 = 22902;

/// The arguments of a registration.
#[derive(Clone, Copy)]
struct Asked {
    handle: ncclComm_t,
    address: *mut c_void,
    bytes: usize,
    place: *mut ncclWindow_t,
    flags: c_int,
}

/// Registers a window.
pub fn register(
    handle: ncclComm_t,
    address: *mut c_void,
    bytes: usize,
    place: *mut ncclWindow_t,
    flags: c_int,
) -> ncclResult_t {
    group::restore_device();
    if let Err(code) = check_awake(Entry::ncclCommWindowRegister, handle) {
        return code;
    }
    let asked = Asked { handle, address, bytes, place, flags };
    // For no memory NCCL makes no window, and does not involve other ranks.
    if address.is_null() || bytes == 0 || place.is_null() {
        let here = |_: &Arc<LazyCommunicator>| match place.is_null() {
            true => refuse(ncclInvalidArgument, format_args!("ncclCommWindowRegister: win is null")),
            false => ncclSuccess,
        };
        return ask(Entry::ncclCommWindowRegister, handle, here, |real| asked.refused_at_once(real));
    }
    keep_apart(handle, Unfit::Everywhere);
    // The application passes such buffers itself, and only it knows the order in which ranks register windows.
    registering_of(handle, Registering::veto);
    let is_grouped = group::is_open();
    need(Entry::ncclCommWindowRegister, handle, move |real| asked.make(real, is_grouped))
}

/// What `look` finds in the kept windows of a communicator that has them.
fn in_kept<T>(handle: ncclComm_t, look: impl FnOnce(&Windows) -> T) -> Option<T> {
    in_peer_group(handle, |peer_group| peer_group.features.windows.as_ref().map(|windows| look(windows)))
}

/// Whether NCCL writes a null window where it makes none. Older releases leave the place unchanged.
fn says_none() -> bool {
    nccl::version() >= SAYS_NONE_SINCE
}

impl Asked {
    fn request(&self) -> WindowRequest {
        let range = Range { base: self.address as u64, bytes: self.bytes as u64 };
        WindowRequest { range, flags: self.flags as u32 }
    }

    fn make(&self, real: ncclComm_t, is_grouped: bool) -> ncclResult_t {
        let peer_group = in_peer_group(self.handle, |peer_group| Some(peer_group.clone()));
        let kept = peer_group
            .as_ref()
            .and_then(|peer_group| Some((peer_group, peer_group.features.windows.as_ref()?)));
        let Some((peer_group, windows)) = kept else { return self.forward(real, is_grouped) };
        if is_grouped {
            guard::or_else(|| (), || windows.forward_grouped(real));
            return self.forward(real, is_grouped);
        }
        let course = guard::or_else(
            || Course::Refused(ncclInternalError),
            || windows.agree(&**peer_group, real, self.request()),
        );
        match course {
            Course::Hit(window) => put(self.place, window as ncclWindow_t, "ncclCommWindowRegister: win"),
            Course::Refused(code) => code,
            Course::Forward => self.forward(real, is_grouped),
            Course::Make(making) => {
                let mut window = null_mut();
                let code = queries::window(real, self.address, self.bytes, &mut window, self.flags);
                if !window.is_null() || says_none() {
                    put(self.place, window, "ncclCommWindowRegister: win");
                }
                match code {
                    code if code == ncclSuccess => {
                        guard::or_else(|| (), || self.made(windows, &making, window as usize));
                    }
                    // NCCL leaves a registration behind after a failure.
                    _ => guard::or_else(|| (), || pool::taint_within(self.request().range)),
                }
                code
            }
        }
    }

    fn made(&self, windows: &Windows, making: &Making, window: usize) {
        windows.made(making, window);
        communicator::find(self.handle).into_iter().for_each(|known| known.gets_windows());
    }

    /// Runs a registration that NCCL refuses without other ranks.
    fn refused_at_once(&self, real: ncclComm_t) -> ncclResult_t {
        let code = self.run(real);
        in_kept(self.handle, |windows| windows.was_refused(self.request(), code));
        code
    }

    /// Has NCCL make a window that is not kept. A block of the pool with such a window is freed by NCCL.
    fn forward(&self, real: ncclComm_t, is_grouped: bool) -> ncclResult_t {
        let code = self.run(real);
        // A group's window does not exist yet, and a failed call leaves a registration in NCCL: the end of neither can be seen.
        match code == ncclSuccess && !is_grouped {
            true => note_registered(self.handle, self.address, self.bytes, self.place.cast()),
            false => guard::or_else(|| (), || pool::taint_within(self.request().range)),
        }
        code
    }

    fn run(&self, real: ncclComm_t) -> ncclResult_t {
        queries::window(real, self.address, self.bytes, self.place, self.flags)
    }
}

/// Deregisters a window, or keeps it. A lazy communicator that is not materialized has none.
pub fn end(handle: ncclComm_t, window: ncclWindow_t) -> ncclResult_t {
    group::restore_device();
    let here = |_: &Arc<LazyCommunicator>| match window.is_null() {
        true => ncclSuccess,
        false => refuse(ncclInvalidArgument, format_args!("ncclCommWindowDeregister: {window:p} is unknown")),
    };
    ask(Entry::ncclCommWindowDeregister, handle, here, |real| {
        let end = || in_kept(handle, |windows| windows.end(window as usize, group::is_open()));
        let ended = if window.is_null() { None } else { end() };
        match ended.unwrap_or(Ended::Unknown) {
            // Divergence: NCCL's own deregistration waits for the peers' processes.
            Ended::Cached | Ended::Counted => ncclSuccess,
            Ended::Twice => guard::call(|| {
                // NCCL's code for an unknown handle.
                let why = format_args!("ncclCommWindowDeregister: {window:p} has been deregistered");
                refuse(ncclInternalError, why)
            }),
            Ended::Real => queries::end_window(real, window),
            Ended::Unknown => {
                let code = queries::end_window(real, window);
                if code == ncclSuccess && !window.is_null() {
                    note_deregistered(handle, window as usize);
                }
                code
            }
        }
    })
}

/// The application's address of a window.
pub fn address(handle: ncclComm_t, window: ncclWindow_t, place: *mut *mut c_void) -> ncclResult_t {
    let unknown = || refuse(ncclInvalidArgument, format_args!("ncclWinGetUserPtr: {window:p} is unknown"));
    ask(
        Entry::ncclWinGetUserPtr,
        handle,
        |_: &Arc<LazyCommunicator>| unknown(),
        |real| {
            if in_kept(handle, |windows| windows.is_cached(window as usize)) == Some(true) {
                return guard::call(unknown);
            }
            queries::window_address(real, window, place)
        },
    )
}

/// Deregisters kept windows that the application has ended.
pub(super) fn end_cached(handle: ncclComm_t) {
    in_kept(handle, |windows| windows.end_cached());
}

/// Drops kept windows that overlap this memory, before NCCL gets it.
pub(super) fn meet(handle: ncclComm_t, address: *const c_void, bytes: usize) {
    meet_each(handle, || vec![Range { base: address as u64, bytes: bytes.max(1) as u64 }]);
}

/// The same for several ranges; `buffers` is called only where there may be windows.
pub(super) fn meet_each(handle: ncclComm_t, buffers: impl Fn() -> Vec<Range>) {
    if communicator::find(handle).is_some_and(|known| known.has_windows()) {
        in_kept(handle, |windows| {
            let _inside = enter_by(handle);
            windows.meet(&buffers());
        });
    }
}
