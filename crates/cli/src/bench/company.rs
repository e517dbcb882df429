//! How many communicators are beside the measured one, as in jobs with several groups, and what is told of them. Pure.

use super::record::Record;
use clap::Args;
use serde::{Deserialize, Serialize};

/// Bursts that wait on one stream at most: a batch that is longer ends without company.
const BURSTS_MAX: usize = 256;
/// By how much the bursts shall outlast a batch, since both vary: a part of it, and microseconds by which hosts are late.
const MARGIN: (f64, f64) = (1.25, 300.0);
/// What is enough of that margin, so that no batch is tried again for the last percent.
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

/// How many idle ones there may be. More than any job is known to have, and less than memory ends at with most GPUs.
pub fn idle() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(0..=64)
}

impl Company {
    /// For headings and titles, after other words; nothing without company.
    pub fn words(self) -> String {
        match (self.beside, self.busy) {
            (0, 0) => String::new(),
            (idle, 0) => format!(", beside {idle} idle"),
            (0, busy) => format!(", beside {busy} busy"),
            (idle, busy) => format!(", beside {idle} idle and {busy} busy"),
        }
    }
}

/// How many bursts of each busy communicator the next run of a batch gets, when `bursts` of them were over `lasted_us` after its
/// beginning and it took `batch_us`. No more than there were if they lasted.
pub fn bursts_for(bursts: usize, lasted_us: f64, batch_us: f64) -> usize {
    let with = |(factor, more_us): (f64, f64)| factor * batch_us + more_us;
    if lasted_us >= with(MARGIN_LEAST) {
        return bursts;
    }
    // At most so much at once: bursts that were over before the batch began tell nothing of how long one is.
    let factor = if lasted_us > 0.0 { (with(MARGIN) / lasted_us).min(16.0) } else { 2.0 };
    ((bursts as f64 * factor).ceil() as usize + 1).min(BURSTS_MAX)
}

/// The part of a batch during which all busy communicators ran.
pub fn part(lasted_us: f64, batch_us: f64) -> f64 {
    if batch_us > 0.0 { (lasted_us / batch_us).clamp(0.0, 1.0) } else { 1.0 }
}

/// Whether the busy ones were busy all the while, in one line; nothing where there were none.
pub fn kept_up(records: &[Record]) -> Option<String> {
    let side = |part: fn(&Record) -> Option<f64>| {
        let parts: Vec<f64> = records.iter().filter_map(part).collect();
        let whole = parts.iter().filter(|part| **part >= 1.0).count();
        // Down: 100 is only said where nothing was missed.
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

    /// Only what is there is told.
    #[test]
    fn told() {
        let words = |beside, busy| Company { beside, busy }.words();
        assert_eq!(words(0, 0), "");
        assert_eq!(words(3, 0), ", beside 3 idle");
        assert_eq!(words(0, 1), ", beside 1 busy");
        assert_eq!(words(3, 2), ", beside 3 idle and 2 busy");
    }

    /// Bursts that lasted stay; short ones grow by what was missing and a margin, never without limit.
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

    /// Parts are parts, whatever clocks say.
    #[test]
    fn parts() {
        assert_eq!([part(50.0, 100.0), part(300.0, 100.0), part(-1.0, 100.0)], [0.5, 1.0, 0.0]);
        assert_eq!(part(0.0, 0.0), 1.0);
    }

    /// How often and at the least, of each side, if there was any.
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

    /// Lines of before had no company.
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
