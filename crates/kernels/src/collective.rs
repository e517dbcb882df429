//! The structures of `device/collective.h`, byte for byte. What each field means is said there.
//!
//! Addresses are device-visible, offsets in regions equal on all ranks. Packets are counted from the init of the
//! communicator, so a region that is zeroed at init needs no further preparation.

#![allow(missing_docs)]

use std::mem::offset_of;

pub const RANKS_MAX: usize = 8;
pub const LL_PAYLOAD_BYTES: u64 = 256;
pub const LL_SLOT_BYTES: u64 = 512;
pub const LL_SLOTS: u64 = 2;
pub const LL_COUNT_BYTES: u64 = 8;
/// Launches for which a ring of one-shot has room.
pub const ONE_SHOT_LAUNCHES: u64 = 2;
/// The most collectives that one kernel runs, and the entries of its list of their packets.
pub const BATCH_CALLS_MAX: usize = 64;
pub const BATCH_ENTRIES: usize = 512;
pub const LL128_HALF_PAYLOAD_BYTES: u64 = 960;
pub const LL128_SLOT_BYTES: u64 = 2048;
/// Shared memory of a block of a Simple kernel.
pub const SIMPLE_SHARED_BYTES: u32 = 128;
pub const CHANNEL_BYTES: u64 = 256;
/// Which word of a channel of LL128 tells how many numbers have been received.
pub const CHANNEL_RECEIVED: usize = 2;

/// The next kernel of the stream may be set up while this one runs.
pub const COLLECTIVE_EARLY_NEXT: u32 = 1;
/// All that is sent, and this rank's own part, comes from one buffer.
pub const COLLECTIVE_SAME: u32 = 2;
/// Every rank sends every other one as many packets.
pub const COLLECTIVE_EVEN: u32 = 4;
/// `scale` of a scaled sum is the address of this rank's scalar, not its bits.
pub const COLLECTIVE_SCALAR_AT: u32 = 8;
/// From this bit on: the root plus 1, for a reduce in two phases.
pub const COLLECTIVE_ROOT_SHIFT: u32 = 4;

/// Values of [`ReportEntry::waited_for`](crate::launch::ReportEntry), beside those of the p2p transport.
pub const WAITED_LL_DATA: u32 = 6;
pub const WAITED_LL128_CREDIT: u32 = 7;
pub const WAITED_LL128_DATA: u32 = 8;
pub const WAITED_RESULT_CREDIT: u32 = 9;
pub const WAITED_RESULT_DATA: u32 = 10;
pub const WAITED_ONE_SHOT_DATA: u32 = 11;

/// Where a wire lies in every rank's region: offsets in the part for collectives.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wire {
    pub rings: u64,
    pub channels: u64,
}

/// The kernels' one parameter.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CollectiveLaunch {
    pub regions: [u64; RANKS_MAX],
    pub wires: [Wire; 2],
    pub control: u64,
    pub report: u64,
    pub first_tag: u64,
    pub send: [u64; RANKS_MAX],
    pub send_bytes: [u64; RANKS_MAX],
    pub receive: [u64; RANKS_MAX],
    pub receive_bytes: [u64; RANKS_MAX],
    pub rank: u32,
    pub ranks: u32,
    pub channels_log2: u32,
    pub ring_slots: u32,
    pub used_channels: u32,
    pub role_warps: u32,
    pub reduction: u32,
    pub flags: u32,
    pub packets: u64,
    pub scale: u64,
}

/// One of several collectives that one kernel runs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchCall {
    pub send: u64,
    pub receive: u64,
    pub send_step: u32,
    pub receive_step: u32,
    pub bytes: u32,
    pub first_packet: u32,
}

/// The one parameter of the kernels that run several.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLaunch {
    pub launch: CollectiveLaunch,
    pub calls: [BatchCall; BATCH_CALLS_MAX],
    pub call_of_packet: [u8; BATCH_ENTRIES],
    pub packets_log2: u32,
    pub count: u32,
}

impl Default for BatchLaunch {
    fn default() -> BatchLaunch {
        BatchLaunch {
            launch: CollectiveLaunch::default(),
            calls: [BatchCall::default(); BATCH_CALLS_MAX],
            call_of_packet: [0; BATCH_ENTRIES],
            packets_log2: 0,
            count: 0,
        }
    }
}

const _: () = {
    assert!(size_of::<BatchCall>() == 32 && offset_of!(BatchCall, bytes) == 24);
    assert!(size_of::<BatchLaunch>() == 424 + 2048 + 512 + 8 && offset_of!(BatchLaunch, calls) == 424);
    assert!(size_of::<Wire>() == 16 && offset_of!(Wire, channels) == 8);
    assert!(size_of::<CollectiveLaunch>() == 424 && offset_of!(CollectiveLaunch, wires) == 64);
    assert!(offset_of!(CollectiveLaunch, control) == 96 && offset_of!(CollectiveLaunch, send) == 120);
    assert!(offset_of!(CollectiveLaunch, rank) == 376 && offset_of!(CollectiveLaunch, scale) == 416);
};
