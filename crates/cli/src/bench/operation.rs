//! The operations that are measured: collectives and patterns of messages, by total size.

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
    /// An all-gather of uneven shares: a group of broadcasts, one from each rank
    UnevenAllGather,
    /// A reduce-scatter of uneven shares: a group of reduces, one to each rank
    UnevenReduceScatter,
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
    /// A matrix product on one stream beside an all-gather on another
    AllGatherBesideProduct,
    /// A matrix product on one stream beside a reduce-scatter on another
    ReduceScatterBesideProduct,
}

/// The arguments of a call: buffers, communicators and streams of one side.
#[derive(Clone, Copy)]
pub struct Issue<'a> {
    pub nccl: &'a Nccl,
    pub communicator: ncclComm_t,
    pub stream: cudaStream_t,
    /// The second communicator and stream, for operations that use two.
    pub other_communicator: ncclComm_t,
    pub other_stream: cudaStream_t,
    pub product: Option<&'a Product>,
    pub send: *const c_void,
    pub receive: *mut c_void,
    /// The receive buffer of the exchange on the other communicator.
    pub other_receive: *mut c_void,
    pub rank: usize,
    pub ranks: usize,
    pub element: Element,
    pub reduction: Reduction,
}

impl Operation {
    /// The least number of calls in a batch. In broadcasts and reduces, NCCL's other ranks run ahead of the root through its ring. On 4 ×
    /// H100, one reduce of 64 MiB took 303 us alone and 209 us after others; Windlass's took 242 and 236. Batches of single calls would
    /// misjudge larger sizes.
    pub fn calls_min(self) -> usize {
        if matches!(self, Operation::Broadcast | Operation::Reduce) { 8 } else { 1 }
    }

    pub const ALL: [Operation; 17] = [
        Operation::AllReduce,
        Operation::AllGather,
        Operation::ReduceScatter,
        Operation::Broadcast,
        Operation::Reduce,
        Operation::AlltoAll,
        Operation::UnevenAllGather,
        Operation::UnevenReduceScatter,
        Operation::SendOneWay,
        Operation::SendBothWays,
        Operation::SendRing,
        Operation::SendAlltoAll,
        Operation::SendTwoCommunicators,
        Operation::Product,
        Operation::SendBesideProduct,
        Operation::AllGatherBesideProduct,
        Operation::ReduceScatterBesideProduct,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Operation::AllReduce => "all_reduce",
            Operation::AllGather => "all_gather",
            Operation::ReduceScatter => "reduce_scatter",
            Operation::Broadcast => "broadcast",
            Operation::Reduce => "reduce",
            Operation::AlltoAll => "alltoall",
            Operation::UnevenAllGather => "uneven_all_gather",
            Operation::UnevenReduceScatter => "uneven_reduce_scatter",
            Operation::SendOneWay => "send_one_way",
            Operation::SendBothWays => "send_both_ways",
            Operation::SendRing => "send_ring",
            Operation::SendAlltoAll => "send_alltoall",
            Operation::SendTwoCommunicators => "send_two_communicators",
            Operation::Product => "product",
            Operation::SendBesideProduct => "send_beside_product",
            Operation::AllGatherBesideProduct => "all_gather_beside_product",
            Operation::ReduceScatterBesideProduct => "reduce_scatter_beside_product",
        }
    }

    /// The collective that the operation calls, if it calls one.
    fn kind(self) -> Option<Kind> {
        match self {
            Operation::AllReduce => Some(Kind::AllReduce),
            Operation::AllGather | Operation::AllGatherBesideProduct => Some(Kind::AllGather),
            Operation::ReduceScatter | Operation::ReduceScatterBesideProduct => Some(Kind::ReduceScatter),
            Operation::Broadcast => Some(Kind::Broadcast),
            Operation::Reduce => Some(Kind::Reduce),
            Operation::AlltoAll => Some(Kind::AlltoAll),
            _ => None,
        }
    }

    /// The functions whose counters the operation changes.
    pub fn functions(self) -> &'static [&'static str] {
        match self {
            Operation::AllReduce => &["ncclAllReduce"],
            Operation::AllGather | Operation::AllGatherBesideProduct => &["ncclAllGather"],
            Operation::ReduceScatter | Operation::ReduceScatterBesideProduct => &["ncclReduceScatter"],
            Operation::Broadcast | Operation::UnevenAllGather => &["ncclBroadcast"],
            Operation::Reduce | Operation::UnevenReduceScatter => &["ncclReduce"],
            Operation::AlltoAll => &["ncclAlltoAll"],
            Operation::Product => &[],
            _ => &["ncclSend", "ncclRecv"],
        }
    }

    pub fn reduces(self) -> bool {
        self == Operation::UnevenReduceScatter || self.kind().is_some_and(Kind::reduces)
    }

    /// Whether the operation uses the other stream, too, which then has to join.
    pub fn has_two_streams(self) -> bool {
        self == Operation::SendTwoCommunicators || self.is_beside_product()
    }

    pub fn has_product(self) -> bool {
        self == Operation::Product || self.is_beside_product()
    }

    fn is_beside_product(self) -> bool {
        matches!(
            self,
            Operation::SendBesideProduct
                | Operation::AllGatherBesideProduct
                | Operation::ReduceScatterBesideProduct
        )
    }

    /// How many blocks of `count` elements a rank's larger buffer holds.
    fn parts(self, ranks: usize) -> usize {
        match self {
            Operation::AllGather
            | Operation::AllGatherBesideProduct
            | Operation::ReduceScatter
            | Operation::ReduceScatterBesideProduct
            | Operation::AlltoAll
            | Operation::SendAlltoAll => ranks,
            _ => 1,
        }
    }

    pub fn exists_in(self, nccl: &Nccl) -> bool {
        self.kind().is_none_or(|kind| kind.exists_in(nccl))
    }

    /// The `count` argument for a call of about `bytes` bytes. As in nccl-tests these are the bytes of a rank's
    /// larger buffer; for uneven shares, of all shares. At least one element.
    pub fn count(self, bytes: u64, element: Element, ranks: usize) -> usize {
        (bytes as usize / element.bytes() / self.parts(ranks)).max(1)
    }

    /// By what nccl-tests multiply the bytes by time for the bandwidth of the bus: what passes a rank's links, by the call's bytes. None for what is no
    /// transfer alone.
    pub fn bus_factor(self, ranks: usize) -> Option<f64> {
        use Operation::*;
        let others = (ranks as f64 - 1.0) / ranks as f64;
        match self {
            AllReduce => Some(2.0 * others),
            AllGather | ReduceScatter | AlltoAll | UnevenAllGather | UnevenReduceScatter | SendAlltoAll => {
                Some(others)
            }
            Broadcast | Reduce | SendOneWay | SendBothWays | SendRing | SendTwoCommunicators => Some(1.0),
            Product | SendBesideProduct | AllGatherBesideProduct | ReduceScatterBesideProduct => None,
        }
    }

    /// The actual bytes of a call with [`count`](Self::count).
    pub fn bytes(self, count: usize, element: Element, ranks: usize) -> u64 {
        (count * self.parts(ranks) * element.bytes()) as u64
    }

    /// Issues one call of this rank.
    pub fn issue(self, count: usize, with: &Issue) -> Result<()> {
        let &Issue { nccl, communicator, stream, rank, ranks, element, reduction, .. } = with;
        let multiply = |stream| with.product.map_or(Ok(()), |product| product.issue(stream));
        if self.is_beside_product() {
            multiply(with.other_stream)?;
        }
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
            Operation::UnevenAllGather | Operation::UnevenReduceScatter => uneven(self, count, with),
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
            Operation::SendBesideProduct => pair.map_or(Ok(()), |partner| exchange(partner, partner)),
            // With an odd number of ranks, the last one has no partner.
            _ => match pair {
                None => Ok(()),
                Some(partner) if self == Operation::SendBothWays => exchange(partner, partner),
                Some(partner) if rank < partner => send(communicator, with.send, partner, stream),
                Some(partner) => receive(communicator, with.receive, partner, stream),
            },
        }
    }
}

