//! What the ranks agreed on at init, and where their wires lie in a region.

use super::kernel::Family;
use super::{Kind, Refused};
use crate::collective::{
    CHANNEL_BYTES, LL_COUNT_BYTES, LL_PAYLOAD_BYTES, LL_SLOT_BYTES, LL_SLOTS, LL128_SLOT_BYTES,
    ONE_SHOT_LAUNCHES, RANKS_MAX, Wire,
};

/// What the ranks agreed on at init; all but `rank` is equal on all of them.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Tag of packet 0 of every channel. Neither it nor a later tag may be 0, which is no tag.
    pub first_tag: u64,
    /// This rank.
    pub rank: u32,
    /// Number of ranks, 2 to 8.
    pub ranks: u32,
    /// Channels of every wire: a power of two.
    pub channels: u32,
    /// Packets that a channel's ring of LL128 holds: a power of two, at least 2.
    pub slots: u32,
    /// Channels of one-shot: any number from 1 on.
    pub one_shot_channels: u32,
    /// The most packets of a connection that go in one shot.
    pub one_shot_slots: u32,
}

/// The fewest channels for each block: as many as a block has senders at full size.
const CHANNELS_A_BLOCK: u32 = 8;
const BLOCKS_MAX: u32 = 32;
/// With 4 slots large collectives of 2 ranks took up to a quarter longer; for more than 4 ranks there is no room for 8.
const SLOTS: u32 = 8;
const SLOTS_OF_MANY: u32 = 4;
/// Warps of a block of one-shot, each of which serves a channel: with 2 ranks as many as its kernels hold. And the most blocks of a grid.
const fn one_shot_channels_a_block(ranks: u32) -> u32 {
    if ranks == 2 { 24 } else { 16 }
}
const ONE_SHOT_BLOCKS_MAX: u32 = 24;
/// The most channels of the other wires, with which one-shot has all its packets. Communicators of fewer blocks have fewer in proportion.
const CHANNELS_MAX: u64 = (CHANNELS_A_BLOCK * BLOCKS_MAX) as u64;

/// The most bytes that go in one shot. One phase has one hop, but carries more bytes than two the more ranks there are: (n - 1)(n - 2) / n of a buffer.
/// With 2 ranks both took 9.45 us for 1.5 MiB, and two phases less above (2 × H100). For 3 ranks and more this is a model.
const fn one_shot_bytes(ranks: u32) -> u64 {
    match ranks {
        2 => 1536 << 10,
        3 => 512 << 10,
        4 => 256 << 10,
        _ => 128 << 10,
    }
}

impl Geometry {
    /// For grids of at most `blocks_max` blocks (equal on all ranks: the least of their limits). With more than 16 blocks a region has
    /// 12, 27 and 32 MiB for 2, 4 and 8 ranks.
    pub fn recommended(blocks_max: u32, ranks: u32, rank: u32, first_tag: u64) -> Geometry {
        let channels = CHANNELS_A_BLOCK * blocks_max.clamp(1, BLOCKS_MAX).next_power_of_two();
        let slots = if ranks <= 4 { SLOTS } else { SLOTS_OF_MANY };
        let one_shot_channels = one_shot_channels_a_block(ranks) * blocks_max.clamp(1, ONE_SHOT_BLOCKS_MAX);
        let one_shot_bytes = one_shot_bytes(ranks) * u64::from(channels) / CHANNELS_MAX;
        let one_shot_slots =
            one_shot_bytes.div_ceil(Family::one_shot(Kind::AllReduce, ranks).packet_bytes()) as u32;
        Geometry { first_tag, rank, ranks, channels, slots, one_shot_channels, one_shot_slots }
    }

    /// The most bytes of a connection that one-shot can carry.
    pub(super) fn one_shot_bytes_max(&self) -> u64 {
        u64::from(self.one_shot_slots) * Family::one_shot(Kind::AllReduce, self.ranks).packet_bytes()
    }

    /// Packets that a ring of a family's wire holds: of a channel, or in one shot of a launch.
    pub(super) fn slots_of(&self, family: Family) -> u32 {
        if family.is_one_shot() { self.one_shot_slots } else { self.slots }
    }

    /// Channels of a family's wire.
    pub fn channels_of(&self, family: Family) -> u32 {
        if family.is_one_shot() { self.one_shot_channels } else { self.channels }
    }

    /// The most bytes of a connection that LL can carry: a packet a channel.
    pub(super) fn ll_bytes_max(&self) -> u64 {
        u64::from(self.channels) * LL_PAYLOAD_BYTES
    }

    pub(super) fn check(&self) -> Result<(), Refused> {
        let Geometry { first_tag, rank, ranks, channels, slots, one_shot_channels, .. } = *self;
        if !(2..=RANKS_MAX as u32).contains(&ranks) {
            return Err(Refused::Ranks(ranks));
        }
        if rank >= ranks {
            return Err(Refused::Rank { rank, ranks });
        }
        let has_channels = channels.is_power_of_two() && one_shot_channels > 0;
        if !has_channels || slots < 2 || !slots.is_power_of_two() || first_tag == 0 {
            return Err(Refused::Geometry { channels, slots, first_tag });
        }
        Ok(())
    }
}

/// Where each wire lies in the part for collectives of every rank's region: offsets from its beginning, 128-byte aligned.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Packets of 256 bytes, for small collectives in which every rank sends every other one as much.
    pub ll: Wire,
    /// Packets of 960 or 1920 bytes.
    pub ll128: Wire,
    /// As `ll128`, for the second phase of kernels that have two.
    pub results: Wire,
    /// Packets as those of `ll128`, for middle sizes.
    pub one_shot: Wire,
    /// Bytes of the whole part. It must be zero before any peer writes.
    pub bytes: u64,
}

impl Layout {
    /// The wires that kernels of a family use.
    pub(super) fn wires(&self, family: Family) -> [Wire; 2] {
        match family {
            Family::Ll | Family::BatchLl => [self.ll, Wire::default()],
            _ if family.is_one_shot() => [self.one_shot, Wire::default()],
            _ if family.has_shares() => [self.ll128, self.results],
            _ => [self.ll128, Wire::default()],
        }
    }

    /// The layout, the same on all ranks.
    pub fn of(geometry: &Geometry) -> Layout {
        let channels = u64::from(geometry.channels);
        // A rank has no ring for itself.
        let sources = u64::from(geometry.ranks) - 1;
        let mut bytes = 0;
        let mut take = |part: u64| {
            let at = bytes;
            bytes += part.next_multiple_of(128);
            at
        };
        let ll = Wire {
            rings: take(sources * channels * LL_SLOTS * LL_SLOT_BYTES),
            channels: take(channels * LL_COUNT_BYTES),
        };
        let mut of_ll128 = || Wire {
            rings: take(sources * channels * u64::from(geometry.slots) * LL128_SLOT_BYTES),
            channels: take(channels * CHANNEL_BYTES),
        };
        let (ll128, results) = (of_ll128(), of_ll128());
        let one_shot_slots = ONE_SHOT_LAUNCHES * u64::from(geometry.one_shot_slots);
        let one_shot = Wire {
            rings: take(
                sources * one_shot_slots * Family::one_shot(Kind::AllReduce, geometry.ranks).line_bytes(),
            ),
            channels: take(u64::from(geometry.one_shot_channels) * LL_COUNT_BYTES),
        };
        Layout { ll, ll128, results, one_shot, bytes }
    }
}
