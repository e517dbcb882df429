//! The structures of `device/p2p.h`, byte for byte. What each field means is said there.
//!
//! Addresses are device-visible. Counts of packets and chunks start at zero with the communicator, so a region that is
//! zeroed at init needs no further preparation.

#![allow(missing_docs)]

use std::mem::offset_of;

pub const PACKET_SLOT_BYTES: u32 = 2048;
pub const PACKET_PAYLOAD_BYTES: u64 = 1920;
pub const LL128_WORD_STRIDE: u32 = 32;
pub const BULK_WORD_STRIDE: u32 = 128;
pub const PROGRESS_STRIDE: u32 = 16;
pub const LL128_FROM_STRIDE: u32 = 8;
pub const LAUNCH_BYTES: usize = 4096;
pub const LAUNCH_HEAD_BYTES: usize = 120;
pub const INLINE_BYTES: usize = LAUNCH_BYTES - LAUNCH_HEAD_BYTES;
pub const REPORT_ENTRIES: usize = 31;
pub const BULK_SERVICE_WARPS: u32 = 2;
/// Bytes of each wire at [`Launch::growth_requests`].
pub const GROWTH_REQUESTS_PER_WIRE: usize = 64;
/// The most virtual blocks of a communicator.
pub const VIRTUAL_BLOCKS_MAX: usize = 32;
pub const PACKETS_A_BLOCK: u64 = 8;
/// The bit of [`Operation::bytes`] where the number of blocks begins.
pub const BLOCKS_SHIFT: u32 = 56;

pub const CONNECTION_RECEIVE: u16 = 1;
/// The connection's bulk messages are sent by ordinary loads and stores; the receiver cannot tell.
pub const CONNECTION_ORDINARY_STORES: u16 = 2;
/// Some connection has a grown ring for its chunks.
pub const LAUNCH_BULK_GREW: u32 = 2;

/// Values of the word at [`Launch::control`].
pub const CONTROL_RUN: u32 = 0;
pub const CONTROL_ABORT: u32 = 1;
/// A warp that waits for a peer reports that and leaves.
pub const CONTROL_ASK: u32 = 2;

/// Values of [`ReportEntry::waited_for`].
pub const WAITED_P2P_LL128_CREDIT: u32 = 1;
pub const WAITED_P2P_LL128_DATA: u32 = 2;
pub const WAITED_BULK_CREDIT: u32 = 3;
pub const WAITED_BULK_DATA: u32 = 4;

/// What the ranks agreed on at init; all but `rank` is equal on all of them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Geometry {
    pub first_tag: u64,
    pub bulk_from_bytes: u64,
    pub ll128_channels: u32,
    pub ll128_slots: u32,
    pub bulk_channels: u32,
    pub bulk_slots: u32,
    pub bulk_chunk_bytes: u32,
    pub rank: u32,
}

/// From how many bytes on messages go by chunks. With 2 ranks these are as fast as LL128 from 40 MiB on (2 × H100,
/// `docs/measurements/2026-11-28-large-messages`). For more ranks nobody measured more than 32 MiB.
pub const fn bulk_from_bytes(ranks: u32) -> u64 {
    if ranks == 2 { 40 << 20 } else { 32 << 20 }
}

impl Geometry {
    /// The measured geometry for grids of at most `blocks_max` blocks (equal on all ranks; from 4 on whole clusters of 4). A connection has at
    /// most 4 MiB of LL128 ring and 2 MiB of bulk ring (3 and 1.5 MiB for 24 blocks). Rings [grow](crate::growth) when they must. Chunks through
    /// so small a ring are slow, and chunks of 32 KiB are slow if a block both sends and receives.
    pub fn recommended(blocks_max: u32, rank: u32) -> Geometry {
        let bulk_channels = match blocks_max.clamp(1, VIRTUAL_BLOCKS_MAX as u32) {
            few @ 1..4 => few,
            more => more / 4 * 4,
        };
        let ll128_channels = PACKETS_A_BLOCK as u32 * bulk_channels;
        let bulk_chunk_bytes = 64 << 10;
        let slots = |ring_bytes: u32, channel_bytes: u32| 1 << (ring_bytes / channel_bytes).ilog2();
        Geometry {
            first_tag: 1,
            bulk_from_bytes: bulk_from_bytes(3),
            ll128_channels,
            ll128_slots: slots(4 << 20, ll128_channels * PACKET_SLOT_BYTES),
            bulk_channels,
            bulk_slots: slots(2 << 20, bulk_channels * bulk_chunk_bytes),
            bulk_chunk_bytes,
            rank,
        }
    }

    /// Bytes of the LL128 ring of one connection, in the receiver's symmetric heap.
    pub fn ll128_ring_bytes(&self) -> u64 {
        u64::from(self.ll128_channels) * u64::from(self.ll128_slots) * u64::from(PACKET_SLOT_BYTES)
    }

