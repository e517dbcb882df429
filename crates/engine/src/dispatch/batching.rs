//! Decides which collectives of one communicator's part of a group run in one kernel (a batch): small ones over LL, others over LL128.
//! Pure, and a function of what all ranks share: see [`group_plan`](super::group_plan), also for why no call may need another's result.

use nccl_sys::{ncclDataType_t, ncclRedOp_t};
use windlass_kernels::collective::{BATCH_CALLS_MAX, BATCH_ENTRIES};
use windlass_kernels::collectives::{Kind, batch_bytes_max, packets};

use crate::plan::{self, Terms};
use windlass_base::call::{Function, Shared};
use windlass_bootstrap::negotiated::capability;
use windlass_transport::tuning::{self, Collective};

use super::fusing::Step;

/// Which collectives of a group may share a kernel, as the ranks have agreed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Batches {
    /// Small ones, over LL.
    Small,
    /// Small ones over LL, larger ones over LL128.
    All,
}

impl Batches {
    /// Reads the capabilities of the [negotiated config](windlass_bootstrap::negotiated).
    pub(super) fn of(capabilities: u64) -> Batches {
        if capabilities & capability::LARGER_BATCHES == 0 { Batches::Small } else { Batches::All }
    }
}

/// What one kernel can do: move bytes, or reduce one type with one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Moves,
    Reduces(ncclDataType_t, ncclRedOp_t),
}

/// A call that may join a batch.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    /// Its index in the list of calls.
    place: usize,
    kind: Kind,
    collective: Collective,
    /// The cell that bounds a batch of it, if it is of another type. None in fixed order, where NCCL is no alternative.
    other: Option<Collective>,
    work: Work,
    bytes: u64,
    /// How many packets it takes over LL; none if it is too large for LL.
    packets: Option<u64>,
}

/// Replaces steps of one call each by batches, as far as they fit. A batch stands where its first call was.
pub(super) fn batched(steps: &[Step], calls: &[Shared], terms: &Terms, batches: Batches) -> Vec<Step> {
    let candidate = |step: &Step| match step {
        Step::Alone(place) => Candidate::of(*place, &calls[*place], terms),
        Step::Fused(_) | Step::Batch(_) | Step::Forwarded(_) => None,
    };
    let candidates: Vec<Option<Candidate>> = steps.iter().map(candidate).collect();
    let sums = Sums::of(candidates.iter().flatten());
    let mut batched: Vec<Step> = Vec::with_capacity(steps.len());
    // The newest batch of each work and wire.
    let mut open: Vec<Open> = Vec::new();
    for (step, candidate) in steps.iter().zip(candidates) {
        let wired = candidate.and_then(|candidate| Some((sums.wire(&candidate, terms, batches)?, candidate)));
        let Some((wire, candidate)) = wired else {
            batched.push(step.clone());
            continue;
        };
        let mut known = open.iter_mut().find(|one| one.work == candidate.work && one.wire == wire);
        let joins = known.as_mut().is_some_and(|known| known.takes(&mut batched[known.step], &candidate));
        if joins {
            continue;
        }
        let new = Open::of(&candidate, wire, batched.len());
        match known {
            Some(known) => *known = new,
            None => open.push(new),
        }
        batched.push(step.clone());
    }
    batched
}

/// A batch that is being filled.
struct Open {
    work: Work,
    wire: Wire,
    /// Its index among the new steps.
    step: usize,
    packets: u64,
}

impl Open {
    fn of(first: &Candidate, wire: Wire, step: usize) -> Open {
        Open { work: first.work, wire, step, packets: first.packets.unwrap_or(0) }
    }

    /// Adds a call to this batch, if the batch has room.
    fn takes(&mut self, step: &mut Step, candidate: &Candidate) -> bool {
        let packets = self.packets + candidate.packets.unwrap_or(0);
        match step {
            _ if self.wire == Wire::Ll && packets > BATCH_ENTRIES as u64 => return false,
            Step::Alone(first) => *step = Step::Batch(vec![*first, candidate.place]),
            Step::Batch(run) if run.len() < BATCH_CALLS_MAX => run.push(candidate.place),
            _ => return false,
        }
        self.packets = packets;
        true
    }
}

