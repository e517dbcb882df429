//! What is measured: collectives and patterns of messages, by total size.

use super::product::Product;
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
    /// Every rank sends to every other and to itself, in one group
    #[value(name = "send_alltoall")]
    #[serde(rename = "send_alltoall")]
    SendAlltoAll,
    /// Two exchanges at once, with different peers where there are more than two ranks, on two communicators and streams
    SendTwoCommunicators,
    /// A matrix product alone, of one size
    Product,
    /// A matrix product on one stream beside pairs of ranks that send to each other on another
    SendBesideProduct,
}

/// Buffers, communicator and stream of one side.
#[derive(Clone, Copy)]
pub struct Issue<'a> {
    pub nccl: &'a Nccl,
    pub communicator: ncclComm_t,
    pub stream: cudaStream_t,
    /// For operations on two communicators, or on two streams.
    pub other_communicator: ncclComm_t,
    pub other_stream: cudaStream_t,
    pub product: Option<&'a Product>,
    pub send: *const c_void,
    pub receive: *mut c_void,
    /// For the exchange on the other communicator.
    pub other_receive: *mut c_void,
    pub rank: usize,
    pub ranks: usize,
    pub element: Element,
    pub reduction: Reduction,
}

impl Operation {
    pub const ALL: [Operation; 13] = [
        Operation::AllReduce,
        Operation::AllGather,
        Operation::ReduceScatter,
        Operation::Broadcast,
        Operation::Reduce,
        Operation::AlltoAll,
        Operation::SendOneWay,
        Operation::SendBothWays,
        Operation::SendRing,
        Operation::SendAlltoAll,
        Operation::SendTwoCommunicators,
        Operation::Product,
        Operation::SendBesideProduct,
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
            Operation::SendAlltoAll => "send_alltoall",
            Operation::SendTwoCommunicators => "send_two_communicators",
            Operation::Product => "product",
            Operation::SendBesideProduct => "send_beside_product",
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
            _ => None,
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
            Operation::Product => &[],
            _ => &["ncclSend", "ncclRecv"],
        }
    }

    pub fn reduces(self) -> bool {
        self.kind().is_some_and(Kind::reduces)
    }

    /// Whether it works on the other stream too, which then has to join.
    pub fn has_two_streams(self) -> bool {
        matches!(self, Operation::SendTwoCommunicators | Operation::SendBesideProduct)
    }

    pub fn has_product(self) -> bool {
        matches!(self, Operation::Product | Operation::SendBesideProduct)
    }

    pub fn exists_in(self, nccl: &Nccl) -> bool {
        self.kind().is_none_or(|kind| kind.exists_in(nccl))
    }

    /// The count argument for a call of about `bytes` bytes in all, as nccl-tests counts them: the larger of the two
    /// buffers of a rank. At least one element.
    pub fn count(self, bytes: u64, element: Element, ranks: usize) -> usize {
        let parts = match self {
            Operation::AllGather
            | Operation::ReduceScatter
            | Operation::AlltoAll
            | Operation::SendAlltoAll => ranks,
            _ => 1,
        };
        (bytes as usize / element.bytes() / parts).max(1)
    }

    /// The bytes that a call with [`count`](Self::count) really has.
    pub fn bytes(self, count: usize, element: Element, ranks: usize) -> u64 {
        let parts = match self {
            Operation::AllGather
            | Operation::ReduceScatter
            | Operation::AlltoAll
            | Operation::SendAlltoAll => ranks,
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
        let send = |communicator, from: *const c_void, peer: usize, stream| {
            nccl_call!(nccl, ncclSend(from, count, element.code, peer as c_int, communicator, stream))
        };
        let receive = |communicator, to: *mut c_void, peer: usize, stream| {
            nccl_call!(nccl, ncclRecv(to, count, element.code, peer as c_int, communicator, stream))
        };
        let exchange = |to: usize, from: usize| {
            nccl_call!(nccl, ncclGroupStart())?;
            send(communicator, with.send, to, stream)?;
            receive(communicator, with.receive, from, stream)?;
            nccl_call!(nccl, ncclGroupEnd())
        };
        let multiply = |stream| with.product.map_or(Ok(()), |product| product.issue(stream));
        let pair = Some(rank ^ 1).filter(|partner| *partner < ranks);
        match self {
            Operation::SendAlltoAll => {
                nccl_call!(nccl, ncclGroupStart())?;
                for peer in 0..ranks {
                    let at = peer * count * element.bytes();
                    send(communicator, with.send.wrapping_byte_add(at), peer, stream)?;
                    receive(communicator, with.receive.wrapping_byte_add(at), peer, stream)?;
                }
                nccl_call!(nccl, ncclGroupEnd())
            }
            Operation::Product => multiply(stream),
            Operation::SendRing => exchange((rank + 1) % ranks, (rank + ranks - 1) % ranks),
            Operation::SendTwoCommunicators => {
                if let Some(partner) = pair {
                    exchange(partner, partner)?;
                }
                let Some(partner) = other_pair(rank, ranks) else { return Ok(()) };
                nccl_call!(nccl, ncclGroupStart())?;
                send(with.other_communicator, with.send, partner, with.other_stream)?;
                receive(with.other_communicator, with.other_receive, partner, with.other_stream)?;
                nccl_call!(nccl, ncclGroupEnd())
            }
            Operation::SendBesideProduct => {
                multiply(with.other_stream)?;
                pair.map_or(Ok(()), |partner| exchange(partner, partner))
            }
            // The last of an odd number of ranks has no partner.
            _ => match pair {
                None => Ok(()),
                Some(partner) if self == Operation::SendBothWays => exchange(partner, partner),
                Some(partner) if rank < partner => send(communicator, with.send, partner, stream),
                Some(partner) => receive(communicator, with.receive, partner, stream),
            },
        }
    }
}

/// Pairs that begin with rank 1: around the end if the number is even.
fn other_pair(rank: usize, ranks: usize) -> Option<usize> {
    if ranks % 2 == 1 && rank == 0 {
        return None;
    }
    Some(if rank % 2 == 1 { (rank + 1) % ranks } else { (rank + ranks - 1) % ranks })
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

    /// Each is its partner's partner, and another one's than in the first pairs where there are others.
    #[test]
    fn other_pairs() {
        for ranks in 2..9 {
            for rank in 0..ranks {
                let Some(partner) = other_pair(rank, ranks) else { continue };
                assert_eq!(other_pair(partner, ranks), Some(rank), "{rank} of {ranks}");
                assert!(partner != rank && (ranks == 2 || partner != rank ^ 1), "{rank} of {ranks}");
            }
        }
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
