//! Memory of the program: which allocation holds a pointer, and the pool of freed blocks of `ncclMemAlloc`.

pub mod allocation;
pub(crate) mod pool;
