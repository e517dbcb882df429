//! Measurements as JSON lines and as a table.

use super::Mode;
use super::company::Company;
use super::first_use::FirstUse;
use super::memory::Memory;
use super::operation::Operation;
use super::statistics::{HostTimes, geometric_mean};
use crate::text;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::{SystemTime, UNIX_EPOCH};

/// One line of the JSON file. Times are microseconds of one call.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// The time in UTC.
    pub date: String,
    pub machine: MachineFacts,
    pub versions: Versions,
    pub ranks: usize,
    pub op: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reduction: Option<String>,
    #[serde(rename = "type")]
    pub element: String,
    pub bytes: u64,
    pub memory: Memory,
    /// The fields `beside` and `busy`.
    #[serde(flatten)]
    pub company: Company,
    pub mode: Mode,
    /// Calls of one batch.
    pub calls: usize,
    /// Batches of each side.
    pub repeat: u32,
    pub plain_us: f64,
    pub plain_min_us: f64,
    pub plain_max_us: f64,
    pub windlass_us: f64,
    pub windlass_min_us: f64,
    pub windlass_max_us: f64,
    /// Windlass's time divided by NCCL's: below 1 Windlass is faster.
    pub ratio: f64,
    /// The number of repeated rounds, since the first looked slower; the numbers are of the round with the median
    /// ratio. 0: not repeated.
    #[serde(default)]
    pub again: usize,
    /// Nanoseconds of single calls on the host, for each side, if the host was timed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plain_host_ns: Option<HostTimes>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub windlass_host_ns: Option<HostTimes>,
    /// The least part of a batch during which all busy communicators worked, for each side; none without busy ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plain_busy_part: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub windlass_busy_part: Option<f64>,
    pub path: String,
}

/// The JSON line of a first use.
#[derive(Serialize)]
pub struct FirstUseLine<'a> {
    pub date: &'a str,
    pub machine: &'a MachineFacts,
    pub versions: &'a Versions,
    pub ranks: usize,
    #[serde(flatten)]
    pub measured: &'a FirstUse,
}

/// The machine of the measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MachineFacts {
    pub gpu: String,
    pub driver: Option<String>,
    /// As `cuDriverGetVersion` gives it.
    pub cuda: i32,
    pub simulated: bool,
    /// NCCL's variables that were set, and WINDLASS_ORDER.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub variables: BTreeMap<String, String>,
}

/// The variables on which a measurement depends and that its line does not have otherwise.
pub fn variables(all: impl Iterator<Item = (OsString, OsString)>) -> BTreeMap<String, String> {
    all.filter_map(|(name, value)| Some((name.into_string().ok()?, value.to_string_lossy().into_owned())))
        .filter(|(name, _)| name.starts_with("NCCL_") || name == "WINDLASS_ORDER")
        .collect()
}

impl Record {
    /// The bandwidths of a call that takes so long, GB/s, as nccl-tests name them: of the algorithm, and of the bus.
    pub fn bandwidths(&self, us: f64) -> Option<(f64, f64)> {
        let factor = Operation::from_str(&self.op, false).ok()?.bus_factor(self.ranks)?;
        let algorithm = self.bytes as f64 / us / 1000.0;
        Some((algorithm, algorithm * factor))
    }
}

/// The versions that were measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Versions {
    pub nccl: String,
    pub windlass: String,
}

/// The heading of the table: what all its lines share.
pub fn heading(ranks: usize, memory: Memory, company: Company) -> String {
    format!("bench: {ranks} ranks, memory {}{}", memory.name(), company.words())
}

/// The table of a run. Bandwidths are GB/s through Windlass.
pub fn table(records: &[Record]) -> String {
    let head = [
        "op",
        "type",
        "bytes",
        "mode",
        "NCCL us",
        "min…max",
        "windlass us",
        "min…max",
        "ratio",
        "algbw",
        "busbw",
        "path",
    ];
    let mut rows = Vec::new();
    for record in records {
        let bandwidths = record.bandwidths(record.windlass_us);
        let bandwidth = |gb: Option<f64>| gb.map_or_else(|| "-".to_owned(), time);
        rows.push(vec![
            record.op.clone(),
            record.element.clone(),
            text::size(record.bytes),
            record.mode.name().to_owned(),
            time(record.plain_us),
            format!("{}…{}", time(record.plain_min_us), time(record.plain_max_us)),
            time(record.windlass_us),
            format!("{}…{}", time(record.windlass_min_us), time(record.windlass_max_us)),
            format!("{:.3}", record.ratio),
            bandwidth(bandwidths.map(|both| both.0)),
            bandwidth(bandwidths.map(|both| both.1)),
            record.path.clone(),
        ]);
    }
    text::table(&head, rows, &[2, 4, 5, 6, 7, 8, 9, 10])
}

/// A table of the host's times of single calls; empty if the host was not timed.
pub fn host_table(records: &[Record]) -> String {
    let head = ["host, ns a call", "type", "bytes", "NCCL", "99 of 100", "windlass", "99 of 100", "path"];
    let mut rows = Vec::new();
    for record in records {
        let (Some(plain), Some(windlass)) = (record.plain_host_ns, record.windlass_host_ns) else { continue };
        let names = [record.op.clone(), record.element.clone(), text::size(record.bytes)];
        let numbers = [plain.median, plain.p99, windlass.median, windlass.p99];
        let numbers = numbers.map(|ns| format!("{ns:.0}"));
        rows.push([&names[..], &numbers, std::slice::from_ref(&record.path)].concat());
    }
    if rows.is_empty() { String::new() } else { text::table(&head, rows, &[2, 3, 4, 5, 6]) }
}

