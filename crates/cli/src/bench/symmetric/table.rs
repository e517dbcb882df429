//! Writes costs and growth as tables.

use super::usage::Resource;
use super::{Cost, Growth, Symmetric, What};
use crate::bench::record::time;
use crate::text;

/// Both tables, and why windows are missing.
pub fn table(found: &Symmetric) -> String {
    let mut text = costs(&found.costs);
    text += &growths(&found.growths);
    if let Some(reason) = &found.without_windows {
        text += &format!("bench: no windows and no cycles: {reason}\n");
    }
    text
}

fn costs(costs: &[Cost]) -> String {
    let head = [
        "symmetric memory, us",
        "bytes",
        "NCCL, first",
        "median",
        "worst",
        "windlass, first",
        "median",
        "worst",
    ];
    let head = head.into_iter().chain(["pool hits", "misses"]);
    let mut lines = vec![head.map(str::to_owned).collect::<Vec<_>>()];
    for cost in costs {
        let (plain, windlass, pool) = (cost.plain_us, cost.windlass_us, cost.windlass_pool);
        let times = [plain.first, plain.median, plain.worst, windlass.first, windlass.median, windlass.worst]
            .map(time);
        let mut line = vec![words(cost.what).to_owned(), text::size(cost.bytes)];
        line.extend(times);
        line.extend([pool.hits, pool.misses].map(|count| count.to_string()));
        lines.push(line);
    }
    text::table(&lines, &[1, 2, 3, 4, 5, 6, 7, 8, 9])
}

fn words(what: What) -> &'static str {
    match what {
        What::Alloc => "alloc",
        What::Free => "free",
        What::AllocAndFree => "alloc and free",
        What::Register => "register",
        What::Deregister => "deregister",
        What::Cycle => "whole cycle",
    }
}

fn growths(growths: &[Growth]) -> String {
    let head = ["cycles add", "bytes", "cycles", "NCCL, before", "added", "windlass, before", "added"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for growth in growths {
        let numbers =
            [growth.plain.before, growth.plain.added, growth.windlass.before, growth.windlass.added];
        let (words, in_words): (_, fn(i64) -> String) = match growth.grown {
            Resource::MemoryBytes => ("device memory, MiB", mib),
            Resource::MapLines => ("mappings", |count| count.to_string()),
            Resource::MapBytes => ("mapped addresses, MiB", mib),
        };
        let mut line = vec![words.to_owned(), text::size(growth.bytes), growth.cycles.to_string()];
        line.extend(numbers.map(in_words));
        lines.push(line);
    }
    if lines.len() == 1 { String::new() } else { text::table(&lines, &[1, 2, 3, 4, 5, 6]) }
}

fn mib(bytes: i64) -> String {
    format!("{:.2}", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::super::{Grown, Pool};
    use super::*;
    use crate::bench::statistics::Steady;

    fn cells(line: &str) -> Vec<&str> {
        line.split_whitespace().collect()
    }

    /// There is a line for each cost and growth, in the units of the heading. Without cycles there is the reason.
    #[test]
    fn tables() {
        let times = |first, median, worst| Steady { first, median, worst };
        let cost = Cost {
            what: What::AllocAndFree,
            bytes: 64 << 20,
            repetitions: 52,
            plain_us: times(5000.4, 2100.0, 2200.0),
            windlass_us: times(2150.0, 0.75, 12.25),
            windlass_pool: Pool { hits: 51, misses: 1 },
        };
        let growth = |grown, added| Growth {
            grown,
            bytes: 2 << 20,
            cycles: 1000,
            plain: Grown { before: 3 << 20, added: 1 << 19 },
            windlass: Grown { before: 7, added },
        };
        let mut found = Symmetric { costs: vec![cost], ..Symmetric::default() };
        found.growths = vec![growth(Resource::MapLines, -2), growth(Resource::MemoryBytes, 0)];
        let text = table(&found);
        let lines: Vec<_> = text.lines().map(cells).collect();
        let expected =
            ["alloc", "and", "free", "64M", "5000", "2100", "2200", "2150", "0.750", "12.25", "51", "1"];
        assert_eq!(lines[1], expected);
        assert_eq!(lines[3], ["mappings", "2M", "1000", "3145728", "524288", "7", "-2"]);
        assert_eq!(lines[4][4..], ["1000", "3.00", "0.50", "0.00", "0.00"]);
        assert_eq!(lines.len(), 5);
        found = Symmetric { without_windows: Some("it is too old".into()), ..Symmetric::default() };
        assert_eq!(table(&found).lines().nth(1), Some("bench: no windows and no cycles: it is too old"));
    }
}
