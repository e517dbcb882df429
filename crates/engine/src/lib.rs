//! Everything in Windlass that decides and acts. Read from the call downwards: a call of the ABI layer comes in at
//! [`dispatch`], is described by [`call`](windlass_base::call), decided by [`plan`], and run by one mechanism: [`forward`], [`p2p`](windlass_transport::p2p), [`native`](windlass_transport::native), or
//! [`forward`] over buffers that [registration](features::registration) has given NCCL. What a module names lies in a layer below its own;
//! `tests/architecture.rs` of the workspace holds that.

#![deny(unsafe_code)]
#![deny(unreachable_pub)]

// For tests alone: everything that reads bytes from outside.
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;

// The call.
pub mod dispatch;

pub mod api;

// What is known and decided.
mod communicator;

mod group;

mod plan;

// What stands for a communicator that NCCL has not built.
mod lazy;

// What ranks agreed on and share.
pub mod peers;

// What a communicator has beside, and what a process has of memory.
pub mod features;

// Threads of ours, and the real NCCL.
mod background;

pub mod forward;
