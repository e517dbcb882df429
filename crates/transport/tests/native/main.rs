//! Tests of native collectives on the simulated driver, strict, with the kernels on threads of this host, beside the p2p transport
//! of the same communicator. Run by nextest, which gives every test a process.

#[path = "../../../../tests/support/mod.rs"]
mod support;

mod communicator;
mod numbers;

mod collectives;
mod ends;
mod order;
mod uneven;
