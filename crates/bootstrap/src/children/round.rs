//! The host's side of a round before a split or shrink, as a pure state machine.
//!
//! All ranks that make the call send a message. All ranks that wait get the same table, or the same failure.

use std::collections::BTreeMap;

use crate::negotiated::RANKS_MAX;

use crate::agreement::{ConnectionId, ToRank};
use crate::message::FromHost;
use crate::outcome::{Failure, SessionOutcome};

use super::plan::{SplitMessage, Table};

/// A round.
#[derive(Clone, Debug, Default)]
pub struct Round {
    /// The ranks that take part, as the first message says.
    ranks: Option<u32>,
    /// The messages, by their ranks' places.
    messages: BTreeMap<u32, SplitMessage>,
    /// The connections of ranks that have spoken and may wait for the answer, with their places. The host has the first
    /// place.
    connections: Vec<(u32, ConnectionId)>,
    /// What all ranks hear, once it is decided.
    pub answer: Option<FromHost>,
}

impl Round {
    /// Takes the message of the rank in this place, of `ranks`. A rank that leaves after its message does not fail the
    /// round: others notice when they need it.
    pub fn said(
        &mut self,
        connection: ConnectionId,
        place: u32,
        ranks: u32,
        message: SplitMessage,
    ) -> Vec<ToRank> {
        if let Some(message) = &self.answer {
            return vec![ToRank { to: connection, message: message.clone() }];
        }
        self.connections.push((place, connection));
        let expected = *self.ranks.get_or_insert(ranks);
        if ranks != expected || place >= ranks || ranks as usize > RANKS_MAX {
            return self.fail(Failure::Mismatch { rank: place, ranks, expected });
        }
        if self.messages.insert(place, message).is_some() {
            return self.fail(Failure::Duplicate { rank: place });
        }
        if self.messages.len() < ranks as usize {
            return Vec::new();
        }
        let table = Table::new(self.messages.values().copied().collect());
        self.end(FromHost::Table(table))
    }

    /// A rank sent another kind of message.
    pub fn disorder(&mut self, connection: ConnectionId, rank: u32) -> Vec<ToRank> {
        self.connections.push((rank, connection));
        self.fail(Failure::Disorder { rank })
    }

    /// Fails the round, unless it has an answer.
    pub fn fail(&mut self, failure: Failure) -> Vec<ToRank> {
        if self.answer.is_some() {
            return Vec::new();
        }
        self.end(FromHost::Outcome(SessionOutcome::Failed(failure)))
    }

    /// A connection is gone.
    pub fn left(&mut self, connection: ConnectionId) {
        self.connections.retain(|(_, other)| *other != connection);
    }

    /// Whether a rank waits for the answer.
    pub fn is_awaited(&self) -> bool {
        self.answer.is_none() && !self.connections.is_empty()
    }

    fn end(&mut self, message: FromHost) -> Vec<ToRank> {
        self.answer = Some(message.clone());
        let mut connections = std::mem::take(&mut self.connections);
        // The host's own rank comes last: its process may end as soon as that rank has heard.
        connections.sort_by_key(|(place, _)| std::cmp::Reverse(*place));
        connections.into_iter().map(|(_, to)| ToRank { to, message: message.clone() }).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::plan::{LazyVote, Parent};
    use super::*;

    fn message(rank: u32) -> SplitMessage {
        SplitMessage {
            color: Some(rank as i32 % 2),
            key: -(rank as i32),
            vote: LazyVote::Always,
            parent: Parent::Built,
        }
    }

    fn failed(answers: &[ToRank]) -> &Failure {
        match &answers[0].message {
            FromHost::Outcome(SessionOutcome::Failed(failure)) => failure,
            other => panic!("{other:?}"),
        }
    }

    proptest! {
        /// Ranks may come in any order: the table is the same, and comes once all have spoken, to all that have not
        /// left.
        #[test]
        fn any_order(order in Just((0..7u32).collect::<Vec<_>>()).prop_shuffle(), leaves in 0..7usize) {
            let mut round = Round::default();
            let mut answers = Vec::new();
            for (count, rank) in order.iter().enumerate() {
                prop_assert!(answers.is_empty());
                if count == 6 {
                    round.left(ConnectionId(order[leaves].into()));
                }
                answers = round.said(ConnectionId(u64::from(*rank)), *rank, 7, message(*rank));
            }
            let table = FromHost::Table(Table::new((0..7).map(message).collect()));
            prop_assert_eq!(answers.len(), if leaves == 6 { 7 } else { 6 });
            prop_assert!(answers.iter().all(|answer| answer.message == table));
            prop_assert!(!round.is_awaited());
        }
    }

    /// A failure reaches ranks that wait and ranks that come later, once. After the table nothing fails.
    #[test]
    fn failures() {
        let mut round = Round::default();
        assert!(round.said(ConnectionId(1), 1, 3, message(1)).is_empty() && round.is_awaited());
        let answers = round.fail(Failure::Absent { rank: 2 });
        assert_eq!((answers.len(), failed(&answers)), (1, &Failure::Absent { rank: 2 }));
        assert!(round.fail(Failure::Absent { rank: 0 }).is_empty());
        let late = round.said(ConnectionId(0), 0, 3, message(0));
        assert_eq!((late[0].to, failed(&late)), (ConnectionId(0), &Failure::Absent { rank: 2 }));

        let mut alone = Round::default();
        assert_eq!(alone.said(ConnectionId(0), 0, 1, message(0)).len(), 1);
        assert!(alone.fail(Failure::Absent { rank: 0 }).is_empty());
    }

    /// The host, in the first place, hears last: its process may end as soon as it has heard.
    #[test]
    fn host_hears_last() {
        let mut round = Round::default();
        for rank in [2, 0] {
            assert!(round.said(ConnectionId(rank.into()), rank, 3, message(rank)).is_empty());
        }
        let answers = round.said(ConnectionId(1), 1, 3, message(1));
        assert_eq!(answers.iter().map(|answer| answer.to.0).collect::<Vec<_>>(), [2, 1, 0]);
    }

    /// Messages that cannot be true end the round.
    #[test]
    fn nonsense() {
        let after = |rank, ranks| {
            let mut round = Round::default();
            round.said(ConnectionId(1), 1, 3, message(1));
            failed(&round.said(ConnectionId(2), rank, ranks, message(rank))).clone()
        };
        assert_eq!(after(1, 3), Failure::Duplicate { rank: 1 });
        assert_eq!(after(0, 4), Failure::Mismatch { rank: 0, ranks: 4, expected: 3 });
        assert_eq!(after(3, 3), Failure::Mismatch { rank: 3, ranks: 3, expected: 3 });
        let mut round = Round::default();
        let answers = round.said(ConnectionId(1), 1, u32::MAX, message(1));
        assert!(matches!(failed(&answers), Failure::Mismatch { .. }));
        let mut round = Round::default();
        assert_eq!(failed(&round.disorder(ConnectionId(1), 1)), &Failure::Disorder { rank: 1 });
    }
}
