//! The symmetric heap and the gpu seam on the simulated driver, strict: what is alive when a test's process ends fails it.
//! Run by nextest, which gives every test a process.

#[path = "../../../../tests/support/mod.rs"]
mod support;

mod application;

mod captures;
mod contexts;
mod faults;
mod gpu;
mod lending;
mod peers;
mod processes;
mod seam;
