//! Finds out which connections need a larger ring, and tells kernels of it. Nothing here calls the driver, takes a lock or allocates, so any
//! thread may call it at any time, even while the kernel waits for room. The words lie in host memory because a copy to the device could queue
//! behind that kernel.

use std::sync::atomic::Ordering;

use windlass_kernels::arrange::{Direction, Peer};
use windlass_kernels::growth::{self, Wire};

use crate::error::TransportError;
use crate::p2p::calls::Words;
use crate::p2p::{Operation, P2p};
use windlass_base::gpu::Address;

/// The peers to whom this rank should send over a larger ring, a bit for each rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Wants {
    pub ll128: u64,
    pub bulk: u64,
}

/// Gives every connection the addresses of its words for larger rings.
pub(super) fn place_words(peers: &mut [Peer], words: Words<'_>) {
    for (index, peer) in (0..).zip(peers) {
        peer.send.growth = words.growth_address(Direction::Send, index);
        peer.receive.growth = words.growth_address(Direction::Receive, index);
    }
}

impl P2p {
    /// The peers to whom this rank's kernel has been sending without room for some 250 ms, over a ring that has not grown.
    pub fn wants_growth(&self) -> Wants {
        let Some(words) = self.words() else { return Wants::default() };
        Wants {
            ll128: words.growth_requests(Wire::Ll128) & !self.grown_sends(Wire::Ll128),
            bulk: words.growth_requests(Wire::Bulk) & !self.grown_sends(Wire::Bulk),
        }
    }

    /// The peers to whom a group sent chunks over a ring that has not grown, which is slow. Known when the group is issued.
    pub fn asks_early(&self) -> Wants {
        let bulk = self.sent_chunks.load(Ordering::Relaxed) & !self.grown_sends(Wire::Bulk);
        Wants { ll128: 0, bulk }
    }

    /// Slots of each channel in a larger ring of this communicator: enough for what NCCL takes before the receiver comes.
    pub fn growth_slots(&self, wire: Wire) -> u32 {
        growth::growth(self.peers.len() as u32, wire, &self.geometry)
    }

    /// Bytes of a larger ring.
    pub fn growth_bytes(&self, wire: Wire) -> u64 {
        growth::ring_bytes(wire, &self.geometry, self.growth_slots(wire))
    }

    /// Sets the ring for messages from or to `peer` from now on, by its address for this rank's device. It lies in the receiver's symmetric
    /// heap, may hold anything, and stays as long as the regions. Call it once for each peer, wire and direction, with the same slots on both
    /// ranks: first on the receiver, then on the sender.
    pub fn grow(
        &self,
        direction: Direction,
        peer: u32,
        wire: Wire,
        address: Address,
        slots: u32,
    ) -> Result<(), TransportError> {
        self.grow_now(direction, peer, wire, address, slots).map_err(TransportError::told)
    }

    fn grow_now(
        &self,
        direction: Direction,
        peer: u32,
        wire: Wire,
        address: Address,
        slots: u32,
    ) -> Result<(), TransportError> {
        let ranks = self.peers.len() as u32;
        if peer >= ranks || peer == self.geometry.rank {
            return Err(TransportError::NoRank { peer, ranks });
        }
        let refused = |why| TransportError::NoGrowth { peer, wire, why };
        let word = growth::ring_word(address, wire, &self.geometry, slots)
            .ok_or_else(|| refused("it is not aligned, or not larger by a power of two"))?;
        let there = self.words().ok_or_else(|| refused("it has ended"))?.growth(direction, peer, wire);
        // Release: whoever sees the word finds the ring mapped.
        there
            .compare_exchange(0, word, Ordering::Release, Ordering::Relaxed)
            .map(drop)
            .map_err(|_| refused("it has grown before"))
    }

    /// Forgets all larger rings, while no kernel runs on any rank. Then all rings are as at init.
    pub fn forget_growth(&self) {
        self.words().into_iter().for_each(|words| words.forget_growth());
        self.sent_chunks.store(0, Ordering::Relaxed);
    }

    /// Whether this side's kernels were told of a larger ring.
    pub fn has_grown(&self, direction: Direction, peer: u32, wire: Wire) -> bool {
        let words = self.words();
        words.is_some_and(|words| words.growth(direction, peer, wire).load(Ordering::Relaxed) != 0)
    }

    pub(super) fn grown_sends(&self, wire: Wire) -> u64 {
        let peers = 0..self.peers.len() as u32;
        let grown = peers.filter(|peer| self.has_grown(Direction::Send, *peer, wire));
        grown.fold(0, |mask, peer| mask | 1 << peer)
    }

    /// Notes to which peers a group sends chunks. Returns whether it is the first to one of them.
    pub(super) fn note_chunks(&self, calls: &[Operation]) -> bool {
        let large = calls.iter().filter(|call| {
            call.direction == Direction::Send
                && call.bytes >= self.geometry.bulk_from_bytes
                && call.peer != self.geometry.rank
        });
        let peers = large.fold(0_u64, |mask, call| mask | 1 << call.peer);
        let are_new = peers & !self.sent_chunks.load(Ordering::Relaxed) != 0;
        if are_new {
            self.sent_chunks.fetch_or(peers, Ordering::Relaxed);
        }
        are_new
    }
}
