//! Which small collectives of one communicator's part of a group one kernel runs beside each other. Pure, and a function of what all
//! ranks share: see [`fusing`](super::fusing), also for why one may not need another's result.

use nccl_sys::{ncclDataType_t, ncclRedOp_t};
use windlass_kernels::collective::{BATCH_CALLS_MAX, BATCH_UNITS_MAX};
use windlass_kernels::collectives::units;

use crate::call::{Function, Shared};
use crate::plan::Terms;
use crate::tuning;

use super::fusing::Step;

/// What one kernel can do: move bytes, or reduce in one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Moves,
    Reduces(ncclDataType_t, ncclRedOp_t),
}

/// What is being filled.
struct Batch {
    work: Work,
    /// Its place in the list of steps.
    step: usize,
    units: u64,
}

/// Puts those that would take a kernel each together, as far as they fit, where the first of them was.
pub fn batched(steps: &[Step], calls: &[Shared], terms: &Terms) -> Vec<Step> {
    let mut batched: Vec<Step> = Vec::with_capacity(steps.len());
    // The newest of each work.
    let mut open: Vec<Batch> = Vec::new();
    for step in steps {
        let Step::Alone(place) = step else {
            batched.push(step.clone());
            continue;
        };
        let Some((work, units)) = work_of(&calls[*place], terms) else {
            batched.push(step.clone());
            continue;
        };
        let known = open.iter_mut().find(|batch| batch.work == work);
        match known {
            Some(batch) if joins(&mut batched[batch.step], *place, batch.units + units) => {
                batch.units += units;
            }
            Some(batch) => {
                (batch.step, batch.units) = (batched.len(), units);
                batched.push(step.clone());
            }
            None => {
                open.push(Batch { work, step: batched.len(), units });
                batched.push(step.clone());
            }
        }
    }
    batched
}

/// Adds a call to what one kernel runs, if that then has no more than so many units.
fn joins(step: &mut Step, place: usize, units: u64) -> bool {
    if units > BATCH_UNITS_MAX as u64 {
        return false;
    }
    match step {
        Step::Alone(first) => {
            *step = Step::Batch(vec![*first, place]);
            true
        }
        Step::Batch(run) if run.len() < BATCH_CALLS_MAX => {
            run.push(place);
            true
        }
        _ => false,
    }
}

/// What a batch does for a call, and its units; none where it would go by other wires alone, or has a root.
fn work_of(call: &Shared, terms: &Terms) -> Option<(Work, u64)> {
    let tuning = tuning::kernels();
    let (work, crossover) = match call.function {
        Function::AllReduce => (Work::Reduces(call.datatype, call.operation?), tuning.all_reduce),
        Function::ReduceScatter => (Work::Reduces(call.datatype, call.operation?), tuning.reduce_scatter),
        Function::AllGather => (Work::Moves, tuning.all_gather),
        _ => return None,
    };
    let pair_bytes = (call.count as u64).checked_mul(call.datatype.size_bytes()? as u64)?;
    let units = units(pair_bytes);
    let is_small = call.bytes(terms.ranks) <= crossover.pairs_bytes_max && units <= BATCH_UNITS_MAX as u64;
    is_small.then_some((work, units))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tuning::{COLLECTIVES, Limits};
    use nccl_sys::{ncclAvg, ncclFloat32, ncclInt8, ncclSum};

    const TERMS: Terms = Terms { ranks: 4, fast: Limits([1 << 30; COLLECTIVES]) };

    fn call(function: Function, count: usize) -> Shared {
        let operation = (function != Function::AllGather).then_some(ncclSum);
        Shared { function, count, datatype: ncclFloat32, operation, root: None }
    }

    fn alone(calls: &[Shared]) -> Vec<Step> {
        let steps: Vec<Step> = (0..calls.len()).map(Step::Alone).collect();
        batched(&steps, calls, &TERMS)
    }

    /// What moves is one kernel, what reduces one for each way, each where its first call was; one alone stays so.
    #[test]
    fn by_work() {
        use Function::{AllGather, AllReduce, ReduceScatter};
        let averages = Shared { operation: Some(ncclAvg), ..call(AllReduce, 9) };
        let calls = [
            call(AllReduce, 100),
            call(AllGather, 7),
            call(ReduceScatter, 64),
            averages,
            Shared { datatype: ncclInt8, ..call(AllGather, 3) },
            call(AllReduce, 1),
        ];
        let expected = [Step::Batch(vec![0, 2, 5]), Step::Batch(vec![1, 4]), Step::Alone(3)];
        assert_eq!(alone(&calls), expected);
        assert_eq!(alone(&[]), []);
    }

    /// A full one is followed by another; what other wires serve better, and what has a root, is none's.
    #[test]
    fn as_many_as_fit() {
        let full = alone(&vec![call(Function::AllReduce, 1); BATCH_CALLS_MAX + 2]);
        let last = vec![BATCH_CALLS_MAX, BATCH_CALLS_MAX + 1];
        assert_eq!(full, [Step::Batch((0..BATCH_CALLS_MAX).collect()), Step::Batch(last)]);
        // 64 KiB are 256 units.
        let large = call(Function::AllReduce, 16 << 10);
        assert_eq!(alone(&[large; 3]), [Step::Batch(vec![0, 1]), Step::Alone(2)]);
        let larger = call(Function::AllReduce, (16 << 10) + 1);
        let small = call(Function::AllReduce, 1);
        assert_eq!(alone(&[small, larger, small]), [Step::Batch(vec![0, 2]), Step::Alone(1)]);
        let rooted = Shared { root: Some(0), ..call(Function::Reduce, 1) };
        assert_eq!(alone(&[rooted, rooted]), [Step::Alone(0), Step::Alone(1)]);
        let overflows = call(Function::AllGather, usize::MAX);
        assert_eq!(alone(&[overflows, overflows]), [Step::Alone(0), Step::Alone(1)]);
    }

    /// Others keep their places.
    #[test]
    fn others_stay() {
        let calls = [call(Function::AllGather, 1); 5];
        let steps =
            [Step::Forwarded(0), Step::Alone(1), Step::Together(vec![2]), Step::Alone(3), Step::Forwarded(4)];
        let expected =
            [Step::Forwarded(0), Step::Batch(vec![1, 3]), Step::Together(vec![2]), Step::Forwarded(4)];
        assert_eq!(batched(&steps, &calls, &TERMS), expected);
    }
}