/// Microseconds, or GB/s, with about three significant digits, also below one.
fn time(us: f64) -> String {
    match us {
        us if us >= 1000.0 => format!("{us:.0}"),
        us if us >= 100.0 => format!("{us:.1}"),
        us if us >= 10.0 => format!("{us:.2}"),
        us => format!("{us:.3}"),
    }
}

/// The mean ratio of each mode, in one line.
pub fn summary(records: &[Record]) -> String {
    let means: Vec<String> = [Mode::Eager, Mode::Graph, Mode::Host]
        .into_iter()
        .filter_map(|mode| {
            let ratios: Vec<f64> =
                records.iter().filter(|record| record.mode == mode).map(|record| record.ratio).collect();
            (!ratios.is_empty())
                .then(|| format!("{} {:.3} over {}", mode.name(), geometric_mean(&ratios), ratios.len()))
        })
        .collect();
    if means.is_empty() {
        return "bench: nothing measured: the library has none of these operations".into();
    }
    format!("bench: ratio windlass/NCCL, geometric mean: {}", means.join(", "))
}

/// A time as `2026-01-31T12:00:00Z`.
pub fn date(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (year, month, day) = civil(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Year, month and day of a day since 1970-01-01, in eras of 400 years that begin in March
/// (Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms").
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use std::time::Duration;

    /// A record for tests.
    pub fn record(op: &str, bytes: u64, plain_us: f64, windlass_us: f64) -> Record {
        serde_json::from_value(serde_json::json!({
            "date": "2026-01-01T00:00:00Z",
            "machine": {"gpu": "H200", "driver": null, "cuda": 13000, "simulated": true},
            "versions": {"nccl": "2.28.9", "windlass": "0.1.0"},
            "ranks": 2, "op": op, "type": "float", "bytes": bytes, "memory": "nccl", "mode": "eager", "calls": 10, "repeat": 9,
            "plain_us": plain_us, "plain_min_us": plain_us, "plain_max_us": plain_us,
            "windlass_us": windlass_us, "windlass_min_us": windlass_us, "windlass_max_us": windlass_us,
            "ratio": windlass_us / plain_us, "path": "Forward",
        }))
        .unwrap()
    }

    /// Days at which wrong calendars fail.
    #[test]
    fn dates() {
        let at = |seconds| date(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(at(1_767_225_599), "2025-12-31T23:59:59Z");
    }

    /// A line has the NCCL variables that were set.
    #[test]
    fn told_variables() {
        let all = ["NCCL_ALGO", "WINDLASS_ORDER", "WINDLASS_LOG", "PATH"];
        let told = variables(all.iter().map(|name| (OsString::from(name), OsString::from("x"))));
        assert_eq!(told.into_keys().collect::<Vec<_>>(), ["NCCL_ALGO", "WINDLASS_ORDER"]);
    }

    /// The table writes sizes as on the command line, and has the path.
    #[test]
    fn tables() {
        let text = table(&[record("all_reduce", 1024, 10.0, 5.0)]);
        let line = text.lines().nth(1).unwrap();
        let cells: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(
            cells,
            [
                "all_reduce",
                "float",
                "1K",
                "eager",
                "10.00",
                "10.00…10.00",
                "5.000",
                "5.000…5.000",
                "0.500",
                "0.205",
                "0.205",
                "Forward"
            ]
        );
    }

    /// Bandwidths are those of nccl-tests: on four ranks, an all-reduce passes its bytes one and a half times.
    #[test]
    fn bandwidths() {
        let of = |op: &str| Record { ranks: 4, ..record(op, 4000, 1.0, 2.0) }.bandwidths(2.0);
        assert_eq!(of("all_reduce"), Some((2.0, 3.0)));
        assert_eq!(of("reduce_scatter"), Some((2.0, 1.5)));
        assert_eq!((of("send_ring"), of("broadcast")), (Some((2.0, 2.0)), Some((2.0, 2.0))));
        assert_eq!((of("product"), of("unknown")), (None, None));
    }

    /// The host's table has only measurements of the host.
    #[test]
    fn host_tables() {
        let mut host = record("all_reduce", 1024, 5.5, 3.0);
        assert_eq!(host_table(std::slice::from_ref(&host)), "");
        host.plain_host_ns = Some(HostTimes { median: 5500.4, p99: 7000.0 });
        host.windlass_host_ns = Some(HostTimes { median: 2900.0, p99: 3100.0 });
        let text = host_table(&[host]);
        let cells: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(cells, ["all_reduce", "float", "1K", "5500", "7000", "2900", "3100", "Forward"]);
    }

    /// The heading has the memory and the communicators beside the measured one.
    #[test]
    fn headings() {
        assert_eq!(heading(4, Memory::Nccl, Company::default()), "bench: 4 ranks, memory nccl");
        let company = Company { beside: 3, busy: 2 };
        assert_eq!(
            heading(4, Memory::Nccl, company),
            "bench: 4 ranks, memory nccl, beside 3 idle and 2 busy"
        );
    }

    /// The mean is of ratios, by mode; without a measurement the line says so.
    #[test]
    fn summaries() {
        let records = [record("a", 1, 1.0, 2.0), record("a", 2, 2.0, 1.0)];
        assert!(summary(&records).ends_with("eager 1.000 over 2"), "{}", summary(&records));
        assert!(summary(&[]).contains("nothing measured"));
    }
}
