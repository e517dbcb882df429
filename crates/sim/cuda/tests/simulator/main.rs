//! The simulator through its C interface, loaded as programs load it. One process per test (nextest): captures in global mode
//! and environment variables reach the whole process.
#![allow(non_snake_case, clippy::too_many_arguments, reason = "the names and signatures are the driver's")]

mod driver;

mod captures;
mod clock;
mod conditional;
mod kernels;
mod memory;
mod processes;
mod streams;
