//! The base of all other crates: CUDA, options, counters, the log, and small tools around threads, descriptors and shared memory.

#![deny(unsafe_code)]
#![deny(unreachable_pub)]

// Words that all modules use.
pub mod call;

pub mod path;

pub mod config;

pub mod error;

pub mod guard;

pub mod descriptor;

pub mod gate;

pub mod lock;

pub mod scoped;

pub mod thread;

pub mod log;

pub mod gpu;

pub mod range;

pub mod shared_page;

pub mod stats;

pub mod observers;

// The process as a whole: its counters, log, report and options.
pub mod process;
