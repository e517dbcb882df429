//! The table as it is written: a line a cell, and above it what was measured.

use super::limit::{self, Finding};
use crate::bench::record::date;
use crate::bench::{CellDone, Mode};
use crate::machine::Machine;
use crate::nccl::version_text;
use crate::text;
use std::time::SystemTime;
use windlass_transport::tuning::file::{Cell, HEAD, Key, Multicast, NATIVE_BYTES_MAX};

/// When and where it was measured.
pub struct Circumstances {
    pub date: String,
    pub gpu: String,
    pub driver: String,
    pub nccl: String,
    pub simulated: bool,
    /// Idle communicators of each side.
    pub beside: u32,
}

/// A cell, and the measurements that it stands on.
pub struct Tuned {
    pub cell: Cell,
    measured: Vec<CellDone>,
}

impl Circumstances {
    pub fn of(machine: &Machine, nccl_version: i32, beside: u32) -> Circumstances {
        Circumstances {
            date: date(SystemTime::now()),
            gpu: machine.device_name().to_owned(),
            driver: machine.gpus.driver.clone().unwrap_or_else(|| "unknown".into()),
            nccl: version_text(nccl_version),
            simulated: machine.is_simulated(),
            beside,
        }
    }
}

impl Tuned {
    pub fn of(key: Key, mut measured: Vec<CellDone>) -> Tuned {
        measured.sort_by_key(|done| (done.bytes, done.cell.mode.name()));
        Tuned { cell: Cell { key, native_bytes_max: limit::native_bytes_max(&measured) }, measured }
    }
}

/// A table that sends everything of these cells to Windlass's kernels.
pub fn forced(keys: &[Key]) -> String {
    let all = |key: &Key| {
        [Multicast::No, Multicast::Yes].map(|multicast| {
            let cell = Cell { key: Key { multicast, ..*key }, native_bytes_max: Some(NATIVE_BYTES_MAX) };
            format!("{cell}\n")
        })
    };
    format!("{HEAD}\n{}", keys.iter().flat_map(all).collect::<String>())
}

/// The whole text.
pub fn table(circumstances: &Circumstances, tuned: &[Tuned]) -> String {
    let Circumstances { date, gpu, driver, nccl, simulated, beside } = circumstances;
    let mut text = format!(
        "{HEAD}\n# windlass tune {}, {date}, {gpu}, driver {driver}, NCCL {nccl}\n",
        env!("CARGO_PKG_VERSION")
    );
    if *simulated {
        text += "# On the simulator: the figures say nothing.\n";
    }
    text += &format!("# Beside {beside} idle communicators of each side. ");
    text += "Bytes of the larger buffer; us of a call, fp32: NCCL alone, Windlass; who was faster.\n";
    for Tuned { cell, measured } in tuned {
        text.push('\n');
        for done in measured {
            text += &format!("# {}\n", figures(done));
        }
        text += &format!("{cell}\n");
    }
    text
}

fn figures(done: &CellDone) -> String {
    let who = match limit::finding(done) {
        Finding::Fast => "windlass",
        Finding::Nccl => "NCCL",
        Finding::Unclear => "unclear",
        Finding::NotOurs => "NCCL ran both",
    };
    let mode = if done.cell.mode == Mode::Graph { "graph" } else { "eager" };
    format!("{:>6} {mode} {:.2} {:.2} {who}", text::size(done.bytes), done.plain.median, done.windlass.median)
}

/// What a user wants to see at once.
pub fn summary(tuned: &[Tuned]) -> String {
    let mut lines = vec![["ranks", "collective", "native up to"].map(str::to_owned).to_vec()];
    lines.extend(tuned.iter().map(|Tuned { cell, .. }| {
        let most = cell.native_bytes_max.map_or_else(|| "none".to_owned(), text::size);
        vec![cell.key.ranks.to_string(), cell.key.collective.name().to_owned(), most]
    }));
    text::table(&lines, &[0, 2])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::operation::Operation;
    use crate::bench::statistics::Spread;
    use crate::element::element;
    use nccl_sys::types::ncclFloat32;
    use windlass_transport::tuning::Collective;
    use windlass_transport::tuning::file::Table;

    const KEY: Key = Key {
        collective: Collective::AllReduce,
        ranks: 4,
        capability: 90,
        multiprocessors: 132,
        multicast: Multicast::No,
    };

    fn done(bytes: u64, plain: f64, windlass: f64) -> CellDone {
        let spread = |median| Spread { median, min: median, max: median };
        let (operation, mode, element) = (Operation::AllReduce, Mode::Graph, element(ncclFloat32));
        CellDone {
            position: 0,
            cell: crate::bench::Cell { operation, bytes, mode, element },
            bytes,
            calls: 1,
            plain: spread(plain),
            windlass: spread(windlass),
            plain_host_ns: None,
            windlass_host_ns: None,
            plain_busy_part: None,
            windlass_busy_part: None,
            again: 0,
            path: "native".into(),
        }
    }

    /// What is written is read, with its figures as comments.
    #[test]
    fn read_again() {
        let tuned = [Tuned::of(KEY, vec![done(2048, 10.0, 12.0), done(1024, 10.0, 5.0)])];
        let circumstances = Circumstances {
            date: "2026-01-31T12:00:00Z".into(),
            gpu: "NVIDIA H200".into(),
            driver: "570".into(),
            nccl: "2.28.9".into(),
            simulated: false,
            beside: 3,
        };
        let text = table(&circumstances, &tuned);
        assert_eq!(Table::parse(&text).unwrap().get(&KEY), Some(Some(1024)));
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].contains("2026-01-31T12:00:00Z, NVIDIA H200, driver 570, NCCL 2.28.9"), "{text}");
        assert!(lines[2].starts_with("# Beside 3 idle communicators of each side. Bytes"), "{text}");
        assert_eq!(
            lines[4..],
            [
                "#     1K graph 10.00 5.00 windlass",
                "#     2K graph 10.00 12.00 NCCL",
                "all_reduce ranks 4 gpu 9.0/132 multicast no native_bytes_max 1K",
            ]
        );
        assert!(summary(&tuned).lines().nth(1).unwrap().ends_with("1K"));
    }

    /// Everything goes to our kernels, with multicast or without.
    #[test]
    fn all_forced() {
        let table = Table::parse(&forced(&[KEY])).unwrap();
        for multicast in [Multicast::No, Multicast::Yes] {
            assert_eq!(table.get(&Key { multicast, ..KEY }), Some(Some(NATIVE_BYTES_MAX)));
        }
    }
}
