//! Reduces the figures of one quantity in all runs to a row of the table.

use super::noise::{CHANCE_MAX, RUNS_MIN, chance};
use crate::bench::statistics::{Spread, spread};
use serde::Serialize;

/// A quantity, measured in every run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub name: String,
    /// Empty if the unit is unknown.
    pub unit: String,
    pub without: Spread,
    pub with: Spread,
    /// The figure with Windlass divided by the one without, for each pair of runs; none if a figure is 0.
    pub ratio: Option<Spread>,
    /// In which part of comparisons of equal programs chance alone gives a difference as clear.
    pub chance: f64,
    pub difference: Difference,
    /// The figures themselves, one of each side for each pair of runs.
    pub values_without: Vec<f64>,
    pub values_with: Vec<f64>,
}

/// How the figures with Windlass compare to those without.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Difference {
    Lower,
    Higher,
    WithinNoise,
    TooFewRuns,
    /// The runs with Windlass had no communicator of it.
    NoVerdict,
}

impl Difference {
    pub fn words(self) -> &'static str {
        match self {
            Difference::Lower => "lower",
            Difference::Higher => "higher",
            Difference::WithinNoise => "within noise",
            Difference::TooFewRuns => "too few runs",
            Difference::NoVerdict => "no verdict",
        }
    }
}

impl Row {
    /// The row of the figures of pairs of runs: both sides have equally many.
    pub fn of(name: impl Into<String>, unit: impl Into<String>, without: Vec<f64>, with: Vec<f64>) -> Row {
        let chance = chance(&with, &without);
        let of_side = |values: &[f64]| spread(&[values.to_vec()]);
        let (spread_without, spread_with) = (of_side(&without), of_side(&with));
        let has_zero = without.contains(&0.0);
        let ratios: Vec<f64> = with.iter().zip(&without).map(|(with, without)| with / without).collect();
        Row {
            name: name.into(),
            unit: unit.into(),
            difference: judge(chance, with.len(), spread_with.median - spread_without.median),
            ratio: (!has_zero && !ratios.is_empty()).then(|| of_side(&ratios)),
            without: spread_without,
            with: spread_with,
            chance,
            values_without: without,
            values_with: with,
        }
    }
}

fn judge(chance: f64, runs: usize, more: f64) -> Difference {
    if runs < RUNS_MIN {
        return Difference::TooFewRuns;
    }
    // Three runs each give exactly this chance, except for rounding.
    if chance > CHANCE_MAX + 1e-9 || more == 0.0 {
        return Difference::WithinNoise;
    }
    if more < 0.0 { Difference::Lower } else { Difference::Higher }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// The ratio is the median of the pairs' ratios; sides that do not overlap differ.
    #[test]
    fn lower() {
        let row = Row::of("wall time", "s", vec![10.0, 12.0, 11.0], vec![8.0, 9.0, 9.9]);
        assert_eq!(row.without, Spread { median: 11.0, min: 10.0, max: 12.0 });
        assert_eq!(row.with, Spread { median: 9.0, min: 8.0, max: 9.9 });
        let ratio = row.ratio.unwrap();
        assert!((ratio.median - 0.8).abs() < 1e-12 && (ratio.max - 0.9).abs() < 1e-12, "{ratio:?}");
        assert_eq!(row.difference, Difference::Lower);
    }

    /// The other results: higher, sides that overlap, too few runs, equal sides.
    #[test]
    fn differences() {
        let of = |without: &[f64], with: &[f64]| Row::of("x", "", without.to_vec(), with.to_vec()).difference;
        assert_eq!(of(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0]), Difference::Higher);
        assert_eq!(of(&[1.0, 2.0, 4.0], &[3.0, 5.0, 6.0]), Difference::WithinNoise);
        assert_eq!(of(&[1.0, 2.0], &[3.0, 5.0]), Difference::TooFewRuns);
        assert_eq!(of(&[0.0; 3], &[0.0; 3]), Difference::WithinNoise);
        assert_eq!(Row::of("x", "", vec![0.0; 3], vec![1.0; 3]).ratio, None);
    }
}
