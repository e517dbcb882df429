//! Computes where the parts of every connection lie in the ranks' regions. The result depends only on what all ranks agreed on, so that every
//! rank computes its peers' addresses, too.
//!
//! A region holds one block for each other rank, then what the rank has once: the report and the list of operations. All begin at multiples
//! of 128 bytes, and rings share no cache line with anything else.

use windlass_kernels::arrange::Peer;
use windlass_kernels::launch::{
    BULK_WORD_STRIDE, Connection, Geometry, LL128_FROM_STRIDE, LL128_WORD_STRIDE, Operation, PROGRESS_STRIDE,
    Report,
};

use windlass_base::gpu::Address;

const LINE: u64 = 128;
/// The most operations of one group; NCCL's own groups run out of memory earlier.
pub const LISTED_MAX: usize = 1 << 16;
/// Bytes of the list that lies in a region.
pub const LIST_BYTES: u64 = (LISTED_MAX * size_of::<Operation>()) as u64;

/// Offsets in a communicator's region, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    ranks: u32,
    block: Block,
    /// The report that kernels write.
    pub report: u64,
    /// The list of the running group's operations, where they do not fit the kernel's parameters.
    pub list: u64,
    /// Size of a region.
    pub bytes: u64,
}

/// The part of a region for one other rank: offsets from the block's beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    /// The other rank sends into these four.
    ll128_ring: u64,
    bulk_ring: u64,
    posted: u64,
    ll128_from: u64,
    /// The other rank gives credit here.
    ll128_credit: u64,
    bulk_credit: u64,
    /// How much this rank has sent and received.
    sent_ll128: u64,
    sent_bulk: u64,
    received_ll128: u64,
    received_bulk: u64,
    bytes: u64,
}

impl Layout {
    /// The layout for a communicator of `ranks` ranks.
    pub fn of(ranks: u32, geometry: &Geometry) -> Layout {
        let block = Block::of(geometry);
        let mut end = block.bytes * u64::from(ranks.saturating_sub(1));
        let report = take(&mut end, size_of::<Report>() as u64);
        let list = take(&mut end, LIST_BYTES);
        Layout { ranks, block, report, list, bytes: end }
    }

    /// The connections of `rank` with `peer`, by the addresses of both regions for the device of `rank`. `growth` is left open: words for larger
    /// rings lie in no region.
    pub fn peer(&self, rank: u32, own: Address, peer: u32, theirs: Address) -> Peer {
        if peer == rank {
            return Peer::default();
        }
        let block = &self.block;
        let mine = own + self.block_of(rank, peer);
        let theirs = theirs + self.block_of(peer, rank);
        let send = Connection {
            ll128_ring: theirs + block.ll128_ring,
            ll128_credit: mine + block.ll128_credit,
            ll128_progress: mine + block.sent_ll128,
            ll128_from: theirs + block.ll128_from,
            bulk_ring: theirs + block.bulk_ring,
            bulk_posted: theirs + block.posted,
            bulk_credit: mine + block.bulk_credit,
            bulk_progress: mine + block.sent_bulk,
            peer,
            ..Connection::default()
        };
        let receive = Connection {
            ll128_ring: mine + block.ll128_ring,
            ll128_credit: theirs + block.ll128_credit,
            ll128_progress: mine + block.received_ll128,
            ll128_from: mine + block.ll128_from,
            bulk_ring: mine + block.bulk_ring,
            bulk_posted: mine + block.posted,
            bulk_credit: theirs + block.bulk_credit,
            bulk_progress: mine + block.received_bulk,
            peer,
            ..Connection::default()
        };
        Peer { send, receive }
    }

    /// Where in the region of `rank` the block for `peer` begins.
    fn block_of(&self, rank: u32, peer: u32) -> u64 {
        u64::from(if peer < rank { peer } else { peer - 1 }) * self.block.bytes
    }
}

impl Block {
    fn of(geometry: &Geometry) -> Block {
        let mut end = 0;
        let ll128_words = |stride: u32| u64::from(geometry.ll128_channels) * u64::from(stride);
        let bulk_words = |stride: u32| u64::from(geometry.bulk_channels) * u64::from(stride);
        Block {
            ll128_ring: take(&mut end, geometry.ll128_ring_bytes()),
            bulk_ring: take(&mut end, geometry.bulk_ring_bytes()),
            posted: take(&mut end, bulk_words(BULK_WORD_STRIDE)),
            ll128_from: take(&mut end, ll128_words(LL128_FROM_STRIDE)),
            ll128_credit: take(&mut end, ll128_words(LL128_WORD_STRIDE)),
            bulk_credit: take(&mut end, bulk_words(BULK_WORD_STRIDE)),
            sent_ll128: take(&mut end, ll128_words(PROGRESS_STRIDE)),
            sent_bulk: take(&mut end, bulk_words(PROGRESS_STRIDE)),
            received_ll128: take(&mut end, ll128_words(PROGRESS_STRIDE)),
            received_bulk: take(&mut end, bulk_words(PROGRESS_STRIDE)),
            bytes: end,
        }
    }
}

