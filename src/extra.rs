//! The few functions of our own, declared in `windlass.h`. All are optional: a program needs none of them.

#![allow(non_camel_case_types, non_snake_case)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::LazyLock;

use nccl_sys::{
    cudaStream_t, ncclComm_t, ncclDataType_t, ncclInvalidArgument, ncclRedOp_t, ncclResult_t, ncclSuccess,
    ncclSystemError, slots,
};
use windlass_base::error::refuse;
use windlass_base::guard;
use windlass_base::process;
use windlass_base::stats::{self, segment, snapshot::Snapshot};
use windlass_engine::api::uneven::{self, Asked, Lists};
use windlass_engine::api::{disable, memory};

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
    /// Kernels of Windlass that ran several collectives of a group each: small ones, or broadcasts or reduces with a root each.
    pub fusedKernels: u64,
    /// Those of `calls` that these kernels ran.
    pub fusedCalls: u64,
    /// Blocks of `ncclMemAlloc` that the program has freed and that are kept to be handed out again.
    pub poolBlocks: u64,
    /// Their bytes.
    pub poolBytes: u64,
    /// Calls of `ncclMemAlloc` that got one of these.
    pub poolHits: u64,
    /// Those for which NCCL made one.
    pub poolMisses: u64,
    /// Where `WINDLASS_ORDER` asks for fixed order: reductions that round and that NCCL ran, or that were refused.
    pub notInFixedOrder: u64,
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

static BUILD: LazyLock<CString> = LazyLock::new(|| {
    let text = format!(
        "windlass {} commit {} kernels {}",
        env!("CARGO_PKG_VERSION"),
        env!("WINDLASS_COMMIT"),
        windlass_kernels::images::DIGEST
    );
    CString::new(text).unwrap_or_default()
});

/// Of what Windlass was built, as a text of one line: `windlass VERSION commit COMMIT kernels DIGEST`. COMMIT is `unknown` where the
/// sources lay in no repository; DIGEST is the SHA-256 of the compiled kernels (`windlass --version` tells the same of the command).
/// The text stays valid as long as the library is loaded.
///
/// `ncclInvalidArgument` if `build` is null. Any thread may call.
///
/// # Safety
///
/// `build` is null or points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn windlassGetBuild(build: *mut *const c_char) -> ncclResult_t {
    guard::call(|| {
        if build.is_null() {
            return refuse(
                ncclInvalidArgument,
                format_args!("windlassGetBuild: build is null, expected a pointer to a text"),
            );
        }
        // SAFETY: not null, so it points to a pointer by this function's contract.
        unsafe { build.write(BUILD.as_ptr()) };
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
    let pooled = |name: &str| snapshot.pool.get(name).copied().unwrap_or(0);
    windlassStats_t {
        size: 0,
        calls: paths.values().map(|(calls, _)| calls).sum(),
        bytes: paths.values().map(|(_, bytes)| bytes).sum(),
        forwardedCalls: paths.get("forward").map_or(0, |(calls, _)| *calls),
        communicatorsMade: snapshot.communicators_made,
        communicatorsAlive: snapshot.communicators.iter().filter(|found| found.state == "live").count()
            as u64,
        communicatorsParked: snapshot.cached,
        fusedKernels: snapshot.fused_kernels,
        fusedCalls: snapshot.fused_calls,
        poolBlocks: pooled("blocks"),
        poolBytes: pooled("bytes"),
        poolHits: pooled("hits"),
        poolMisses: pooled("misses"),
        notInFixedOrder: snapshot.ordered().1,
    }
}

/// All-gather of parts of different sizes: what every rank gives, every rank gets.
///
/// `recvcounts` has as many elements as the communicator has ranks; `recvcounts[r]` is how many elements rank `r` gives.
/// `displs[r]` is the element of `recvbuff` at which they go; null: each rank's follow those of the rank before. Both lists, in
/// host memory and read before this returns, are equal on all ranks but for `displs`, which each rank chooses for itself. Counts of 0
/// are allowed. `sendbuff` holds this rank's `recvcounts[rank]` elements; it may be the place in `recvbuff` to which they go. Parts
/// of `recvbuff` must not overlap; what lies between them is left as it is. Buffers are device memory of any alignment.
///
/// It is a group of `ncclBroadcast`, one for each rank in the order of ranks, and counted as that, also within a group that is open.
/// In a communicator with a peer group that is one kernel, up to the sizes of docs/collectives.md; else NCCL runs the broadcasts.
///
/// `ncclInvalidArgument`, which fails an open group: no such communicator or type; `recvcounts` is null; `recvbuff` is null and
/// anybody gives something; `sendbuff` is null and this rank does; a part would end beyond 2^63 - 1 bytes, as counts that were
/// negative do. Else what NCCL's calls answer. As with NCCL one thread at a time may call with a communicator.
///
/// # Safety
///
/// Lists are null or have an element for each rank; buffers are as large as these say, until the stream has done the work.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn windlassAllGatherV(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    recvcounts: *const usize,
    displs: *const usize,
    datatype: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let asked = Asked {
        name: "windlassAllGatherV",
        operation: None,
        send: sendbuff,
        receive: recvbuff,
        datatype,
        communicator: comm,
        stream,
    };
    // SAFETY: by this function's contract.
    uneven::run(&asked, |ranks| unsafe { lists(recvcounts, displs, ranks) })
}

