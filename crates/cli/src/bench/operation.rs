//! What is measured: collectives and patterns of messages, by total size.

use crate::collective::{Collective, Kind};
use crate::element::{Element, Reduction};
use crate::nccl::{Nccl, nccl_call};
use anyhow::Result;
use nccl_sys::types::{cudaStream_t, ncclComm_t};
use serde::{Deserialize, Serialize};
use std::ffi::{c_int, c_void};

/// An operation that all ranks do together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    Reduce,
    #[value(name = "alltoall")]
    #[serde(rename = "alltoall")]
    AlltoAll,
    /// Even ranks send to the next rank
    SendOneWay,
    /// Pairs of ranks send to each other
    SendBothWays,
    /// Every rank sends to the next and receives from the previous
    SendRing,
}

/// Buffers, communicator and stream of one side.
#[derive(Clone, Copy)]
pub struct Issue<'a> {
    pub nccl: &'a Nccl,
    pub communicator: ncclComm_t,
    pub stream: cudaStream_t,
    pub send: *const c_void,
    pub receive: *mut c_void,
    pub rank: usize,
    pub ranks: usize,
    pub element: Element,
    pub reduction: Reduction,
}

impl Operation {
    pub const ALL: [Operation; 9] = [
        Operation::AllReduce,
        Operation::AllGather,
        Operation::ReduceScatter,
        Operation::Broadcast,
        Operation::Reduce,
        Operation::AlltoAll,
        Operation::SendOneWay,
        Operation::SendBothWays,
        Operation::SendRing,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Operation::AllReduce => "all_reduce",
            Operation::AllGather => "all_gather",
            Operation::ReduceScatter => "reduce_scatter",
            Operation::Broadcast => "broadcast",
            Operation::Reduce => "reduce",
            Operation::AlltoAll => "alltoall",
            Operation::SendOneWay => "send_one_way",
            Operation::SendBothWays => "send_both_ways",
            Operation::SendRing => "send_ring",
        }
    }

    fn kind(self) -> Option<Kind> {
        match self {
            Operation::AllReduce => Some(Kind::AllReduce),
            Operation::AllGather => Some(Kind::AllGather),
            Operation::ReduceScatter => Some(Kind::ReduceScatter),
            Operation::Broadcast => Some(Kind::Broadcast),
            Operation::Reduce => Some(Kind::Reduce),
            Operation::AlltoAll => Some(Kind::AlltoAll),
            Operation::SendOneWay | Operation::SendBothWays | Operation::SendRing => None,
        }
    }

    /// The functions whose counters it moves.
    pub fn functions(self) -> &'static [&'static str] {
        match self {
            Operation::AllReduce => &["ncclAllReduce"],
            Operation::AllGather => &["ncclAllGather"],
            Operation::ReduceScatter => &["ncclReduceScatter"],
            Operation::Broadcast => &["ncclBroadcast"],
            Operation::Reduce => &["ncclReduce"],
            Operation::AlltoAll => &["ncclAlltoAll"],
            Operation::SendOneWay | Operation::SendBothWays | Operation::SendRing => {
                &["ncclSend", "ncclRecv"]
            }
        }
    }

    pub fn reduces(self) -> bool {
        self.kind().is_some_and(Kind::reduces)
    }

    pub fn exists_in(self, nccl: &Nccl) -> bool {
        self.kind().is_none_or(|kind| kind.exists_in(nccl))
    }

    /// The count argument for a call of about `bytes` bytes in all, as nccl-tests counts them: the larger of the two
    /// buffers of a rank. At least one element.
    pub fn count(self, bytes: u64, element: Element, ranks: usize) -> usize {
        let parts = match self {
            Operation::AllGather | Operation::ReduceScatter | Operation::AlltoAll => ranks,
            _ => 1,
        };
        (bytes as usize / element.bytes() / parts).max(1)
    }

    /// The bytes that a call with [`count`](Self::count) really has.
    pub fn bytes(self, count: usize, element: Element, ranks: usize) -> u64 {
        let parts = match self {
            Operation::AllGather | Operation::ReduceScatter | Operation::AlltoAll => ranks,
            _ => 1,
        };
        (count * parts * element.bytes()) as u64
    }

    /// Issues one call of this rank.
    pub fn issue(self, count: usize, with: &Issue) -> Result<()> {
        let &Issue { nccl, communicator, stream, rank, ranks, element, reduction, .. } = with;
        if let Some(kind) = self.kind() {
            let call = Collective { kind, count, element, reduction, root: 0 };
            return call.issue(nccl, with.send, with.receive, communicator, stream);
        }
        let send = |peer: usize| {
            nccl_call!(nccl, ncclSend(with.send, count, element.code, peer as c_int, communicator, stream))
        };
        let receive = |peer: usize| {
            nccl_call!(nccl, ncclRecv(with.receive, count, element.code, peer as c_int, communicator, stream))
        };
        let exchange = |to: usize, from: usize| {
            nccl_call!(nccl, ncclGroupStart())?;
            send(to)?;
            receive(from)?;
            nccl_call!(nccl, ncclGroupEnd())
        };
        let partner = rank ^ 1;
        match self {
            // The last of an odd number of ranks has no partner.
            Operation::SendOneWay | Operation::SendBothWays if partner >= ranks => Ok(()),
            Operation::SendOneWay if rank < partner => send(partner),
            Operation::SendOneWay => receive(partner),
            Operation::SendBothWays => exchange(partner, partner),
            _ => exchange((rank + 1) % ranks, (rank + ranks - 1) % ranks),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes mean the whole call: parts of collectives that have parts are smaller.
    #[test]
    fn counts() {
        let float = "float".parse().unwrap();
        assert_eq!(Operation::AllReduce.count(1024, float, 4), 256);
        assert_eq!(Operation::AllGather.count(1024, float, 4), 64);
        assert_eq!(Operation::AllGather.bytes(64, float, 4), 1024);
        assert_eq!(Operation::AlltoAll.count(1, float, 4), 1);
        assert_eq!(Operation::SendRing.bytes(256, float, 4), 1024);
    }

    /// Names are the same on the command line, in tables and in JSON.
    #[test]
    fn one_name() {
        use clap::ValueEnum;
        for operation in Operation::ALL {
            assert_eq!(Operation::from_str(operation.name(), false), Ok(operation));
            assert_eq!(serde_json::to_value(operation).unwrap(), operation.name());
        }
    }
}
