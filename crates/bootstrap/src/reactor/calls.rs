//! The calls (splits, shrinks, host-local rendezvous) whose sessions and rounds are at this process's process listener:
//! which ranks come, and which never will.

use std::collections::{HashMap, VecDeque};

use rustix::event::epoll::EventFlags;

use super::hosting::Sessions;
use super::rounds::Rounds;
use super::session::Session;
use super::sockets::{Endpoint, Sockets};
use crate::agreement::{ConnectionId, Event};
use crate::children::arrivals::Arrivals;
use crate::children::{self, GREETING_BYTES, Invitation, Visitor};
use crate::commands::Expected;
use crate::connection::{Connection, Line};
use crate::counts::Counts;
use crate::message::FromRank;
use crate::negotiated::Token;
use crate::outcome::{Failure, SessionOutcome};

/// All such calls, and the connections that have not said for which call they come.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// The arrived ranks of each call or round, and the order in which calls became known.
    arrivals: HashMap<Token, Arrivals>,
    order: VecDeque<Token>,
    rounds: Rounds,
    /// Connections that have sent no greeting yet, the oldest first.
    visitors: VecDeque<u64>,
}

impl Calls {
    pub(super) fn accept_visitors(&mut self, sockets: &mut Sockets, process_listener: u64) {
        for _ in 0..sockets.limits.accepts_per_turn {
            let Some(watched) = sockets.next_visitor(process_listener) else { return };
            let key = watched.key();
            sockets.endpoints.insert(key, Endpoint::Visitor(Connection::new(watched)));
            self.visitors.push_back(key);
            if self.visitors.len() > sockets.limits.newcomers_max
                && let Some(oldest) = self.visitors.pop_front()
            {
                // The oldest has been silent for longest. No rank connects and stays silent.
                sockets.endpoints.remove(&oldest);
                Counts::up(&sockets.shared.counts.turned_away);
            }
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
        connection: Connection,
        name: Token,
        rank: u32,
    ) {
        let key = connection.watched.key();
        self.arrivals(sockets, sessions, name);
        if !self.rounds.enter(sockets, connection, name, rank) {
            self.arrivals(sockets, sessions, name).died(rank);
            return self.look_at(sockets, sessions, name);
        }
        self.in_round(sockets, sessions, key);
    }

    /// Handles input of a rank's connection in a round.
    pub(super) fn in_round(&mut self, sockets: &mut Sockets, sessions: &mut Sessions, key: u64) {
        let Some(heard) = self.rounds.hear(sockets, key) else { return };
        let (name, rank) = (heard.name, heard.rank);
        for message in heard.messages {
            if self.rounds.has(name) {
                self.arrivals(sockets, sessions, name).spoke(rank);
                self.rounds.said(sockets, key, name, rank, message);
            }
        }
        if heard.line == Line::Closed {
            self.rounds.left(sockets, key, name);
            // A rank that has sent no message will send none. For one that has, this changes nothing.
            self.arrivals.get_mut(&name).into_iter().for_each(|arrivals| arrivals.died(rank));
        }
        self.look_at(sockets, sessions, name);
    }

    fn arrivals(&mut self, sockets: &mut Sockets, sessions: &mut Sessions, call: Token) -> &mut Arrivals {
        if !self.arrivals.contains_key(&call) {
            self.make_room(sockets, sessions);
            self.order.push_back(call);
        }
        self.arrivals.entry(call).or_default()
    }

    fn make_room(&mut self, sockets: &mut Sockets, sessions: &mut Sessions) {
        if self.arrivals.len() < sockets.limits.calls_max {
            return;
        }
        let awaited = |call: &&Token| {
            let child = self.arrivals.get(*call).and_then(Arrivals::child);
            let session = child.and_then(|child| sessions.get(child));
            session.is_some_and(|session| !session.is_left()) || self.rounds.is_awaited(**call)
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
        self.arrivals.contains_key(&call)
    }

    /// The host's own rank makes the call: from now on the other ranks are known, and the deaths of their processes are
    /// seen.
    pub(super) fn await_ranks(&mut self, sockets: &mut Sockets, sessions: &mut Sessions, expected: Expected) {
        let Expected { call, ranks, lives } = expected;
        self.arrivals(sockets, sessions, call).await_ranks(ranks);
        for (rank, life) in lives {
            let mut watched = sockets.poll.watch(life);
            match watched.want(EventFlags::IN) {
                Ok(()) => {
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
            && let Some(arrivals) = self.arrivals.get_mut(&call)
        {
            log::debug!("bootstrap {call:?} the process of rank {rank} has died");
            arrivals.died(rank);
            self.look_at(sockets, sessions, call);
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
        let lost = self.arrivals.get(&call).and_then(Arrivals::lost);
        lost.into_iter().for_each(|rank| self.rounds.fail(sockets, call, Failure::Absent { rank }));
        let Some(arrivals) = self.arrivals.get(&call) else { return };
        let Some(coming) = arrivals.coming() else { return };
        let (over, rank) = (arrivals.is_over(), arrivals.absent());
        let is_lost = |child: &Token| {
            let session = sessions.get(*child);
            session.and_then(Session::missing).is_some_and(|missing| missing > coming)
        };
        if let Some(child) = arrivals.child().filter(is_lost) {
            sessions.happen(sockets, child, Event::Absent(Failure::Absent { rank }));
        }
        if over {
            self.forget(sockets, sessions, call);
        }
    }

    fn forget(&mut self, sockets: &mut Sockets, sessions: &mut Sessions, call: Token) {
        let Some(arrivals) = self.arrivals.remove(&call) else { return };
        self.rounds.forget(sockets, call);
        self.order.retain(|other| *other != call);
        sockets
            .endpoints
            .retain(|_, endpoint| !matches!(endpoint, Endpoint::Life { call: of, .. } if *of == call));
        arrivals.child().into_iter().for_each(|child| sessions.nobody_comes(child));
    }
}

/// The key of no connection.
const NOBODYS_KEY: u64 = 0;
