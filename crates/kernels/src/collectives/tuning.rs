//! Decides which kernel serves which size.

use super::kernel::{Family, Reducer, can_post, has_two_groups};
use super::{Geometry, Kind};

/// The sizes at which a kind of collective changes its kernel, in total bytes: count times element, for all-gather and reduce-scatter also
/// times ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crossover {
    /// Up to here it goes by LL, if there are channels enough; 0: never. A broadcast and a reduce never do: LL is for what every rank sends every
    /// other one.
    pub ll_bytes_max: u64,
    /// Above LL up to here it goes in one shot, as far as the rings for that hold it; 0: never. A broadcast
    /// and a reduce never do.
    pub one_shot_bytes_max: u64,
    /// Above these up to here it goes by LL128 in packets of two groups, above in packets of four. An all-reduce, and more than 4 ranks, always have
    /// two.
    pub two_groups_bytes_max: u64,
    /// From here it goes the way of large ones. All-reduces and reduce-scatters that sum floats on at most 4 ranks go by Simple packets. A reduce
    /// goes in two phases, if bytes times (ranks - 2) reach this size.
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
/// In one phase the root of a reduce gets ranks - 1 buffers; in two phases it gets one, some microseconds later. On 4 ranks 1 MB took 9.3 us in
/// one phase and 10.4 in two, 8 MB 73 and 40 (4 × H100). For other numbers of ranks this is a model.
const TWO_PHASES_BYTES_MIN: u64 = 3 << 20;
/// Above, LL128 is faster with 2 ranks: 8.1 us and 8.3 for 3 MiB (2 × H100). Rings for more ranks hold less.
const ALL_GATHER_ONE_SHOT_BYTES_MAX: u64 = 2 << 20;

impl Default for Tuning {
    /// Measured on 2 × H200 with grids of 32 blocks; from 4 × H200 only that Simple packets pay there sooner
    /// (`docs/measurements/2026-11-22-collectives`). One-shot follows LL, which is faster at 64 KiB: 2.97 us and 3.24 for fp32 (2 × H100).
    fn default() -> Self {
        let crossover = |ll_bytes_max, two_groups_bytes_max, large_bytes_min| Crossover {
            ll_bytes_max,
            one_shot_bytes_max: u64::MAX,
            two_groups_bytes_max,
            large_bytes_min,
        };
        Tuning {
            all_reduce: crossover(64 << 10, u64::MAX, 12 << 20),
            broadcast: crossover(0, 64 << 10, NEVER),
            reduce: crossover(0, 64 << 10, TWO_PHASES_BYTES_MIN),
            all_gather: Crossover {
                one_shot_bytes_max: ALL_GATHER_ONE_SHOT_BYTES_MAX,
                ..crossover(128 << 10, 256 << 10, NEVER)
            },
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

    /// `connection_bytes`: bytes from one rank to another.
    pub(super) fn family(
        &self,
        kind: Kind,
        reducer: Reducer,
        total_bytes: u64,
        connection_bytes: u64,
        geometry: &Geometry,
    ) -> Family {
        let crossover = self.crossover(kind);
        // What only fixed order makes native has kernels of `AllReduce` and `Ll128x2` alone.
        let is_usual = kind.is_even() && reducer != Reducer::Ordered;
        let is_ll =
            is_usual && total_bytes <= crossover.ll_bytes_max && connection_bytes <= geometry.ll_bytes_max();
        let is_one_shot = is_usual
            && total_bytes <= crossover.one_shot_bytes_max
            && connection_bytes <= geometry.one_shot_bytes_max();
        let is_simple = total_bytes >= crossover.large_bytes_min && can_post(reducer, geometry.ranks);
        let in_two_phases =
            total_bytes.saturating_mul(u64::from(geometry.ranks) - 2) >= crossover.large_bytes_min;
        match kind {
            _ if is_ll => Family::Ll,
            _ if is_one_shot => Family::one_shot(kind, geometry.ranks),
            Kind::Reduce { .. } if in_two_phases => Family::two_phases(reducer, geometry.ranks),
            Kind::AllReduce if is_simple => Family::SimpleAllReduce,
            Kind::AllReduce => Family::two_phases(reducer, geometry.ranks),
            Kind::ReduceScatter if is_simple => Family::Simple,
            _ => self.over_ll128(kind, reducer, total_bytes, geometry.ranks),
        }
    }

    /// The family over LL128 in one phase.
    pub(super) fn over_ll128(&self, kind: Kind, reducer: Reducer, total_bytes: u64, ranks: u32) -> Family {
        let is_small =
            total_bytes <= self.crossover(kind).two_groups_bytes_max && has_two_groups(reducer, ranks);
        if reducer == Reducer::Ordered || ranks > 4 || is_small { Family::Ll128x2 } else { Family::Ll128x4 }
    }
}