impl Candidate {
    /// None for a call with a root (those are fused, or rare), and for one whose elements no batch kernel can reduce.
    fn of(place: usize, call: &Shared, terms: &Terms) -> Option<Candidate> {
        if call.reduces_alone() {
            return None;
        }
        let (tuning, collective) = (tuning::kernels(), Collective::of(call.function)?);
        let cell = plan::cell_of(call, collective)?;
        let other = (cell != collective && !plan::is_in_fixed_order(call, terms)).then_some(cell);
        let (kind, work, crossover) = match call.function {
            Function::AllReduce => {
                (Kind::AllReduce, Work::Reduces(call.datatype, call.operation?), tuning.all_reduce)
            }
            Function::ReduceScatter => {
                (Kind::ReduceScatter, Work::Reduces(call.datatype, call.operation?), tuning.reduce_scatter)
            }
            Function::AllGather => (Kind::AllGather, Work::Moves, tuning.all_gather),
            _ => return None,
        };
        let bytes = call.bytes(terms.ranks);
        let connection_bytes = (call.count as u64).checked_mul(call.datatype.size_bytes()? as u64)?;
        let packets = packets(connection_bytes);
        let is_small = bytes <= crossover.ll_bytes_max && packets <= BATCH_ENTRIES as u64;
        let packets = is_small.then_some(packets);
        (bytes <= tuning::BATCHED_BYTES_MAX).then_some(Candidate {
            place,
            kind,
            collective,
            other,
            work,
            bytes,
            packets,
        })
    }
}

/// The wire of a batch. Over LL a batch may hold several kinds of collectives, over LL128 one kind.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wire {
    Ll,
    Ll128(Kind),
}

/// Totals over all candidates of a group.
struct Sums {
    /// LL packets of each work; none where a call is too large for LL.
    packets: Vec<(Work, Option<u64>)>,
    /// Bytes of each work and kind.
    bytes: Vec<((Work, Kind), u64)>,
}

