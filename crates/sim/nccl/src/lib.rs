//! A simulator of libnccl.so.2 on host memory, for machines without a GPU.
//!
//! It calls the simulated CUDA driver: an operation is a host function on the user's stream, which waits for the other
//! ranks in a shared-memory segment and moves bytes. Misuse that would hang or corrupt on NCCL ends the process with
//! status 86 and lines that begin with `sim-nccl: `.
//!
//! - `WINDLASS_SIM_STRICT=0` switches off checks that only find misuse: leaks, mixed registration, unequal offsets, use of freed
//!   memory, calls of two threads at once, captures on some ranks, use after the end. Mismatched calls and sizes stay failures.
//! - `WINDLASS_SIM_TIMEOUT_MS`: how long an operation waits without progress before the state of all ranks is dumped, 20000.
//! - `WINDLASS_SIM_NCCL_LOG=1`: a line on stderr for each call.
//! - `WINDLASS_SIM_LOST_INITS`: numbers of inits of this process that fail after all ranks have joined, separated by commas. They
//!   count from 1, splits and shrinks included. The handle stays valid, as in NCCL.
//! - `WINDLASS_SIM_REFUSED_INITS`: inits of this process that fail before they join, numbered likewise; the other ranks wait.
//! - `WINDLASS_SIM_DEREGISTER_MS`: how long the end of a registration takes, inside the call, 0.
//! - `WINDLASS_SIM_ALLOC_MS`: how long `ncclMemAlloc` takes, inside the call, 0.
//! - `WINDLASS_SIM_FAILED_LAUNCHES`: eager launches of collectives of this process that return an error but run, numbered
//!   likewise; a group is a launch of each of its communicators.
//! - `WINDLASS_SIM_KEPT_REGISTRATIONS`: calls of `ncclCommDeregister` of this process that return an error and end nothing, numbered
//!   likewise.
//! - `WINDLASS_SIM_ADDRESSES`: IPv4 addresses separated by commas, 127.0.0.1. Roots of ids and their ranks listen at the first one that
//!   belongs to this host. All ranks must still run under one kernel.
//! - `NCCL_CUMEM_ENABLE=0`: memory is that of cudaMalloc, as in NCCL.
//! - `WINDLASS_SIM_NCCL_VERSION`: the simulated release, 22809. From 22602 on a group's communicators run in the order of
//!   their ids' hashes, before in the order of their first calls, both as in NCCL.
//! - `WINDLASS_SIM_NCCL_RINGS=1`: the sum of each rank's share starts at another rank, as in NCCL's rings; else at rank 0.
//! - `NCCL_PROFILER_PLUGIN`: a profiler plugin, as in NCCL from 2.27 on (`profiler.rs`).
//! - `NCCL_LEGACY_CUDA_REGISTER=1`: registrations of cudaMalloc memory count, as in NCCL.
//!
//! Ranks connect to the root of their id with the bytes that NCCL's ranks send (`root.rs`). The root is a socket of the process that
//! made the id. It treats unknown connections as NCCL's root does, and closes when all ranks have connected. An id that is used twice is
//! refused, at once where NCCL tries for a minute.
//!
//! Exit handlers and static destructors that were registered after this library was loaded may call everything: leaks are counted after
//! them. Older ones get the errors that NCCL gives once its CUDA runtime has ended.
//!
//! Registration is as in NCCL 2.28.9 on one host without multicast (`lookup.rs`). Every call looks its buffers up in a table of ranges.
//! Peers import a registered receive buffer at its first use, and keep it until `ncclCommDeregister`. That call does not wait, and is
//! misuse while operations that use the range are in flight. Exports for tests count what NCCL saw (`counters.rs`).
//!
//! Windows are as in NCCL 2.28.9, too. All ranks register together. Their allocations must be of one size, and all or none must have
//! a window already (later releases of `WINDLASS_SIM_NCCL_VERSION` allow more). A window keeps its memory until it is deregistered; that
//! is misuse while operations use the window, or another window begins at its address. The handle points to a record that begins as
//! NCCL's and leads to the ranks' memory (`reach.rs`). Each window has an address range of its own, where NCCL's share one.
//!
//! Where it differs from NCCL: every collective waits for all ranks; 8-bit floats are copied but not reduced; there are
//! no device communicators.

#![allow(non_upper_case_globals)]

// Exports and calls.
mod exports;

mod counters;
mod reentry;

mod arguments;
mod device_api;

mod group;

mod lifecycle;
mod split;

// Operations.
mod operation;
mod sorting;
mod work;

mod order;

mod agreement;
mod collective;
mod operators;
mod reduce;

mod p2p;

// Memory.
mod allocation;
mod import;
mod legacy;
mod lookup;
mod reach;
mod registration;
mod window;

// Communicators and what they share.
mod communicator;

mod rendezvous;
mod root;

mod exchange;
mod segment;

// Profilers.
mod profiler;

// Reports of misuse and errors.
mod strict;

mod dump;
mod leaks;
mod refusal;

// The driver and the environment.
mod driver;
mod settings;
