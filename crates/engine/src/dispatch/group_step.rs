//! A step of a group plan.

/// Who runs which collectives; numbers are indices in the list of calls.
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
