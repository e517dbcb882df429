//! The exact rank-sum test (Wilcoxon; Mann and Whitney): how likely chance alone gives a difference as clear as the one that was seen.
//! It assumes no distribution of times, and needs few runs.

/// A difference counts if chance gives one as clear in at most this part of all comparisons of equal programs.
pub const CHANCE_MAX: f64 = 0.1;

/// With fewer runs of each side no difference can be that clear.
pub const RUNS_MIN: usize = 3;

/// The most runs of each side for which the test is exact and fast.
pub const RUNS_MAX: usize = 30;

/// The part of all ways to deal these values to both sides with the sides at least as far apart. Equal values share their ranks.
pub fn chance(one: &[f64], other: &[f64]) -> f64 {
    let ranks = doubled_ranks(one, other);
    let all: usize = ranks.iter().sum();
    let seen: usize = ranks[..one.len()].iter().sum();
    // Over all ways to deal, sums of ranks are distributed symmetrically around their mean.
    let mean_by_total = |sum: usize| (sum * ranks.len()).abs_diff(all * one.len());
    let sums = deals(&ranks, one.len());
    let total: f64 = sums.iter().sum();
    let as_clear = sums.iter().enumerate().filter(|(sum, _)| mean_by_total(*sum) >= mean_by_total(seen));
    as_clear.map(|(_, ways)| ways).sum::<f64>() / total
}

/// Twice the rank of each value, first those of `one`. Equal values get the mean of their ranks.
fn doubled_ranks(one: &[f64], other: &[f64]) -> Vec<usize> {
    let all: Vec<f64> = one.iter().chain(other).copied().collect();
    let rank = |value: &f64| {
        let below = all.iter().filter(|other| *other < value).count();
        let equal = all.iter().filter(|other| *other == value).count();
        2 * below + equal + 1
    };
    all.iter().map(rank).collect()
}

/// For each sum, in how many ways `taken` of the ranks give it.
fn deals(ranks: &[usize], taken: usize) -> Vec<f64> {
    let sums = ranks.iter().sum::<usize>() + 1;
    let mut ways = vec![vec![0.0; sums]; taken + 1];
    ways[0][0] = 1.0;
    for rank in ranks {
        for count in (1..=taken).rev() {
            let (fewer, one_more) = ways.split_at_mut(count);
            for (with, without) in one_more[0][*rank..].iter_mut().zip(&fewer[count - 1]) {
                *with += without;
            }
        }
    }
    ways.pop().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(one: f64, other: f64) {
        assert!((one - other).abs() < 1e-12, "{one}, expected {other}");
    }

    /// Known values for sides that do not overlap, of 3, 4 and 5 runs each.
    #[test]
    fn apart() {
        close(chance(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0]), 2.0 / 20.0);
        close(chance(&[4.0, 5.0, 6.0, 7.0], &[0.0, 1.0, 2.0, 3.0]), 2.0 / 70.0);
        close(chance(&[1.0, 2.0, 3.0, 4.0, 5.0], &[6.0, 7.0, 8.0, 9.0, 10.0]), 2.0 / 252.0);
    }

    /// Sides of three values that overlap.
    #[test]
    fn overlapping() {
        close(chance(&[1.0, 2.0, 4.0], &[3.0, 5.0, 6.0]), 4.0 / 20.0);
        assert!(chance(&[1.0, 4.0, 5.0], &[2.0, 3.0, 6.0]) > 0.9);
    }

    /// Equal values give no difference; of three runs each, sides that differ throughout are as clear as possible.
    #[test]
    fn equal_values() {
        close(chance(&[2.0; 3], &[2.0; 3]), 1.0);
        close(chance(&[2.0; 3], &[1.0; 3]), 0.1);
        close(chance(&[2.0, 2.0, 1.0], &[1.0, 1.0, 2.0]), 1.0);
    }

    /// The most runs are computed quickly and without overflow.
    #[test]
    fn many_runs() {
        let values: Vec<f64> = (0..2 * RUNS_MAX).map(|value| value as f64).collect();
        let (low, high) = values.split_at(RUNS_MAX);
        let chance = chance(low, high);
        assert!(chance > 0.0 && chance < 1e-16, "{chance}");
    }
}
