//! Describes where a rank's operations were stuck, from the report that its kernels wrote when they left.

use std::fmt;

use windlass_kernels::arrange::Direction;
use windlass_kernels::collective::{
    WAITED_LL_DATA, WAITED_LL128_CREDIT, WAITED_LL128_DATA, WAITED_ONE_SHOT_DATA, WAITED_RESULT_CREDIT,
    WAITED_RESULT_DATA,
};
use windlass_kernels::growth::Wire;
use windlass_kernels::launch::{
    REPORT_ENTRIES, Report, ReportEntry, WAITED_BULK_CREDIT, WAITED_BULK_DATA, WAITED_P2P_LL128_CREDIT,
    WAITED_P2P_LL128_DATA,
};

/// All waits of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// The rank that waited.
    pub rank: u32,
    /// What it waited for.
    pub waits: Vec<Wait>,
    /// Waits that the report had no room for, and entries that cannot be read.
    pub dropped: u32,
}

/// One channel that made no progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// The rank on the other side.
    pub peer: u32,
    /// Whether this rank sends or receives.
    pub direction: Direction,
    /// What the channel carries.
    pub carries: Carries,
    /// Which channel of the connection.
    pub channel: u32,
    /// For messages: the index, from 0, among the group's messages to or from this peer.
    pub message: u32,
    /// The number, since init, of the packet or chunk of this channel that was waited for.
    pub sequence: u64,
    /// How far the other side was: packets or chunks consumed for a send, arrived for a receive.
    pub seen: u64,
}

/// What channels carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carries {
    /// Messages of groups.
    Messages(Wire),
    /// A small collective.
    Ll,
    /// A larger collective; of an all-reduce the parts to be reduced.
    Ll128,
    /// The reduced parts of an all-reduce.
    Results,
    /// An all-reduce of middle size. Its numbers are launches, not packets.
    OneShot,
}

impl Stuck {
    /// Whether nothing has waited.
    pub fn is_empty(&self) -> bool {
        self.waits.is_empty() && self.dropped == 0
    }

    /// Reads a report. Entries that cannot be read are left out and counted.
    pub(super) fn of(report: &Report, rank: u32) -> Stuck {
        let claimed = report.claimed as usize;
        let waits: Vec<Wait> =
            report.entries[..claimed.min(REPORT_ENTRIES)].iter().filter_map(Wait::of).collect();
        let dropped = (claimed - waits.len()) as u32;
        Stuck { rank, waits, dropped }
    }
}

impl Wait {
    fn of(entry: &ReportEntry) -> Option<Wait> {
        let (direction, carries) = match entry.waited_for {
            WAITED_P2P_LL128_CREDIT => (Direction::Send, Carries::Messages(Wire::Ll128)),
            WAITED_P2P_LL128_DATA => (Direction::Receive, Carries::Messages(Wire::Ll128)),
            WAITED_BULK_CREDIT => (Direction::Send, Carries::Messages(Wire::Bulk)),
            WAITED_BULK_DATA => (Direction::Receive, Carries::Messages(Wire::Bulk)),
            WAITED_LL_DATA => (Direction::Receive, Carries::Ll),
            WAITED_LL128_CREDIT => (Direction::Send, Carries::Ll128),
            WAITED_LL128_DATA => (Direction::Receive, Carries::Ll128),
            WAITED_RESULT_CREDIT => (Direction::Send, Carries::Results),
            WAITED_RESULT_DATA => (Direction::Receive, Carries::Results),
            WAITED_ONE_SHOT_DATA => (Direction::Receive, Carries::OneShot),
            _ => return None,
        };
        Some(Wait {
            peer: entry.peer,
            direction,
            carries,
            channel: entry.channel,
            message: entry.operation,
            sequence: entry.sequence,
            seen: entry.seen,
        })
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (verb, preposition) = match self.direction {
            Direction::Send => ("sending", "to"),
            Direction::Receive => ("receiving", "from"),
        };
        let (piece, protocol) = match self.carries {
            Carries::Messages(Wire::Ll128) => ("packet", "LL128"),
            Carries::Messages(Wire::Bulk) => ("chunk", "bulk"),
            Carries::Ll => ("packet", "LL"),
            Carries::Ll128 => ("packet", "LL128"),
            Carries::Results => ("packet", "result"),
            Carries::OneShot => ("launch", "one-shot"),
        };
        match self.carries {
            Carries::Messages(_) => write!(out, "{verb} message {} of the group", self.message)?,
            _ => write!(out, "{verb} a collective")?,
        }
        write!(
            out,
            " {preposition} rank {}: {piece} {} of {protocol} channel {}, the peer was at {}",
            self.peer, self.sequence, self.channel, self.seen
        )
    }
}

impl fmt::Display for Stuck {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "rank {} was stuck in {} places", self.rank, self.waits.len() + self.dropped as usize)?;
        self.waits.iter().try_for_each(|wait| write!(out, "; {wait}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Entries become words; what is beyond the report's room, or nonsense, is counted.
    #[test]
    fn reports() {
        let mut report = Report { claimed: 3, ..Report::default() };
        report.entries[0] =
            ReportEntry { peer: 2, waited_for: 2, channel: 5, operation: 1, sequence: 77, seen: 76 };
        report.entries[1] = ReportEntry { waited_for: 3, ..ReportEntry::default() };
        let stuck = Stuck::of(&report, 4);
        assert_eq!((stuck.waits.len(), stuck.dropped), (2, 1));
        assert_eq!(
            stuck.waits[0].to_string(),
            "receiving message 1 of the group from rank 2: packet 77 of LL128 channel 5, the peer was at 76"
        );
        report.entries[1] =
            ReportEntry { peer: 1, waited_for: WAITED_RESULT_CREDIT, sequence: 9, ..report.entries[1] };
        assert_eq!(
            Stuck::of(&report, 4).waits[1].to_string(),
            "sending a collective to rank 1: packet 9 of result channel 0, the peer was at 0"
        );
        report.claimed = 1000;
        assert_eq!(Stuck::of(&report, 4).dropped, 998);
        assert!(Stuck::of(&report, 4).to_string().starts_with("rank 4 was stuck in 1000 places; receiving"));
    }
}
