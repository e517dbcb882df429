//! From which size on which kernel serves.

use super::kernel::Family;
use super::{Geometry, Kind};

/// Sizes at which one kind changes its kernels, in total bytes: count times element, of all-gather, reduce-scatter and
/// all-to-all times ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crossover {
    /// Up to here it goes by pairs, if they have the lanes for it; 0: never. A broadcast and a reduce never do: pairs are
    /// for what every rank sends every other one.
    pub pairs_bytes_max: u64,
    /// Above pairs up to here it goes by lines in units of two groups, above of four. An all-reduce, and more than 4 ranks,
    /// always have two.
    pub two_groups_bytes_max: u64,
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
    /// Of [`Kind::AlltoAll`].
    pub all_to_all: Crossover,
}

impl Default for Tuning {
    /// Measured on 4 × H200 with 32 blocks and little different on 2 (`docs/measurements/2026-11-22-collectives`).
    fn default() -> Self {
        let crossover =
            |pairs_bytes_max, two_groups_bytes_max| Crossover { pairs_bytes_max, two_groups_bytes_max };
        Tuning {
            all_reduce: crossover(64 << 10, u64::MAX),
            broadcast: crossover(0, 512 << 10),
            reduce: crossover(0, 0),
            all_gather: crossover(0, 0),
            reduce_scatter: crossover(128 << 10, 0),
            all_to_all: crossover(32 << 10, 512 << 10),
        }
    }
}

impl Tuning {
    /// `pair_bytes`: what goes from one rank to another.
    pub(super) fn family(
        &self,
        kind: Kind,
        total_bytes: u64,
        pair_bytes: u64,
        geometry: &Geometry,
    ) -> Family {
        let crossover = match kind {
            Kind::AllReduce => &self.all_reduce,
            Kind::Broadcast { .. } => &self.broadcast,
            Kind::Reduce { .. } => &self.reduce,
            Kind::AllGather => &self.all_gather,
            Kind::ReduceScatter => &self.reduce_scatter,
            Kind::AlltoAll => &self.all_to_all,
        };
        if kind.is_even()
            && total_bytes <= crossover.pairs_bytes_max
            && pair_bytes <= geometry.pairs_bytes_max()
        {
            Family::Pairs
        } else if kind == Kind::AllReduce {
            Family::AllReduce
        } else if total_bytes <= crossover.two_groups_bytes_max || geometry.ranks > 4 {
            Family::Lines2
        } else {
            Family::Lines4
        }
    }
}
