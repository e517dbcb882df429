//! Writes limits as text: a line for each cell, with its measurements above it.

use super::measure::OfRanks;
use super::rule::{Finding, finding};
use super::search::Task;
use crate::bench::record::{MachineFacts, Versions, date};
use crate::bench::{CellDone, Mode};
use crate::built;
use crate::text;
use std::time::SystemTime;
use windlass_transport::tuning::file::{Cell, HEAD, Key, Multicast, NATIVE_BYTES_MAX};

/// A cell, and the measurements from which it follows.
pub struct Tuned {
    pub cell: Cell,
    /// The task of the cell.
    task: Task,
    measured: Vec<CellDone>,
}

impl Tuned {
    pub fn of(task: &Task, key: Key, native_bytes_max: Option<u64>, measured: &[CellDone]) -> Tuned {
        let mut measured: Vec<CellDone> = measured.iter().filter(|done| task.owns(done)).cloned().collect();
        measured.sort_by_key(|done| (done.bytes, done.cell.mode.name()));
        Tuned { cell: Cell { key, native_bytes_max }, task: *task, measured }
    }

    /// The limit in words, as `all_reduce up to 1M`.
    pub fn words(&self) -> String {
        let name = self.cell.key.collective.name();
        match self.cell.native_bytes_max {
            Some(bytes) => format!("{name} up to {}", text::size(bytes)),
            None => format!("{name} never"),
        }
    }
}

/// A table that sends all sizes of some cells to Windlass, and none of others.
pub fn forced(all: &[Key], nothing: &[Key]) -> String {
    let lines = |keys: &[Key], native_bytes_max: Option<u64>| -> String {
        let both = |key: &Key| [Multicast::No, Multicast::Yes].map(|multicast| Key { multicast, ..*key });
        let cells = keys.iter().flat_map(both).map(|key| Cell { key, native_bytes_max });
        cells.map(|cell| format!("{cell}\n")).collect()
    };
    format!("{HEAD}\n{}{}", lines(all, Some(NATIVE_BYTES_MAX)), lines(nothing, None))
}

/// The lines of one cell, with the date and kind of the measurement at their end.
pub fn block(tuned: &Tuned, how: &str) -> String {
    let date = date(SystemTime::now());
    format!("{}{} # {date}, {how} of {}\n", figures_of(tuned), tuned.cell, built::VERSION)
}

/// The text of a whole file: limits measured at a date on a machine, beside so many idle communicators of each side.
pub fn table(
    (date, machine, versions): &(String, MachineFacts, Versions),
    beside: u32,
    all: &[OfRanks],
) -> String {
    let driver = machine.driver.as_deref().unwrap_or("unknown");
    let mut text = format!(
        "{HEAD}\n# windlass tune {}, {date}, {}, driver {driver}, NCCL {}\n",
        versions.windlass, machine.gpu, versions.nccl
    );
    if machine.simulated {
        text += "# On the simulator: the figures say nothing.\n";
    }
    text += &format!("# Beside {beside} idle communicators of each side. ");
    text += "Bytes of the larger buffer; us of a call, fp32, sums of bf16, or maxima of fp16: NCCL alone, Windlass; who was faster.\n";
    for tuned in all.iter().flat_map(|found| &found.tuned) {
        text += &format!("\n{}{}\n", figures_of(tuned), tuned.cell);
    }
    text
}

fn figures_of(tuned: &Tuned) -> String {
    tuned.measured.iter().map(|done| format!("# {}\n", figures(done, &tuned.task))).collect()
}

/// The figures of one round.
fn figures(done: &CellDone, task: &Task) -> String {
    let who = match finding(std::iter::once(done), task.path(), task.standard(done.cell.bytes)) {
        Finding::Windlass => "windlass",
        Finding::Nccl => "NCCL",
        Finding::Unclear => "unclear",
        Finding::NotOurs => "NCCL ran both",
    };
    let mode = if done.cell.mode == Mode::Graph { "graph" } else { "eager" };
    format!("{:>6} {mode} {:.2} {:.2} {who}", text::size(done.bytes), done.plain.median, done.windlass.median)
}

