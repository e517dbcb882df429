//! Everything in Windlass that decides and acts. Read from the call downwards: a call of the ABI layer comes in at
//! [`dispatch`], is described by [`call`], decided by [`plan`], and run by one mechanism: [`forward`], [`p2p`], [`native`], or
//! [`forward`] over buffers that [`registration`] has given NCCL. What a module names lies in a layer below its own;
//! `tests/architecture.rs` of the workspace holds that.

#![deny(unsafe_code)]

// For tests alone: everything that reads bytes from outside.
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;

// The call.
pub mod dispatch;

pub mod lifecycle;

// What is known and decided.
pub mod communicator;

pub mod group;

pub mod plan;

// What stands for a communicator that NCCL has not built.
pub mod lazy;

// What ranks agreed on and share.
pub mod peers;

// The mechanisms.
pub mod forward;

pub mod rendezvous;

pub mod heap;

pub mod p2p;

pub mod native;

pub mod registration;

pub mod allocation;

pub mod agreed;

pub mod pool;

pub mod windows;

pub mod checking;

// What mechanisms that run on GPUs stand on.
pub mod sequencer;

// The process and what it counts, says and is told.
pub mod process;

pub mod gpu;

pub mod range;

pub mod shared_page;

pub mod stats;

pub mod annotate;

pub mod log;

pub mod config;

pub mod error;

pub mod guard;

pub mod descriptor;

pub mod gate;

pub mod thread;

// Words that all of them use.
pub mod call;

pub mod tuning;

pub mod negotiated;

pub mod path;
