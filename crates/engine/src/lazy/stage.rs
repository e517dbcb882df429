//! The stages of a lazy communicator on its way to be materialized.

use std::time::Duration;

/// How long an abort waits for NCCL's init to end by itself. NCCL 2.28 frees memory in use if an init is aborted in the middle
/// (seen: double frees). An init that takes longer than this waits for a rank that does not come, and can be aborted.
pub(super) const INIT_WITHIN: Duration = Duration::from_secs(3);

/// The stage of a lazy communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Lazy,
    /// A thread is in NCCL's init.
    Materializing,
    /// A thread still is, and another one aborts NCCL's communicator.
    Aborting,
    Materialized,
}
