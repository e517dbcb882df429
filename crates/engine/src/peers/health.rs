//! Ranks that fail or die, and those that wait for them.

pub(in crate::peers) mod error_propagation;
pub(in crate::peers) mod hang_detector;
pub(in crate::peers) mod ranks;
