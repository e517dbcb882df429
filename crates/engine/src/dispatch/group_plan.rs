//! Decides which of a communicator's collectives in a group share a kernel, and which NCCL runs (never those in fixed order). Pure, and
//! a function of what all ranks share: pointers, streams and whether a call is in place cannot be passed in.
//!
//! # Why all ranks decide alike
//! NCCL requires that ranks group their collectives alike. It chooses one algorithm for all of a kind and like size in a group, and
//! deals them out over its channels in turn (2.28.9, `ncclPrepareTasks` and `scheduleCollTasksToPlan` in src/enqueue.cc).
//! Ranks with other groups would wait for each other's channels for ever.
//!
//! Divergence: where calls are so few and small that NCCL puts them on one channel in call order, ranks that group them unlike may work
//! on NCCL. They hang on a batch of Windlass, and on broadcasts or reduces of which some are above its limits: of one group NCCL then
//! runs all, outside groups each call is judged by itself. The order of a group's calls may differ between ranks on both: see
//! [`common_order`](super::common_order).

use windlass_kernels::collective::BATCH_CALLS_MAX;

use crate::plan::{Terms, is_in_fixed_order};
use windlass_base::call::Shared;
use windlass_transport::tuning;

use super::batching::{self, Batches};
use super::fusing::{self, Step};

/// Who runs the held collectives of a communicator, which come in the order that all ranks [have](super::common_order). [`fusing`] finds
/// calls that become one collective, [`batching`] calls that run beside each other. If more than a few would take a kernel each, NCCL
/// runs those, in one kernel.
///
/// # Why one may not need another's result
/// NCCL guarantees no order within a group. Its list is sorted by size (`ncclTaskCollSorterInsert`, src/include/comm.h), the last first
/// among equals, and runs on several channels at once. So two calls with common buffers are the program's fault on NCCL, too.
pub(super) fn steps(calls: &[Shared], terms: &Terms, batches: Batches) -> Vec<Step> {
    let single = few_lists(fusing::kernels(calls, terms), calls, terms);
    let batched = batching::batched(&single, calls, terms, batches);
    let bytes_of = |place: &usize| calls[*place].bytes(terms.ranks);
    let stays = |place: &usize| is_in_fixed_order(&calls[*place], terms);
    let separate = || {
        batched.iter().filter_map(|step| match step {
            Step::Alone(place) if stays(place) => None,
            Step::Batch(run) if run.iter().all(stays) => None,
            Step::Alone(place) => Some(bytes_of(place)),
            // NCCL takes longer for a full batch than a kernel of Windlass does.
            Step::Batch(run) if run.len() == BATCH_CALLS_MAX => None,
            Step::Batch(run) => Some(run.iter().map(bytes_of).fold(0, u64::saturating_add)),
            Step::Fused(_) | Step::Forwarded(_) => None,
        })
    };
    if tuning::serve_separate(separate().count(), separate().min().unwrap_or_default()) {
        return batched;
    }
    // Calls in fixed order stay, and are batched among themselves.
    let (kept, single): (Vec<Step>, Vec<Step>) = single.into_iter().partition(|step| match step {
        Step::Alone(place) => stays(place),
        _ => false,
    });
    let course = |step| match step {
        Step::Alone(place) => Step::Forwarded(place),
        other => other,
    };
    let rest = single.into_iter().map(course);
    rest.chain(batching::batched(&kept, calls, terms, batches)).collect()
}

