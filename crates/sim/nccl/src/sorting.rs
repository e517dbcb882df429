//! The order in which NCCL runs a communicator's collectives of one group. NCCL sorts them by size (2.28.9: `ncclTaskCollSorterInsert` in
//! src/include/comm.h, `ncclPrepareTasks` in src/enqueue.cc). So ranks may call them in different orders if no two are in one size bin.

use crate::operation::{Call, Kind};
use std::cmp::Reverse;

/// The first release that sorts, for all programs.
pub const SORTED_SINCE: i32 = 22_203;

/// The indices of `calls` in the order in which they run. Calls that NCCL makes of sends and receives come last.
pub fn places(calls: &[Call], ranks: usize) -> Vec<usize> {
    let (mut sorted, messages): (Vec<usize>, Vec<usize>) =
        (0..calls.len()).partition(|place| traffic(&calls[*place], ranks).is_some());
    // Within one bin the last call comes first.
    sorted.reverse();
    sorted.sort_by_key(|place| Reverse(traffic(&calls[*place], ranks).map(bin)));
    // Calls that one kernel can run together; the group with the largest call comes first.
    let mut works: Vec<Vec<usize>> = Vec::new();
    for place in sorted {
        let work = work(&calls[place]);
        match works.iter_mut().find(|one| self::work(&calls[one[0]]) == work) {
            Some(one) => one.push(place),
            None => works.push(vec![place]),
        }
    }
    let smallest_first = works.into_iter().flat_map(|one| one.into_iter().rev());
    smallest_first.chain(messages).collect()
}

/// The bytes by which NCCL sorts a call; `None` for calls that it makes of sends and receives.
fn traffic(call: &Call, ranks: usize) -> Option<usize> {
    let times = match call.kind {
        Kind::AllReduce => 2,
        Kind::AllGather | Kind::ReduceScatter => ranks,
        Kind::Broadcast | Kind::Reduce => 1,
        Kind::AlltoAll | Kind::Gather | Kind::Scatter | Kind::Send | Kind::Recv => return None,
    };
    Some(call.bytes().saturating_mul(times))
}

/// The size bin of some traffic: four bins for each power of two, up to 1 GiB.
fn bin(traffic: usize) -> usize {
    let units = traffic.min(1 << 30) >> 10;
    match units {
        0..4 => units,
        _ => {
            let log = units.ilog2() as usize;
            4 * (log - 1) + (units >> (log - 2)) % 4
        }
    }
}

fn work(call: &Call) -> (Kind, Option<(i32, i32)>) {
    (call.kind, call.kind.reduces().then_some((call.datatype.0, call.operator.0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nccl_sys::{ncclInt8, ncclSum};

    fn call(kind: Kind, count: usize) -> Call {
        Call { kind, send: 0, receive: 0, count, datatype: ncclInt8, operator: ncclSum, root: 0, stream: 0 }
    }

    /// Bins are numbered without gaps; sizes above 1 GiB share the last one.
    #[test]
    fn bins() {
        let edges = [0, 1 << 10, 2 << 10, 3 << 10, 4 << 10, 5 << 10, 6 << 10, 7 << 10, 8 << 10, 10 << 10];
        assert_eq!(edges.map(bin), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!((bin((10 << 10) - 1), bin(1 << 30), bin(1 << 40)), (8, 76, 76));
    }

    /// The kernel of the largest call runs first; within a kernel the smallest call is first, and calls of one bin stay in call order.
    /// Of kernels whose largest calls are in one bin, the last called runs first.
    #[test]
    fn sorted() {
        use Kind::{AllGather, AllReduce, AlltoAll, Broadcast, Send};
        let calls = [
            call(Send, 9),
            call(AllReduce, 70 << 10),
            call(AlltoAll, 1 << 20),
            call(AllReduce, 9 << 10),
            call(AllReduce, 8 << 10),
            call(AllGather, 4 << 10),
            call(Broadcast, 16 << 10),
        ];
        assert_eq!(places(&calls, 4), [3, 4, 1, 6, 5, 0, 2]);
        assert_eq!(places(&[], 4), [0; 0]);
    }
}
