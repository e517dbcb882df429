//! The few functions of our own, declared in `windlass.h`. All are optional: a program needs none of them.

#![allow(non_camel_case_types, non_snake_case)]

use std::ffi::{CStr, c_char, c_int};
use std::path::Path;

use nccl_sys::{ncclInvalidArgument, ncclResult_t, ncclSuccess, ncclSystemError, slots};
use windlass_engine::error::refuse;
use windlass_engine::lifecycle::switching_off;
use windlass_engine::stats::{segment, snapshot::Snapshot};
use windlass_engine::{guard, process};

/// What Windlass counted in this process so far. Set `size` to `sizeof(windlassStats_t)` before the call: a library
/// that knows fewer fields fills those, one that knows more fills what fits.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct windlassStats_t {
    /// Bytes of this structure, set by the caller.
    pub size: usize,
    /// Collectives, sends and receives.
    pub calls: u64,
    /// Their bytes: of the larger buffer of each call, as nccl-tests counts.
    pub bytes: u64,
    /// Those of `calls` that the real NCCL ran.
    pub forwardedCalls: u64,
    /// Communicators made.
    pub communicatorsMade: u64,
    /// Communicators alive.
    pub communicatorsAlive: u64,
    /// The real NCCL's communicators that ended ones left, kept to be used again.
    pub communicatorsParked: u64,
}

/// The version of Windlass: 10000 * major + 100 * minor + patch. (`ncclGetVersion` gives the real NCCL's.)
///
/// `ncclInvalidArgument` if `version` is null. Any thread may call.
///
/// # Safety
///
/// `version` is null or points to an `int`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn windlassGetVersion(version: *mut c_int) -> ncclResult_t {
    guard::call(|| {
        if version.is_null() {
            return refuse(
                ncclInvalidArgument,
                format_args!("windlassGetVersion: version is null, expected an int"),
            );
        }
        let part = |text: &str| text.parse::<c_int>().unwrap_or(0);
        let code = 10000 * part(env!("CARGO_PKG_VERSION_MAJOR"))
            + 100 * part(env!("CARGO_PKG_VERSION_MINOR"))
            + part(env!("CARGO_PKG_VERSION_PATCH"));
        // SAFETY: not null, so it points to an int by this function's contract.
        unsafe { version.write(code) };
        ncclSuccess
    })
}

/// What was counted in this process so far.
///
/// `ncclInvalidArgument` if `stats` is null or its `size` holds not even the field `calls`. Any thread may call.
///
/// # Safety
///
/// `stats` is null or points to `stats->size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn windlassGetStats(stats: *mut windlassStats_t) -> ncclResult_t {
    guard::call(|| {
        process::first_call();
        // SAFETY: the size field comes first, and there is one unless the pointer is null.
        let size = if stats.is_null() { 0 } else { unsafe { (&raw const (*stats).size).read() } };
        let least = 2 * size_of::<u64>();
        if size < least {
            let why = format_args!(
                "windlassGetStats: size is {size}, expected sizeof(windlassStats_t), at least {least}"
            );
            return refuse(ncclInvalidArgument, why);
        }
        let filled = windlassStats_t { size, ..count() };
        let length = size.min(size_of::<windlassStats_t>());
        // SAFETY: the caller's structure has `size` bytes, ours at least `length`.
        unsafe {
            std::ptr::copy_nonoverlapping((&raw const filled).cast::<u8>(), stats.cast::<u8>(), length)
        };
        ncclSuccess
    })
}

fn count() -> windlassStats_t {
    let snapshot = Snapshot::of(segment::current());
    let paths = snapshot.paths();
    windlassStats_t {
        size: 0,
        calls: paths.values().map(|(calls, _)| calls).sum(),
        bytes: paths.values().map(|(_, bytes)| bytes).sum(),
        forwardedCalls: paths.get("forward").map_or(0, |(calls, _)| *calls),
        communicatorsMade: snapshot.communicators_made,
        communicatorsAlive: snapshot.communicators.iter().filter(|found| found.state == "live").count()
            as u64,
        communicatorsParked: snapshot.parked,
    }
}

/// Writes the report of this process so far, as JSON, to a file; `%h` and `%p` in its name become the host's name
/// and the process id.
///
/// `ncclInvalidArgument` if `path` is null, `ncclSystemError` if the file cannot be written. Any thread may call.
///
/// # Safety
///
/// `path` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn windlassDump(path: *const c_char) -> ncclResult_t {
    guard::call(|| {
        process::first_call();
        if path.is_null() {
            return refuse(
                ncclInvalidArgument,
                format_args!("windlassDump: path is null, expected a file name"),
            );
        }
        // SAFETY: not null, so it is a C string by this function's contract.
        let path = unsafe { CStr::from_ptr(path) }.to_string_lossy();
        match process::dump(Path::new(&*path)) {
            Ok(()) => ncclSuccess,
            Err(error) => refuse(ncclSystemError, format_args!("windlassDump: {path}: {error}")),
        }
    })
}

/// Switches Windlass off in this process, for good: every later call goes straight to the real NCCL, unseen and
/// uncounted. Call it at the same point on every rank, while no other thread is about to call NCCL. Any thread may call.
/// Waits for calls whose buffers Windlass has registered.
///
/// `ncclInvalidUsage` within a group, or while other threads are in calls or groups; `ncclInternalError` if NCCL keeps what was
/// registered: then Windlass stays on.
#[unsafe(no_mangle)]
pub extern "C" fn windlassDisable() -> ncclResult_t {
    guard::call(|| {
        process::first_call();
        let ready = switching_off::before();
        if ready == ncclSuccess {
            slots::forward_everything();
        }
        ready
    })
}
