//! Tests of the symmetric heap and of `gpu` on the simulated driver, strict: whatever still lives when a test's process ends fails
//! it. Run by nextest, which gives every test a process.

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
mod sleep;
