//! Which collectives of one communicator's part of a group are fused into one: broadcasts with a root each an all-gather-v, reduces with
//! a root each a reduce-scatter-v. Pure, and a function of what all ranks share: see [`group_plan`](super::group_plan).

use crate::plan::{Standing, Terms, are_native_fused, plan};
use windlass_base::call::{Function, Shared};
use windlass_base::path::Path;
use windlass_transport::tuning::Collective;

use super::group_step::Step;

/// A kernel each, but for what is fused into one collective.
pub(super) fn kernels(calls: &[Shared], terms: &Terms) -> Vec<Step> {
    let mut steps = Vec::with_capacity(calls.len());
    let mut from = 0;
    while from < calls.len() {
        let run = from..from + run_of(&calls[from..]).len();
        from = run.end;
        let is_ours = |place: &usize| plan(&calls[*place], Standing::PeerGroup(*terms)) == Path::Native;
        if run.len() == 1 {
            let place = run.start;
            steps.push(if is_ours(&place) { Step::Alone(place) } else { Step::Forwarded(place) });
            continue;
        }
        let run: Vec<usize> = run.collect();
        if are_fused(calls, &run, terms) {
            steps.push(Step::Fused(run));
            continue;
        }
        // What is NCCL's by itself goes there; the rest is a smaller one.
        let (ours, nccls): (Vec<usize>, Vec<usize>) = run.into_iter().partition(is_ours);
        steps.extend(nccls.into_iter().map(Step::Forwarded));
        match are_fused(calls, &ours, terms) {
            true => steps.push(Step::Fused(ours)),
            false => steps.extend(ours.into_iter().map(Step::Alone)),
        }
    }
    steps
}

fn are_fused(calls: &[Shared], run: &[usize], terms: &Terms) -> bool {
    run.len() > 1 && are_native_fused(run.iter().map(|place| &calls[*place]), terms)
}

/// The first calls, as many as one kernel can run, at least one: alike but for roots and counts, with a root each.
fn run_of(calls: &[Shared]) -> &[Shared] {
    let Some((first, others)) = calls.split_first() else { return calls };
    // Whether two operations that the program made are the same one no rank knows of the others.
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

/// What only moves may be of any types.
pub(super) fn is_alike(one: &Shared, other: &Shared) -> bool {
    Collective::of(one.function) == Collective::of(other.function)
        && (one.function != Function::Reduce
            || (one.datatype, one.operation) == (other.datatype, other.operation))
}
