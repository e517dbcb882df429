//! A simulator of libnccl.so.2 on host memory, for machines without a GPU.
//!
//! A client of the CUDA driver, as the real library is: an operation is a host function on the user's stream that
//! meets the other ranks in a shared-memory segment and moves bytes. Misuse that would hang or corrupt on NCCL ends
//! the process with status 86 and lines that begin with `sim-nccl: `.
//!
//! - `WINDLASS_SIM_STRICT=0` switches off what only finds misuse: leaks, mixed registration, unequal offsets, freed
//!   memory, threads side by side, captures on some ranks, use after the end. Mismatched calls and sizes stay failures.
//! - `WINDLASS_SIM_TIMEOUT_MS`: how long an operation waits without progress before everybody's state is dumped, 20000.
//! - `WINDLASS_SIM_NCCL_LOG=1`: a line a call on stderr.
//! - `WINDLASS_SIM_LOST_INITS`: which inits of this process fail when all ranks have joined, splits and shrinks too, by
//!   number from 1, apart by commas. The handle stays, as NCCL's does.
//! - `WINDLASS_SIM_REFUSED_INITS`: which inits of this process fail before they join, numbered likewise; the others wait.
//! - `WINDLASS_SIM_DEREGISTER_MS`: how long the end of a registration takes, inside the call, 0.
//! - `WINDLASS_SIM_ALLOC_MS`: how long `ncclMemAlloc` takes, inside the call, 0.
//! - `WINDLASS_SIM_FAILED_LAUNCHES`: which eager launches of collectives of this process answer an error and run all the same,
//!   numbered likewise; a group is a launch of each of its communicators.
//! - `WINDLASS_SIM_KEPT_REGISTRATIONS`: which ends of registrations of this process answer an error and end nothing, numbered
//!   likewise.
//! - `WINDLASS_SIM_ADDRESSES`: where the roots of ids and their ranks listen, 127.0.0.1: IPv4 addresses apart by commas, of which the first counts that
//!   is this host's. Ranks are in one kernel all the same.
//! - `NCCL_CUMEM_ENABLE=0`: memory is that of cudaMalloc, as in NCCL.
//! - `WINDLASS_SIM_NCCL_VERSION`: which release this says it is, 22809. From 22602 on a group's communicators run in the order of
//!   their ids' hashes, before in the order of their first calls, both as in NCCL.
//! - `WINDLASS_SIM_NCCL_RINGS=1`: sums begin with another rank in each share of a call, as in NCCL's rings; else with rank 0 always.
//! - `NCCL_LEGACY_CUDA_REGISTER=1`: registrations of cudaMalloc memory count, as in NCCL.
//!
//! Ranks go to the root of their id as NCCL's do, byte for byte (`root.rs`): to a socket of the process that made the id, which takes
//! unknown connections as NCCL's does and closes when all ranks have been there. An id that is used twice is refused, at once where NCCL tries
//! for a minute.
//!
//! Everything can be used in exit handlers and static destructors that were registered after this library was loaded, by the thread
//! that called `exit`, too: leaks are looked for behind them. To older ones it answers as NCCL does, whose CUDA runtime has ended then.
//!
//! Registration is as in NCCL 2.28.9 on one host without multicast (`lookup.rs`): a table of ranges that every call is looked
//! up in; peers import a registered receive buffer at its first use and keep it until `ncclCommDeregister`, which waits for
//! nothing and must not find operations in flight that use what it ends. Tests ask a few more exports what NCCL saw:
//! `simRegisteredCollectives(comm)` and `simRegistrations(comm)`, both `uint64_t` and all ones for an unknown handle; and
//! `simAllocations()` and `simFrees()` how often it has made memory for `ncclMemAlloc`, and freed it.
//!
//! Windows are as in NCCL 2.28.9, too: all ranks meet, their allocations must be of one size, and all or none of these must have
//! a window already (`WINDLASS_SIM_NCCL_VERSION` says what later releases let pass); a window keeps its memory until it is
//! deregistered, which must not find operations in flight that use it, nor another window at its address. Its handle points to
//! memory that begins as NCCL's and leads to the ranks' memory (`reach.rs`). Each window has a space of addresses of its own, where
//! NCCL's share one, in which without multicast ranks may differ. `simWindowsMade(comm)` and `simWindows(comm)` say how many were
//! made and live.
//!
//! Where it differs from NCCL: every collective waits for all ranks; 8-bit floats are copied but not reduced; there are
//! no device communicators.

#![allow(non_upper_case_globals)]

// The calls.
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

// When something is wrong.
mod strict;

mod dump;
mod leaks;
mod refusal;

// Below.
mod driver;
mod settings;
