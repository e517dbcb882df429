//! C types of `nccl.h`, the one list of NCCL's entry points, and the real library underneath.
//!
//! * [`types`]: codes and structures of the C interface.
//! * [`for_each_entry`]: the list that the face, the header, the stand-in and the tests expand from.
//! * [`slots`]: one cell an entry point, through which every call reaches the real library; bound at first use.
//! * [`real`]: typed calls through those cells.
//! * [`find`]: where the real library is looked for; [`objects`] and [`cache`] are what it reads.
//! * [`open`]: opening it, once.

pub mod types;
mod table;
pub mod slots;
pub mod real;
mod missing;
pub mod open;
pub mod find;
pub mod objects;
pub mod cache;


pub use types::*;
