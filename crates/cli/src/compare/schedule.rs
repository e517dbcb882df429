//! Decides which runs are made, and in which order.

use serde::Serialize;

/// The side of the comparison to which a run belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The command alone.
    Without,
    /// The command over Windlass.
    With,
}

impl Side {
    /// The name in file names.
    pub fn name(self) -> &'static str {
        match self {
            Side::Without => "without",
            Side::With => "with",
        }
    }

    /// The words in sentences.
    pub fn words(self) -> &'static str {
        match self {
            Side::Without => "without Windlass",
            Side::With => "with Windlass",
        }
    }
}

/// Whether a run counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Purpose {
    /// The run fills caches and does not count.
    Warmup,
    Measured,
}

/// A run to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Turn {
    /// The number from 1, in the order of time.
    pub number: usize,
    pub side: Side,
    pub purpose: Purpose,
}

impl Turn {
    /// The beginning of the run's file names, as `1-without`.
    pub fn name(&self) -> String {
        format!("{}-{}", self.number, self.side.name())
    }
}

/// All runs, in pairs of one run of each side. Every other pair begins with the other side, so a machine that gets slower from run to
/// run slows down both sides.
pub fn turns(pairs: usize, warmup_pairs: usize) -> Vec<Turn> {
    let pair = |pair: usize| {
        let sides = [[Side::Without, Side::With], [Side::With, Side::Without]][pair % 2];
        let purpose = if pair < warmup_pairs { Purpose::Warmup } else { Purpose::Measured };
        sides.map(|side| (side, purpose))
    };
    let all = (0..warmup_pairs + pairs).flat_map(pair).zip(1..);
    all.map(|((side, purpose), number)| Turn { number, side, purpose }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both sides run and begin equally often; warm-up pairs come first and do not count.
    #[test]
    fn in_turns() {
        let names: Vec<String> = turns(3, 0).iter().map(Turn::name).collect();
        assert_eq!(names, ["1-without", "2-with", "3-with", "4-without", "5-without", "6-with"]);
        let turns = turns(1, 1);
        let purposes: Vec<Purpose> = turns.iter().map(|turn| turn.purpose).collect();
        assert_eq!(purposes, [Purpose::Warmup, Purpose::Warmup, Purpose::Measured, Purpose::Measured]);
        assert_eq!(turns[3].name(), "4-without");
    }
}
