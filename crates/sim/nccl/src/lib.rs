//! A stand-in for libnccl.so.2 on host memory, for machines without a GPU.
//!
//! A client of the CUDA driver, as the real library is: an operation is a host function on the user's stream that
//! meets the other ranks in a shared-memory segment and moves bytes. Misuse that would hang or corrupt on NCCL ends
//! the process with status 86 and lines that begin with `sim-nccl: `.

mod allocation;
mod arguments;
mod collective;
mod communicator;
mod device_api;
mod driver;
mod dump;
mod exchange;
mod exports;
mod group;
mod leaks;
mod lifecycle;
mod mailbox;
mod operation;
mod operators;
mod order;
mod reduce;
mod refusal;
mod registration;
mod rendezvous;
mod segment;
mod settings;
mod split;
mod strict;
mod window;
