//! The one place that calls CUDA: the driver API, opened when the first communicator needs it, in the driver's own terms.
//!
//! [`Driver`] is the seam: a table of the driver's functions and what it takes to call them. Tests put other functions
//! into the table. Everything here is thin; what is decided with it is decided elsewhere. Nothing panics without a
//! `libcuda.so.1`: [`driver`] then says so.
//!
//! Owned things ([`memory`], [`stream`]) give themselves back when dropped, except in a forked child, where CUDA is dead.

#![allow(unsafe_code)]

pub mod library;

pub mod types;

pub mod failure;

pub mod device;

pub mod context;

pub mod capture;

pub mod memory;

pub mod pointer;

pub mod stream;

pub mod record;

pub mod graph;

pub mod module;

mod nvlink;

pub use context::{Context, Home};
pub use device::Ordinal;
pub use failure::Failure;
pub use library::{Calls, Driver, driver, opened};
pub use stream::StreamHandle;

/// `CUdeviceptr`: an address that all devices and the host agree on.
pub type Address = u64;
