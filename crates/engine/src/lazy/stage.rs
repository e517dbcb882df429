//! How far NCCL is with the communicator behind a lazy one.

use std::time::Duration;

/// How long an abort lets NCCL's init come to its end: NCCL 2.28 frees what that still uses if it is aborted in the middle (seen:
/// double frees), but not while it waits for a rank that does not come, which is why it takes longer than this.
pub(super) const INIT_WITHIN: Duration = Duration::from_secs(3);

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Lazy,
    /// A thread is in NCCL.
    Materializing,
    /// It still is, and another has aborted NCCL's communicator.
    Aborting,
    Materialized,
}
