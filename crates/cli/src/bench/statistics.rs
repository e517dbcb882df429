//! Repetitions of a measurement on all ranks, reduced to three numbers.

use serde::{Deserialize, Serialize};

/// Over repetitions, of the slowest rank of each.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

/// Takes one list of times a rank, equally long: a repetition took as long as its slowest rank.
pub fn spread(ranks: &[Vec<f64>]) -> Spread {
    let mut times = slowest(ranks);
    times.sort_by(f64::total_cmp);
    Spread {
        median: median(&times),
        min: times.first().copied().unwrap_or(0.0),
        max: times.last().copied().unwrap_or(0.0),
    }
}

/// What the first of a series took, and what the others come to; of the slowest rank of each.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Steady {
    pub first: f64,
    pub median: f64,
    pub worst: f64,
}

/// Takes one list of times a rank, in the order in which they were taken.
pub fn steady(ranks: &[Vec<f64>]) -> Steady {
    let mut times = slowest(ranks).into_iter();
    let first = times.next().unwrap_or(0.0);
    let mut others: Vec<f64> = times.collect();
    others.sort_by(f64::total_cmp);
    Steady { first, median: median(&others), worst: others.last().copied().unwrap_or(0.0) }
}

/// The second of two sides over the first, by repetition: each of its slowest rank.
pub fn ratios(sides: [&[Vec<f64>]; 2]) -> Vec<f64> {
    let [first, second] = sides.map(slowest);
    first.into_iter().zip(second).map(|(first, second)| second / first).collect()
}

/// Of each repetition the slowest rank's time.
fn slowest(ranks: &[Vec<f64>]) -> Vec<f64> {
    let repetitions = ranks.iter().map(Vec::len).min().unwrap_or(0);
    let slowest = |repetition: usize| ranks.iter().map(|times| times[repetition]).fold(0.0, f64::max);
    (0..repetitions).map(slowest).collect()
}

/// Of what calls cost the host, all ranks' together, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostTimes {
    pub median: f64,
    pub p99: f64,
}

/// None without a call.
pub fn host_times(ranks: &[Vec<u32>]) -> Option<HostTimes> {
    let mut times: Vec<f64> = ranks.iter().flatten().map(|ns| f64::from(*ns)).collect();
    times.sort_by(f64::total_cmp);
    let p99 = *times.get((times.len() * 99 / 100).min(times.len().checked_sub(1)?))?;
    Some(HostTimes { median: median(&times), p99 })
}

/// The median of sorted values; the mean of the middle two of an even number.
fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        length if length % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

/// The geometric mean, the fair one for ratios.
pub fn geometric_mean(values: &[f64]) -> f64 {
    (values.iter().map(|value| value.ln()).sum::<f64>() / values.len().max(1) as f64).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The slowest rank counts in each repetition, then the median over repetitions.
    #[test]
    fn slowest_then_median() {
        let spread = spread(&[vec![1.0, 9.0, 3.0], vec![2.0, 1.0, 4.0]]);
        assert_eq!(spread, Spread { median: 4.0, min: 2.0, max: 9.0 });
    }

    /// The first stands alone, whatever it took.
    #[test]
    fn first_then_steady() {
        let found = steady(&[vec![90.0, 9.0, 3.0, 1.0], vec![2.0, 1.0, 4.0, 2.0]]);
        assert_eq!(found, Steady { first: 90.0, median: 4.0, worst: 9.0 });
        assert_eq!(steady(&[vec![7.0]]), Steady { first: 7.0, median: 0.0, worst: 0.0 });
    }

    /// Even numbers and none.
    #[test]
    fn medians() {
        assert_eq!(median(&[1.0, 2.0, 4.0, 8.0]), 3.0);
        assert_eq!(spread(&[]).median, 0.0);
    }

    /// All ranks' calls are one list; a hundredth of them lies above the second number.
    #[test]
    fn host_calls() {
        let ranks = [(1..=100).collect(), (101..=200).collect()];
        assert_eq!(host_times(&ranks), Some(HostTimes { median: 100.5, p99: 199.0 }));
        assert_eq!(host_times(&[vec![7], vec![]]), Some(HostTimes { median: 7.0, p99: 7.0 }));
        assert_eq!(host_times(&[vec![], vec![]]), None);
    }

    /// Pairs are of one repetition, and of the slowest rank of each side, whichever that is.
    #[test]
    fn pairs() {
        let (first, second) = ([vec![1.0, 2.0], vec![2.0, 1.0]], [vec![1.0, 1.0], vec![0.5, 3.0]]);
        assert_eq!(super::ratios([&first, &second]), [0.5, 1.5]);
    }

    /// Twice as fast and twice as slow cancel out.
    #[test]
    fn ratios() {
        assert!((geometric_mean(&[0.5, 2.0]) - 1.0).abs() < 1e-12);
    }
}
