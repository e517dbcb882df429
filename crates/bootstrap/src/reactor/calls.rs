//! The calls (splits, shrinks, host-local rendezvous) whose sessions and rounds are at this process's process listener:
//! which ranks come, and which never will; and what the ranks of a round say and hear.

use std::collections::{HashMap, VecDeque};

use rustix::event::epoll::EventFlags;

use super::hosting::Sessions;
use super::sockets::{Endpoint, Sockets};
use crate::agreement::{ConnectionId, Event, ToRank};
use crate::children::arrivals::Arrivals;
use crate::children::round::Round;
use crate::children::{self, GREETING_BYTES, Invitation, Visitor};
use crate::commands::Expected;
use crate::connection::{Connection, Line};
use crate::counts::Counts;
use crate::message::{FromHost, FromRank};
use crate::negotiated::Token;
use crate::outcome::{Failure, SessionOutcome};

/// All such calls, and the connections that have not said for which call they come.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// Calls and rounds by their names, and the order in which they became known.
    known: HashMap<Token, Call>,
    order: VecDeque<Token>,
    /// Connections that have sent no greeting yet, the oldest first.
    visitors: VecDeque<u64>,
}

/// A call or round: which ranks have arrived, and what was said, once a rank has come to the round.
#[derive(Debug, Default)]
struct Call {
    arrivals: Arrivals,
    round: Option<Round>,
}

impl Calls {
    pub(super) fn accept_visitors(&mut self, sockets: &mut Sockets, process_listener: u64) {
        for _ in 0..sockets.limits.accepts_per_turn {
            let Some(watched) = sockets.next_visitor(process_listener) else { return };
            let key = watched.key();
            sockets.endpoints.insert(key, Endpoint::Visitor(Connection::new(watched)));
            self.visitors.push_back(key);
            sockets.turn_oldest_away(&mut self.visitors);
        }
    }

    pub(super) fn visitor(&mut self, sockets: &mut Sockets, sessions: &mut Sessions, key: u64) {
        let process_listener = sockets.process_listener;
        let Some(Endpoint::Visitor(connection)) = sockets.endpoints.get_mut(&key) else { return };
        let line = connection.fill(GREETING_BYTES);
        let visitor = children::identify(&connection.input, process_listener);
        if visitor == Visitor::Unclear && line == Line::Open {
            return;
        }
        let Some(Endpoint::Visitor(connection)) = sockets.endpoints.remove(&key) else { return };
        self.visitors.retain(|visitor| *visitor != key);
        match visitor {
            Visitor::Invited(invitation) => self.welcome(sockets, sessions, connection, invitation),
            _ => Counts::up(&sockets.shared.counts.turned_away),
        }
    }

    fn welcome(
        &mut self,
        sockets: &mut Sockets,
        sessions: &mut Sessions,
        connection: Connection,
        invitation: Invitation,
    ) {
        let Invitation { call, child, rank, .. } = invitation;
        if child == children::round(call) {
            return self.enter_round(sockets, sessions, connection, child, rank);
        }
        let key = connection.watched.key();
        if !self.arrivals(sockets, sessions, call).comes_for(child) {
            return Counts::up(&sockets.shared.counts.turned_away);
        }
        if !sessions.of_call(call, child).enter(key, Some(rank), sockets.limits.present_max) {
            Counts::up(&sockets.shared.counts.turned_away);
            self.arrivals(sockets, sessions, call).died(rank);
            return self.look_at(sockets, sessions, call);
        }
        sockets.seat(connection, child);
        self.present(sockets, sessions, key, child);
    }

    /// Handles input of a rank's connection in a session. A rank of a call has arrived with its first message, or with
    /// the end of its connection without one.
    pub(super) fn present(&mut self, sockets: &mut Sockets, sessions: &mut Sessions, key: u64, token: Token) {
        let Some(heard) = sessions.hear(sockets, key, token) else { return };
        if let Some((call, rank, line)) = heard.arrived {
            let arrivals = self.arrivals(sockets, sessions, call);
            match line {
                Line::Open => arrivals.spoke(rank),
                Line::Closed => arrivals.died(rank),
            }
            self.look_at(sockets, sessions, call);
        }
        sessions.leave_if_closed(sockets, key, token, heard);
    }

