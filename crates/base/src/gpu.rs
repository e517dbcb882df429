//! The one place that calls CUDA's driver API. The driver is opened when the first communicator needs it.
//!
//! [`Driver`] is a table of the driver's functions and what is needed to call them. Tests put other functions into it.
//! The code here only wraps the driver: decisions are made elsewhere. Without a `libcuda.so.1` nothing panics:
//! [`driver`] gives an error.
//!
//! Owned things ([`memory`], [`stream`]) are freed when dropped, except in a forked child, where CUDA does not work.

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

pub mod nvml;

pub use context::{Context, Home};
pub use device::Ordinal;
pub use failure::Failure;
pub use library::{Calls, Driver, driver, opened};
pub use stream::StreamHandle;

/// `CUdeviceptr`: an address that is the same on all devices and the host.
pub type Address = u64;
