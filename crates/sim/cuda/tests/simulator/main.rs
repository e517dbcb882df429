//! Tests of the simulator through its C interface, loaded as programs load it. Each test needs a process of its own (nextest):
//! captures in global mode and environment variables affect the whole process.
#![allow(non_snake_case, clippy::too_many_arguments, reason = "the names and signatures are the driver's")]

mod driver;

mod captures;
mod clock;
mod conditional;
mod kernels;
mod memory;
mod processes;
mod streams;
