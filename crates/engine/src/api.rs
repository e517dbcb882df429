//! The functions of NCCL, one file a family. Calls that move bytes are in [`dispatch`](crate::dispatch).

mod children;
pub mod communicators;
pub mod disable;
mod foreign_ids;
pub mod groups;
mod handles;
mod init_ends;
pub mod memory;
pub mod queries;
mod session;
pub mod sleep;
pub mod uneven;
pub mod windows;
