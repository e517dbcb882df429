//! Registers the buffers of large collectives with NCCL, where the program registers none. See docs/registration.md.

pub mod agreed;
mod aliases;
pub mod cache;
pub(crate) mod deregistration;
pub(crate) mod freeing;
mod offer_pacing;
pub(crate) mod registering;
mod staging;
mod substitutes;
