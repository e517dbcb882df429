//! A stand-in for libnccl.so.2 on host memory, for machines without a GPU.
//!
//! A client of the CUDA driver, as the real library is: an operation is a host function on the user's stream that
//! meets the other ranks in a shared-memory segment and moves bytes. Misuse that would hang or corrupt on NCCL ends
//! the process with status 86 and lines that begin with `sim-nccl: `.
//!
//! `settings` lists the environment variables.

#![allow(non_upper_case_globals)]

// The calls.
mod exports;

mod arguments;
mod device_api;

mod group;

mod lifecycle;
mod split;

// Operations.
mod operation;

mod order;

mod collective;
mod operators;
mod reduce;

mod mailbox;

// Memory.
mod allocation;
mod registration;
mod window;

// Communicators and what they share.
mod communicator;

mod rendezvous;

mod exchange;
mod segment;

// When something is wrong.
mod strict;

mod dump;
mod leaks;
mod refusal;

// Below.
mod driver;
mod settings;