/// Takes `bytes` bytes at `end`, and returns their offset.
fn take(end: &mut u64, bytes: u64) -> u64 {
    let at = *end;
    *end = (at + bytes).next_multiple_of(LINE);
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Geometry = Geometry {
        first_tag: 1,
        bulk_from_bytes: 40_000,
        ll128_channels: 3,
        ll128_slots: 4,
        bulk_channels: 2,
        bulk_slots: 4,
        bulk_chunk_bytes: 4096,
        rank: 0,
    };

    fn geometries() -> [Geometry; 3] {
        [SMALL, Geometry::recommended(1, 0), Geometry::recommended(32, 0)]
    }

    /// Regions of all ranks side by side, as all see them.
    fn region(layout: &Layout, rank: u32) -> Address {
        (1 << 40) + u64::from(rank) * layout.bytes
    }

    fn pair(layout: &Layout, rank: u32, peer: u32) -> Peer {
        layout.peer(rank, region(layout, rank), peer, region(layout, peer))
    }

    /// Both sides of a connection mean the same rings and words, and not the same counts.
    #[test]
    fn both_sides_agree() {
        for geometry in geometries() {
            let layout = Layout::of(8, &geometry);
            for (from, to) in (0..8).flat_map(|from| (0..8).map(move |to| (from, to))) {
                if from == to {
                    continue;
                }
                let (send, receive) = (pair(&layout, from, to).send, pair(&layout, to, from).receive);
                let shared = |c: &Connection| {
                    (c.ll128_ring, c.ll128_credit, c.ll128_from, c.bulk_ring, c.bulk_posted, c.bulk_credit)
                };
                assert_eq!(shared(&send), shared(&receive));
                assert_ne!(send.ll128_progress, receive.ll128_progress);
                assert_eq!((send.peer, receive.peer), (to, from));
            }
        }
    }

    /// Every part of every region has bytes of its own, aligned, within the region of the rank that must have it.
    #[test]
    fn no_overlap() {
        for (geometry, ranks) in geometries().into_iter().flat_map(|geometry| [(geometry, 2), (geometry, 5)])
        {
            let layout = Layout::of(ranks, &geometry);
            let mut parts = Vec::new();
            let ll128_words = |stride: u32| u64::from(geometry.ll128_channels * stride);
            let bulk_words = |stride: u32| u64::from(geometry.bulk_channels * stride);
            for rank in 0..ranks {
                parts.push((region(&layout, rank) + layout.report, size_of::<Report>() as u64, rank));
                parts.push((region(&layout, rank) + layout.list, LIST_BYTES, rank));
                for peer in (0..ranks).filter(|peer| *peer != rank) {
                    let Peer { send, receive } = pair(&layout, rank, peer);
                    parts.extend([
                        (receive.ll128_ring, geometry.ll128_ring_bytes(), rank),
                        (receive.bulk_ring, geometry.bulk_ring_bytes(), rank),
                        (receive.bulk_posted, bulk_words(BULK_WORD_STRIDE), rank),
                        (receive.ll128_from, ll128_words(LL128_FROM_STRIDE), rank),
                        (send.ll128_credit, ll128_words(LL128_WORD_STRIDE), rank),
                        (send.bulk_credit, bulk_words(BULK_WORD_STRIDE), rank),
                        (send.ll128_progress, ll128_words(PROGRESS_STRIDE), rank),
                        (send.bulk_progress, bulk_words(PROGRESS_STRIDE), rank),
                        (receive.ll128_progress, ll128_words(PROGRESS_STRIDE), rank),
                        (receive.bulk_progress, bulk_words(PROGRESS_STRIDE), rank),
                    ]);
                }
            }
            parts.sort_unstable();
            for pair in parts.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?}");
            }
            for (at, bytes, rank) in parts {
                let begin = region(&layout, rank);
                assert!(at.is_multiple_of(LINE) && at >= begin && at + bytes <= begin + layout.bytes);
            }
        }
    }

    /// What the recommended geometry costs: 6 MiB a connection, less than 8 MiB for a pair of ranks.
    #[test]
    fn bytes_of_the_recommended() {
        let bytes = |ranks| Layout::of(ranks, &Geometry::recommended(32, 0)).bytes;
        let pair = bytes(3) - bytes(2);
        assert!(pair > 6 << 20 && pair < (6 << 20) + (64 << 10), "{pair}");
        assert!(bytes(2) < 8 << 20);
        assert!(bytes(1) < 2 << 20);
    }
}