/// Issues a group of broadcasts or reduces, each of its root's share of `elements` elements.
fn uneven(operation: Operation, elements: usize, with: &Issue) -> Result<()> {
    let &Issue { nccl, communicator, stream, ranks, element, reduction, .. } = with;
    nccl_call!(nccl, ncclGroupStart())?;
    for root in 0..ranks {
        let (begin, end) = (share_begin(root, ranks, elements), share_begin(root + 1, ranks, elements));
        let at = begin * element.bytes();
        let (kind, send, receive) = match operation {
            Operation::UnevenAllGather => (Kind::Broadcast, with.send, with.receive.wrapping_byte_add(at)),
            _ => (Kind::Reduce, with.send.wrapping_byte_add(at), with.receive),
        };
        let call = Collective { kind, count: end - begin, element, reduction, root };
        call.issue(nccl, send, receive, communicator, stream)?;
    }
    nccl_call!(nccl, ncclGroupEnd())
}

/// The first element of a rank's share of `elements`. The shares of n ranks are as 2n + 1, 2n + 3 … 4n - 1, in sum
/// 3n².
fn share_begin(rank: usize, ranks: usize, elements: usize) -> usize {
    (elements as u128 * (rank * (2 * ranks + rank)) as u128 / (3 * ranks * ranks) as u128) as usize
}

/// The partner in pairs that begin with rank 1. With an even number of ranks, the last rank and rank 0 are a pair.
fn other_pair(rank: usize, ranks: usize) -> Option<usize> {
    if ranks % 2 == 1 && rank == 0 {
        return None;
    }
    Some(if rank % 2 == 1 { (rank + 1) % ranks } else { (rank + ranks - 1) % ranks })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A size is that of the whole call, so the parts of collectives with parts are smaller.
    #[test]
    fn counts() {
        let float = "float".parse().unwrap();
        assert_eq!(Operation::AllReduce.count(1024, float, 4), 256);
        assert_eq!(Operation::AllGather.count(1024, float, 4), 64);
        assert_eq!(Operation::AllGather.bytes(64, float, 4), 1024);
        assert_eq!(Operation::AlltoAll.count(1, float, 4), 1);
        assert_eq!(Operation::SendRing.bytes(256, float, 4), 1024);
    }

    /// Shares follow one another, are uneven, and make up the whole.
    #[test]
    fn shares() {
        assert_eq!([0, 1, 2, 3, 4].map(|rank| share_begin(rank, 4, 4800)), [0, 900, 2000, 3300, 4800]);
        assert_eq!([0, 1, 2].map(|rank| share_begin(rank, 2, 1)), [0, 0, 1]);
        assert_eq!(share_begin(8, 8, usize::MAX), usize::MAX);
    }

    /// Partners are mutual, and differ from those of the first pairs where there are enough ranks.
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
