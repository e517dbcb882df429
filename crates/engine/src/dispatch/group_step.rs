//! A step of a group plan.

/// Who runs which collectives; numbers are indices in the list of calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// One kernel runs this call alone.
    Alone(usize),
    /// One kernel runs all these calls, fused into one collective.
    Fused(Vec<usize>),
    /// One kernel runs all these calls beside each other.
    Batch(Vec<usize>),
    /// NCCL runs it.
    Forwarded(usize),
}