/// Gives all fused steps back to NCCL if they are more than a few. Steps in fixed order stay.
fn few_lists(steps: Vec<Step>, calls: &[Shared], terms: &Terms) -> Vec<Step> {
    let stays = |run: &Vec<usize>| is_in_fixed_order(&calls[run[0]], terms);
    let lists = || {
        steps.iter().filter_map(|step| match step {
            Step::Fused(run) if stays(run) => None,
            Step::Fused(run) => Some(run),
            Step::Alone(_) | Step::Batch(_) | Step::Forwarded(_) => None,
        })
    };
    let bytes = |run: &Vec<usize>| run.iter().map(|place| calls[*place].bytes(terms.ranks)).sum::<u64>();
    let reduce = lists().any(|run| calls[run[0]].operation.is_some());
    if tuning::serve_lists(lists().count(), reduce, lists().map(bytes).min().unwrap_or_default()) {
        return steps;
    }
    let course = |step| match step {
        Step::Fused(run) if !stays(&run) => run.into_iter().map(Step::Forwarded).collect(),
        other => vec![other],
    };
    steps.into_iter().flat_map(course).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Standing, may_be_fused, plan};
    use nccl_sys::{
        ncclDataType_t, ncclFloat32, ncclInt8, ncclInt32, ncclMax, ncclMin, ncclRedOp_t, ncclSum,
    };
    use proptest::prelude::*;
    use windlass_base::call::Function;
    use windlass_base::path::Path;
    use windlass_transport::tuning::{COLLECTIVES, Limits};

    const MIB: usize = 1 << 20;
    /// All-reduce, broadcast, reduce, all-gather, reduce-scatter, the last two uneven; then reductions of other types.
    const NATIVE: Limits = Limits([
        16 << 20,
        1 << 20,
        1 << 20,
        64 << 20,
        64 << 20,
        64 << 20,
        64 << 20,
        (64 << 10) + 1,
        (64 << 10) + 1,
        (64 << 10) + 1,
        0,
    ]);
    const TERMS: Terms = Terms { ranks: 4, native: NATIVE, fixed_order: false };

    fn broadcast(root: i32, count: usize) -> Shared {
        Shared { function: Function::Broadcast, count, datatype: ncclInt8, operation: None, root: Some(root) }
    }

    fn reduce(root: i32, count: usize) -> Shared {
        let datatype = ncclFloat32;
        Shared { function: Function::Reduce, count, datatype, operation: Some(ncclSum), root: Some(root) }
    }

    fn fused(run: std::ops::Range<usize>) -> Step {
        Step::Fused(run.collect())
    }

    /// An all-gather-v is one kernel, whatever its sizes, also if parts are larger than broadcasts may be.
    #[test]
    fn roots_of_their_own() {
        let gather = |sizes: [usize; 4]| {
            let calls: Vec<Shared> = (0..).zip(sizes).map(|(root, count)| broadcast(root, count)).collect();
            steps(&calls, &TERMS, Batches::All)
        };
        assert_eq!(gather([1, 2, 3, 4]), [fused(0..4)]);
        assert_eq!(gather([MIB, 3 * MIB / 2, MIB / 2, MIB]), [fused(0..4)]);
        assert_eq!(gather([15 * MIB; 4]), [fused(0..4)]);
        let scatter: Vec<Shared> = (0..4).map(|root| reduce(3 - root, MIB / 2 + 9 * root as usize)).collect();
        assert_eq!(steps(&scatter, &TERMS, Batches::All), [fused(0..4)]);
        // Some roots are missing.
        assert_eq!(steps(&[reduce(3, 5000), reduce(1, 9)], &TERMS, Batches::All), [fused(0..2)]);
        // `Bcast` and another type fuse, too: bytes are moved.
        let bcast = Shared { function: Function::Bcast, datatype: ncclInt32, ..broadcast(2, 5) };
        assert_eq!(steps(&[broadcast(0, 7), bcast], &TERMS, Batches::All), [fused(0..2)]);
    }

    /// Above the limits NCCL runs all calls of a run; a single call is judged by itself.
    #[test]
    fn by_themselves() {
        use Step::{Alone, Forwarded};
        assert_eq!(steps(&[broadcast(1, 100)], &TERMS, Batches::All), [Alone(0)]);
        assert_eq!(steps(&[broadcast(1, 2 * MIB)], &TERMS, Batches::All), [Forwarded(0)]);
        let all = |sizes: [usize; 4]| {
            let calls: Vec<Shared> = (0..).zip(sizes).map(|(root, count)| broadcast(root, count)).collect();
            steps(&calls, &TERMS, Batches::All)
        };
        for sizes in [[17 * MIB; 4], [8 * MIB, 10, 10, 10], [10, 8 * MIB, 10, 8 * MIB]] {
            assert_eq!(all(sizes), [0, 1, 2, 3].map(Forwarded));
        }
        let all_reduce = Shared { function: Function::AllReduce, root: None, ..reduce(0, 10) };
        let mixed = [broadcast(0, 10), all_reduce, broadcast(1, 10), broadcast(2, 10), reduce(0, 2 * MIB)];
        assert_eq!(steps(&mixed, &TERMS, Batches::All), [Alone(0), Alone(1), fused(2..4), Forwarded(4)]);
        assert_eq!(steps(&[], &TERMS, Batches::All), []);
    }

    /// A root that comes again, another type or operation of reduces, or another collective begins the next run.
    #[test]
    fn ends_of_runs() {
        use Step::Alone;
        let again = [broadcast(0, 9), broadcast(1, 9), broadcast(1, 9), broadcast(0, 9)];
        assert_eq!(fusing::kernels(&again, &TERMS), [fused(0..2), fused(2..4)]);
        let max = Shared { operation: Some(ncclMax), ..reduce(2, 9) };
        let other_type = Shared { datatype: ncclInt32, ..reduce(3, 9) };
        assert_eq!(
            steps(&[reduce(0, 9), reduce(1, 9), max, other_type], &TERMS, Batches::All),
            [fused(0..2), Alone(2), Alone(3)]
        );
        assert_eq!(steps(&[broadcast(0, 9), reduce(1, 9)], &TERMS, Batches::All), [Alone(0), Alone(1)]);
    }

    /// Reductions of elements that were not timed have the same limits fused as alone.
    #[test]
    fn other_elements() {
        let maxima = |count| {
            let max = |root| Shared { operation: Some(ncclMax), ..reduce(root, count) };
            steps(&[max(0), max(1), max(2), max(3)], &TERMS, Batches::All)
        };
        assert_eq!(maxima(4096), [fused(0..4)]);
        assert_eq!(maxima(4097), [0, 1, 2, 3].map(Step::Forwarded), "four kernels");
        assert_eq!(maxima(16385), [0, 1, 2, 3].map(Step::Forwarded));
    }

    type Rooted = fn(i32, usize) -> Shared;

    /// NCCL runs several all-gather-v, or reduce-scatter-v, of a group where a kernel for each takes longer than NCCL's one.
    #[test]
    fn many_lists() {
        let lists = |count: usize, bytes: usize, of: Rooted| {
            let parts = if of(0, 1).operation.is_some() { bytes / 8 } else { bytes / 2 };
            let calls: Vec<Shared> = (0..count).flat_map(|_| [of(0, parts), of(1, parts)]).collect();
            (steps(&calls, &TERMS, Batches::All), (0..count).map(|at| fused(2 * at..2 * at + 2)).collect())
        };
        let (broadcasts, reduces): (Rooted, Rooted) = (broadcast, reduce);
        for (count, bytes, of, are_ours) in [
            (1, 8, broadcasts, true),
            (2, 8, broadcasts, true),
            (3, 8, broadcasts, false),
            (3, 64 << 10, broadcasts, false),
            (4, MIB, broadcasts, true),
            (5, MIB, broadcasts, false),
            (1, 8, reduces, true),
            (2, 8, reduces, true),
            (3, MIB, reduces, false),
        ] {
            let (steps, fused): (Vec<Step>, Vec<Step>) = lists(count, bytes, of);
            let nccls: Vec<Step> = (0..2 * count).map(Step::Forwarded).collect();
            assert_eq!(steps, if are_ours { fused } else { nccls }, "{count} of {bytes} bytes");
        }
        // Other collectives are judged by themselves.
        let all_reduce = Shared { function: Function::AllReduce, root: None, ..reduce(0, 9) };
        let mut mixed: Vec<Shared> = (0..6).map(|place| broadcast(place % 2, 9)).collect();
        mixed.push(all_reduce);
        let mut expected: Vec<Step> = (0..6).map(Step::Forwarded).collect();
        expected.push(Step::Alone(6));
        assert_eq!(steps(&mixed, &TERMS, Batches::All), expected);
    }

    /// Calls that NCCL runs in one kernel do not run in many.
    #[test]
    fn many_are_nccls() {
        const KIB: usize = 1 << 10;
        let all_reduce =
            |bytes: usize| Shared { function: Function::AllReduce, root: None, ..reduce(0, bytes / 4) };
        let all_reduces = |count, bytes, batches| steps(&vec![all_reduce(bytes); count], &TERMS, batches);
        for (count, bytes, are_ours) in [
            (2, 65 * KIB, true),
            (3, 65 * KIB, false),
            (3, MIB, true),
            (4, MIB, true),
            (5, MIB, false),
            (4, MIB - 4, false),
        ] {
            let expected = |place| if are_ours { Step::Alone(place) } else { Step::Forwarded(place) };
            let expected: Vec<Step> = (0..count).map(expected).collect();
            assert_eq!(all_reduces(count, bytes, Batches::Small), expected, "{count} of {bytes} bytes");
            assert_eq!(all_reduces(count, bytes, Batches::All), [Step::Batch((0..count).collect())]);
        }
        // Calls that are fused into one kernel stay on Windlass beside them.
        let large = all_reduce(65 * KIB);
        let mixed = [large, large, broadcast(0, 9), broadcast(1, 9), large];
        use Step::{Alone, Batch, Forwarded};
        let separate = [Forwarded(0), Forwarded(1), fused(2..4), Forwarded(4)];
        assert_eq!(steps(&mixed, &TERMS, Batches::Small), separate);
        assert_eq!(steps(&mixed, &TERMS, Batches::All), [Batch(vec![0, 1, 4]), fused(2..4)]);
        // A full batch of 64 calls is faster than NCCL, so any number of full batches stays.
        assert_eq!(all_reduces(64, 4, Batches::All), [Batch((0..64).collect())]);
        let three = [Batch((0..64).collect()), Batch((64..128).collect()), Batch(vec![128, 129])];
        assert_eq!(all_reduces(130, 4, Batches::All), three);
        // Calls of another operation take kernels of their own.
        let small = all_reduce(4);
        let max = Shared { operation: Some(ncclMax), ..small };
        let min = Shared { operation: Some(ncclMin), ..small };
        assert_eq!(steps(&[small, max, small], &TERMS, Batches::All), [Batch(vec![0, 2]), Alone(1)]);
        assert_eq!(steps(&[small, max, small, min], &TERMS, Batches::All), [0, 1, 2, 3].map(Forwarded));
    }

    /// In fixed order NCCL never runs reductions that round, however many kernels they take; other calls are judged as ever. Operations
    /// that the program made have a kernel each.
    #[test]
    fn fixed_order() {
        use Step::{Alone, Batch, Forwarded};
        let fixed = Terms { fixed_order: true, native: Limits::NONE, ..TERMS };
        let all_reduce = |count| Shared { function: Function::AllReduce, root: None, ..reduce(0, count) };
        let max = Shared { operation: Some(ncclMax), ..all_reduce(9) };
        let own = Shared { operation: Some(ncclRedOp_t(5)), ..all_reduce(9) };
        let run = |calls: &[Shared], batches| steps(calls, &fixed, batches);
        assert_eq!(run(&[all_reduce(MIB); 9], Batches::Small), (0..9).map(Alone).collect::<Vec<_>>());
        assert_eq!(
            run(&[all_reduce(9), max, all_reduce(9)], Batches::All),
            [Batch(vec![0, 2]), Forwarded(1)]
        );
        assert_eq!(run(&[own; 5], Batches::All), (0..5).map(Alone).collect::<Vec<_>>());
        let lists: Vec<Shared> = (0..8).map(|place| reduce(place % 2, 64 * MIB)).collect();
        let expected: Vec<Step> = (0..4).map(|list| fused(2 * list..2 * list + 2)).collect();
        assert_eq!(run(&lists, Batches::All), expected);
        let of_own: Vec<Shared> =
            (0..4).map(|root| Shared { operation: own.operation, ..reduce(root, 9) }).collect();
        assert_eq!(run(&of_own, Batches::All), (0..4).map(Alone).collect::<Vec<_>>());
        let lists_of_max: Vec<Shared> =
            lists.iter().map(|call| Shared { operation: max.operation, ..*call }).collect();
        assert_eq!(run(&lists_of_max, Batches::All), (0..8).map(Forwarded).collect::<Vec<_>>());
    }

    fn any_call() -> impl Strategy<Value = Shared> {
        let functions = prop_oneof![
            4 => Just(Function::Broadcast),
            1 => Just(Function::Bcast),
            4 => Just(Function::Reduce),
            1 => Just(Function::AllGather),
            1 => Just(Function::AllReduce),
        ];
        (functions, 0..4_i32, 0..25_u32, 0..3_i32, any::<bool>()).prop_map(
            |(function, root, log, datatype, is_sum)| {
                let rooted = matches!(function, Function::Broadcast | Function::Bcast | Function::Reduce);
                let reduces = matches!(function, Function::Reduce | Function::AllReduce);
                Shared {
                    function,
                    count: 1 << log,
                    datatype: if datatype == 0 { ncclInt8 } else { ncclDataType_t(6 + datatype) },
                    operation: reduces.then_some(if is_sum { ncclSum } else { ncclMax }),
                    root: rooted.then_some(root),
                }
            },
        )
    }

    proptest! {
        /// Each call is in exactly one step. Fused calls are alike, have different roots, and pass `may_be_fused`.
        #[test]
        fn every_call_once(
            calls in proptest::collection::vec(any_call(), 0..24),
            limits in any::<[u32; COLLECTIVES]>(),
            shift in 0..32_u32,
            batches in prop_oneof![Just(Batches::Small), Just(Batches::All)],
        ) {
            let terms = Terms { native: Limits(limits.map(|limit| u64::from(limit >> shift))), ..TERMS };
            let (mut places, mut alone, mut lists) = (Vec::new(), 0, 0);
            for step in steps(&calls, &terms, batches) {
                if let Step::Batch(run) = &step {
                    prop_assert!(run.len() > 1 && run.is_sorted());
                    prop_assert!(run.iter().all(|place| plan(&calls[*place], Standing::PeerGroup(&terms)) == Path::Native));
                }
                match step {
                    Step::Alone(place) => {
                        prop_assert_eq!(plan(&calls[place], Standing::PeerGroup(&terms)), Path::Native);
                        alone += 1;
                        places.push(place);
                    }
                    Step::Batch(run) => {
                        alone += usize::from(run.len() < BATCH_CALLS_MAX);
                        places.extend(run);
                    }
                    Step::Forwarded(place) => {
                        places.push(place);
                    }
                    Step::Fused(run) => {
                        lists += 1;
                        let run: Vec<&Shared> = run.iter().map(|place| { places.push(*place); &calls[*place] }).collect();
                        let mut roots: Vec<_> = run.iter().map(|call| call.root).collect();
                        roots.sort();
                        roots.dedup();
                        prop_assert!(run.len() > 1 && roots.len() == run.len() && roots[0].is_some());
                        prop_assert!(run.iter().all(|call| may_be_fused(call, &terms)));
                        prop_assert!(run.iter().all(|call| fusing::is_alike(run[0], call)));
                    }
                }
            }
            prop_assert!(alone <= 4 && lists <= 4, "{} {}", alone, lists);
            places.sort();
            prop_assert_eq!(places, (0..calls.len()).collect::<Vec<_>>());
        }
    }
}
