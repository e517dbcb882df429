//! Memory of the application: which allocation holds a pointer, and blocks of `ncclMemAlloc` that are kept.

pub mod allocation;
pub(crate) mod pool;
