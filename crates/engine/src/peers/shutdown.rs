//! The ends: of a communicator, of all registrations of this process, and of the process.

pub(in crate::peers) mod at_exit;
pub(in crate::peers) mod closing;
pub(in crate::peers) mod draining;
pub(in crate::peers) mod release_all;
pub(in crate::peers) mod room;
