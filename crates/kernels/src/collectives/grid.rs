//! Decides how many blocks and warps serve the channels. Channel `l` is served by block `l % blocks`, and each warp goes through its channels
//! in increasing order. The grid is equal on all ranks, so that a block waits only for blocks of its own number.

use super::kernel::{Family, Kernel};
use super::refused::Refused;
use super::{Geometry, Kind};
use crate::collective::CollectiveLaunch;

/// The limits of all grids: the ranks agreed on them, so they are equal on all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Blocks of a grid; at least 1.
    pub blocks_max: u32,
    /// Whether every rank's device has clusters (9.0 and newer).
    pub clusters: bool,
}

impl Limits {
    pub(super) fn check(&self) -> Result<(), Refused> {
        if self.blocks_max == 0 { Err(Refused::Blocks(self.blocks_max)) } else { Ok(()) }
    }

    /// The limits for a collective of so many bytes: with fewer blocks if programs run it beside matrix products.
    pub(super) fn modest(self, kind: Kind, total_bytes: u64) -> Limits {
        let is_beside_products = matches!(kind, Kind::AllGather | Kind::ReduceScatter);
        let row =
            BESIDE_PRODUCTS.iter().find(|(bytes_max, _)| is_beside_products && total_bytes <= *bytes_max);
        let blocks = row.map_or(self.blocks_max, |(_, blocks)| *blocks);
        Limits { blocks_max: self.blocks_max.min(blocks), ..self }
    }
}

/// How to launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Which kernel.
    pub kernel: Kernel,
    /// Blocks of the grid.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Warps of a block for each role, as in the launch.
    pub role_warps: u32,
    /// Channels that are used, the first ones, as in the launch.
    pub used_channels: u32,
    /// Bytes of dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Blocks of a cluster; 1: launch without the attribute.
    pub cluster: u32,
    /// Whether programmatic serialization pays, if the launch is not captured. Then also set
    /// [`COLLECTIVE_EARLY_NEXT`](crate::collective::COLLECTIVE_EARLY_NEXT).
    pub early: bool,
}

/// Blocks of a cluster. Without clusters the first blocks crowd on one part of the GPU and starve its links.
const CLUSTER: u32 = 4;
/// Kernels of more bytes do not begin early: a next kernel that waits spoils the placement of their blocks.
const EARLY_BYTES_MAX: u64 = 2 << 20;
/// Warps of a block of LL kernels while there are blocks left. 1 to 8 were as fast (within 2 %, 2 × H200), and fewer blocks hinder fewer
/// other kernels.
const LL_WARPS_FIRST: u32 = 8;
/// Blocks of all-gathers and reduce-scatters of up to so many bytes in all. Programs run these beside matrix products. A block that waits for
/// its peer's holds a multiprocessor, so that the product may need one more wave. On 2 × H200, beside products of 0.17 and 1.4 ms, 32 blocks
/// made both together take up to 17 % longer than with NCCL, these did not (`docs/measurements/2026-11-22-beside-products`). From 2 to 16 MiB
/// 24 blocks and 16 take both together equally long on average (single sizes differ by up to 6 %), and 24 are up to 21 % faster alone
/// (2 × H100, `docs/measurements/2026-11-28-blocks`). 8 blocks take both together 3 % less, and alone up to twice as long.
const BESIDE_PRODUCTS: [(u64, u32); 2] = [(64 << 10, 8), (1 << 20, 16)];

impl Shape {
    /// `packets`: those of the largest connection.
    pub(super) fn of(
        kernel: Kernel,
        packets: u64,
        geometry: &Geometry,
        total_bytes: u64,
        limits: &Limits,
    ) -> Shape {
        // At most `channels`, so it fits.
        let family = kernel.family;
        let channels = packets.min(u64::from(geometry.channels_of(family))) as u32;
        // LL128 blocks spread over as many multiprocessors as they can: that is what their time depends on.
        let role_warps_first =
            if matches!(family, Family::Ll | Family::BatchLl) { LL_WARPS_FIRST } else { 1 };
        let wanted = channels.div_ceil(role_warps_first).min(limits.blocks_max);
        let (blocks, cluster) = if limits.clusters && wanted > 2 && limits.blocks_max >= CLUSTER {
            (wanted.div_ceil(CLUSTER).min(limits.blocks_max / CLUSTER) * CLUSTER, CLUSTER)
        } else {
            (wanted, 1)
        };
        let role_warps = channels.div_ceil(blocks).min(kernel.role_warps_max());
        let used_channels = evenly(family, channels, blocks * role_warps);
        let threads = 32 * family.warps(role_warps);
        let early = total_bytes <= EARLY_BYTES_MAX;
        let shared_bytes = family.shared_bytes();
        Shape { kernel, blocks, threads, role_warps, used_channels, shared_bytes, cluster, early }
    }

    /// Writes its part of the launch.
    pub(super) fn tell(&self, launch: &mut CollectiveLaunch) {
        (launch.used_channels, launch.role_warps) = (self.used_channels, self.role_warps);
    }
}

/// How many of `channels` channels to use: whole rounds of the warps. A warp serves its channels one after the other, so a warp with one more
/// than the others would end last. A single call over LL has one packet a channel, so it keeps all channels. So does one-shot, as a packet's
/// place belongs to one channel for good.
fn evenly(family: Family, channels: u32, warps: u32) -> u32 {
    let rounds = channels / warps;
    if rounds == 0 || family.sends_at_once() { channels } else { rounds * warps }
}
