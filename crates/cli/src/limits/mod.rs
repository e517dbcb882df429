//! Finds up to which sizes Windlass's collectives are faster than NCCL's on this machine. The modules measure for `windlass run` and
//! `windlass tune`, conclude limits, and keep them.

pub mod measure;
pub mod rule;
pub mod search;
pub mod store;
pub mod written;
