//! What a communicator with a peer group has beside messages and collectives of ours, and what a process has of memory. Each in a folder
//! of its own: what is decided (pure), and what is kept.

pub(crate) mod check;
pub mod memory;
pub(crate) mod page_layout;
pub(crate) mod recycling;
pub mod registration;
pub(crate) mod windows;
