//! The one list of entry points: every public name of NCCL 2.18 to 2.32 with its twin, signature, first release and
//! role. The ABI layer, the header, the simulator and the tests are made from it.
//!
//! A row reads `[first role] fn name | twin (arguments) -> result;`.
//!
//! * *first* is the version code (as `ncclGetVersion` gives it) of the first release on PyPI that exports the
//!   name; `abi/exports` holds what each release exports, and a test compares.
//! * *role*: `seen` has Rust code in the ABI layer. `handle` jumps straight to the real library, with NCCL's own communicator in
//!   the place of a lazy one's, which is the first argument. `pass` always jumps straight to the real library.
//!
//! The second list, `opaque`, holds names whose signature is not fixed: NVIDIA's device headers declare them, and
//! their structures change with releases. Only the result is written down, for the answer when the real library lacks
//! the function. Calls jump through with registers and stack untouched.
//!
//! Left out: a few C++ objects (not functions), as `ncclParamDumpAllFlag`, that only 2.30.3 exported, by accident. No
//! header declares them, and only the library uses them. Functions that were exported with them are in.

/// Calls `$callback!` with the whole list: `calls { rows } opaque { rows }`, after any leading tokens.
#[macro_export]
macro_rules! for_each_entry {
    ($callback:path $(, $($lead:tt)*)?) => {
        $callback! { $($($lead)*)?
        calls {
            // Library.
            /// The version code of the real library: 10000·major + 100·minor + patch.
            [21803 pass] fn ncclGetVersion | pncclGetVersion (version: *mut c_int) -> ncclResult_t;
            /// A static string for a result code.
            [21803 pass] fn ncclGetErrorString | pncclGetErrorString (result: ncclResult_t) -> *const c_char;
            /// The text of the last error of this process. `comm` may be null.
            [21803 seen] fn ncclGetLastError | pncclGetLastError (comm: ncclComm_t) -> *const c_char;
            /// Makes the real library read its debug settings again. Deprecated by NVIDIA.
            [22403 pass] fn ncclResetDebugInit | pncclResetDebugInit ();
            /// Asks for encrypted sockets.
            [23203 pass] fn ncclSetEncryption | pncclSetEncryption (config: *const ncclEncryptionConfig_t) -> ncclResult_t;
            // Making and ending communicators.
            /// Makes the 128-byte id with which the ranks of a new communicator find each other.
            [21803 seen] fn ncclGetUniqueId | pncclGetUniqueId (uniqueId: *mut ncclUniqueId) -> ncclResult_t;
            /// Joins a new communicator as `rank` of `nranks`; blocks until all ranks have joined, unless in a group.
            [21803 seen] fn ncclCommInitRank | pncclCommInitRank (comm: *mut ncclComm_t, nranks: c_int, commId: ncclUniqueId, rank: c_int) -> ncclResult_t;
            /// As `ncclCommInitRank`, with a configuration; with `blocking = 0` it may answer `ncclInProgress`.
            [21803 seen] fn ncclCommInitRankConfig | pncclCommInitRankConfig (comm: *mut ncclComm_t, nranks: c_int, commId: ncclUniqueId, rank: c_int, config: *mut ncclConfig_t) -> ncclResult_t;
            /// As `ncclCommInitRankConfig`, with `nId` ids that share the bootstrap work.
            [22304 seen] fn ncclCommInitRankScalable | pncclCommInitRankScalable (newcomm: *mut ncclComm_t, nranks: c_int, myrank: c_int, nId: c_int, commIds: *mut ncclUniqueId, config: *mut ncclConfig_t) -> ncclResult_t;
            /// Makes `ndev` communicators of one process, one a device; `devlist` null means devices 0…`ndev`-1.
            [21803 seen] fn ncclCommInitAll | pncclCommInitAll (comm: *mut ncclComm_t, ndev: c_int, devlist: *const c_int) -> ncclResult_t;
            /// Splits a communicator by color, ranks ordered by key; `*newcomm` is written when the split completes.
            [21803 seen] fn ncclCommSplit | pncclCommSplit (comm: ncclComm_t, color: c_int, key: c_int, newcomm: *mut ncclComm_t, config: *mut ncclConfig_t) -> ncclResult_t;
            /// Makes a communicator without the listed ranks; those do not call.
            [22703 seen] fn ncclCommShrink | pncclCommShrink (comm: ncclComm_t, excludeRanksList: *mut c_int, excludeRanksCount: c_int, newcomm: *mut ncclComm_t, config: *mut ncclConfig_t, shrinkFlags: c_int) -> ncclResult_t;
            /// An id under which new ranks may join `comm` by `ncclCommGrow`.
            [22902 seen] fn ncclCommGetUniqueId | pncclCommGetUniqueId (comm: ncclComm_t, uniqueId: *mut ncclUniqueId) -> ncclResult_t;
            /// Makes a communicator with more ranks than `comm` has; new ranks pass a null `comm`.
            [22902 seen] fn ncclCommGrow | pncclCommGrow (comm: ncclComm_t, nRanks: c_int, uniqueId: *const ncclUniqueId, rank: c_int, newcomm: *mut ncclComm_t, config: *mut ncclConfig_t) -> ncclResult_t;
            /// Flushes all operations of a communicator; `ncclCommDestroy` then frees it.
            [21803 seen] fn ncclCommFinalize | pncclCommFinalize (comm: ncclComm_t) -> ncclResult_t;
            /// Frees a communicator after its operations have finished.
            [21803 seen] fn ncclCommDestroy | pncclCommDestroy (comm: ncclComm_t) -> ncclResult_t;
            /// Frees a communicator and ends its unfinished operations; may be called from another thread.
            [21803 seen] fn ncclCommAbort | pncclCommAbort (comm: ncclComm_t) -> ncclResult_t;
            /// Stops a communicator without freeing it.
            [22807 seen] fn ncclCommRevoke | pncclCommRevoke (comm: ncclComm_t, revokeFlags: c_int) -> ncclResult_t;
            // Questions to a communicator.
            /// The state of a communicator: success, in progress, or the error that stopped it.
            [21803 seen] fn ncclCommGetAsyncError | pncclCommGetAsyncError (comm: ncclComm_t, asyncError: *mut ncclResult_t) -> ncclResult_t;
            /// How many ranks a communicator has.
            [21803 seen] fn ncclCommCount | pncclCommCount (comm: ncclComm_t, count: *mut c_int) -> ncclResult_t;
            /// The CUDA device of this rank.
            [21803 seen] fn ncclCommCuDevice | pncclCommCuDevice (comm: ncclComm_t, device: *mut c_int) -> ncclResult_t;
            /// This rank.
            [21803 seen] fn ncclCommUserRank | pncclCommUserRank (comm: ncclComm_t, rank: *mut c_int) -> ncclResult_t;
            /// Gives back memory of an idle communicator.
            [22907 seen] fn ncclCommSuspend | pncclCommSuspend (comm: ncclComm_t, flags: c_int) -> ncclResult_t;
            /// Takes back what `ncclCommSuspend` gave.
            [22907 seen] fn ncclCommResume | pncclCommResume (comm: ncclComm_t) -> ncclResult_t;
            /// Bytes of GPU memory that a communicator holds, by kind.
            [22907 seen] fn ncclCommMemStats | pncclCommMemStats (comm: ncclComm_t, stat: ncclCommMemStat_t, value: *mut u64) -> ncclResult_t;
            // Memory, registration, windows.
            /// Allocates `size` bytes of device memory fit for registration and windows.
            [21903 seen] fn ncclMemAlloc | pncclMemAlloc (ptr: *mut *mut c_void, size: usize) -> ncclResult_t;
            /// Frees memory of `ncclMemAlloc`.
            [21903 seen] fn ncclMemFree | pncclMemFree (ptr: *mut c_void) -> ncclResult_t;
            /// Registers `size` bytes at `buff` with a communicator for zero-copy use.
            [21903 seen] fn ncclCommRegister | pncclCommRegister (comm: ncclComm_t, buff: *mut c_void, size: usize, handle: *mut *mut c_void) -> ncclResult_t;
            /// Ends a registration.
            [21903 seen] fn ncclCommDeregister | pncclCommDeregister (comm: ncclComm_t, handle: *mut c_void) -> ncclResult_t;
            /// Registers a symmetric window; every rank must call, with equal `size` (bytes).
            [22703 seen] fn ncclCommWindowRegister | pncclCommWindowRegister (comm: ncclComm_t, buff: *mut c_void, size: usize, win: *mut ncclWindow_t, winFlags: c_int) -> ncclResult_t;
            /// Ends a window.
            [22703 seen] fn ncclCommWindowDeregister | pncclCommWindowDeregister (comm: ncclComm_t, win: ncclWindow_t) -> ncclResult_t;
            /// The user's pointer of a window.
            [22902 seen] fn ncclWinGetUserPtr | pncclWinGetUserPtr (comm: ncclComm_t, win: ncclWindow_t, outUserPtr: *mut *mut c_void) -> ncclResult_t;
            // User-defined reductions.
            /// Makes an operation that multiplies each rank's input by `scalar`, then sums.
            [21803 seen] fn ncclRedOpCreatePreMulSum | pncclRedOpCreatePreMulSum (op: *mut ncclRedOp_t, scalar: *mut c_void, datatype: ncclDataType_t, residence: ncclScalarResidence_t, comm: ncclComm_t) -> ncclResult_t;
            /// Ends an operation; calls already made keep it.
            [21803 seen] fn ncclRedOpDestroy | pncclRedOpDestroy (op: ncclRedOp_t, comm: ncclComm_t) -> ncclResult_t;
            // Collectives.
            /// Reduces `count` elements of every rank into `recvbuff` of every rank.
            [21803 seen] fn ncclAllReduce | pncclAllReduce (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
            /// Copies `count` elements from `root` to every rank.
            [21803 seen] fn ncclBroadcast | pncclBroadcast (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
            /// `ncclBroadcast` in place.
            [21803 seen] fn ncclBcast | pncclBcast (buff: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
            /// Reduces `count` elements of every rank into `recvbuff` of `root`.
            [21803 seen] fn ncclReduce | pncclReduce (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, op: ncclRedOp_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
            /// Gathers `sendcount` elements of every rank, in rank order, on every rank.
            [21803 seen] fn ncclAllGather | pncclAllGather (sendbuff: *const c_void, recvbuff: *mut c_void, sendcount: usize, datatype: ncclDataType_t, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
            /// Reduces `nranks * recvcount` elements and leaves block `i` of `recvcount` on rank `i`.
            [21803 seen] fn ncclReduceScatter | pncclReduceScatter (sendbuff: *const c_void, recvbuff: *mut c_void, recvcount: usize, datatype: ncclDataType_t, op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
            /// Sends block `i` of `count` elements to rank `i` and receives one from each.
            [22803 seen] fn ncclAlltoAll | pncclAlltoAll (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
            /// Gathers `count` elements of every rank, in rank order, on `root`.
            [22803 seen] fn ncclGather | pncclGather (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
            /// Sends block `i` of `count` elements of `root` to rank `i`.
            [22803 seen] fn ncclScatter | pncclScatter (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
            /// `ncclAllReduce` with a configuration for this call (null: none).
            [23102 seen] fn ncclAllReduceConfig | pncclAllReduceConfig (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t, config: *const ncclCollConfig_t) -> ncclResult_t;
            /// `ncclBroadcast` with a configuration for this call (null: none).
            [23102 seen] fn ncclBroadcastConfig | pncclBroadcastConfig (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t, config: *const ncclCollConfig_t) -> ncclResult_t;
            /// `ncclReduce` with a configuration for this call (null: none).
            [23102 seen] fn ncclReduceConfig | pncclReduceConfig (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, op: ncclRedOp_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t, config: *const ncclCollConfig_t) -> ncclResult_t;
            /// `ncclAllGather` with a configuration for this call (null: none).
            [23102 seen] fn ncclAllGatherConfig | pncclAllGatherConfig (sendbuff: *const c_void, recvbuff: *mut c_void, sendcount: usize, datatype: ncclDataType_t, comm: ncclComm_t, stream: cudaStream_t, config: *const ncclCollConfig_t) -> ncclResult_t;
            /// `ncclReduceScatter` with a configuration for this call (null: none).
            [23102 seen] fn ncclReduceScatterConfig | pncclReduceScatterConfig (sendbuff: *const c_void, recvbuff: *mut c_void, recvcount: usize, datatype: ncclDataType_t, op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t, config: *const ncclCollConfig_t) -> ncclResult_t;
            /// `ncclAlltoAll` with a configuration for this call (null: none).
            [23102 seen] fn ncclAlltoAllConfig | pncclAlltoAllConfig (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, comm: ncclComm_t, stream: cudaStream_t, config: *const ncclCollConfig_t) -> ncclResult_t;
            /// `ncclGather` with a configuration for this call (null: none).
            [23102 seen] fn ncclGatherConfig | pncclGatherConfig (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t, config: *const ncclCollConfig_t) -> ncclResult_t;
            /// `ncclScatter` with a configuration for this call (null: none).
            [23102 seen] fn ncclScatterConfig | pncclScatterConfig (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t, config: *const ncclCollConfig_t) -> ncclResult_t;
            // Point to point.
            /// Sends `count` elements to `peer`.
            [21803 seen] fn ncclSend | pncclSend (sendbuff: *const c_void, count: usize, datatype: ncclDataType_t, peer: c_int, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
            /// Receives `count` elements from `peer`.
            [21803 seen] fn ncclRecv | pncclRecv (recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, peer: c_int, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
            /// Writes `count` elements into a window of `peer`, then signals it.
            [22902 seen] fn ncclPutSignal | pncclPutSignal (localbuff: *const c_void, count: usize, datatype: ncclDataType_t, peer: c_int, peerWin: ncclWindow_t, peerWinOffset: usize, sigIdx: c_int, ctx: c_int, flags: c_uint, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
            /// Signals `peer` without data.
            [22902 seen] fn ncclSignal | pncclSignal (peer: c_int, sigIdx: c_int, ctx: c_int, flags: c_uint, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
            /// Waits, on the stream, for signals of peers.
            [22902 seen] fn ncclWaitSignal | pncclWaitSignal (nDesc: c_int, signalDescs: *mut ncclWaitSignalDesc_t, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
            // Groups.
            /// Opens a group of this thread; groups nest.
            [21803 seen] fn ncclGroupStart | pncclGroupStart () -> ncclResult_t;
            /// Closes a group; the outermost one starts everything in it.
            [21803 seen] fn ncclGroupEnd | pncclGroupEnd () -> ncclResult_t;
            /// Closes a group without running it and estimates its time.
            [22203 seen] fn ncclGroupSimulateEnd | pncclGroupSimulateEnd (simInfo: *mut ncclSimInfo_t) -> ncclResult_t;
            // Parameters.
            /// A handle to the parameter `key`.
            [23003 pass] fn ncclParamBind | pncclParamBind (out: *mut ncclParamHandle_t, key: *const c_char) -> ncclResult_t;
            /// The value of a parameter as i8.
            [23003 pass] fn ncclParamGetI8 | pncclParamGetI8 (h: ncclParamHandle_t, out: *mut i8) -> ncclResult_t;
            /// The value of a parameter as i16.
            [23003 pass] fn ncclParamGetI16 | pncclParamGetI16 (h: ncclParamHandle_t, out: *mut i16) -> ncclResult_t;
            /// The value of a parameter as i32.
            [23003 pass] fn ncclParamGetI32 | pncclParamGetI32 (h: ncclParamHandle_t, out: *mut i32) -> ncclResult_t;
            /// The value of a parameter as i64.
            [23003 pass] fn ncclParamGetI64 | pncclParamGetI64 (h: ncclParamHandle_t, out: *mut i64) -> ncclResult_t;
            /// The value of a parameter as u8.
            [23003 pass] fn ncclParamGetU8 | pncclParamGetU8 (h: ncclParamHandle_t, out: *mut u8) -> ncclResult_t;
            /// The value of a parameter as u16.
            [23003 pass] fn ncclParamGetU16 | pncclParamGetU16 (h: ncclParamHandle_t, out: *mut u16) -> ncclResult_t;
            /// The value of a parameter as u32.
            [23003 pass] fn ncclParamGetU32 | pncclParamGetU32 (h: ncclParamHandle_t, out: *mut u32) -> ncclResult_t;
            /// The value of a parameter as u64.
            [23003 pass] fn ncclParamGetU64 | pncclParamGetU64 (h: ncclParamHandle_t, out: *mut u64) -> ncclResult_t;
            /// The value of a parameter as text, valid until the next call on this thread.
            [23003 pass] fn ncclParamGetStr | pncclParamGetStr (h: ncclParamHandle_t, out: *mut *const c_char) -> ncclResult_t;
            /// The bytes of a parameter, at most `maxLen`.
            [23003 pass] fn ncclParamGet | pncclParamGet (h: ncclParamHandle_t, out: *mut c_void, maxLen: c_int, len: *mut c_int) -> ncclResult_t;
            /// The value of the parameter `key` as text.
            [23003 pass] fn ncclParamGetParameter | pncclParamGetParameter (key: *const c_char, value: *mut *const c_char, valueLen: *mut c_int) -> ncclResult_t;
            /// All parameter keys.
            [23003 pass] fn ncclParamGetAllParameterKeys | pncclParamGetAllParameterKeys (table: *mut *mut *const c_char, tableLen: *mut c_int) -> ncclResult_t;
            /// Prints all parameters to the log.
            [23003 pass] fn ncclParamDumpAll | pncclParamDumpAll ();
        }
        opaque {
            [22803 handle] ncclDevCommCreate | pncclDevCommCreate -> ncclResult_t;
            [22803 handle] ncclDevCommDestroy | pncclDevCommDestroy -> ncclResult_t;
            [22803 pass] ncclLLA2ACalcSlots | pncclLLA2ACalcSlots -> c_int;
            [22803 pass] ncclLLA2ACreateRequirement | pncclLLA2ACreateRequirement -> ncclResult_t;
            [22803 pass] ncclLsaBarrierCreateRequirement | pncclLsaBarrierCreateRequirement -> ncclResult_t;
            [22803 pass] ncclResetDebugInitInternal -> ();
            [22803 handle] ncclTeamLsa | pncclTeamLsa -> ncclTeam_t;
            [22803 handle] ncclTeamRail | pncclTeamRail -> ncclTeam_t;
            [22803 handle] ncclTeamRankToLsa | pncclTeamRankToLsa -> c_int;
            [22803 handle] ncclTeamRankToWorld | pncclTeamRankToWorld -> c_int;
            [22803 handle] ncclTeamWorld | pncclTeamWorld -> ncclTeam_t;
            [22807 handle] ncclGinBarrierCreateRequirement | pncclGinBarrierCreateRequirement -> ncclResult_t;
            [22902 handle] ncclCommQueryProperties | pncclCommQueryProperties -> ncclResult_t;
            [22902 pass] ncclGetLsaDevicePointer | pncclGetLsaDevicePointer -> ncclResult_t;
            [22902 pass] ncclGetLsaMultimemDevicePointer | pncclGetLsaMultimemDevicePointer -> ncclResult_t;
            [22902 pass] ncclGetMultimemDevicePointer | pncclGetMultimemDevicePointer -> ncclResult_t;
            [22902 pass] ncclGetPeerDevicePointer | pncclGetPeerDevicePointer -> ncclResult_t;
            [22907 pass] ncclGinInboxA2ACreateRequirement | pncclGinInboxA2ACreateRequirement -> ncclResult_t;
            [22907 pass] ncclGinOutboxCreateRequirement | pncclGinOutboxCreateRequirement -> ncclResult_t;
            [23003 pass] ncclParamEnvPluginGet -> usize;
            [23003 pass] ncclParamIsCacheDisabled -> usize;
            [23003 pass] ncclParamRegistryInstance -> usize;
            [23102 pass] ncclGetCftDeviceLeInfo | pncclGetCftDeviceLeInfo -> ncclResult_t;
            [23102 pass] ncclGetMultimemDeviceLeInfo | pncclGetMultimemDeviceLeInfo -> ncclResult_t;
            [23102 pass] ncclGetPeerDeviceLeInfo | pncclGetPeerDeviceLeInfo -> ncclResult_t;
            [23102 handle] ncclTeamCft | pncclTeamCft -> ncclTeam_t;
            [23102 handle] ncclTeamCftMultimem | pncclTeamCftMultimem -> ncclTeam_t;
        }
        }
    };
}