    fn enter_round(
        &mut self,
        sockets: &mut Sockets,
        sessions: &mut Sessions,
        mut connection: Connection,
        name: Token,
        rank: u32,
    ) {
        let key = connection.watched.key();
        let present = sockets.endpoints.values().filter(|endpoint| is_of_round(endpoint, name)).count();
        let arrivals = self.arrivals(sockets, sessions, name);
        if present >= sockets.limits.present_max {
            arrivals.died(rank);
            Counts::up(&sockets.shared.counts.turned_away);
            return self.look_at(sockets, sessions, name);
        }
        if let Some(call) = self.known.get_mut(&name) {
            call.round.get_or_insert_default();
        }
        connection.input.clear();
        sockets.endpoints.insert(key, Endpoint::InRound(connection, name, rank));
        self.in_round(sockets, sessions, key);
    }

    /// Handles input of a rank's connection in a round.
    pub(super) fn in_round(&mut self, sockets: &mut Sockets, sessions: &mut Sessions, key: u64) {
        let Some((messages, line)) = sockets.hear(key) else { return };
        let Some(Endpoint::InRound(_, name, rank)) = sockets.endpoints.get(&key) else { return };
        let (name, rank, connection) = (*name, *rank, ConnectionId(key));
        for message in messages {
            if !self.has(name) {
                break;
            }
            self.arrivals(sockets, sessions, name).spoke(rank);
            self.step(sockets, name, |round| match message {
                FromRank::Split { place, ranks, message } => round.said(connection, place, ranks, message),
                FromRank::Decline(SessionOutcome::Failed(failure)) => round.fail(failure),
                _ => round.disorder(connection, rank),
            });
        }
        if line == Line::Closed {
            sockets.endpoints.remove(&key);
            if let Some(Call { arrivals, round: Some(round) }) = self.known.get_mut(&name) {
                round.left(connection);
                // A rank that has sent no message will send none. For one that has, this changes nothing.
                arrivals.died(rank);
            }
        }
        self.look_at(sockets, sessions, name);
    }

