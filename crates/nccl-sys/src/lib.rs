//! C types of `nccl.h`, the one list of NCCL's entry points, and the real library underneath.
//!
//! * [`types`]: codes and structures of the C interface.
//! * [`for_each_entry`]: the list that the ABI layer, the header, the simulator and the tests expand from.
//! * [`slots`]: one cell an entry point, through which every call reaches the real library.
//! * [`real`]: typed calls through those cells.
//! * [`mod@trampoline`]: keeps a call's arguments while Rust code decides where it goes on.
//! * [`missing`]: answers where there is nothing to call.
//! * [`forked`]: what a forked child's calls go through.
//! * [`open`]: opening the real library, once.
//! * [`find`]: where it is looked for; [`objects`] and [`cache`] are what the search reads.
//! * [`second`]: whether another NCCL is mapped beside it; [`exported`] is how one is recognised.

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

pub use slots::Entry;
pub use types::*;

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!("Windlass runs on x86-64 Linux: its entry points are a few instructions of that machine");
