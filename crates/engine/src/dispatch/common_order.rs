//! In which order a communicator's collectives of a group are taken: one that all ranks have, whatever order each called them in. Pure,
//! and a function of what all ranks share: see [`fusing`](super::fusing), also for why one may not need another's result.
//!
//! NCCL sorts a group's collectives by size (2.28.9: `ncclTaskCollSorterInsert` in src/include/comm.h, `ncclPrepareTasks` in
//! src/enqueue.cc; four bins for a power of two), so ranks may call them in any order if no two sizes are of one bin. Of ours they may if
//! calls differ in anything that ranks must have alike: kind, bytes, root, and of what reduces type and operation. What is alike in all
//! that stays in call order, as there.
//!
//! It is as near to NCCL's as that goes, for ranks that group very small ones unlike ([`fusing`](super::fusing)): the work of
//! which NCCL moves most in one call comes first, and of one work the smallest.

use std::cmp::Reverse;
use std::ffi::c_int;

use crate::call::{Function, Shared};
use crate::tuning::Collective;

/// What may be a run, or a batch. What only moves may be of any types, also on other ranks: NCCL counts bytes.
type Work = (Option<Collective>, Option<(c_int, c_int)>);

/// In order of comparison; no two of a list are equal.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    /// Of the largest call of its work.
    traffic: Reverse<u64>,
    work: Work,
    /// Which it is among those of its work and root, so that those with a root each follow each other.
    turn: usize,
    root: Option<c_int>,
    bytes: u64,
    /// In the list of calls.
    place: usize,
}

impl Key {
    fn of(place: usize, call: &Shared, ranks: usize) -> Key {
        let (function, bytes) = (Collective::of(call.function), call.bytes(ranks));
        let reduces = call.operation.map(|operation| (call.datatype.0, operation.0));
        Key { traffic: Reverse(0), work: (function, reduces), turn: 0, root: call.root, bytes, place }
    }
}

/// The places of these calls, which come in call order, as they are taken.
pub fn places(calls: &[Shared], ranks: usize) -> Vec<usize> {
    if calls.len() == 1 {
        return vec![0];
    }
    let mut keys: Vec<Key> =
        calls.iter().enumerate().map(|(place, call)| Key::of(place, call, ranks)).collect();
    keys.sort_unstable();
    for alike in keys.chunk_by_mut(|one, other| one.work == other.work) {
        let most = alike.iter().map(|key| traffic(&calls[key.place], key.bytes)).max().unwrap_or_default();
        alike.iter_mut().for_each(|key| key.traffic = Reverse(most));
        let with_roots = alike.chunk_by_mut(|one, other| one.root == other.root);
        for of_root in with_roots.filter(|of_root| of_root[0].root.is_some()) {
            of_root.iter_mut().enumerate().for_each(|(turn, key)| key.turn = turn);
        }
    }
    keys.sort_unstable();
    keys.into_iter().map(|key| key.place).collect()
}

/// As NCCL reckons it (`ncclFuncTrafficPerByte`).
fn traffic(call: &Shared, bytes: u64) -> u64 {
    bytes.saturating_mul(if call.function == Function::AllReduce { 2 } else { 1 })
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

    /// What moves most is first, and of one work the smallest; what is alike stays in call order.
    #[test]
    fn as_nccl_has_it() {
        use Function::{AllGather, AllReduce, ReduceScatter};
        let calls = [
            call(AllGather, 25),
            call(AllReduce, 90),
            call(AllReduce, 10),
            call(AllReduce, 10),
            Shared { operation: Some(ncclMax), ..call(AllReduce, 90) },
            Shared { datatype: ncclInt8, ..call(AllGather, 4) },
            call(ReduceScatter, 50),
        ];
        // 800 bytes, twice 720 and 400.
        assert_eq!(places(&calls, 4), [6, 2, 3, 1, 4, 5, 0]);
        assert_eq!(places(&calls[..1], 4), [0]);
        assert_eq!(places(&[], 4), [0; 0]);
    }

    /// Those with a root each follow each other, the smallest of each root first, whatever stood between.
    #[test]
    fn roots_together() {
        use Function::{AllReduce, Bcast, Broadcast, Reduce};
        let calls = [
            rooted(Broadcast, 0, 100),
            rooted(Broadcast, 0, 3),
            rooted(Reduce, 1, 9),
            rooted(Broadcast, 2, 7),
            call(AllReduce, 1),
            rooted(Bcast, 1, 50),
            Shared { datatype: ncclInt32, ..rooted(Broadcast, 2, 6) },
            rooted(Reduce, 0, 9),
        ];
        assert_eq!(places(&calls, 4), [1, 5, 6, 0, 3, 7, 2, 4]);
    }

    /// Any number of calls takes little time.
    #[test]
    fn very_many() {
        let calls: Vec<Shared> = (0..100_000).map(|number| rooted(Function::Reduce, number % 3, 8)).collect();
        let places = places(&calls, 3);
        assert!((0..100_000).all(|number| places[number] == number), "they were in that order");
    }
}
