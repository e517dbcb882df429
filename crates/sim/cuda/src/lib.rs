//! A simulator of `libcuda.so.1` on host memory, for machines without a GPU.
//!
//! It exports the driver API with the driver's names and ABI. Device memory is host memory, every stream is an OS thread,
//! and kernels are host functions. It is a test instrument: it refuses what the driver refuses, and answers
//! `CUDA_ERROR_NOT_SUPPORTED` to what it does not simulate.
//!
//! Physical memory of `cuMemCreate` may be mapped any number of times, and counts as used by the process that made it until
//! its last handle, mapping and descriptor have gone, in whatever process. Memory of `cuMemAlloc` that another process opened
//! by its IPC handle stops counting once its maker frees it.
//!
//! # Environment
//! - `WINDLASS_SIM_DEVICES`: number of devices, 8.
//! - `WINDLASS_SIM_DEVICE_MEMORY`: MiB per device and process, 1024.
//! - `WINDLASS_SIM_MULTIPROCESSORS`: multiprocessors of a device, 32.
//! - `WINDLASS_SIM_CAPABILITY`: compute capability times 10, by default 90 for 9.0. Below 90, launches with clusters are refused.
//! - `WINDLASS_SIM_NVLINK=0`: devices reach each other as over PCIe, without native atomics.
//! - `WINDLASS_SIM_MULTICAST=1`: the device attribute says that multicast objects are supported, but the calls for them are not.
//! - `WINDLASS_SIM_QUEUE`: operations that a stream queues before the next submission waits, as in a real driver at about 1024; no limit.
//! - `WINDLASS_SIM_DESTRUCTOR_LAG`: milliseconds that pass before each call of a user object's destructor, by default 0. The calls come one
//!   after the other. Destructors of a driver under load lag, too.
//! - `WINDLASS_SIM_FORMER=1`: half of the pages of `cuMemCreate`, at random, hold what memory of its size and device held that this process released
//!   last. The others, and all unless set, hold zeros. A driver promises nothing.
//! - `WINDLASS_SIM_CLOCK`: events measure modelled times, see below; without it they measure real times.
//! - `WINDLASS_SIM_STRICT=1`: objects that were never released are listed at exit as `sim-cuda: leak: COUNT KIND`, and the
//!   exit status becomes 86.
//!
//! # Kernels
//! A module is a shared object: `cuModuleLoad` and `cuLibraryLoadFromFile` take its path, the calls that take an image
//! take `windlass-sim:` followed by the terminated path. For every kernel it exports
//! ```c
//! struct SimLaunch {
//!     uint32_t grid[3], block[3], shared_bytes, cooperative, cluster[3];
//!     int32_t device;
//!     uint64_t stream_id;
//! };
//! void name(const struct SimLaunch *launch, void **params);  /* params[i] points to a copy of parameter i */
//! const struct { uint32_t count, bytes[N]; } name_params;    /* sizes of the parameters, copied at launch */
//! struct SimWork { const char *side, *operation; uint64_t bytes; uint32_t ranks, reserved; };
//! void name_work(void *const *params, struct SimWork *work); /* optional: tells the modelled clock what the kernel does */
//! ```
//! For compiled device code (a cubin or PTX), `libsim_kernels.so` beside this library is loaded instead; if there is none,
//! the image is refused.
//!
//! The function runs once per launch on the stream's thread and does the work of the whole grid. It makes no CUDA calls;
//! those answer `CUDA_ERROR_NOT_PERMITTED`.
//!
//! Functions that only the simulated NCCL, simulated kernels and tests call:
//! - `simLaunch(stream, function, data, work)` launches a host function as a kernel; `work` is null or a `SimWork`, read at once.
//! - `simSetConditional(handle, value)` is `cudaGraphSetConditional`, for simulated kernels.
//! - `simNeedStack(bytes)` acts as the launch of a kernel that needs so many bytes of stack a thread, in the current context.
//! - `simBeforeLeaks(function)` registers a function that is called at exit before leaks are counted.
//! - `simKeepEvent(event)` makes an event never count as a leak.
//! - `simHold(name, state)` holds the next call of the function `name`, of whatever thread: `*state` becomes 1, and the call goes on when it is
//!   anything else.
//! - `simInitJoined()` does nothing. The simulated NCCL calls it when the ranks of an init have come, so that a test can hold it there.
//! - `simTakeGrids(prefix, blocks, room, &count)` gives and forgets the blocks of each launch on the current device of kernels whose names
//!   begin with `prefix`, oldest first. Launches are recorded from its first call on.
//!
//! # The modelled clock
//! `WINDLASS_SIM_CLOCK` is a list of `NAME=VALUE`, separated by commas:
//! - `nccl=LATENCY_US:GB_PER_S` and `windlass=LATENCY_US:GB_PER_S`, both needed: an operation of this side takes the latency plus its bytes
//!   over the bandwidth (10^9 bytes a second). Its bytes are those of a rank's larger buffer, as `windlass bench` counts them.
//! - `SIDE.OPERATION`, `SIDE@RANKS` and `SIDE.OPERATION@RANKS` instead of a side: for this operation, this number of ranks, or both, as
//!   `windlass.all_reduce@8=5:40`. The most specific one holds; an operation is more specific than ranks. Operations are `all_reduce`, `broadcast`,
//!   `reduce`, `all_gather`, `reduce_scatter`, `uneven_all_gather`, `uneven_reduce_scatter`, `alltoall`, `gather`, `scatter`, `send_recv`.
//!   All of Windlass's messages are `send_recv`, of any number of ranks.
//! - `registered`: a third side, for NCCL's eager operations over registered buffers. Where it has no entry, that of `nccl` holds.
//! - `noise=PART`: costs vary by up to this part both ways, differently on each device, but alike in each run.
//! - `slow=DEVICE:FACTOR`, for any number of devices: this device's operations take so many times as long. `load=FACTOR`: all devices' do.
//!
//! A group of NCCL calls on one communicator is one operation with the bytes of all (of sends or receives, whichever are more). All other work
//! takes no time. Streams, events, graphs and host threads carry modelled time to each other: a waiting one goes on at the later time of both.
//! Three waits carry no modelled time: between processes of different ranks, for a value in memory, and for another process's event.
//! A list that cannot be read ends the process at `cuInit`.

mod exports;

mod capture;
mod clock;
mod code;
mod conditional;
mod context;
mod device;
mod event;
mod executable;
mod ffi;
mod former;
mod graph;
mod grids;
mod guard;
mod hold;
mod holders;
mod ipc;
mod lane;
mod leak;
mod mapping;
mod memory;
mod module;
mod pointer;
mod report;
mod simulator;
mod stack;
mod stream;
mod sync;
mod table;
mod user_object;
mod virtual_memory;
mod work;
