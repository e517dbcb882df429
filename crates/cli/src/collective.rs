//! The collectives as data: how many elements go in and out, what comes out, and the call itself.

use crate::element::{Element, Reduction};
use crate::nccl::{Nccl, nccl_call};
use anyhow::Result;
use nccl_sys::types::{cudaStream_t, ncclComm_t};
use std::ffi::{c_int, c_void};

/// A kind of collective.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    AllReduce,
    Broadcast,
    /// `ncclBcast`: a broadcast in place.
    Bcast,
    Reduce,
    AllGather,
    ReduceScatter,
    AlltoAll,
    Gather,
    Scatter,
}

impl Kind {
    pub const ALL: [Kind; 9] = [
        Kind::AllReduce,
        Kind::Broadcast,
        Kind::Bcast,
        Kind::Reduce,
        Kind::AllGather,
        Kind::ReduceScatter,
        Kind::AlltoAll,
        Kind::Gather,
        Kind::Scatter,
    ];

    /// The function of the C interface.
    pub fn function(self) -> &'static str {
        match self {
            Kind::AllReduce => "ncclAllReduce",
            Kind::Broadcast => "ncclBroadcast",
            Kind::Bcast => "ncclBcast",
            Kind::Reduce => "ncclReduce",
            Kind::AllGather => "ncclAllGather",
            Kind::ReduceScatter => "ncclReduceScatter",
            Kind::AlltoAll => "ncclAlltoAll",
            Kind::Gather => "ncclGather",
            Kind::Scatter => "ncclScatter",
        }
    }

    /// Whether `nccl` has it: all-to-all, gather and scatter came with 2.28.3.
    pub fn exists_in(self, nccl: &Nccl) -> bool {
        match self {
            Kind::AlltoAll => nccl.functions.ncclAlltoAll.is_some(),
            Kind::Gather => nccl.functions.ncclGather.is_some(),
            Kind::Scatter => nccl.functions.ncclScatter.is_some(),
            _ => true,
        }
    }

    pub fn reduces(self) -> bool {
        matches!(self, Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter)
    }

    pub fn has_root(self) -> bool {
        matches!(self, Kind::Broadcast | Kind::Bcast | Kind::Reduce | Kind::Gather | Kind::Scatter)
    }
}

/// One collective call of all ranks.
#[derive(Clone, Copy, Debug)]
pub struct Collective {
    pub kind: Kind,
    /// The count argument, in elements.
    pub count: usize,
    pub element: Element,
    pub reduction: Reduction,
    pub root: usize,
}

impl Collective {
    /// Elements that every rank has in its send buffer.
    pub fn elements_in(&self, ranks: usize) -> usize {
        match self.kind {
            Kind::ReduceScatter | Kind::AlltoAll | Kind::Scatter => self.count * ranks,
            _ => self.count,
        }
    }

    /// Elements that every rank has room for in its receive buffer.
    pub fn elements_out(&self, ranks: usize) -> usize {
        match self.kind {
            Kind::AllGather | Kind::AlltoAll | Kind::Gather => self.count * ranks,
            _ => self.count,
        }
    }

    /// Bytes of the larger of the two buffers of a rank, as nccl-tests and Windlass count.
    pub fn bytes(&self, ranks: usize) -> u64 {
        (self.elements_in(ranks).max(self.elements_out(ranks)) * self.element.bytes()) as u64
    }

    /// What `rank` must find in its receive buffer, when rank `r` put `value(r, i)` at element `i` of its send
    /// buffer; `None` where the call leaves the buffer alone.
    pub fn expected(
        &self,
        rank: usize,
        ranks: usize,
        value: impl Fn(usize, usize) -> f64,
    ) -> Option<Vec<f64>> {
        let count = self.count;
        let reduced =
            |index: usize| self.reduction.of(self.element, (0..ranks).map(|from| value(from, index)));
        let blocks = |one: &dyn Fn(usize, usize) -> f64| {
            (0..count * ranks).map(|index| one(index / count, index % count)).collect()
        };
        match self.kind {
            Kind::AllReduce => Some((0..count).map(reduced).collect()),
            Kind::Broadcast | Kind::Bcast => Some((0..count).map(|index| value(self.root, index)).collect()),
            Kind::Reduce => (rank == self.root).then(|| (0..count).map(reduced).collect()),
            Kind::AllGather => Some(blocks(&|from, index| value(from, index))),
            Kind::ReduceScatter => Some((0..count).map(|index| reduced(rank * count + index)).collect()),
            Kind::AlltoAll => Some(blocks(&|from, index| value(from, rank * count + index))),
            Kind::Gather => (rank == self.root).then(|| blocks(&|from, index| value(from, index))),
            Kind::Scatter => Some((0..count).map(|index| value(self.root, rank * count + index)).collect()),
        }
    }

