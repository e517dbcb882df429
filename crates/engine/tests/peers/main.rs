//! Tests of inits of peer groups on the simulated driver, strict, with all ranks in this process. Run by nextest, which gives every
//! test a process.

#[path = "../../../../tests/support/mod.rs"]
mod support;

mod children;
mod ids;
mod inits;
mod processes;
mod rings;
mod room;
mod shared_pages;
