//! How many communicators are beside the measured one, as in jobs with several groups, and how that is reported. Pure.

use super::record::Record;
use clap::Args;
use serde::{Deserialize, Serialize};

/// The most bursts that wait on one stream. A longer batch ends without busy communicators.
const BURSTS_MAX: usize = 256;
/// By how much the bursts should outlast a batch, since both vary: a factor, and microseconds for late hosts.
const MARGIN: (f64, f64) = (1.25, 300.0);
/// The least margin: with it a batch is not tried again.
const MARGIN_LEAST: (f64, f64) = (1.1, 100.0);

/// Further communicators of the same ranks, of each side; none unless asked for, and none in records of before.
#[derive(Args, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Company {
    /// The number of idle communicators beside the measured one on each side, 0 to 64; NCCL takes about 0.7 GiB of each GPU for one
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = idle())]
    #[serde(default)]
    pub beside: u32,
    /// The number of busy communicators beside the measured one on each side, 0 to 8. Each runs all-reduces of 16 KiB on a stream of its own while that side is measured
    // Each keeps blocks on the device that wait for their peers': those of all, and the measured call's, must fit.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=8))]
    #[serde(default)]
    pub busy: u32,
}

/// The range of the number of idle communicators. More than any known job has; with more, most GPUs run out of
/// memory.
pub fn idle() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(0..=64)
}

impl Company {
    /// Words for headings and titles, to follow other words; empty without such communicators.
    pub fn words(self) -> String {
        match (self.beside, self.busy) {
            (0, 0) => String::new(),
            (idle, 0) => format!(", beside {idle} idle"),
            (0, busy) => format!(", beside {busy} busy"),
            (idle, busy) => format!(", beside {idle} idle and {busy} busy"),
        }
    }
}

/// The number of bursts for the next run of a batch. In the last run `bursts` bursts lasted `lasted_us` and the batch took
/// `batch_us`. If the bursts lasted long enough, their number stays.
pub fn bursts_for(bursts: usize, lasted_us: f64, batch_us: f64) -> usize {
    let with = |(factor, more_us): (f64, f64)| factor * batch_us + more_us;
    if lasted_us >= with(MARGIN_LEAST) {
        return bursts;
    }
    // Grows at most by this factor: if the bursts ended before the batch began, they do not tell how long one is.
    let factor = if lasted_us > 0.0 { (with(MARGIN) / lasted_us).min(16.0) } else { 2.0 };
    ((bursts as f64 * factor).ceil() as usize + 1).min(BURSTS_MAX)
}

/// The part of a batch during which all busy communicators ran.
pub fn part(lasted_us: f64, batch_us: f64) -> f64 {
    if batch_us > 0.0 { (lasted_us / batch_us).clamp(0.0, 1.0) } else { 1.0 }
}

/// One line that tells in how many batches the busy communicators worked all the time; none without busy ones.
pub fn kept_up(records: &[Record]) -> Option<String> {
    let side = |part: fn(&Record) -> Option<f64>| {
        let parts: Vec<f64> = records.iter().filter_map(part).collect();
        let whole = parts.iter().filter(|part| **part >= 1.0).count();
        // Rounded down: 100 is only reported if nothing was missed.
        let least = (parts.iter().copied().reduce(f64::min)? * 100.0).floor();
        Some(format!("{whole} of {} (in the least {least} % of a batch)", parts.len()))
    };
    let (plain, windlass) =
        (side(|record| record.plain_busy_part)?, side(|record| record.windlass_busy_part)?);
    Some(format!(
        "bench: busy communicators ran all through a measurement: of NCCL {plain}, of Windlass {windlass}"
    ))
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::record;
    use super::*;

    /// Only communicators that exist are reported.
    #[test]
    fn told() {
        let words = |beside, busy| Company { beside, busy }.words();
        assert_eq!(words(0, 0), "");
        assert_eq!(words(3, 0), ", beside 3 idle");
        assert_eq!(words(0, 1), ", beside 1 busy");
        assert_eq!(words(3, 2), ", beside 3 idle and 2 busy");
    }

    /// Bursts that lasted stay; others grow by what was missing and a margin, up to a limit.
    #[test]
    fn enough_bursts() {
        assert_eq!(bursts_for(4, 1200.0, 1000.0), 4);
        assert_eq!(bursts_for(4, 1199.0, 1000.0), 7);
        assert_eq!(bursts_for(4, 500.0, 1000.0), 14);
        assert_eq!(bursts_for(1, 1.0, 1e9), 17);
        assert_eq!(bursts_for(8, -5.0, 100.0), 17);
        assert_eq!(bursts_for(8, f64::NAN, 100.0), 17);
        assert_eq!(bursts_for(BURSTS_MAX, 50.0, 100.0), BURSTS_MAX);
    }

    /// A part is between 0 and 1, whatever the clocks say.
    #[test]
    fn parts() {
        assert_eq!([part(50.0, 100.0), part(300.0, 100.0), part(-1.0, 100.0)], [0.5, 1.0, 0.0]);
        assert_eq!(part(0.0, 0.0), 1.0);
    }

    /// How often and the least part, for each side with busy communicators.
    #[test]
    fn least_parts() {
        let alone = record("all_reduce", 1, 1.0, 1.0);
        assert_eq!(kept_up(std::slice::from_ref(&alone)), None);
        let of = |plain, windlass| Record {
            plain_busy_part: Some(plain),
            windlass_busy_part: Some(windlass),
            ..alone.clone()
        };
        let told = kept_up(&[of(1.0, 0.999), of(0.5, 1.0), alone.clone()]).unwrap();
        let sides = "of NCCL 1 of 2 (in the least 50 % of a batch), of Windlass 1 of 2 (in the least 99 % of a batch)";
        assert!(told.ends_with(sides), "{told}");
    }

    /// Lines of earlier versions have no such communicators.
    #[test]
    fn read_before() {
        assert_eq!(record("all_reduce", 1, 1.0, 1.0).company, Company::default());
        let line = serde_json::to_value(Record {
            company: Company { beside: 3, busy: 2 },
            ..record("all_reduce", 1, 1.0, 1.0)
        });
        let line = line.unwrap();
        assert_eq!((&line["beside"], &line["busy"]), (&3.into(), &2.into()));
    }
}
