//! Buffers of large collectives, registered with NCCL though the application registers none. See docs/registration.md.

pub mod agreed;
mod aliases;
pub mod cache;
pub(crate) mod deregistration;
pub(crate) mod freeing;
mod offer_pacing;
pub(crate) mod registering;
mod staging;
mod substitutes;
