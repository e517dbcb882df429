//! Writes into a launch which bytes go from where to where.

use super::kernel::Family;
use super::{Collective, Kind};
use crate::collective::{
    COLLECTIVE_EVEN, COLLECTIVE_ROOT_SHIFT, COLLECTIVE_SAME, CollectiveLaunch, RANKS_MAX,
};

/// Shares of an all-reduce begin at multiples of this, counted from the beginning of the buffer: no element is cut, and a
/// vector that a thread loads lies in one share.
const SHARE_ALIGNMENT: u64 = 16;

/// Bytes of the first, largest share of a call in two phases: `ranks` ranks reduce `bytes` bytes. The share may exceed `bytes`.
pub(super) fn share(bytes: u64, ranks: u32) -> u64 {
    bytes.div_ceil(ranks.into()).next_multiple_of(SHARE_ALIGNMENT)
}

/// Writes this rank's buffers and their bytes. Returns the bytes of the largest connection among all ranks.
pub(super) fn write(collective: &Collective, family: Family, launch: &mut CollectiveLaunch) -> u64 {
    let Collective { send, receive, .. } = *collective;
    let (me, ranks) = (launch.rank as usize, launch.ranks as usize);
    // The bytes that `count` stands for.
    let bytes = collective.connection_bytes();
    // Wrapping: an address beyond all memory faults on the device, as with NCCL.
    let part = |buffer: u64, rank: usize| buffer.wrapping_add(rank as u64 * bytes);
    match collective.kind {
        Kind::AllReduce if family.has_shares() => {
            let share = share(bytes, launch.ranks);
            for rank in 0..ranks {
                let at = (rank as u64 * share).min(bytes);
                let length = share.min(bytes - at);
                launch.set_send(rank, send.wrapping_add(at), length);
                launch.set_receive(rank, receive.wrapping_add(at), length);
            }
            return share.min(bytes);
        }
        Kind::Reduce { root } if family.has_shares() => {
            let share = share(bytes, launch.ranks - 1);
            launch.flags |= (root + 1) << COLLECTIVE_ROOT_SHIFT;
            // The root has no share.
            for (index, rank) in (0..ranks).filter(|rank| *rank != root as usize).enumerate() {
                let at = (index as u64 * share).min(bytes);
                let length = share.min(bytes - at);
                launch.set_send(rank, send.wrapping_add(at), length);
                if me == root as usize {
                    launch.set_receive(rank, receive.wrapping_add(at), length);
                }
            }
            return share.min(bytes);
        }
        Kind::AllReduce => {
            launch.send_to_all(send, bytes);
            launch.set_receive(me, receive, bytes);
        }
        Kind::Broadcast { root } => {
            if me == root as usize {
                launch.send_to_all(send, bytes);
            }
            launch.set_receive(root as usize, receive, bytes);
        }
        Kind::Reduce { root } => {
            launch.set_send(root as usize, send, bytes);
            if me == root as usize {
                launch.set_receive(me, receive, bytes);
            }
        }
        Kind::AllGather => {
            launch.send_to_all(send, bytes);
            (0..ranks).for_each(|rank| launch.set_receive(rank, part(receive, rank), bytes));
        }
        Kind::ReduceScatter => {
            (0..ranks).for_each(|rank| launch.set_send(rank, part(send, rank), bytes));
            launch.set_receive(me, receive, bytes);
        }
    }
    bytes
}

impl CollectiveLaunch {
    /// Whether this rank may use the straight kernel of a family, if there is one.
    pub fn is_straight(&self, family: Family) -> bool {
        self.flags & COLLECTIVE_EVEN != 0 && self.is_whole(family.vector_bytes())
    }

    /// Whether all that this rank moves begins and ends at multiples of `vector_bytes` (a power of two).
    fn is_whole(&self, vector_bytes: u64) -> bool {
        let of = |addresses: &[u64; RANKS_MAX], bytes: &[u64; RANKS_MAX]| {
            let moved = addresses.iter().zip(bytes).filter(|(_, bytes)| **bytes > 0);
            moved.fold(0, |bits, (address, bytes)| bits | address | bytes)
        };
        (of(&self.send, &self.send_bytes) | of(&self.receive, &self.receive_bytes))
            .is_multiple_of(vector_bytes)
    }

    fn set_send(&mut self, rank: usize, address: u64, bytes: u64) {
        (self.send[rank], self.send_bytes[rank]) = (address, bytes);
    }

    fn set_receive(&mut self, rank: usize, address: u64, bytes: u64) {
        (self.receive[rank], self.receive_bytes[rank]) = (address, bytes);
    }

    fn send_to_all(&mut self, address: u64, bytes: u64) {
        (0..self.ranks as usize).for_each(|rank| self.set_send(rank, address, bytes));
        self.flags |= COLLECTIVE_SAME;
    }
}