/// A table of the limits for the user.
pub fn summary(all: &[OfRanks]) -> String {
    let rows = all.iter().flat_map(|found| &found.tuned).map(|Tuned { cell, .. }| {
        let most = cell.native_bytes_max.map_or_else(|| "none".to_owned(), text::size);
        vec![cell.key.ranks.to_string(), cell.key.collective.name().to_owned(), most]
    });
    text::table(&["ranks", "collective", "up to"], rows, &[0, 2])
}

/// The limits in one line, of the usual collectives only: `2 ranks: all_reduce up to 1M, …; 4 ranks: …`.
pub fn line(all: &[OfRanks]) -> String {
    let of = |found: &OfRanks| {
        let is_usual = |tuned: &&Tuned| !tuned.cell.key.collective.is_other();
        let words: Vec<String> = found.tuned.iter().filter(is_usual).map(Tuned::words).collect();
        (!words.is_empty()).then(|| format!("{} ranks: {}", found.group.ranks, words.join(", ")))
    };
    all.iter().filter_map(of).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::adaptive::Group;
    use crate::bench::tests::cell;
    use crate::limits::search::USUAL;
    use windlass_transport::tuning::Collective;
    use windlass_transport::tuning::file::Table;

    const KEY: Key = Key {
        collective: Collective::AllReduce,
        ranks: 4,
        capability: 90,
        multiprocessors: 132,
        multicast: Multicast::No,
    };

    fn done(bytes: u64, ratio: f64) -> CellDone {
        let cell = crate::bench::Cell { element: USUAL[0].element(), ..cell(ratio).cell };
        CellDone { cell, bytes, ratios: vec![ratio; 5], ..crate::bench::tests::cell(ratio) }
    }

    fn found() -> [OfRanks; 1] {
        let place = serde_json::json!({
            "circumstances": [], "capability": 90, "multiprocessors": 132, "multicast": false,
        });
        let group = Group { ranks: 4, place: serde_json::from_value(place).unwrap(), nccl_version: 22809 };
        let tuned = Tuned::of(&USUAL[0], KEY, Some(1024), &[done(2048, 1.2), done(1024, 0.5)]);
        [OfRanks {
            group,
            what: crate::bench::adaptive::What::Native,
            tuned: vec![tuned],
            is_native: true,
            measured: Vec::new(),
        }]
    }

    /// Written limits are read back, with their figures as comments.
    #[test]
    fn read_again() {
        let machine = MachineFacts {
            gpu: "NVIDIA H200".into(),
            driver: Some("570".into()),
            cuda: 12080,
            simulated: false,
            variables: Default::default(),
        };
        let versions = Versions { nccl: "2.28.9".into(), windlass: "0.3.0".into() };
        let text = table(&("2026-01-31T12:00:00Z".into(), machine, versions), 3, &found());
        assert_eq!(Table::parse(&text).unwrap().get(&KEY), Some(Some(1024)));
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].contains("2026-01-31T12:00:00Z, NVIDIA H200, driver 570, NCCL 2.28.9"), "{text}");
        assert!(lines[2].starts_with("# Beside 3 idle communicators of each side. Bytes"), "{text}");
        assert_eq!(
            lines[4..],
            [
                "#     1K graph 1.00 0.50 windlass",
                "#     2K graph 1.00 1.20 NCCL",
                "all_reduce ranks 4 gpu 9.0/132 multicast no native_bytes_max 1K",
            ]
        );
        assert!(summary(&found()).lines().nth(1).unwrap().ends_with("1K"));
        assert_eq!(line(&found()), "4 ranks: all_reduce up to 1K");
        let block = block(&found()[0].tuned[0], "tune");
        assert_eq!(Cell::parse(block.lines().last().unwrap()).unwrap().key, KEY);
    }

    /// All sizes or none go to Windlass, with and without multicast.
    #[test]
    fn all_forced() {
        let other = Key { collective: Collective::Reduce, ..KEY };
        let table = Table::parse(&forced(&[KEY], &[other])).unwrap();
        for multicast in [Multicast::No, Multicast::Yes] {
            assert_eq!(table.get(&Key { multicast, ..KEY }), Some(Some(NATIVE_BYTES_MAX)));
            assert_eq!(table.get(&Key { multicast, ..other }), Some(None));
        }
    }
}
