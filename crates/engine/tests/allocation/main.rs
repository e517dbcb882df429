//! Tests of which allocation holds a pointer, on the simulated driver, strict, or on a GPU machine's own. Run by nextest, which
//! gives every test a process.

#[path = "../../../../tests/support/mod.rs"]
mod support;

mod memory;

mod aliases;
mod kinds;
mod lookups;
mod reuse;
mod threads;
