//! A simulator of `libcuda.so.1` on host memory, for machines without a GPU.
//!
//! It exports the driver API with the driver's names and ABI. Device memory is host memory, every stream is an OS thread,
//! and kernels are host functions. It is a test instrument: strict where a GPU would be, and honest about the rest
//! (`CUDA_ERROR_NOT_SUPPORTED`).
//!
//! Physical memory of `cuMemCreate` may be mapped any number of times, and counts as used by the process that made it until
//! its last handle, mapping and descriptor have gone, in whatever process. Memory of `cuMemAlloc` opened by its IPC handle
//! does not count that way.
//!
//! # Environment
//! - `WINDLASS_SIM_DEVICES`: number of devices, 8.
//! - `WINDLASS_SIM_DEVICE_MEMORY`: MiB per device and process, 1024.
//! - `WINDLASS_SIM_MULTIPROCESSORS`: multiprocessors of a device, 32.
//! - `WINDLASS_SIM_CAPABILITY`: compute capability, 90 for 9.0, which it is; there are no clusters before.
//! - `WINDLASS_SIM_NVLINK=0`: devices reach each other as over PCIe, without native atomics.
//! - `WINDLASS_SIM_MULTICAST=1`: devices say that they have multicast objects, and have none. Only for what follows from saying so.
//! - `WINDLASS_SIM_QUEUE`: how many operations a stream holds before who submits more waits, as a GPU's driver does at about 1024; without end.
//! - `WINDLASS_SIM_CLOCK`: what work takes by the times of events, below; without it they are real times.
//! - `WINDLASS_SIM_STRICT=1`: what was never released is listed at exit as `sim-cuda: leak: COUNT KIND`, and the exit
//!   status becomes 86.
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
//! void name_work(void *const *params, struct SimWork *work); /* if there is one: what the kernel is, for the modelled clock */
//! ```
//! Compiled device code (a cubin or PTX) stands for `libsim_kernels.so` beside this library, if it is there; without it
//! such an image is refused.
//!
//! The function runs once per launch on the stream's thread and does the work of the whole grid. It makes no CUDA calls;
//! those answer `CUDA_ERROR_NOT_PERMITTED`.
//!
//! `simLaunch(stream, function, data, work)` launches a function of the host that counts as a kernel, for the simulated NCCL; `work` is null or
//! a `SimWork`, read at once. `simSetConditional(handle, value)`
//! is a device's `cudaGraphSetConditional`.
//! `simNeedStack(bytes)` is what launching a kernel of so many bytes of stack a thread does to the current context. `simBeforeLeaks(function)`
//! has a function called at exit, before leaks are looked for; an event of `simKeepEvent(event)` is none.
//! `simTakeGrids(prefix, blocks, room, &count)` tells the grids of the kernels of the current context's device whose names begin so that
//! have begun since it was last called, in their order; kernels are looked at from its first call on.
//!
//! # The modelled clock
//! `WINDLASS_SIM_CLOCK` is a list of `NAME=VALUE` apart by commas:
//! - `nccl=LATENCY_US:GB_PER_S` and `windlass=LATENCY_US:GB_PER_S`, both needed: an operation of this side takes the latency, and its bytes over
//!   the bandwidth (10^9 bytes a second). Its bytes are those of a rank's larger buffer, as `windlass bench` counts them.
//! - `SIDE.OPERATION`, `SIDE@RANKS` and `SIDE.OPERATION@RANKS` instead of a side: for this operation, this number of ranks, or both, as
//!   `windlass.all_reduce@8=5:40`. The one that says most holds; an operation says more than ranks. Operations are `all_reduce`, `broadcast`,
//!   `reduce`, `all_gather`, `reduce_scatter`, `uneven_all_gather`, `uneven_reduce_scatter`, `alltoall`, `gather`, `scatter`, `send_recv`.
//!   All of Windlass's messages are `send_recv`, of any number of ranks.
//! - `registered`: a third side, for eager operations of NCCL's over registered buffers. What it does not say is as of `nccl`.
//! - `noise=PART`: costs vary by up to this part both ways, otherwise on each device, but alike in each run.
//! - `slow=DEVICE:FACTOR`, for any number of devices: this device takes so many times as long. `load=FACTOR`: all devices do.
//!
//! A group of NCCL's on one communicator is one operation with the bytes of all, of sends and receives the more of both. All other work
//! takes no time. Streams, events, graphs and the host are ordered in modelled time as programs order them: whoever waits goes on at the later
//! time. Processes are not: a rank does not wait for a slow one's time. Nor is what waits for a value in memory, or for an event of another
//! process. A list that cannot be read ends the process at `cuInit`.

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
mod graph;
mod grids;
mod guard;
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
