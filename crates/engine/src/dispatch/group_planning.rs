//! Plans the calls that a group has held, just before its outermost end: for each communicator, which kernels run, and which calls go
//! to NCCL after all.

use std::sync::Arc;

use nccl_sys::{ncclComm_t, ncclInternalError, ncclNumOps, ncclResult_t};

use crate::communicator;
use crate::group::{self, Awaited, Held, Ours};
use crate::peers::PeerGroup;
use crate::plan::Terms;
use windlass_base::call::{Call, Shared};
use windlass_base::error::{panicked, refuse};
use windlass_base::gpu::StreamHandle;
use windlass_base::guard;
use windlass_base::path::Path;
use windlass_transport::native::Task;
use windlass_transport::p2p::{self, Operation};

use super::batching::Batches;
use super::fusing::Step;
use super::ordering::Part;
use super::{collectives, common_order, fixed_order, group_plan, route};

/// Plans the held calls at the outermost end, before NCCL closes the group. Calls that NCCL is to run after all go to NCCL now:
/// communicators in the order of their first such calls, the calls of each in the order that [all ranks have](common_order). A call
/// that NCCL refuses fails the group, as at the call. The returned parts are in the order of their communicators' tokens and ranks, which
/// all ranks see alike, as NCCL runs communicators (since 2.26). So ranks may group calls that other ranks make in another order.
///
/// As in NCCL, a group in which a rank's messages to itself are not matched fails, and nothing of that communicator runs.
///
/// Divergence: nothing of the group's other communicators runs either, while NCCL has run those that come first.
///
/// Divergence: where NCCL checks pointers (NCCL_CHECK_POINTERS), it may refuse such a call only at the group's end.
pub fn plan() -> Vec<Part> {
    plan_by(decide)
}

fn plan_by(decide: impl FnOnce(&[Held]) -> (Vec<Part>, Vec<Call>)) -> Vec<Part> {
    let decided = || {
        let held = group::take_held();
        let decided = decide(&held);
        group::put_back(held);
        decided
    };
    let (parts, forwarded) = guard::or_else(
        || {
            // A panic has lost the held calls, so nothing of the group runs.
            group::wait_for(Awaited::Failed(panicked("what a group held within peer groups")));
            Default::default()
        },
        decided,
    );
    for call in &forwarded {
        // NCCL, and a lazy communicator, keep a refusal until the end of the group.
        let _ = route::forward_held(call);
    }
    parts
}

fn decide(held: &[Held]) -> (Vec<Part>, Vec<Call>) {
    let mut peer_groups: Vec<&Arc<PeerGroup>> = Vec::new();
    for Held { peer_group, .. } in held {
        if !peer_groups.iter().any(|known| Arc::ptr_eq(known, peer_group)) {
            peer_groups.push(peer_group);
        }
    }
    let (mut parts, mut forwarded, mut refused) = (Vec::new(), Vec::new(), None);
    for peer_group in peer_groups {
        let own = held.iter().enumerate().filter(|(_, one)| Arc::ptr_eq(&one.peer_group, peer_group));
        let own: Vec<(usize, &Held)> = own.collect();
        let negotiated = peer_group.negotiated();
        let terms = peer_group.terms();
        let batches = Batches::of(negotiated.capabilities);
        let sorted = Sorted::of(own.iter().map(|(_, one)| (one.what, one.stream)), &terms, batches);
        let Some((_, Held { communicator, .. })) = own.first() else { continue };
        sorted.count(*communicator, &terms);
        refused = refused.or_else(|| p2p::unmatched(&sorted.operations, peer_group.rank()));
        if let Some((first, _)) = own.iter().zip(&sorted.are_ours).find(|(_, is_ours)| !**is_ours) {
            forwarded.push((first.0, sorted.forwarded().collect::<Vec<Call>>()));
        }
        if sorted.streams.is_empty() {
            continue;
        }
        parts.push(Part {
            communicator: *communicator,
            peer_group: peer_group.clone(),
            tasks: sorted.tasks(peer_group.rank(), terms.ranks),
            streams: sorted.streams,
            operations: sorted.operations,
        });
    }
    if let Some(refusal) = refused {
        group::wait_for(Awaited::Failed(refuse(refusal.result(), format_args!("{refusal}"))));
        return Default::default();
    }
    forwarded.sort_by_key(|(place, _)| *place);
    parts.sort_by_key(|part: &Part| (part.peer_group.negotiated().comm, part.peer_group.rank()));
    (parts, forwarded.into_iter().flat_map(|(_, calls)| calls).collect())
}

