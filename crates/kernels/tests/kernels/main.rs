//! Tests of the device code that need more than Rust: the committed output of its compiler, and programs of `host/`.

mod arrange;
mod compiled;
mod host;
mod simulation;
