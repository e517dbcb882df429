//! The rounds at the process listener of this process: who speaks, and what they hear.

use std::collections::HashMap;

use super::sockets::{Endpoint, Sockets};
use crate::agreement::{ConnectionId, ToRank};
use crate::connection::{Connection, Line};
use crate::counts::Counts;
use crate::message::{FROM_RANK_BYTES_MAX, FromHost, FromRank};
use crate::negotiated::Token;
use crate::outcome::{Failure, SessionOutcome};
use crate::round::Round;

/// The rounds, by their names. Each also has its arrivals by its name.
#[derive(Debug, Default)]
pub(super) struct Rounds(HashMap<Token, Round>);

/// What came over the connection of a rank.
pub(super) struct HeardInRound {
    /// Of which round.
    pub name: Token,
    /// Whose.
    pub rank: u32,
    pub messages: Vec<FromRank>,
    pub line: Line,
}

impl Rounds {
    /// Takes a connection of a rank of the parent in, if there is room.
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

    /// What a rank's connection has.
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

    /// Whether somebody waits for its answer.
    pub(super) fn is_awaited(&self, name: Token) -> bool {
        self.0.get(&name).is_some_and(Round::is_awaited)
    }

    /// A rank has said something.
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

    /// A connection is gone.
    pub(super) fn left(&mut self, sockets: &mut Sockets, key: u64, name: Token) {
        sockets.endpoints.remove(&key);
        self.0.get_mut(&name).into_iter().for_each(|round| round.left(ConnectionId(key)));
    }

    /// There will be no table, if this is a round and there is none.
    pub(super) fn fail(&mut self, sockets: &mut Sockets, name: Token, failure: Failure) {
        self.step(sockets, name, |round| round.fail(failure));
    }

    /// Those who are there and have said nothing would wait for ever.
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
