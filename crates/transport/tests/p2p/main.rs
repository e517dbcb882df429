//! Tests of the p2p transport on the simulated driver, strict, with the kernel on threads of this host: whatever still lives when a
//! test's process ends fails it. Run by nextest, which gives every test a process.

#[path = "../../../../tests/support/mod.rs"]
mod support;

mod communicator;
mod traffic;

mod ends;
mod graphs;
mod growing;
mod messages;
mod order;
mod processes;
mod shared_graphs;
