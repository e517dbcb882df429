//! The rounds at this process's process listener: takes the ranks' messages and sends the answers.

use std::collections::HashMap;

use super::sockets::{Endpoint, Sockets};
use crate::agreement::{ConnectionId, ToRank};
use crate::children::round::Round;
use crate::connection::{Connection, Line};
use crate::counts::Counts;
use crate::message::{FROM_RANK_BYTES_MAX, FromHost, FromRank};
use crate::negotiated::Token;
use crate::outcome::{Failure, SessionOutcome};

/// The rounds, by their names. [`Calls`](super::calls::Calls) keeps the arrivals of each under the same name.
#[derive(Debug, Default)]
pub(super) struct Rounds(HashMap<Token, Round>);

/// The input of a rank's connection.
pub(super) struct HeardInRound {
    /// The round's name.
    pub name: Token,
    /// The rank in the parent.
    pub rank: u32,
    pub messages: Vec<FromRank>,
    pub line: Line,
}

impl Rounds {
    /// Takes a connection of a rank of the parent, if there is room.
    #[must_use]
    pub(super) fn enter(
        &mut self,
        sockets: &mut Sockets,
        mut connection: Connection,
        name: Token,
        rank: u32,
    ) -> bool {
        let present = sockets.endpoints.values().filter(|endpoint| is_of_round(endpoint, name)).count();
        self.0.entry(name).or_default();
        if present >= sockets.limits.present_max {
            Counts::up(&sockets.shared.counts.turned_away);
            return false;
        }
        connection.input.clear();
        sockets.endpoints.insert(connection.watched.key(), Endpoint::InRound(connection, name, rank));
        true
    }

    /// Reads the input of a rank's connection.
    pub(super) fn hear(&self, sockets: &mut Sockets, key: u64) -> Option<HeardInRound> {
        let Some(Endpoint::InRound(connection, name, rank)) = sockets.endpoints.get_mut(&key) else {
            return None;
        };
        let (name, rank) = (*name, *rank);
        let (messages, mut line, complaint) = connection.messages(FROM_RANK_BYTES_MAX, FromRank::decode);
        if line == Line::Open {
            line = connection.flush();
        }
        if let Some(complaint) = complaint {
            log::warn!("bootstrap round {name:?} {complaint} from rank {rank}: closing its connection");
            Counts::up(&sockets.shared.counts.unreadable);
        }
        Some(HeardInRound { name, rank, messages, line })
    }

    pub(super) fn has(&self, name: Token) -> bool {
        self.0.contains_key(&name)
    }

    /// Whether a rank waits for the round's answer.
    pub(super) fn is_awaited(&self, name: Token) -> bool {
        self.0.get(&name).is_some_and(Round::is_awaited)
    }

    /// Handles a message of a rank.
    pub(super) fn said(
        &mut self,
        sockets: &mut Sockets,
        key: u64,
        name: Token,
        rank: u32,
        message: FromRank,
    ) {
        let connection = ConnectionId(key);
        self.step(sockets, name, |round| match message {
            FromRank::Split { place, ranks, message } => round.said(connection, place, ranks, message),
            FromRank::Decline(SessionOutcome::Failed(failure)) => round.fail(failure),
            _ => round.disorder(connection, rank),
        });
    }

    /// Handles the end of a connection.
    pub(super) fn left(&mut self, sockets: &mut Sockets, key: u64, name: Token) {
        sockets.endpoints.remove(&key);
        self.0.get_mut(&name).into_iter().for_each(|round| round.left(ConnectionId(key)));
    }

    /// Fails the round, if there is one of this name without an answer.
    pub(super) fn fail(&mut self, sockets: &mut Sockets, name: Token, failure: Failure) {
        self.step(sockets, name, |round| round.fail(failure));
    }

    /// Forgets a round. Without an answer its connections close: ranks that have said nothing would wait for ever.
    pub(super) fn forget(&mut self, sockets: &mut Sockets, name: Token) {
        if self.0.remove(&name).is_some_and(|round| round.answer().is_none()) {
            sockets.endpoints.retain(|_, endpoint| !is_of_round(endpoint, name));
        }
    }

    fn step(&mut self, sockets: &mut Sockets, name: Token, step: impl FnOnce(&mut Round) -> Vec<ToRank>) {
        let Some(round) = self.0.get_mut(&name) else { return };
        let before = round.answer().is_some();
        let answers = step(round);
        if let (false, Some(answer)) = (before, round.answer()) {
            let counts = &sockets.shared.counts;
            let is_table = matches!(answer, FromHost::Table(_));
            Counts::up(if is_table { &counts.rounds } else { &counts.rounds_failed });
            log::debug!("bootstrap round {name:?} ends: {answer:?}");
        }
        for ToRank { to, message } in answers {
            let Some(Endpoint::InRound(connection, ..)) = sockets.endpoints.get_mut(&to.0) else { continue };
            if connection.last_message(&message.encode()) == Line::Closed {
                sockets.endpoints.remove(&to.0);
            }
        }
    }
}

fn is_of_round(endpoint: &Endpoint, name: Token) -> bool {
    matches!(endpoint, Endpoint::InRound(_, other, _) if *other == name)
}
