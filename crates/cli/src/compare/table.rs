//! Writes the comparison as a table for people.

use super::counting::{Count, Counters};
use super::noise::{CHANCE_MAX, RUNS_MIN};
use super::row::Row;
use crate::bench::statistics::Spread;
use crate::text;
use windlass_base::stats::report::size;

/// One line for each quantity.
pub fn table(rows: &[Row]) -> String {
    let head = ["", "without", "with", "ratio of pairs", "with Windlass"];
    text::table(&head, rows.iter().map(|row| cells(row).to_vec()), &[])
}

/// The cells of a quantity.
fn cells(row: &Row) -> [String; 5] {
    // Times of less than 10 ms would have many zeros.
    let is_short = row.unit == "s" && row.without.median.max(row.with.median) < 0.01;
    let (unit, times) = if is_short { ("ms", 1e3) } else { (&*row.unit, 1.0) };
    let figure = |value: f64| figure(value * times);
    let name = if row.unit.is_empty() { row.name.clone() } else { format!("{}, {unit}", row.name) };
    let ratio = row.ratio.map_or_else(|| "-".into(), |ratio| spread(&ratio, |value| format!("{value:.3}")));
    [name, spread(&row.without, figure), spread(&row.with, figure), ratio, row.difference.words().into()]
}

/// Windlass's counters of a run, with a line for each function and path; empty if nothing was counted.
pub fn counters(counters: &Counters) -> String {
    let Counters { processes, communicators, calls } = counters;
    if calls.is_empty() {
        return String::new();
    }
    let row = |count: &Count| {
        vec![count.function.clone(), count.path.clone(), count.calls.to_string(), size(count.bytes)]
    };
    format!(
        "\nWindlass's counters of the last run with it, of all ranks together (processes: {processes}, communicators: {communicators}). \
         Windlass counts calls and bytes, not the time inside calls.\n{}",
        text::table(&["function", "path", "calls", "bytes"], calls.iter().map(row), &[2, 3])
    )
}

/// The rule that distinguishes differences from noise.
pub fn rule(pairs: usize) -> String {
    if pairs < RUNS_MIN {
        return format!(
            "Fewer than {RUNS_MIN} runs of each side cannot tell a difference from noise: see --runs."
        );
    }
    let one_in = 1.0 / CHANCE_MAX;
    let needs = match pairs {
        3 => " Of 3 runs each, every run of one side must lie below every run of the other.",
        _ => "",
    };
    format!(
        "A difference is within noise where chance alone gives one as clear in more than 1 of {one_in:.0} comparisons of equal \
         programs (exact rank-sum test).{needs}"
    )
}

/// The median, and the lowest and highest value.
fn spread(spread: &Spread, figure: impl Fn(f64) -> String) -> String {
    format!("{} ({} to {})", figure(spread.median), figure(spread.min), figure(spread.max))
}

/// A figure with four digits, or with all digits before the point.
fn figure(value: f64) -> String {
    let size = value.abs();
    match size {
        _ if value == 0.0 => "0".into(),
        _ if size >= 1000.0 => format!("{value:.0}"),
        _ if size >= 100.0 => format!("{value:.1}"),
        _ if size >= 10.0 => format!("{value:.2}"),
        _ if size >= 0.01 => format!("{value:.3}"),
        _ => format!("{value:.2e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line has a name with its unit, medians with ranges, the ratio, and the difference in words.
    #[test]
    fn tables() {
        let rows = [
            Row::of("wall time", "s", vec![10.0, 12.0, 11.0], vec![8.0, 9.0, 9.9]),
            Row::of("loss", "", vec![0.0; 3], vec![0.0; 3]),
            Row::of("wall time", "s", vec![0.002; 3], vec![0.0014; 3]),
        ];
        let expected = "\
              without                 with                   ratio of pairs          with Windlass
wall time, s  11.00 (10.00 to 12.00)  9.000 (8.000 to 9.900)  0.800 (0.750 to 0.900)  lower
loss          0 (0 to 0)              0 (0 to 0)              -                       within noise
wall time, ms  2.000 (2.000 to 2.000)  1.400 (1.400 to 1.400)  0.700 (0.700 to 0.700)  lower
";
        let words = |text: &str| -> Vec<Vec<String>> {
            text.lines()
                .map(|line| {
                    line.split("  ")
                        .map(|cell| cell.trim().to_owned())
                        .filter(|cell| !cell.is_empty())
                        .collect()
                })
                .collect()
        };
        assert_eq!(words(&table(&rows)), words(expected), "{}", table(&rows));
    }

    /// The rule tells what three runs need, and how many are too few.
    #[test]
    fn rules() {
        assert!(
            rule(3).contains("in more than 1 of 10 comparisons") && rule(3).contains("every run of one side")
        );
        assert!(!rule(5).contains("every run"));
        assert!(rule(2).starts_with("Fewer than 3 runs"));
    }

    /// Large and small figures stay short.
    #[test]
    fn figures() {
        let figures = [0.0, 0.000_123, 0.05, 1.0, 12.345, 123.45, 19_032.4].map(figure);
        assert_eq!(figures, ["0", "1.23e-4", "0.050", "1.000", "12.35", "123.5", "19032"]);
    }
}
