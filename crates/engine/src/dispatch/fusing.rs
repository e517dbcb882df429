//! Decides which collectives of one communicator's part of a group are fused: broadcasts with a root each into an all-gather-v, reduces
//! with a root each into a reduce-scatter-v. Pure, and a function of what all ranks share: see [`group_plan`](super::group_plan).

use crate::plan::{Standing, Terms, are_native_fused, plan};
use windlass_base::call::{Function, Shared};
use windlass_base::path::Path;
use windlass_transport::tuning::Collective;

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

/// A step for each call, but one step for calls that are fused. NCCL runs those that are above the limits.
pub(super) fn kernels(calls: &[Shared], terms: &Terms) -> Vec<Step> {
    let mut steps = Vec::with_capacity(calls.len());
    let mut from = 0;
    while from < calls.len() {
        let run = from..from + run_of(&calls[from..]).len();
        from = run.end;
        if run.len() == 1 {
            let place = run.start;
            let path = plan(&calls[place], Standing::PeerGroup(terms));
            steps.push(if path == Path::Native { Step::Alone(place) } else { Step::Forwarded(place) });
            continue;
        }
        if are_native_fused(calls[run.clone()].iter(), terms) {
            steps.push(Step::Fused(run.collect()));
        } else {
            // NCCL runs all of them in one kernel. Running a part here would be one kernel more.
            steps.extend(run.map(Step::Forwarded));
        }
    }
    steps
}

/// The longest prefix that can be fused, at least one call: calls alike but for counts, each with another root.
fn run_of(calls: &[Shared]) -> &[Shared] {
    let Some((first, others)) = calls.split_first() else { return calls };
    // No rank knows whether two operations that the program made are the same one on the other ranks.
    if first.has_own_operation() || Collective::of(first.function).and_then(Collective::fused).is_none() {
        return &calls[..1];
    }
    let mut length = 1;
    for call in others {
        let is_new = calls[..length].iter().all(|known| known.root != call.root);
        if !is_new || !is_alike(first, call) {
            break;
        }
        length += 1;
    }
    &calls[..length]
}

/// Whether two calls can be fused. Broadcasts may have different types.
pub(super) fn is_alike(one: &Shared, other: &Shared) -> bool {
    Collective::of(one.function) == Collective::of(other.function)
        && (one.function != Function::Reduce
            || (one.datatype, one.operation) == (other.datatype, other.operation))
}
