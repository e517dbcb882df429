//! C types of `nccl.h`, the one list of NCCL's entry points, and the real library underneath.
//!
//! * [`types`]: codes and structures of the C interface.
//! * [`for_each_entry`]: the list from which the ABI layer, the header, the simulator and the tests are made.
//! * [`slots`]: one cell for each entry point, through which every call reaches the real library.
//! * [`real`]: typed calls through those cells.
//! * [`mod@trampoline`]: keeps a call's arguments while Rust code decides where the call goes.
//! * [`missing`]: answers for functions that cannot be called.
//! * [`forked`]: guards the calls of forked children.
//! * [`open`]: opens the real library, once.
//! * [`find`]: the search for it; [`objects`] and [`cache`] read its input.
//! * [`profiler`]: the interface of profiler plugins.
//! * [`second`]: finds another NCCL that is mapped beside it; [`exported`] recognises one.

#![allow(non_upper_case_globals)]

pub mod types;

mod table;

mod trampoline;

pub mod slots;

pub mod real;

pub mod missing;

pub mod forked;

pub mod open;

pub mod find;

pub mod second;

pub mod objects;

pub mod exported;

pub mod cache;

pub mod profiler;

pub use slots::Entry;
pub use types::*;

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!("Windlass runs on x86-64 Linux: its entry points are a few instructions of that machine");
