//! Tells whether Windlass is slower than NCCL on the device at any size. A size that looks slower is measured again first, since one
//! of hundreds of measurements is slow by chance.

use super::Mode;
use super::record::Record;
use super::worker::CellDone;
use crate::text;

/// A measurement above this ratio is called slower.
const SLOWER: f64 = 1.02;
/// A measurement above this ratio is measured again. It is below [`SLOWER`], since chance may also hide a part of the
/// difference.
const SUSPICIOUS: f64 = 1.01;
/// The most measurements that are made again, the worst first.
const AGAIN_MAX: usize = 64;

/// The positions of the measurements to repeat, in order. The same on ranks with the same measurements.
pub fn suspicious(done: &[CellDone]) -> Vec<usize> {
    let mut found: Vec<usize> = (0..done.len())
        .filter(|position| is_of_device(done[*position].cell.mode) && done[*position].ratio() > SUSPICIOUS)
        .collect();
    found.sort_by(|left, right| done[*right].ratio().total_cmp(&done[*left].ratio()));
    found.truncate(AGAIN_MAX);
    found.sort_unstable();
    found
}

/// The round with the median ratio (the upper one of two), which stands for all rounds of a measurement. The first round is
/// not among them, since it was chosen for being slow.
pub fn settled(mut rounds: Vec<CellDone>) -> Option<CellDone> {
    rounds.sort_by(|left, right| left.ratio().total_cmp(&right.ratio()));
    let (again, middle) = (rounds.len(), rounds.len() / 2);
    let chosen = rounds.into_iter().nth(middle)?;
    Some(CellDone { again, ..chosen })
}

/// Whether the device is timed. The host's cost of a call only matters there if the device waits for it, and then the
/// device's time shows it.
fn is_of_device(mode: Mode) -> bool {
    mode != Mode::Host
}

/// Lines with the measurements that were slower, or that there were none.
pub fn slower(records: &[Record]) -> String {
    let (mut count, mut found) = (0, Vec::new());
    for record in records.iter().filter(|record| is_of_device(record.mode)) {
        count += 1;
        found.extend((record.ratio > SLOWER).then_some(record));
    }
    let percent = (SLOWER - 1.0) * 100.0;
    let head = format!("bench: slower than NCCL by more than {percent:.0} %:");
    if found.is_empty() {
        return format!("{head} none of {count}");
    }
    let line = |record: &Record| {
        let Record { op, element, ratio, .. } = record;
        let (size, mode) = (text::size(record.bytes), record.mode.name());
        let rounds = match record.again {
            0 => "measured once".to_owned(),
            again => format!("the median of {again} more rounds"),
        };
        format!("\n  {op} {element} {size} {mode}: {ratio:.3}, {rounds}")
    };
    format!("{head} {} of {count}{}", found.len(), found.into_iter().map(line).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::record;
    use super::super::worker::tests::cell;
    use super::*;

    /// Measurements above the lower limit are repeated, in order; if there are too many, only the worst.
    #[test]
    fn suspicions() {
        let ratios = |ratios: &[f64]| ratios.iter().map(|ratio| cell(*ratio)).collect::<Vec<_>>();
        assert_eq!(suspicious(&ratios(&[0.5, 1.5, 1.0099, 1.011, 1.3])), [1, 3, 4]);
        let mut many = vec![1.1; AGAIN_MAX + 1];
        many[3] = 1.05;
        assert_eq!(suspicious(&ratios(&many)).len(), AGAIN_MAX);
        assert!(!suspicious(&ratios(&many)).contains(&3));
    }

    /// The middle round stands for all, and has their number.
    #[test]
    fn rounds() {
        let settled = settled([1.2, 0.9, 1.01].map(cell).to_vec()).unwrap();
        assert_eq!((settled.ratio(), settled.again), (1.01, 3));
        assert!(super::settled(Vec::new()).is_none());
    }

    /// Slower measurements are named with their numbers.
    #[test]
    fn lists() {
        let mut slow = record("all_reduce", 1024, 10.0, 10.5);
        assert!(slower(&[record("reduce", 1, 1.0, 1.02)]).ends_with("2 %: none of 1"));
        assert!(
            slower(std::slice::from_ref(&slow))
                .ends_with("1 of 1\n  all_reduce float 1K eager: 1.050, measured once")
        );
        slow.again = 3;
        let host = Record { mode: Mode::Host, ..slow.clone() };
        assert!(slower(&[host]).ends_with("none of 0"));
        assert!(slower(&[slow]).ends_with("1.050, the median of 3 more rounds"));
    }
}