    /// Bytes of the bulk ring of one connection, in the receiver's symmetric heap.
    pub fn bulk_ring_bytes(&self) -> u64 {
        u64::from(self.bulk_channels) * u64::from(self.bulk_slots) * u64::from(self.bulk_chunk_bytes)
    }

    /// Whether the kernel can work with it: see the fields in `device/p2p.h`. `first_tag` must leave room for all
    /// tags that a channel will ever use, as 0 is no tag.
    pub fn is_valid(&self) -> bool {
        self.first_tag != 0
            && self.bulk_from_bytes != 0
            && (1..=u32::from(u16::MAX)).contains(&self.ll128_channels)
            && (1..=VIRTUAL_BLOCKS_MAX as u32).contains(&self.bulk_channels)
            && self.ll128_channels.is_multiple_of(self.bulk_channels)
            && self.ll128_slots.is_power_of_two()
            && self.bulk_slots.is_power_of_two()
            && self.bulk_chunk_bytes != 0
            && self.bulk_chunk_bytes.is_multiple_of(128)
    }
}

/// One message.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Operation {
    pub address: u64,
    pub bytes: u64,
}

/// All messages of a group to one peer, or from one.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Connection {
    pub ll128_ring: u64,
    pub ll128_credit: u64,
    pub ll128_progress: u64,
    pub ll128_from: u64,
    pub bulk_ring: u64,
    pub bulk_posted: u64,
    pub bulk_credit: u64,
    pub bulk_progress: u64,
    pub growth: u64,
    pub peer: u32,
    pub flags: u16,
    pub first_block: u16,
    pub first_operation: u32,
    pub operations: u32,
    pub active_ll128_blocks: u16,
    pub active_ll128_rounds: u16,
    pub active_bulk_channels: u32,
}

/// Words of a connection in [`Launch::storage`].
pub const CONNECTION_WORDS: usize = size_of::<Connection>() / 8;

impl Connection {
    pub(crate) fn words(&self) -> [u64; CONNECTION_WORDS] {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let halves = |low: u16, high: u16| u32::from(low) | u32::from(high) << 16;
        [
            self.ll128_ring,
            self.ll128_credit,
            self.ll128_progress,
            self.ll128_from,
            self.bulk_ring,
            self.bulk_posted,
            self.bulk_credit,
            self.bulk_progress,
            self.growth,
            pair(self.peer, halves(self.flags, self.first_block)),
            pair(self.first_operation, self.operations),
            pair(halves(self.active_ll128_blocks, self.active_ll128_rounds), self.active_bulk_channels),
        ]
    }
}

/// The kernel's one parameter. Only its first [`Shape::parameter_bytes`](crate::arrange::Shape) bytes need be passed.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    pub geometry: Geometry,
    pub control: u64,
    pub report: u64,
    pub operation_list: u64,
    pub growth_requests: u64,
    pub send_connections: u32,
    pub receive_connections: u32,
    pub used_blocks: u32,
    pub bulk_tasks: u32,
    pub ll128_send_warps: u32,
    pub ll128_receive_warps: u32,
    pub copy_warps: u32,
    pub stages: u16,
    pub copy_blocks: u16,
    pub jobs_per_warp: u16,
    pub ll128_rounds: u16,
    pub flags: u32,
    pub operations: u32,
    pub copies: u32,
    pub storage: [u64; INLINE_BYTES / 8],
}

impl Default for Launch {
    fn default() -> Self {
        Launch {
            geometry: Geometry::default(),
            control: 0,
            report: 0,
            operation_list: 0,
            growth_requests: 0,
            send_connections: 0,
            receive_connections: 0,
            used_blocks: 0,
            bulk_tasks: 0,
            ll128_send_warps: 0,
            ll128_receive_warps: 0,
            copy_warps: 0,
            stages: 0,
            copy_blocks: 0,
            jobs_per_warp: 0,
            ll128_rounds: 0,
            flags: 0,
            operations: 0,
            copies: 0,
            storage: [0; INLINE_BYTES / 8],
        }
    }
}

/// What a warp waited for when it left on an abort or a question.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReportEntry {
    pub peer: u32,
    pub waited_for: u32,
    pub channel: u32,
    pub operation: u32,
    pub sequence: u64,
    pub seen: u64,
}

/// Written by kernels that leave on an abort or a question; zero before. In device memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub claimed: u32,
    pub rank: u32,
    pub reserved: [u64; 3],
    pub entries: [ReportEntry; REPORT_ENTRIES],
}

const _: () = {
    assert!(size_of::<Geometry>() == 40 && offset_of!(Geometry, ll128_channels) == 16);
    assert!(size_of::<Operation>() == 16);
    assert!(size_of::<Connection>() == 96 && offset_of!(Connection, peer) == 72);
    assert!(size_of::<Launch>() == LAUNCH_BYTES && offset_of!(Launch, storage) == LAUNCH_HEAD_BYTES);
    assert!(offset_of!(Launch, control) == 40 && offset_of!(Launch, used_blocks) == 80);
    assert!(size_of::<ReportEntry>() == 32 && size_of::<Report>() == 32 + 31 * 32);
};
