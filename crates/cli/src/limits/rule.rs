//! When a size counts for Windlass. Pure.
//!
//! Batches of both sides alternate; the ratio of a pair is Windlass's time over NCCL's, each of its slowest rank. A size counts only
//! where the difference is worth a change of sides and is no accident, in every mode.

use crate::bench::CellDone;

/// The median pair must take at most this part of NCCL's time: what is nearer is no reason to change sides.
const FASTER_LEAST: f64 = 0.95;
/// And the confidence bound at most this part.
const SURELY_BELOW: f64 = 0.98;
/// What Windlass runs anyway may take so much longer.
const SLOWER_MOST: f64 = 1.02;
/// Of the bound, one-sided: five pairs have it by their worst.
const CONFIDENCE: f64 = 0.96;

/// What a size must show to count for Windlass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standard {
    /// That Windlass is faster, surely and by enough.
    Faster,
    /// That NCCL is not surely faster: where Windlass runs the collective anyway, and a call that it left to NCCL would take longer than NCCL
    /// alone, as NCCL's work is then followed.
    NotSlower,
}

/// Which of the two was faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Windlass, surely and by enough.
    Windlass,
    /// NCCL, or the difference is surely too small.
    Nccl,
    /// The pairs vary too much to tell, or are too few.
    Unclear,
    /// Windlass left it to NCCL.
    NotOurs,
}

/// What all rounds of one measurement say together, of calls that are Windlass's only by this path.
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

/// The median of sorted values, between its lower and its upper confidence bound: order statistics, which suppose nothing of how values are
/// spread. None where there are too few values for any.
fn bounds(sorted: &[f64]) -> Option<(f64, f64, f64)> {
    let count = sorted.len();
    // The chance that at most so many of the values lie below the true median.
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

    /// Five pairs are bounded by their worst, more by fewer; four tell nothing.
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

    /// Enough and surely; all other things are NCCL's or not known.
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
        // One outlier of ten is none.
        let mut ten = [0.9; 10];
        ten[3] = 3.0;
        assert_eq!(of(&ten), Finding::Windlass);
    }

    /// What Windlass runs anyway stays unless NCCL is surely faster.
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
