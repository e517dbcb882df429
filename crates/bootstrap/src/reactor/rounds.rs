//! The rounds at the process listener of this process: who speaks, and what they hear.

use crate::negotiated::Token;

use super::{Endpoint, Reactor};
use crate::agreement::{ConnectionId, ToRank};
use crate::connection::{Connection, Line};
use crate::counts::Counts;
use crate::message::{FROM_RANK_BYTES_MAX, FromHost, FromRank};
use crate::outcome::{Failure, SessionOutcome};
use crate::round::Round;

impl Reactor {
    pub(super) fn enter_round(&mut self, mut connection: Connection, name: Token, rank: u32) {
        let key = connection.watched.key();
        let of_round =
            |endpoint: &&Endpoint| matches!(endpoint, Endpoint::InRound(_, other, _) if *other == name);
        let present = self.endpoints.values().filter(of_round).count();
        self.arrivals(name);
        self.rounds.entry(name).or_default();
        if present >= self.limits.present_max {
            Counts::up(&self.shared.counts.turned_away);
            self.arrivals(name).died(rank);
            return self.look_at(name);
        }
        connection.input.clear();
        self.endpoints.insert(key, Endpoint::InRound(connection, name, rank));
        self.in_round(key);
    }

    pub(super) fn in_round(&mut self, key: u64) {
        let Some(Endpoint::InRound(connection, name, rank)) = self.endpoints.get_mut(&key) else { return };
        let (name, rank) = (*name, *rank);
        let (messages, mut line, complaint) = connection.messages(FROM_RANK_BYTES_MAX, FromRank::decode);
        if line == Line::Open {
            line = connection.flush();
        }
        if let Some(complaint) = complaint {
            log::warn!("bootstrap round {name:?} {complaint} from rank {rank}: closing its connection");
            Counts::up(&self.shared.counts.unreadable);
        }
        for message in messages {
            self.said(ConnectionId(key), name, rank, message);
        }
        if line == Line::Closed {
            self.endpoints.remove(&key);
            self.rounds.get_mut(&name).into_iter().for_each(|round| round.left(ConnectionId(key)));
            // Without a message it will never send one; with one, it has.
            self.arrivals_by_call.get_mut(&name).into_iter().for_each(|arrivals| arrivals.died(rank));
        }
        self.look_at(name);
    }

    fn said(&mut self, connection: ConnectionId, name: Token, rank: u32, message: FromRank) {
        if !self.rounds.contains_key(&name) {
            return;
        }
        self.arrivals(name).spoke(rank);
        self.step(name, |round| match message {
            FromRank::Split { place, ranks, message } => round.said(connection, place, ranks, message),
            FromRank::Decline(SessionOutcome::Failed(failure)) => round.fail(failure),
            _ => round.disorder(connection, rank),
        });
    }

    /// There will be no table, if this is a round and there is none.
    pub(super) fn end_round(&mut self, name: Token, failure: Failure) {
        self.step(name, |round| round.fail(failure));
    }

    /// Those who are there and have said nothing would wait for ever.
    pub(super) fn forget_round(&mut self, name: Token) {
        if self.rounds.remove(&name).is_some_and(|round| round.answer().is_none()) {
            let is_of_it =
                |endpoint: &Endpoint| matches!(endpoint, Endpoint::InRound(_, other, _) if *other == name);
            self.endpoints.retain(|_, endpoint| !is_of_it(endpoint));
        }
    }

    fn step(&mut self, name: Token, step: impl FnOnce(&mut Round) -> Vec<ToRank>) {
        let Some(round) = self.rounds.get_mut(&name) else { return };
        let before = round.answer().is_some();
        let answers = step(round);
        if let (false, Some(answer)) = (before, round.answer()) {
            let counts = &self.shared.counts;
            let is_table = matches!(answer, FromHost::Table(_));
            Counts::up(if is_table { &counts.rounds } else { &counts.rounds_failed });
            log::debug!("bootstrap round {name:?} ends: {answer:?}");
        }
        for ToRank { to, message } in answers {
            let Some(Endpoint::InRound(connection, ..)) = self.endpoints.get_mut(&to.0) else { continue };
            if connection.last_message(&message.encode()) == Line::Closed {
                self.endpoints.remove(&to.0);
            }
        }
    }
}
