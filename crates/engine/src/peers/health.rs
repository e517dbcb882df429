//! What happens when a rank fails or dies: other ranks hear of it, and their waits for it end.

pub(in crate::peers) mod awaited;
pub(in crate::peers) mod error_propagation;
pub(in crate::peers) mod hang_detector;
pub(in crate::peers) mod ranks;
