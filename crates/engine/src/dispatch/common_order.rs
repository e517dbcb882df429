//! Sorts a communicator's collectives of a group into an order that is equal on all ranks, whatever order each rank called them in.
//! Pure, and a function of what all ranks share: see [`group_plan`](super::group_plan), also for why no call may need another's result.
//!
//! NCCL sorts a group's collectives by size (2.28.9: `ncclTaskCollSorterInsert` in src/include/comm.h, `ncclPrepareTasks` in
//! src/enqueue.cc; four bins for a power of two). So ranks may call collectives of different bins in any order; within a bin NCCL keeps
//! call order. Windlass sorts by the same bins and keeps call order in each. Very small collectives all share a bin, so they run in
//! call order even on ranks that do not group them, as with NCCL. Collectives that differ in kind, root or, of reductions, type or
//! operation may be called in any order.
//!
//! The `Work` with the largest single call comes first (by bytes that NCCL moves), and within a `Work` the smallest bin.

use std::cmp::Reverse;
use std::ffi::c_int;

use windlass_base::call::{Function, Shared};
use windlass_transport::tuning::Collective;

/// Function, and type and operation of a reduction: calls of one `Work` may share a kernel. A collective that only moves bytes may
/// have any type, even another one on each rank: NCCL counts bytes.
type Work = (Option<Collective>, Option<(c_int, c_int)>);

/// The sort key of a call; its fields stand in order of comparison. No two keys of a list are equal.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    /// Bytes that the largest call of this `Work` moves.
    traffic: Reverse<u64>,
    work: Work,
    /// Its number among the calls of its `Work` and root, so that calls with a root each follow each other.
    turn: usize,
    root: Option<c_int>,
    bin: u32,
    /// Index in the list of calls.
    place: usize,
}

impl Key {
    fn of(place: usize, call: &Shared, ranks: usize) -> Key {
        let function = Collective::of(call.function);
        let reduces = call.operation.map(|operation| (call.datatype.0, operation.0));
        let bin = bin_of(call, ranks);
        Key { traffic: Reverse(0), work: (function, reduces), turn: 0, root: call.root, bin, place }
    }
}

/// The indices of `calls`, which are in call order, in the order that all ranks have.
pub(super) fn places(calls: &[Shared], ranks: usize) -> Vec<usize> {
    if calls.len() == 1 {
        return vec![0];
    }
    let mut keys: Vec<Key> =
        calls.iter().enumerate().map(|(place, call)| Key::of(place, call, ranks)).collect();
    keys.sort_unstable();
    for alike in keys.chunk_by_mut(|one, other| one.work == other.work) {
        let most = alike.iter().map(|key| traffic(&calls[key.place], ranks)).max().unwrap_or_default();
        alike.iter_mut().for_each(|key| key.traffic = Reverse(most));
        let with_roots = alike.chunk_by_mut(|one, other| one.root == other.root);
        for of_root in with_roots.filter(|of_root| of_root[0].root.is_some()) {
            of_root.iter_mut().enumerate().for_each(|(turn, key)| key.turn = turn);
        }
    }
    keys.sort_unstable();
    keys.into_iter().map(|key| key.place).collect()
}

/// Bytes that a call moves, as NCCL counts them (`ncclFuncTrafficPerByte`).
fn traffic(call: &Shared, ranks: usize) -> u64 {
    call.bytes(ranks).saturating_mul(if call.function == Function::AllReduce { 2 } else { 1 })
}

/// The bin into which NCCL sorts a call.
pub(super) fn bin_of(call: &Shared, ranks: usize) -> u32 {
    bin(traffic(call, ranks))
}

/// Four bins for each power of two, from 1 KiB to 1 GiB.
fn bin(traffic: u64) -> u32 {
    let units = (traffic.min(1 << 30) >> 10) as u32;
    match units {
        0..4 => units,
        _ => 4 * (units.ilog2() - 1) + (units >> (units.ilog2() - 2)) % 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nccl_sys::{ncclFloat32, ncclInt8, ncclInt32, ncclMax, ncclSum};

    fn call(function: Function, count: usize) -> Shared {
        let reduces = matches!(function, Function::AllReduce | Function::Reduce | Function::ReduceScatter);
        let operation = reduces.then_some(ncclSum);
        Shared { function, count, datatype: ncclFloat32, operation, root: None }
    }

    fn rooted(function: Function, root: c_int, count: usize) -> Shared {
        Shared { root: Some(root), ..call(function, count) }
    }

    /// The `Work` that moves most is first, and within a `Work` the smallest call; equal calls stay in call order.
    #[test]
    fn as_nccl_has_it() {
        use Function::{AllGather, AllReduce, ReduceScatter};
        let calls = [
            call(AllGather, 25 << 10),
            call(AllReduce, 90 << 10),
            call(AllReduce, 10 << 10),
            call(AllReduce, 10 << 10),
            Shared { operation: Some(ncclMax), ..call(AllReduce, 90 << 10) },
            Shared { datatype: ncclInt8, ..call(AllGather, 4 << 10) },
            call(ReduceScatter, 50 << 10),
        ];
        // 800 KiB, twice 720 and 400.
        assert_eq!(places(&calls, 4), [6, 2, 3, 1, 4, 5, 0]);
        assert_eq!(places(&calls[..1], 4), [0]);
        assert_eq!(places(&[], 4), [0; 0]);
    }

    /// Calls with a root each follow each other, the smallest of each root first, whatever stood between.
    #[test]
    fn roots_together() {
        use Function::{AllReduce, Bcast, Broadcast, Reduce};
        let calls = [
            rooted(Broadcast, 0, 100 << 10),
            rooted(Broadcast, 0, 3 << 10),
            rooted(Reduce, 1, 9 << 10),
            rooted(Broadcast, 2, 7 << 10),
            call(AllReduce, 1),
            rooted(Bcast, 1, 50 << 10),
            Shared { datatype: ncclInt32, ..rooted(Broadcast, 2, 6 << 10) },
            rooted(Reduce, 0, 9 << 10),
        ];
        assert_eq!(places(&calls, 4), [1, 5, 6, 0, 3, 7, 2, 4]);
    }

    /// Calls of one bin of NCCL's stay in call order, so all very small calls do.
    #[test]
    fn of_one_bin() {
        use Function::{AllReduce, Broadcast};
        let small = [rooted(Broadcast, 0, 128), rooted(Broadcast, 0, 2), rooted(Broadcast, 0, 64)];
        assert_eq!(places(&small, 2), [0, 1, 2]);
        // Twice 21 and 20 KiB are of one bin, and 15.
        let calls = [21, 20, 15].map(|kib| call(AllReduce, kib << 8));
        assert_eq!(places(&calls, 2), [2, 0, 1]);
        let edges = [0, 1 << 10, 2 << 10, 3 << 10, 4 << 10, 5 << 10, 6 << 10, 7 << 10, 8 << 10, 10 << 10];
        assert_eq!(edges.map(bin), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(bin((8 << 10) - 1), 7);
        assert_eq!(bin(u64::MAX), bin(1 << 30));
    }

    /// Any number of calls takes little time.
    #[test]
    fn very_many() {
        let calls: Vec<Shared> = (0..100_000).map(|number| rooted(Function::Reduce, number % 3, 8)).collect();
        let places = places(&calls, 3);
        assert!((0..100_000).all(|number| places[number] == number), "they were in that order");
    }
}
