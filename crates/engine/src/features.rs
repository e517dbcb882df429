//! The features of a communicator beside moving bytes, and the process's memory. Each feature has a folder: its pure decisions apart from its
//! state.

pub mod memory;
pub(crate) mod page_layout;
pub(crate) mod recycling;
pub mod registration;
pub(crate) mod windows;
