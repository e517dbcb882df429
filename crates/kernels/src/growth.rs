//! Decides how large a ring grows, and makes the word that tells kernels of it (`device/growth.cuh`).

use crate::launch::{Geometry, PACKET_PAYLOAD_BYTES, PACKET_SLOT_BYTES};

/// The two kinds of channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Wire {
    Ll128,
    Bulk,
}

/// How many messages NCCL takes before the receiver comes, whatever their size.
const MESSAGES: u64 = 8;

/// Bytes that NCCL takes before the receiver comes, in a communicator of `ranks` ranks within a host.
pub fn absorbed_bytes(ranks: u32) -> u64 {
    match ranks {
        0..=2 => 64 << 20,
        3..=4 => 32 << 20,
        _ => 16 << 20,
    }
}

/// Slots of each channel of the larger ring, so that a connection takes at least what NCCL takes before the receiver comes, by either wire.
/// A power of two, more than the first ring has.
pub fn growth(ranks: u32, wire: Wire, geometry: &Geometry) -> u32 {
    let absorbed = absorbed_bytes(ranks);
    let slots = match wire {
        // Every message begins at the first channel, so each may need one packet more there. (Messages by chunks are so long that NCCL takes two
        // at most.)
        Wire::Ll128 => {
            absorbed.div_ceil(u64::from(geometry.ll128_channels) * PACKET_PAYLOAD_BYTES) + MESSAGES
        }
        Wire::Bulk => {
            let chunks = u64::from(geometry.bulk_channels) * u64::from(geometry.bulk_chunk_bytes);
            absorbed.div_ceil(chunks)
        }
    };
    // A geometry of a few bytes only would need more.
    let slots = u32::try_from(slots).unwrap_or(u32::MAX).min(1 << 30);
    slots.next_power_of_two().max(2 * first_slots(wire, geometry))
}

/// Slots of each channel of the first ring, made at init.
pub fn first_slots(wire: Wire, geometry: &Geometry) -> u32 {
    match wire {
        Wire::Ll128 => geometry.ll128_slots,
        Wire::Bulk => geometry.bulk_slots,
    }
}

/// Bytes of the ring of one connection, with `slots` slots a channel.
pub fn ring_bytes(wire: Wire, geometry: &Geometry, slots: u32) -> u64 {
    let (channels, slot_bytes) = match wire {
        Wire::Ll128 => (geometry.ll128_channels, PACKET_SLOT_BYTES),
        Wire::Bulk => (geometry.bulk_channels, geometry.bulk_chunk_bytes),
    };
    u64::from(channels) * u64::from(slot_bytes) * u64::from(slots)
}

/// The word for a ring. None if no channel can move into it: it must be aligned to 128 bytes, and its slots a power of two above the first ring's.
/// So a sender finds room as soon as it has moved.
pub fn ring_word(address: u64, wire: Wire, geometry: &Geometry, slots: u32) -> Option<u64> {
    let fits = address != 0
        && address.is_multiple_of(128)
        && slots.is_power_of_two()
        && slots > first_slots(wire, geometry);
    fits.then(|| address | u64::from(slots.ilog2()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever the grid, grown LL128 rings take what NCCL takes, in eight messages or in one; their memory stays within bounds.
    #[test]
    fn takes_what_nccl_takes() {
        for blocks in 1..=32 {
            let geometry = Geometry::recommended(blocks, 0);
            for (ranks, absorbed) in
                [(2, 64 << 20), (3, 32 << 20), (4, 32 << 20), (5, 16 << 20), (8, 16 << 20)]
            {
                assert_eq!(absorbed_bytes(ranks), absorbed);
                let slots = growth(ranks, Wire::Ll128, &geometry);
                let messages = absorbed / MESSAGES;
                let packets =
                    messages.div_ceil(PACKET_PAYLOAD_BYTES).div_ceil(u64::from(geometry.ll128_channels));
                assert!(u64::from(slots) >= MESSAGES * packets, "{blocks} blocks, {ranks} ranks");
                assert!(ring_bytes(Wire::Ll128, &geometry, slots) <= 3 * absorbed);
                let slots = growth(ranks, Wire::Bulk, &geometry);
                let bytes = ring_bytes(Wire::Bulk, &geometry, slots);
                assert!((absorbed..=2 * absorbed).contains(&bytes), "{bytes}");
                for wire in [Wire::Ll128, Wire::Bulk] {
                    assert!(ring_word(1 << 40, wire, &geometry, growth(ranks, wire, &geometry)).is_some());
                }
            }
        }
        let geometry = Geometry::recommended(32, 0);
        let bytes = |ranks, wire| ring_bytes(wire, &geometry, growth(ranks, wire, &geometry)) >> 20;
        assert_eq!([2, 4, 8].map(|ranks| bytes(ranks, Wire::Ll128)), [128, 64, 32]);
        assert_eq!([2, 4, 8].map(|ranks| bytes(ranks, Wire::Bulk)), [64, 32, 16]);
    }

    /// A ring that no channel can move into has no word.
    #[test]
    fn words() {
        let geometry = Geometry::recommended(32, 0);
        assert_eq!(ring_word(0x1_0000, Wire::Ll128, &geometry, 64), Some(0x1_0000 | 6));
        for (address, slots) in
            [(0, 64), (0x1_0040, 64), (0x1_0000, 48), (0x1_0000, geometry.ll128_slots), (0x1_0000, 0)]
        {
            assert_eq!(ring_word(address, Wire::Ll128, &geometry, slots), None);
        }
    }
}