    fn step(&mut self, sockets: &mut Sockets, name: Token, step: impl FnOnce(&mut Round) -> Vec<ToRank>) {
        let Some(Call { round: Some(round), .. }) = self.known.get_mut(&name) else { return };
        let before = round.answer.is_some();
        let answers = step(round);
        if let (false, Some(answer)) = (before, &round.answer) {
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

    fn arrivals(&mut self, sockets: &mut Sockets, sessions: &mut Sessions, call: Token) -> &mut Arrivals {
        if !self.has(call) {
            self.make_room(sockets, sessions);
            self.order.push_back(call);
        }
        &mut self.known.entry(call).or_default().arrivals
    }

    fn make_room(&mut self, sockets: &mut Sockets, sessions: &mut Sessions) {
        if self.known.len() < sockets.limits.calls_max {
            return;
        }
        let awaited = |name: &&Token| {
            let Some(Call { arrivals, round }) = self.known.get(*name) else { return false };
            let session = arrivals.child.and_then(|child| sessions.get(child));
            session.is_some_and(|session| session.present > 0)
                || round.as_ref().is_some_and(Round::is_awaited)
        };
        let oldest = self.order.iter().find(|call| !awaited(call)).copied();
        if let Some(oldest) = oldest {
            log::warn!("bootstrap forgets call {oldest:?}, for which nobody waits: there are too many");
            Counts::up(&sockets.shared.counts.calls_forgotten);
            self.forget(sockets, sessions, oldest);
        }
    }

    /// Whether the call is known and not over.
    pub(super) fn has(&self, call: Token) -> bool {
        self.known.contains_key(&call)
    }

    /// The host's own rank makes the call: from now on the other ranks are known, and the deaths of their processes are
    /// seen.
    pub(super) fn await_ranks(&mut self, sockets: &mut Sockets, sessions: &mut Sessions, expected: Expected) {
        let Expected { call, ranks, lives } = expected;
        self.arrivals(sockets, sessions, call).await_ranks(ranks);
        for (rank, life) in lives {
            match sockets.poll.watch_for(life, EventFlags::IN) {
                Ok(watched) => {
                    let key = watched.key();
                    let life = Endpoint::Life { call, rank, _end: watched };
                    drop(sockets.endpoints.insert(key, life))
                }
                Err(error) => log::warn!("bootstrap cannot watch the process of rank {rank}: {error}"),
            }
        }
        self.look_at(sockets, sessions, call);
    }

    /// Handles the end of the process of a rank that has not come.
    pub(super) fn died(&mut self, sockets: &mut Sockets, sessions: &mut Sessions, key: u64) {
        if let Some(Endpoint::Life { call, rank, .. }) = sockets.endpoints.remove(&key)
            && self.has(call)
        {
            log::debug!("bootstrap {call:?} the process of rank {rank} has died");
            self.lose(sockets, sessions, call, rank);
        }
    }

    /// Notes that an expected rank will not come to the session, because its process is gone.
    pub(super) fn lose(&mut self, sockets: &mut Sockets, sessions: &mut Sessions, call: Token, rank: u32) {
        self.arrivals(sockets, sessions, call).died(rank);
        self.look_at(sockets, sessions, call);
    }

    /// Handles an expected rank that declines elsewhere (at the host-local rendezvous): the session of this
    /// communicator gets its decline.
    pub(super) fn decline(
        &mut self,
        sockets: &mut Sockets,
        sessions: &mut Sessions,
        call: Token,
        child: Token,
        rank: u32,
        outcome: SessionOutcome,
    ) {
        let arrivals = self.arrivals(sockets, sessions, call);
        arrivals.comes_for(child);
        arrivals.spoke(rank);
        sessions.of_call(call, child);
        let said = FromRank::Decline(outcome);
        sessions.happen(sockets, child, Event::Said(ConnectionId(NOBODYS_KEY), said));
        self.look_at(sockets, sessions, call);
    }

    /// Ends the session or round whose missing ranks cannot all come, and forgets the call when no rank can come any
    /// more.
    fn look_at(&mut self, sockets: &mut Sockets, sessions: &mut Sessions, call: Token) {
        if let Some(rank) = self.known.get(&call).and_then(|known| known.arrivals.lost()) {
            self.step(sockets, call, |round| round.fail(Failure::Absent { rank }));
        }
        let Some(Call { arrivals, .. }) = self.known.get(&call) else { return };
        let Some(coming) = arrivals.coming() else { return };
        let (over, rank) = (arrivals.is_over(), arrivals.absent());
        let is_lost = |child: &Token| {
            let missing = sessions.get(*child).and_then(|session| session.agreement.missing());
            missing.is_some_and(|missing| missing > coming)
        };
        if let Some(child) = arrivals.child.filter(is_lost) {
            sessions.happen(sockets, child, Event::Absent(Failure::Absent { rank }));
        }
        if over {
            self.forget(sockets, sessions, call);
        }
    }

    fn forget(&mut self, sockets: &mut Sockets, sessions: &mut Sessions, call: Token) {
        let Some(Call { arrivals, round }) = self.known.remove(&call) else { return };
        // Ranks that have said nothing would wait for ever.
        if round.is_some_and(|round| round.answer.is_none()) {
            sockets.endpoints.retain(|_, endpoint| !is_of_round(endpoint, call));
        }
        self.order.retain(|other| *other != call);
        sockets
            .endpoints
            .retain(|_, endpoint| !matches!(endpoint, Endpoint::Life { call: of, .. } if *of == call));
        arrivals.child.into_iter().for_each(|child| sessions.nobody_comes(child));
    }
}

fn is_of_round(endpoint: &Endpoint, name: Token) -> bool {
    matches!(endpoint, Endpoint::InRound(_, other, _) if *other == name)
}

/// The key of no connection.
const NOBODYS_KEY: u64 = 0;