    /// Issues the call of one rank. `ncclBcast` works in `receive` alone.
    pub fn issue(
        &self,
        nccl: &Nccl,
        send: *const c_void,
        receive: *mut c_void,
        communicator: ncclComm_t,
        stream: cudaStream_t,
    ) -> Result<()> {
        let (count, kind, op, root) =
            (self.count, self.element.code, self.reduction.code, self.root as c_int);
        match self.kind {
            Kind::AllReduce => {
                nccl_call!(nccl, ncclAllReduce(send, receive, count, kind, op, communicator, stream))
            }
            Kind::Broadcast => {
                nccl_call!(nccl, ncclBroadcast(send, receive, count, kind, root, communicator, stream))
            }
            Kind::Bcast => nccl_call!(nccl, ncclBcast(receive, count, kind, root, communicator, stream)),
            Kind::Reduce => {
                nccl_call!(nccl, ncclReduce(send, receive, count, kind, op, root, communicator, stream))
            }
            Kind::AllGather => {
                nccl_call!(nccl, ncclAllGather(send, receive, count, kind, communicator, stream))
            }
            Kind::ReduceScatter => {
                nccl_call!(nccl, ncclReduceScatter(send, receive, count, kind, op, communicator, stream))
            }
            Kind::AlltoAll => {
                nccl_call!(nccl, ncclAlltoAll(send, receive, count, kind, communicator, stream))
            }
            Kind::Gather => {
                nccl_call!(nccl, ncclGather(send, receive, count, kind, root, communicator, stream))
            }
            Kind::Scatter => {
                nccl_call!(nccl, ncclScatter(send, receive, count, kind, root, communicator, stream))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::{SUM, element};
    use nccl_sys::types::ncclInt32;

    fn collective(kind: Kind) -> Collective {
        Collective { kind, count: 2, element: element(ncclInt32), reduction: SUM, root: 1 }
    }

    /// What each collective leaves on each of two ranks, against values worked out by hand.
    #[test]
    fn expected_values() {
        let value = |rank: usize, index: usize| (10 * rank + index) as f64;
        let expected = |kind, rank| collective(kind).expected(rank, 2, value);
        assert_eq!(expected(Kind::AllReduce, 0), Some(vec![10.0, 12.0]));
        assert_eq!(expected(Kind::Broadcast, 0), Some(vec![10.0, 11.0]));
        assert_eq!(expected(Kind::Reduce, 0), None);
        assert_eq!(expected(Kind::Reduce, 1), Some(vec![10.0, 12.0]));
        assert_eq!(expected(Kind::AllGather, 1), Some(vec![0.0, 1.0, 10.0, 11.0]));
        assert_eq!(expected(Kind::ReduceScatter, 1), Some(vec![14.0, 16.0]));
        assert_eq!(expected(Kind::AlltoAll, 1), Some(vec![2.0, 3.0, 12.0, 13.0]));
        assert_eq!(expected(Kind::Gather, 0), None);
        assert_eq!(expected(Kind::Scatter, 0), Some(vec![10.0, 11.0]));
        assert_eq!(expected(Kind::Scatter, 1), Some(vec![12.0, 13.0]));
    }

    /// Receive buffers hold exactly what is expected, also for no elements at all.
    #[test]
    fn sizes() {
        for kind in Kind::ALL {
            for count in [0, 2] {
                let call = Collective { count, ..collective(kind) };
                let expected = call.expected(1, 3, |_, _| 1.0).unwrap();
                assert_eq!(expected.len(), call.elements_out(3), "{kind:?}");
            }
        }
    }
}
