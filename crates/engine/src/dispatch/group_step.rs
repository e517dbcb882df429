//! A step of a group's plan.

/// What becomes of collectives; numbers are places in the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// One kernel runs this one.
    Alone(usize),
    /// One kernel runs all these, fused into one collective.
    Fused(Vec<usize>),
    /// One kernel runs all these beside each other.
    Batch(Vec<usize>),
    /// NCCL runs it.
    Forwarded(usize),
}
