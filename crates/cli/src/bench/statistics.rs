//! Reduces the repetitions of a measurement on all ranks to three numbers.

use serde::{Deserialize, Serialize};

/// Of repetitions, each of which counts by its slowest rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

/// Takes one list of times for each rank, equally long. A repetition takes as long as its slowest rank.
pub fn spread(ranks: &[Vec<f64>]) -> Spread {
    let mut times = slowest(ranks);
    times.sort_by(f64::total_cmp);
    Spread {
        median: median(&times),
        min: times.first().copied().unwrap_or(0.0),
        max: times.last().copied().unwrap_or(0.0),
    }
}

/// The second side's time divided by the first's, for each repetition by the slowest rank of each side.
pub fn ratios(sides: [&[Vec<f64>]; 2]) -> Vec<f64> {
    let [first, second] = sides.map(slowest);
    first.into_iter().zip(second).map(|(first, second)| second / first).collect()
}

/// The slowest rank's time of each repetition.
fn slowest(ranks: &[Vec<f64>]) -> Vec<f64> {
    let repetitions = ranks.iter().map(Vec::len).min().unwrap_or(0);
    let slowest = |repetition: usize| ranks.iter().map(|times| times[repetition]).fold(0.0, f64::max);
    (0..repetitions).map(slowest).collect()
}

/// Nanoseconds of calls on the host, over all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostTimes {
    pub median: f64,
    pub p99: f64,
}

/// None if there was no call.
pub fn host_times(ranks: &[Vec<u32>]) -> Option<HostTimes> {
    let mut times: Vec<f64> = ranks.iter().flatten().map(|ns| f64::from(*ns)).collect();
    times.sort_by(f64::total_cmp);
    let p99 = *times.get((times.len() * 99 / 100).min(times.len().checked_sub(1)?))?;
    Some(HostTimes { median: median(&times), p99 })
}

/// The median of sorted values; of an even number, the mean of the middle two.
fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        length if length % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

/// The geometric mean, which treats ratios above and below 1 alike.
pub fn geometric_mean(values: &[f64]) -> f64 {
    (values.iter().map(|value| value.ln()).sum::<f64>() / values.len().max(1) as f64).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A repetition counts by its slowest rank; the median is over repetitions.
    #[test]
    fn slowest_then_median() {
        let spread = spread(&[vec![1.0, 9.0, 3.0], vec![2.0, 1.0, 4.0]]);
        assert_eq!(spread, Spread { median: 4.0, min: 2.0, max: 9.0 });
    }

    /// An even number of values, and no values.
    #[test]
    fn medians() {
        assert_eq!(median(&[1.0, 2.0, 4.0, 8.0]), 3.0);
        assert_eq!(spread(&[]).median, 0.0);
    }

    /// The calls of all ranks are one list, of which a hundredth is above the second number.
    #[test]
    fn host_calls() {
        let ranks = [(1..=100).collect(), (101..=200).collect()];
        assert_eq!(host_times(&ranks), Some(HostTimes { median: 100.5, p99: 199.0 }));
        assert_eq!(host_times(&[vec![7], vec![]]), Some(HostTimes { median: 7.0, p99: 7.0 }));
        assert_eq!(host_times(&[vec![], vec![]]), None);
    }

    /// A ratio is of one repetition, by the slowest rank of each side.
    #[test]
    fn pairs() {
        let (first, second) = ([vec![1.0, 2.0], vec![2.0, 1.0]], [vec![1.0, 1.0], vec![0.5, 3.0]]);
        assert_eq!(super::ratios([&first, &second]), [0.5, 1.5]);
    }

    /// Twice as fast and twice as slow have a mean of 1.
    #[test]
    fn ratios() {
        assert!((geometric_mean(&[0.5, 2.0]) - 1.0).abs() < 1e-12);
    }
}
