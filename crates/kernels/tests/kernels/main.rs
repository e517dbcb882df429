//! Tests of the device code that need more than Rust: the committed output of its compiler, and programs of `host/`.

mod arrange;
mod collective_simulation;
mod compiled;
mod host;
mod simulation;
mod structures;
