//! From which size on which kernel serves.

use super::kernel::{Family, Reducer, can_post};
use super::{Geometry, Kind};

/// Sizes at which one kind changes its kernels, in total bytes: count times element, of all-gather and reduce-scatter
/// times ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crossover {
    /// Up to here it goes by LL, if it has the channels for it; 0: never. A broadcast and a reduce never do: LL is
    /// for what every rank sends every other one.
    pub ll_bytes_max: u64,
    /// Above LL up to here it goes by LL128 in packets of two groups, above of four. An all-reduce, and more than 4 ranks,
    /// always have two.
    pub two_groups_bytes_max: u64,
    /// From here it goes the way of large ones: all-reduces and reduce-scatters that sum floats, of at most 4 ranks, by Simple packets; a
    /// reduce in two phases, if bytes times ranks - 2 are as many.
    pub large_bytes_min: u64,
}

/// A crossover for each kind. All ranks must have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Of [`Kind::AllReduce`].
    pub all_reduce: Crossover,
    /// Of [`Kind::Broadcast`].
    pub broadcast: Crossover,
    /// Of [`Kind::Reduce`].
    pub reduce: Crossover,
    /// Of [`Kind::AllGather`].
    pub all_gather: Crossover,
    /// Of [`Kind::ReduceScatter`].
    pub reduce_scatter: Crossover,
}

const NEVER: u64 = u64::MAX;
/// In one phase a root gets ranks - 1 buffers, in two phases one, some microseconds later. Of 4 ranks 1 MB took 9.3 us in one phase and 10.4 in two,
/// 8 MB 73 and 40 (4 × H100); that other numbers of ranks are alike is a model.
const TWO_PHASES_BYTES_MIN: u64 = 3 << 20;

impl Default for Tuning {
    /// Measured on 2 × H200 with grids of 32 blocks; from 4 × H200 only that Simple packets pay there sooner
    /// (`docs/measurements/2026-11-22-collectives`).
    fn default() -> Self {
        let crossover = |ll_bytes_max, two_groups_bytes_max, large_bytes_min| Crossover {
            ll_bytes_max,
            two_groups_bytes_max,
            large_bytes_min,
        };
        Tuning {
            all_reduce: crossover(64 << 10, u64::MAX, 12 << 20),
            broadcast: crossover(0, 64 << 10, NEVER),
            reduce: crossover(0, 64 << 10, TWO_PHASES_BYTES_MIN),
            all_gather: crossover(128 << 10, 256 << 10, NEVER),
            reduce_scatter: crossover(128 << 10, 256 << 10, 24 << 20),
        }
    }
}

impl Tuning {
    pub(super) fn crossover(&self, kind: Kind) -> &Crossover {
        match kind {
            Kind::AllReduce => &self.all_reduce,
            Kind::Broadcast { .. } => &self.broadcast,
            Kind::Reduce { .. } => &self.reduce,
            Kind::AllGather => &self.all_gather,
            Kind::ReduceScatter => &self.reduce_scatter,
        }
    }

    /// `connection_bytes`: what goes from one rank to another.
    pub(super) fn family(
        &self,
        kind: Kind,
        reducer: Reducer,
        total_bytes: u64,
        connection_bytes: u64,
        geometry: &Geometry,
    ) -> Family {
        let crossover = self.crossover(kind);
        let is_simple = total_bytes >= crossover.large_bytes_min && can_post(reducer, geometry.ranks);
        let in_two_phases =
            total_bytes.saturating_mul(u64::from(geometry.ranks) - 2) >= crossover.large_bytes_min;
        match kind {
            Kind::Reduce { .. } if in_two_phases => Family::AllReduce,
            // One way of each kind has kernels.
            Kind::AllReduce if reducer == Reducer::Ordered => Family::AllReduce,
            _ if reducer == Reducer::Ordered => Family::Ll128x2,
            _ if kind.is_even()
                && total_bytes <= crossover.ll_bytes_max
                && connection_bytes <= geometry.ll_bytes_max() =>
            {
                Family::Ll
            }
            Kind::AllReduce if is_simple => Family::SimpleAllReduce,
            Kind::AllReduce => Family::AllReduce,
            Kind::ReduceScatter if is_simple => Family::Simple,
            _ if total_bytes <= crossover.two_groups_bytes_max || geometry.ranks > 4 => Family::Ll128x2,
            _ => Family::Ll128x4,
        }
    }
}
