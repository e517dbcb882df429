//! Decides whether a size counts for Windlass. Pure.
//!
//! Batches of both sides alternate. The ratio of a pair is Windlass's time divided by NCCL's, each by its slowest rank. A size
//! counts only if in every mode the difference is large enough and no accident.

use crate::bench::CellDone;

/// The median pair must take at most this part of NCCL's time: a smaller gain is no reason to leave NCCL.
const FASTER_LEAST: f64 = 0.95;
/// The upper confidence bound must be at most this part.
const SURELY_BELOW: f64 = 0.98;
/// A collective that Windlass runs anyway may take at most this part.
const SLOWER_MOST: f64 = 1.02;
/// The one-sided confidence of the bound. With five pairs the bound is the worst pair.
const CONFIDENCE: f64 = 0.96;

/// What a measurement must show so that the size counts for Windlass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standard {
    /// Windlass is faster, by enough and with confidence.
    Faster,
    /// It is not certain that NCCL is faster. This suffices where Windlass runs the collective anyway: a call left to NCCL would take longer
    /// than with NCCL alone, since Windlass follows NCCL's work.
    NotSlower,
}

/// The faster side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Windlass, by enough and with confidence.
    Windlass,
    /// NCCL, or the difference is certainly too small.
    Nccl,
    /// Not known: the pairs vary too much or are too few.
    Unclear,
    /// Windlass left the calls to NCCL.
    NotOurs,
}

/// The finding of all rounds of one measurement together. Only calls on `path` are Windlass's.
pub fn finding<'a>(
    rounds: impl Iterator<Item = &'a CellDone> + Clone,
    path: &str,
    standard: Standard,
) -> Finding {
    if rounds.clone().any(|done| done.path != path) {
        return Finding::NotOurs;
    }
    of_pairs(rounds.flat_map(|done| done.ratios.iter().copied()).collect(), standard)
}

fn of_pairs(mut ratios: Vec<f64>, standard: Standard) -> Finding {
    ratios.sort_by(f64::total_cmp);
    let is_usable = ratios.iter().all(|ratio| ratio.is_finite() && *ratio > 0.0);
    let Some((least, median, most)) = bounds(&ratios).filter(|_| is_usable) else { return Finding::Unclear };
    match standard {
        Standard::NotSlower if least > SLOWER_MOST => Finding::Nccl,
        Standard::NotSlower => Finding::Windlass,
        Standard::Faster if median <= FASTER_LEAST && most <= SURELY_BELOW => Finding::Windlass,
        Standard::Faster if least > FASTER_LEAST => Finding::Nccl,
        Standard::Faster => Finding::Unclear,
    }
}

/// The median of sorted values, between its lower and upper confidence bound. The bounds are order statistics, which assume no
/// distribution. None if there are too few values.
fn bounds(sorted: &[f64]) -> Option<(f64, f64, f64)> {
    let count = sorted.len();
    // The chance that at most `below` of the values are below the true median.
    let mut chance = 0.5_f64.powi(i32::try_from(count).ok()?);
    let mut sum = 0.0;
    for below in 0..count {
        sum += chance;
        if sum >= CONFIDENCE {
            let median = (sorted[(count - 1) / 2] + sorted[count / 2]) / 2.0;
            return Some((sorted[count - 1 - below], median, sorted[below]));
        }
        chance *= (count - below) as f64 / (below + 1) as f64;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With five pairs the worst is the bound; with more, fewer are beyond it; four give none.
    #[test]
    fn order_statistics() {
        let values = |count: usize| (1..=count).map(|value| value as f64).collect::<Vec<_>>();
        assert_eq!(bounds(&values(4)), None);
        assert_eq!(bounds(&[]), None);
        assert_eq!(bounds(&values(5)), Some((1.0, 3.0, 5.0)));
        assert_eq!(bounds(&values(7)), Some((1.0, 4.0, 7.0)));
        assert_eq!(bounds(&values(9)), Some((2.0, 5.0, 8.0)));
        assert_eq!(bounds(&values(10)), Some((2.0, 5.5, 9.0)));
        let (least, median, most) = bounds(&values(101)).unwrap();
        assert!(least > 40.0 && median == 51.0 && most < 62.0, "{least} {most}");
    }

    /// Windlass wins by enough and with confidence; otherwise NCCL wins, or it is not known.
    #[test]
    fn findings() {
        let of = |ratios: &[f64]| of_pairs(ratios.to_vec(), Standard::Faster);
        assert_eq!(of(&[0.5; 5]), Finding::Windlass);
        assert_eq!(of(&[0.95; 5]), Finding::Windlass);
        assert_eq!(of(&[0.96; 5]), Finding::Nccl);
        assert_eq!(of(&[1.2; 5]), Finding::Nccl);
        assert_eq!(of(&[0.9, 0.9, 0.9, 0.9, 0.99]), Finding::Unclear);
        assert_eq!(of(&[0.9, 0.9, 0.9, 0.9, 0.97]), Finding::Windlass);
        assert_eq!(of(&[0.9, 1.2, 1.2, 1.2, 1.2]), Finding::Unclear);
        assert_eq!(of(&[0.5; 4]), Finding::Unclear);
        assert_eq!(of(&[0.5, 0.5, 0.5, 0.5, f64::NAN]), Finding::Unclear);
        assert_eq!(of(&[0.0; 5]), Finding::Unclear);
        // One outlier of ten does not count.
        let mut ten = [0.9; 10];
        ten[3] = 3.0;
        assert_eq!(of(&ten), Finding::Windlass);
    }

    /// A collective that Windlass runs anyway stays, unless NCCL is certainly faster.
    #[test]
    fn not_slower() {
        let of = |ratios: &[f64]| of_pairs(ratios.to_vec(), Standard::NotSlower);
        assert_eq!(of(&[0.5; 5]), Finding::Windlass);
        assert_eq!(of(&[1.01; 5]), Finding::Windlass);
        assert_eq!(of(&[1.0, 1.5, 1.5, 1.5, 1.5]), Finding::Windlass);
        assert_eq!(of(&[1.03; 5]), Finding::Nccl);
        assert_eq!(of(&[1.0; 4]), Finding::Unclear);
    }
}
