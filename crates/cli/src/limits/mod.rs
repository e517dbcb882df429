//! Up to which sizes Windlass's collectives are faster than NCCL's on this machine: what `windlass run` and `windlass tune` measure, how a
//! limit follows, and where it is kept.

pub mod measure;
pub mod rule;
pub mod search;
pub mod store;
pub mod written;