/// Reduce-scatter of parts of different sizes: each rank gets its part of the sum (or what `op` says) of what all ranks give.
///
/// `recvcounts` has as many elements as the communicator has ranks; `recvcounts[r]` is how many elements rank `r` gets.
/// `displs[r]` is the element of `sendbuff` at which they begin; null: each rank's follow those of the rank before. Both lists, in
/// host memory and read before this returns, are equal on all ranks but for `displs`, which each rank chooses for itself. Counts of 0
/// are allowed. `recvbuff` gets `recvcounts[rank]` elements; it may be the place in `sendbuff` at which this rank's begin. Buffers
/// are device memory, aligned as their elements.
///
/// It is a group of `ncclReduce`, one for each rank in the order of ranks, and counted as that, also within a group that is open. On
/// ranks that Windlass joins that is one kernel, up to the sizes of docs/collectives.md; else NCCL runs the reduces.
///
/// `ncclInvalidArgument`, which fails an open group: no such communicator or type; `recvcounts` is null; `sendbuff` is null and
/// anybody gets something; `recvbuff` is null and this rank does; a part would end beyond 2^63 - 1 bytes, as counts that were
/// negative do. Else what NCCL's calls answer. As with NCCL one thread at a time may call with a communicator.
///
/// # Safety
///
/// Lists are null or have an element for each rank; buffers are as large as these say, until the stream has done the work.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn windlassReduceScatterV(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    recvcounts: *const usize,
    displs: *const usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let asked = Asked {
        name: "windlassReduceScatterV",
        operation: Some(op),
        send: sendbuff,
        receive: recvbuff,
        datatype,
        communicator: comm,
        stream,
    };
    // SAFETY: by this function's contract.
    uneven::run(&asked, |ranks| unsafe { lists(recvcounts, displs, ranks) })
}

/// # Safety
///
/// Both are null or have as many elements as there are ranks.
unsafe fn lists<'a>(counts: *const usize, displacements: *const usize, ranks: usize) -> Option<Lists<'a>> {
    // SAFETY: by contract, where it is not null.
    let list =
        |list: *const usize| (!list.is_null()).then(|| unsafe { std::slice::from_raw_parts(list, ranks) });
    Some(Lists { counts: list(counts)?, displacements: list(displacements) })
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

/// Gives back to the driver what is kept of memory that was freed by `ncclMemFree`, and NCCL's communicators that are kept of
/// destroyed ones, on every device.
///
/// Any thread may call. NCCL takes about half a millisecond for a block, and up to 0.2 seconds for a communicator, whose end may wait
/// for work on the device. After 2 seconds on a device the call returns, and a thread of Windlass ends the rest.
#[unsafe(no_mangle)]
pub extern "C" fn windlassTrim() -> ncclResult_t {
    guard::call(|| {
        process::first_call();
        memory::trim();
        ncclSuccess
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
        let ready = disable::before();
        if ready == ncclSuccess {
            slots::forward_everything();
            stats::count::switched_off();
        }
        ready
    })
}
