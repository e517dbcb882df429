//! How many blocks and warps serve the channels: channel `l` is served by block `l % blocks`, and each warp goes through its channels in
//! increasing order. The grid is equal on all ranks, so that a block waits for blocks of its own number alone.

use super::kernel::{Family, Kernel};
use super::refused::Refused;
use super::{Geometry, Kind};
use crate::collective::CollectiveLaunch;

/// What the ranks agreed on for all grids: equal on all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Blocks of a grid; at least 1.
    pub blocks_max: u32,
    /// Every rank's device has clusters (9.0 and newer).
    pub clusters: bool,
}

impl Limits {
    pub(super) fn check(&self) -> Result<(), Refused> {
        if self.blocks_max == 0 { Err(Refused::Blocks(self.blocks_max)) } else { Ok(()) }
    }

    /// What a collective of so many bytes in all takes of them.
    pub(super) fn modest(self, kind: Kind, ranks: u32, total_bytes: u64) -> Limits {
        let is_beside_products = match kind {
            Kind::AllGather | Kind::ReduceScatter => {
                ranks == 2 || total_bytes <= BESIDE_PRODUCTS_BYTES_MAX_OF_MORE
            }
            Kind::AllReduce | Kind::Broadcast { .. } | Kind::Reduce { .. } => false,
        };
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
    /// Warps of a block for each role: what the launch says.
    pub role_warps: u32,
    /// Channels that are used, the first ones: what the launch says.
    pub used_channels: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Blocks of a cluster; 1: launch without the attribute.
    pub cluster: u32,
    /// Programmatic serialization pays, if the launch is not captured. Then also set
    /// [`COLLECTIVE_EARLY_NEXT`](crate::collective::COLLECTIVE_EARLY_NEXT).
    pub early: bool,
}

/// Blocks of a cluster. Without clusters the first blocks crowd on one part of the GPU and starve its links.
const CLUSTER: u32 = 4;
/// A next kernel that waits spoils the placement of the blocks of larger ones.
const EARLY_BYTES_MAX: u64 = 2 << 20;
/// Warps of a block of the kernels of LL while there are blocks left: 1 to 8 were as quick (within 2 %, 2 × H200), and fewer
/// blocks are in the way of fewer of others.
const LL_WARPS_FIRST: u32 = 8;
/// Blocks of all-gathers and reduce-scatters of up to so many bytes in all. Programs run these beside matrix products, and a block
/// that waits for its peer's holds a multiprocessor, so that the product's last wave may need another. On 2 × H200, beside products of 0.17
/// and 1.4 ms, 32 blocks made both together up to 17 % longer than NCCL's did, these not (`docs/measurements/2026-11-22-beside-products`);
/// alone they cost the collective 9, 4 and 26 % at 64 KB, 1 MB and 16 MB.
const BESIDE_PRODUCTS: [(u64, u32); 2] = [(64 << 10, 8), (16 << 20, 16)];
/// More ranks move more bytes: from there on the narrower grid was not measured, and all blocks stay.
const BESIDE_PRODUCTS_BYTES_MAX_OF_MORE: u64 = 1 << 20;

impl Shape {
    /// `packets`: of the largest connection.
    pub(super) fn of(
        kernel: Kernel,
        packets: u64,
        geometry: &Geometry,
        total_bytes: u64,
        limits: &Limits,
    ) -> Shape {
        // At most `channels`, so it fits.
        let channels = packets.min(u64::from(geometry.channels)) as u32;
        let family = kernel.family();
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

    /// What the launch says of it.
    pub(super) fn tell(&self, launch: &mut CollectiveLaunch) {
        (launch.used_channels, launch.role_warps) = (self.used_channels, self.role_warps);
    }
}

/// Of so many channels, those of whole rounds of the warps: a warp serves its channels one after the other, so one with a channel more
/// than the others would be the last. A channel of a single call over LL has one packet, so they are as many as packets.
fn evenly(family: Family, channels: u32, warps: u32) -> u32 {
    let rounds = channels / warps;
    if rounds == 0 || family == Family::Ll { channels } else { rounds * warps }
}