/// One communicator's calls of a group.
#[derive(Debug, Default)]
struct Sorted {
    /// Its collectives, in the order that all ranks have.
    collectives: Vec<Call>,
    /// The plan of these collectives.
    steps: Vec<Step>,
    operations: Vec<Operation>,
    /// For each held call, in call order: whether a kernel of Windlass runs it.
    are_ours: Vec<bool>,
    /// The streams of the calls that Windlass runs, each once, in call order.
    streams: Vec<StreamHandle>,
}

impl Sorted {
    /// Sorts and plans the calls, which come in call order, each with its stream. `batches`: see [`group_plan::steps`].
    fn of(
        calls: impl Iterator<Item = (Ours, StreamHandle)> + Clone,
        terms: &Terms,
        batches: Batches,
    ) -> Sorted {
        let mut sorted = Sorted::default();
        let (mut called, mut shared) = (Vec::new(), Vec::new());
        for (place, (what, _)) in calls.clone().enumerate() {
            match what {
                Ours::Collective(call) => {
                    called.push((place, call));
                    shared.push(common(call.shared));
                }
                Ours::Message(operation) => sorted.operations.push(operation),
            }
        }
        sorted.are_ours = vec![true; called.len() + sorted.operations.len()];
        if !called.is_empty() {
            let order = common_order::places(&shared, terms.ranks);
            sorted.collectives = order.iter().map(|at| called[*at].1).collect();
            let shared: Vec<Shared> = order.iter().map(|at| shared[*at]).collect();
            sorted.steps = group_plan::steps(&shared, terms, batches);
            for step in &sorted.steps {
                if let Step::Forwarded(at) = step {
                    sorted.are_ours[called[order[*at]].0] = false;
                }
            }
        }
        for ((_, stream), _) in calls.zip(&sorted.are_ours).filter(|(_, is_ours)| **is_ours) {
            if !sorted.streams.contains(&stream) {
                sorted.streams.push(stream);
            }
        }
        sorted
    }

    fn forwarded(&self) -> impl Iterator<Item = Call> {
        self.steps.iter().filter_map(|step| match step {
            Step::Forwarded(place) => Some(self.collectives[*place]),
            Step::Alone(_) | Step::Fused(_) | Step::Batch(_) => None,
        })
    }

    /// Counts the held collectives: their paths are known only now.
    fn count(&self, handle: ncclComm_t, terms: &Terms) {
        let Some(communicator) = communicator::find(handle) else { return };
        let count = |call: &Call, path| {
            super::count(call, communicator, path);
            if path == Path::Native {
                fixed_order::kept(&call.shared, communicator.counters(), terms);
            }
        };
        for step in &self.steps {
            match step {
                Step::Alone(place) => count(&self.collectives[*place], Path::Native),
                Step::Forwarded(place) => count(&self.collectives[*place], Path::Forward),
                Step::Fused(run) | Step::Batch(run) => {
                    run.iter().for_each(|place| count(&self.collectives[*place], Path::Native));
                }
            }
        }
    }

    fn tasks(&self, rank: u32, ranks: usize) -> Result<Vec<Task>, ncclResult_t> {
        let task = |step: &Step| match step {
            Step::Alone(place) => Some(collectives::alone(&self.collectives[*place], rank, ranks)),
            Step::Fused(run) => {
                Some(collectives::fused(run.iter().map(|place| &self.collectives[*place]), rank, ranks))
            }
            Step::Batch(run) => {
                Some(collectives::batch(run.iter().map(|place| &self.collectives[*place]), rank, ranks))
            }
            Step::Forwarded(_) => None,
        };
        let tasks: Option<Vec<Task>> = self.steps.iter().filter_map(task).collect();
        tasks.ok_or_else(|| {
            let calls = &self.collectives;
            refuse(ncclInternalError, format_args!("collectives of a group, looked at before: {calls:?}"))
        })
    }
}