impl Sums {
    fn of<'a>(candidates: impl Iterator<Item = &'a Candidate>) -> Sums {
        let mut sums = Sums { packets: Vec::new(), bytes: Vec::new() };
        for Candidate { work, kind, bytes, packets, .. } in candidates {
            match sums.packets.iter_mut().find(|(known, _)| known == work) {
                Some((_, sum)) => *sum = sum.zip(*packets).map(|(sum, packets)| sum + packets),
                None => sums.packets.push((*work, *packets)),
            }
            match sums.bytes.iter_mut().find(|(known, _)| *known == (*work, *kind)) {
                Some((_, sum)) => *sum = sum.saturating_add(*bytes),
                None => sums.bytes.push(((*work, *kind), *bytes)),
            }
        }
        sums
    }

    /// The wire of a call in a batch; none if the call runs alone.
    fn wire(&self, call: &Candidate, terms: &Terms, batches: Batches) -> Option<Wire> {
        let by_ll = call.packets.map(|_| Wire::Ll);
        match batches {
            Batches::Small => by_ll,
            Batches::All if self.are_few_packets(call) || !self.suit_ll128(call, terms) => by_ll,
            Batches::All => Some(Wire::Ll128(call.kind)),
        }
    }

    /// Whether all calls of its work fit into one kernel over LL. More or larger calls are quicker over LL128.
    fn are_few_packets(&self, call: &Candidate) -> bool {
        let sum = self.packets.iter().find(|(known, _)| *known == call.work).and_then(|(_, sum)| *sum);
        sum.is_some_and(|packets| packets <= BATCH_ENTRIES as u64)
    }

    /// Whether all calls of its work and kind have so few bytes that one kernel is not slower than NCCL's. Several kernels would be slower.
    /// False where even single collectives have no measured limit. Batches of other types were not measured, and count as one call.
    fn suit_ll128(&self, call: &Candidate, terms: &Terms) -> bool {
        if !terms.native.serve(call.collective, tuning::UNMEASURED_BYTES_MAX + 1) {
            return false;
        }
        let sum = self.bytes.iter().find(|(known, _)| *known == (call.work, call.kind));
        let most = u32::try_from(terms.ranks).map_or(0, |ranks| batch_bytes_max(call.kind, ranks));
        let serves = |bytes| call.other.is_none_or(|other| terms.native.serve(other, bytes));
        sum.is_some_and(|(_, bytes)| *bytes <= most && serves(*bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::collectives;
    use nccl_sys::{ncclAvg, ncclBfloat16, ncclFloat8e4m3, ncclFloat32, ncclInt8, ncclMax, ncclSum};
    use proptest::prelude::*;
    use std::ptr::{null, null_mut, without_provenance_mut};
    use windlass_base::call::{Call, Local};
    use windlass_kernels::collective::BatchLaunch;
    use windlass_kernels::collectives::{Limits as GridLimits, arrange_batch};
    use windlass_transport::native::{Geometry, Layout, Task};
    use windlass_transport::tuning::{COLLECTIVES, Limits};

    const TERMS: Terms = Terms { ranks: 4, native: Limits([1 << 30; COLLECTIVES]), fixed_order: false };

    fn call(function: Function, count: usize) -> Shared {
        let operation = (function != Function::AllGather).then_some(ncclSum);
        Shared { function, count, datatype: ncclFloat32, operation, root: None }
    }

    fn alone_with(batches: Batches, calls: &[Shared]) -> Vec<Step> {
        let steps: Vec<Step> = (0..calls.len()).map(Step::Alone).collect();
        batched(&steps, calls, &TERMS, batches)
    }

    fn alone(calls: &[Shared]) -> Vec<Step> {
        alone_with(Batches::All, calls)
    }

    /// Calls that move bytes share a kernel, and reductions one for each type and operation, where the first call was.
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
        // Reductions of floats of 8 bits have no batch kernel.
        let of_8_bits = |function| Shared { datatype: ncclFloat8e4m3, ..call(function, 9) };
        let calls = [AllReduce, AllGather, AllReduce, AllGather].map(of_8_bits);
        assert_eq!(alone(&calls), [Step::Alone(0), Step::Batch(vec![1, 3]), Step::Alone(2)]);
    }

    /// A full batch is followed by another. Beside a larger call, or where LL packets do not fit, each kind has a batch of its own.
    #[test]
    fn as_many_as_fit() {
        use Function::{AllGather, AllReduce, Reduce, ReduceScatter};
        let full = alone(&vec![call(AllReduce, 1); BATCH_CALLS_MAX + 2]);
        let last = vec![BATCH_CALLS_MAX, BATCH_CALLS_MAX + 1];
        assert_eq!(full, [Step::Batch((0..BATCH_CALLS_MAX).collect()), Step::Batch(last)]);
        // 64 KiB are 256 packets.
        let large = call(AllReduce, 16 << 10);
        let scattered = call(ReduceScatter, 1);
        assert_eq!(alone(&[large, large]), [Step::Batch(vec![0, 1])]);
        let by_ll128 = [Step::Batch(vec![0, 2]), Step::Alone(1)];
        assert_eq!(alone(&[large, scattered, large]), by_ll128);
        assert_eq!(alone(&[large; 5]), [Step::Batch((0..5).collect())]);
        let larger = call(AllReduce, (16 << 10) + 1);
        let small = call(AllReduce, 1);
        assert_eq!(alone(&[small, larger, small]), [Step::Batch(vec![0, 1, 2])]);
        assert_eq!(
            alone(&[small, call(AllGather, 4 << 10), small]),
            [Step::Batch(vec![0, 2]), Step::Alone(1)]
        );
        let rooted = Shared { root: Some(0), ..call(Reduce, 1) };
        assert_eq!(alone(&[rooted, rooted]), [Step::Alone(0), Step::Alone(1)]);
        let overflows = call(AllGather, usize::MAX);
        assert_eq!(alone(&[overflows, overflows]), [Step::Alone(0), Step::Alone(1)]);
    }

    /// With `Batches::Small`, a call whose packets do not fit begins the next batch, and a larger call has a kernel of its own.
    #[test]
    fn small_alone() {
        use Function::{AllGather, AllReduce, ReduceScatter};
        let small = |calls: &[Shared]| alone_with(Batches::Small, calls);
        // 64 KiB are 256 packets.
        let (large, larger) = (call(AllReduce, 16 << 10), call(AllReduce, (16 << 10) + 1));
        assert_eq!(small(&[large; 3]), [Step::Batch(vec![0, 1]), Step::Alone(2)]);
        assert_eq!(small(&[large; 4]), [Step::Batch(vec![0, 1]), Step::Batch(vec![2, 3])]);
        let (one, scattered) = (call(AllReduce, 1), call(ReduceScatter, 1));
        assert_eq!(small(&[one, larger, one]), [Step::Batch(vec![0, 2]), Step::Alone(1)]);
        assert_eq!(small(&[one, call(AllGather, 1), scattered]), [Step::Batch(vec![0, 2]), Step::Alone(1)]);
    }

    /// Capabilities give the batches.
    #[test]
    fn agreed() {
        use capability::{LARGER_BATCHES, NATIVE};
        assert_eq!([NATIVE, NATIVE | LARGER_BATCHES].map(Batches::of), [Batches::Small, Batches::All]);
    }

    /// Above the bytes of one batch kernel, calls of a kind do not share one over LL128, and large calls run alone.
    #[test]
    fn not_too_large() {
        use Function::{AllGather, AllReduce, ReduceScatter};
        const MIB: usize = 1 << 20;
        let of =
            |function, bytes: usize| call(function, bytes / 4 / if function == AllReduce { 1 } else { 2 });
        let two = Terms { ranks: 2, ..TERMS };
        let in_all = |function, mib: usize, more| {
            let mut calls = vec![of(function, MIB); mib];
            calls.extend(vec![of(function, 8); more]);
            batched(&(0..calls.len()).map(Step::Alone).collect::<Vec<_>>(), &calls, &two, Batches::All)
        };
        for (function, most) in [(AllReduce, 32), (ReduceScatter, 48)] {
            assert_eq!(in_all(function, most, 0), [Step::Batch((0..most).collect())], "{function:?}");
            let (mut more, small) = ((0..most).map(Step::Alone).collect::<Vec<_>>(), vec![most, most + 1]);
            more.push(Step::Batch(small));
            assert_eq!(in_all(function, most, 2), more, "{function:?}: what is small goes by LL");
        }
        let full = [Step::Batch((0..64).collect()), Step::Batch((64..128).collect())];
        assert_eq!(in_all(AllGather, 128, 0), full);
        assert_eq!(in_all(AllGather, 128, 1).len(), 129);
        // Each kind is counted by itself; calls too large for a batch do not count.
        let most = tuning::BATCHED_BYTES_MAX as usize;
        let [reduced, scattered] = [AllReduce, ReduceScatter].map(|function| of(function, most));
        let large = of(AllReduce, most + 4);
        let calls = [reduced, scattered, large, reduced, scattered, large, reduced, reduced];
        let steps: Vec<Step> = (0..calls.len()).map(Step::Alone).collect();
        let expected =
            [Step::Batch(vec![0, 3, 6, 7]), Step::Batch(vec![1, 4]), Step::Alone(2), Step::Alone(5)];
        assert_eq!(batched(&steps, &calls, &two, Batches::All), expected);
        // Ranks for which batches were not timed.
        assert_eq!(alone(&[call(AllReduce, MIB); 2]), [Step::Batch(vec![0, 1])]);
        assert_eq!(alone(&[call(AllReduce, MIB); 3]), [0, 1, 2].map(Step::Alone));
    }

    /// Calls of other types have together at most as many bytes as one call of these types.
    #[test]
    fn other_types() {
        const MIB: usize = 1 << 20;
        let mut two = Terms { ranks: 2, ..TERMS };
        two.native.0[Collective::OtherAllReduce as usize] = 4 * MIB as u64 + 1;
        let maximum = Shared { operation: Some(ncclMax), ..call(Function::AllReduce, MIB / 4) };
        let together = |count| {
            let steps: Vec<Step> = (0..count).map(Step::Alone).collect();
            batched(&steps, &vec![maximum; count], &two, Batches::All)
        };
        assert_eq!(together(4), [Step::Batch((0..4).collect())]);
        assert_eq!(together(5), (0..5).map(Step::Alone).collect::<Vec<_>>());
    }

    /// Where even single collectives have no measured limit, only small calls share a kernel, over LL.
    #[test]
    fn unmeasured() {
        let unmeasured = Terms { native: Limits([tuning::UNMEASURED_BYTES_MAX + 1; COLLECTIVES]), ..TERMS };
        // 16 KiB are 64 packets.
        let calls = vec![call(Function::AllReduce, 4 << 10); 9];
        let steps: Vec<Step> = (0..calls.len()).map(Step::Alone).collect();
        let cut = [Step::Batch((0..8).collect()), Step::Alone(8)];
        assert_eq!(batched(&steps, &calls, &unmeasured, Batches::All), cut);
        assert_eq!(alone(&calls), [Step::Batch((0..9).collect())]);
    }

    /// The time is linear in the number of calls.
    #[test]
    fn very_many() {
        let calls = vec![call(Function::AllReduce, 16 << 10); 100_000];
        let two_each = alone_with(Batches::Small, &calls);
        assert_eq!((two_each.len(), &two_each[1]), (50_000, &Step::Batch(vec![2, 3])));
        let small = vec![call(Function::AllReduce, 20); 100_000];
        assert_eq!(alone(&small).len(), 100_000_usize.div_ceil(BATCH_CALLS_MAX));
    }

    /// Other steps keep their places.
    #[test]
    fn others_stay() {
        let calls = [call(Function::AllGather, 1); 5];
        let steps =
            [Step::Forwarded(0), Step::Alone(1), Step::Fused(vec![2]), Step::Alone(3), Step::Forwarded(4)];
        let expected =
            [Step::Forwarded(0), Step::Batch(vec![1, 3]), Step::Fused(vec![2]), Step::Forwarded(4)];
        assert_eq!(batched(&steps, &calls, &TERMS, Batches::All), expected);
    }

    fn any_call() -> impl Strategy<Value = Shared> {
        use Function::{AllGather, AllReduce, ReduceScatter};
        let functions = prop::sample::select(vec![AllGather, AllReduce, ReduceScatter]);
        let counts = prop_oneof![6 => 0..3000_usize, 3 => 0..100_000_usize, 1 => 0..9_000_000_usize];
        // Mostly alike, so that kernels fill.
        let others = prop::sample::select(vec![ncclInt8, ncclBfloat16, ncclFloat8e4m3]);
        let datatypes = prop_oneof![6 => Just(ncclFloat32), 2 => others];
        let operations = prop_oneof![6 => Just(ncclSum), 1 => Just(ncclMax), 1 => Just(ncclAvg)];
        (functions, counts, datatypes, operations).prop_map(|(function, count, datatype, operation)| Shared {
            datatype,
            operation: (function != AllGather).then_some(operation),
            ..call(function, count)
        })
    }

    /// The name of the kernel that runs a step; none where all its calls are empty.
    fn kernel_of(run: &[usize], calls: &[Shared], ranks: u32, blocks: u32) -> Option<&'static str> {
        let calls: Vec<Call> = run.iter().map(|place| called(calls[*place])).collect();
        let Some(Task::Batch(collectives)) = collectives::batch(calls.iter(), ranks - 1, ranks as usize)
        else {
            panic!("NCCL takes them")
        };
        let geometry = Geometry::recommended(blocks, ranks, ranks - 1, 1);
        let regions: Vec<u64> = (1..=u64::from(ranks)).map(|rank| rank << 40).collect();
        let limits = GridLimits { blocks_max: blocks, clusters: true };
        let (layout, tuning) = (Layout::of(&geometry), tuning::kernels());
        let mut batch = BatchLaunch::default();
        let arranged =
            arrange_batch(&collectives, &geometry, &layout, &regions, &tuning, &limits, &mut batch);
        arranged.expect("what is batched is not refused").map(|shape| shape.kernel.name())
    }

    fn called(shared: Shared) -> Call {
        let local = Local {
            called: shared.function,
            send: without_provenance_mut(1 << 44),
            receive: without_provenance_mut(1 << 45),
            peer: None,
            config: null(),
            communicator: null_mut(),
            stream: null_mut(),
            scalar: None,
        };
        Call { shared, local }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        /// Every call is in one step, and kernels take every batch: `small` ones over LL, as the ranks have agreed.
        #[test]
        fn kernels_take_it(
            calls in prop::collection::vec(any_call(), 1..100),
            ranks in 2..=8_u32,
            blocks in 1..=32_u32,
            batches in prop::sample::select(vec![Batches::Small, Batches::All]),
        ) {
            let terms = Terms { ranks: ranks as usize, ..TERMS };
            let steps = batched(&(0..calls.len()).map(Step::Alone).collect::<Vec<_>>(), &calls, &terms, batches);
            let mut places = Vec::new();
            for step in &steps {
                match step {
                    Step::Alone(place) => places.push(*place),
                    Step::Batch(run) => {
                        let kernel = kernel_of(run, &calls, ranks, blocks);
                        let by_ll = kernel.is_none_or(|name| name.starts_with("ncclWindlass_LLBatch_"));
                        prop_assert!(batches == Batches::All || by_ll, "{kernel:?} runs {run:?}");
                        places.extend(run);
                    }
                    other => prop_assert!(false, "{other:?}"),
                }
            }
            places.sort_unstable();
            prop_assert_eq!(places, (0..calls.len()).collect::<Vec<_>>());
        }
    }
}