/// A call in a form that is equal on every rank: without a configuration, and with one number for all operations that the program
/// made, as each rank numbers those by itself.
fn common(call: Shared) -> Shared {
    let operation = if call.has_own_operation() { Some(ncclNumOps) } else { call.operation };
    Shared { function: call.function.plain(), operation, ..call }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nccl_sys::{ncclBfloat16, ncclFloat32, ncclInt8, ncclMax, ncclSum};
    use proptest::prelude::*;
    use std::ptr::{dangling, dangling_mut, null, null_mut, without_provenance_mut};
    use windlass_base::call::{Function, Local};
    use windlass_transport::native::{Collective, Kind};
    use windlass_transport::p2p::Direction;
    use windlass_transport::tuning::{COLLECTIVES, Limits};

    const TERMS: Terms = Terms { ranks: 4, native: Limits([1000; COLLECTIVES]), fixed_order: false };

    fn collective(function: Function, count: usize, root: Option<i32>) -> Ours {
        let operation = (function == Function::AllReduce).then_some(ncclSum);
        Ours::Collective(Call {
            shared: Shared { function, count, datatype: ncclInt8, operation, root },
            local: Local {
                called: function,
                send: dangling(),
                receive: dangling_mut(),
                peer: None,
                config: null(),
                communicator: null_mut(),
                stream: null_mut(),
                scalar: None,
            },
        })
    }

    fn ours(is_collective: bool, number: u64) -> Ours {
        match is_collective {
            true => collective(Function::AllReduce, number as usize, None),
            false => {
                let direction = Direction::Send;
                Ours::Message(Operation { address: 1, bytes: number, peer: 0, direction })
            }
        }
    }

    fn counts(sorted: &Sorted) -> Vec<u64> {
        let counts = |task| match task {
            Task::One(Collective { count, .. }) => vec![count],
            Task::Fused(_) => vec![u64::MAX],
            Task::Batch(collectives) => collectives.iter().map(|collective| collective.count).collect(),
        };
        sorted.tasks(0, 4).unwrap().into_iter().flat_map(counts).collect()
    }

    fn any_collective() -> impl Strategy<Value = Shared> {
        use Function::{AllGather, AllReduce, Bcast, Broadcast, Reduce, ReduceScatter};
        let functions = prop::sample::select(vec![
            AllReduce,
            AllReduce,
            AllGather,
            ReduceScatter,
            Broadcast,
            Bcast,
            Reduce,
        ]);
        let counts = prop_oneof![1..400_usize, 1..9000_usize, 1..600_000_usize];
        let datatypes = prop::sample::select(vec![ncclFloat32, ncclFloat32, ncclBfloat16]);
        let operations = prop::sample::select(vec![ncclSum, ncclSum, ncclMax]);
        (functions, counts, datatypes, operations, 0..4).prop_map(
            |(function, count, datatype, operation, root)| {
                let reduces = matches!(function, AllReduce | ReduceScatter | Reduce);
                let operation = reduces.then_some(operation);
                let root = matches!(function, Broadcast | Bcast | Reduce).then_some(root);
                Shared { function, count, datatype, operation, root }
            },
        )
    }

    /// A call with addresses by which the test recognizes it.
    fn at(place: usize, shared: &Shared) -> Ours {
        let Ours::Collective(call) = collective(Function::AllGather, 1, None) else { unreachable!() };
        let (send, receive) =
            (without_provenance_mut(8 + 16 * place), without_provenance_mut(16 + 16 * place));
        Ours::Collective(Call { shared: *shared, local: Local { send, receive, ..call.local } })
    }

    /// What one rank runs, and what NCCL gets, of calls in this order.
    fn run_in(order: &[usize], calls: &[Shared], terms: &Terms, batches: Batches) -> (Vec<Task>, Vec<usize>) {
        let held = order.iter().map(|place| (at(*place, &calls[*place]), StreamHandle(*place % 3)));
        let sorted = Sorted::of(held, terms, batches);
        let nccls: Vec<usize> = sorted.forwarded().map(|call| call.local.send as usize / 16).collect();
        assert_eq!(sorted.are_ours.iter().filter(|is_ours| !**is_ours).count(), nccls.len());
        assert!(order.iter().zip(&sorted.are_ours).all(|(place, is_ours)| *is_ours != nccls.contains(place)));
        (sorted.tasks(0, terms.ranks).unwrap(), nccls)
    }

    proptest! {
        /// Ranks may call a group's collectives in any order: all run the same, and give NCCL the same, one after the other.
        #[test]
        fn in_any_order(
            (calls, one, other) in proptest::collection::vec(any_collective(), 1..24).prop_flat_map(|mut calls| {
                // Only calls that differ for NCCL, too: not just by type where nothing is reduced, nor by a little in size.
                let mut known = Vec::new();
                calls.retain(|call| {
                    let function = if call.function == Function::Bcast { Function::Broadcast } else { call.function };
                    let reduces = call.operation.map(|operation| (call.datatype, operation));
                    let facts = (function, common_order::bin_of(call, 4), reduces, call.root);
                    let is_new = !known.contains(&facts);
                    known.push(facts);
                    is_new
                });
                let places: Vec<usize> = (0..calls.len()).collect();
                (Just(calls), Just(places.clone()).prop_shuffle(), Just(places).prop_shuffle())
            }),
            limit in prop_oneof![Just(64_u64 << 20), Just(1 << 20), Just(16 << 10)],
            batches in prop_oneof![Just(Batches::Small), Just(Batches::All)],
        ) {
            let terms = Terms { native: Limits([limit; COLLECTIVES]), ..TERMS };
            let [one, other] = [one, other].map(|order| run_in(&order, &calls, &terms, batches));
            prop_assert_eq!(one, other);
        }
    }

    /// Equal calls, and very small ones, stay in call order.
    #[test]
    fn alike_in_call_order() {
        let all_reduce = |count| Shared {
            function: Function::AllReduce,
            count,
            datatype: ncclFloat32,
            operation: Some(ncclSum),
            root: None,
        };
        let calls = [all_reduce(7), all_reduce(9), all_reduce(7), all_reduce(7)];
        let sends = |order: &[usize]| {
            let (tasks, nccls) = run_in(order, &calls, &TERMS, Batches::All);
            let Task::Batch(collectives) = &tasks[0] else { panic!("not one: {tasks:?}") };
            assert_eq!((tasks.len(), nccls.len()), (1, 0));
            collectives.iter().map(|collective| collective.send as usize / 16).collect::<Vec<_>>()
        };
        assert_eq!(sends(&[0, 1, 2, 3]), [0, 1, 2, 3]);
        assert_eq!(sends(&[1, 3, 0, 2]), [1, 3, 0, 2]);
    }

    proptest! {
        /// Messages keep their order, and so do small collectives of one kind, whatever stands between; every stream is listed
        /// once, the first one first.
        #[test]
        fn each_kind_in_its_order(
            mut calls in proptest::collection::vec((any::<bool>(), 0..4_usize), 0..20),
            batches in prop_oneof![Just(Batches::Small), Just(Batches::All)],
        ) {
            // More collectives would be NCCL's.
            calls.iter_mut().filter(|(is_collective, _)| *is_collective).skip(2).for_each(|(is, _)| *is = false);
            // The last collective is the smallest, but all are in one bin of NCCL's.
            let number_of = |place: u64, is_collective: bool| if is_collective { 100 - place } else { place };
            let held = (1..).zip(&calls).map(|(place, (is, stream))| (ours(*is, number_of(place, *is)), StreamHandle(*stream)));
            let sorted = Sorted::of(held, &TERMS, batches);
            let of = |wanted: bool| {
                let numbers = (1..).zip(&calls).filter(|(_, (is, _))| *is == wanted);
                numbers.map(|(place, _)| number_of(place, wanted)).collect::<Vec<u64>>()
            };
            prop_assert_eq!(counts(&sorted), of(true));
            prop_assert_eq!(sorted.operations.iter().map(|one| one.bytes).collect::<Vec<_>>(), of(false));
            let mut streams: Vec<usize> = Vec::new();
            for (_, stream) in &calls {
                if !streams.contains(stream) {
                    streams.push(*stream);
                }
            }
            prop_assert_eq!(sorted.streams.iter().map(|stream| stream.0).collect::<Vec<_>>(), streams);
        }
    }

    /// A panic while a group is planned fails the group: no held call is lost silently.
    #[test]
    fn a_panic_fails_the_group() {
        group::opened();
        let parts = plan_by(|_| panic!("on purpose"));
        assert!(parts.is_empty());
        let awaited = group::closed().awaited;
        assert!(matches!(awaited[..], [Awaited::Failed(code)] if code == ncclInternalError), "{awaited:?}");
    }

    /// Calls that NCCL runs are taken out with their streams; the others are in the order that all ranks have.
    #[test]
    fn nccls_is_taken_out() {
        let broadcast = |root, count| collective(Function::Broadcast, count, Some(root));
        let calls = [
            (broadcast(0, 30), StreamHandle(1)),
            (ours(true, 7), StreamHandle(2)),
            (broadcast(2, 10), StreamHandle(3)),
            (broadcast(1, 20), StreamHandle(2)),
            (ours(false, 9), StreamHandle(4)),
            (broadcast(1, 6000), StreamHandle(5)),
        ];
        let sorted = Sorted::of(calls.into_iter(), &TERMS, Batches::All);
        let forwarded: Vec<usize> = sorted.forwarded().map(|call| call.shared.count).collect();
        assert_eq!(forwarded, [6000]);
        assert_eq!(sorted.are_ours, [true, true, true, true, true, false]);
        assert_eq!(sorted.streams, [1, 2, 3, 4].map(StreamHandle));
        assert_eq!(counts(&sorted), [u64::MAX, 7]);
        assert_eq!(sorted.operations.len(), 1);
        let Task::Fused(uneven) = &sorted.tasks(0, 4).unwrap()[0] else { panic!("not one") };
        assert_eq!(uneven.parts.map(|part| part.bytes)[..4], [30, 20, 10, 0]);
        let Ours::Collective(call) = collective(Function::AllGather, 1, None) else { unreachable!() };
        assert_eq!(
            collectives::alone(&call, 0, 4)
                .map(|task| matches!(task, Task::One(Collective { kind: Kind::AllGather, .. }))),
            Some(true)
        );
    }
}
