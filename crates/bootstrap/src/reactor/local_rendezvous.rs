//! The host-local rendezvous whose roster this process keeps: who enters, asks and goes.

use rustix::event::epoll::EventFlags;

use crate::negotiated::Token;
use windlass_base::descriptor::Ours;

use super::hosting::Session;
use super::{Endpoint, Expected, Reactor};
use crate::agreement::{ConnectionId, Event};
use crate::children;
use crate::connection::{Connection, Line};
use crate::counts::Counts;
use crate::local_rendezvous::{
    self, GREETING_BYTES, MESSAGE_BYTES, Missing, Roster, RosterAnswer, RosterCourse, RosterMessage,
};
use crate::message::FromRank;
use crate::outcome::{FallbackReason, SessionOutcome};

/// A host-local rendezvous, for as long as anybody is connected to it.
#[derive(Debug)]
pub(super) struct LocalRendezvous {
    listener: u64,
    /// Those that have not said who they are, too.
    connections: usize,
    roster: Roster,
}

/// A connection to a host-local rendezvous.
#[derive(Debug)]
pub(super) struct Visit {
    connection: Connection,
    name: Token,
    has_entered: bool,
    /// How it says that it goes.
    last: Option<RosterMessage>,
}

impl Reactor {
    pub(super) fn open_local_rendezvous(&mut self, name: Token, listener: Ours) {
        let mut watched = self.poll.watch(listener);
        // Without it whoever connects hears that nobody is there.
        if let Err(error) = watched.want(EventFlags::IN) {
            return log::warn!("bootstrap cannot listen at a host-local rendezvous: {error}");
        }
        let local_rendezvous =
            LocalRendezvous { listener: watched.key(), connections: 0, roster: Roster::default() };
        self.endpoints.insert(watched.key(), Endpoint::LocalRendezvous(watched, name));
        self.local_rendezvous.insert(name, local_rendezvous);
    }

    pub(super) fn accept_at_local_rendezvous(&mut self, listener: u64, name: Token) {
        for _ in 0..self.limits.accepts_per_turn {
            let Some(watched) = self.next_visitor(listener) else { break };
            let newcomers_max = self.limits.newcomers_max;
            let Some(local_rendezvous) = self.local_rendezvous.get_mut(&name) else { return };
            // Nothing honest is silent here.
            if local_rendezvous.connections - local_rendezvous.roster.present() >= newcomers_max {
                Counts::up(&self.shared.counts.turned_away);
                continue;
            }
            local_rendezvous.connections += 1;
            let (key, connection) = (watched.key(), Connection::new(watched));
            let visit = Visit { connection, name, has_entered: false, last: None };
            self.endpoints.insert(key, Endpoint::AtLocalRendezvous(visit));
        }
        // None of those that came could be kept.
        if !self.paused.contains(&listener) {
            self.end_local_rendezvous_if_left(name);
        }
    }

    pub(super) fn at_local_rendezvous(&mut self, key: u64) {
        // What was said before the line closed counts.
        while let Some(said) = self.next_said(key) {
            match said {
                Said::Nothing => return,
                Said::Closed => return self.leave_local_rendezvous(key),
                Said::Greeting(rank) => self.enter_local_rendezvous(key, rank),
                Said::Message(RosterMessage::Ask { ranks }) => self.ask_local_rendezvous(key, ranks),
                Said::Message(last) => {
                    if let Some(Endpoint::AtLocalRendezvous(visit)) = self.endpoints.get_mut(&key) {
                        visit.last = Some(last);
                    }
                }
            }
        }
    }

    fn next_said(&mut self, key: u64) -> Option<Said> {
        let Some(Endpoint::AtLocalRendezvous(visit)) = self.endpoints.get_mut(&key) else { return None };
        let length = if visit.has_entered { MESSAGE_BYTES } else { GREETING_BYTES };
        let line = visit.connection.fill(length);
        if visit.connection.input.len() < length {
            return Some(if line == Line::Open { Said::Nothing } else { Said::Closed });
        }
        let words: Vec<u8> = visit.connection.input.drain(..length).collect();
        let said = match visit.has_entered {
            false => local_rendezvous::who(&words, visit.name).map(Said::Greeting),
            true => RosterMessage::decode(&words).map(Said::Message),
        };
        if said.is_none() {
            Counts::up(&self.shared.counts.turned_away);
        }
        Some(said.unwrap_or(Said::Closed))
    }

    fn enter_local_rendezvous(&mut self, key: u64, rank: u32) {
        let Some(Endpoint::AtLocalRendezvous(visit)) = self.endpoints.get_mut(&key) else { return };
        visit.has_entered = true;
        let Some(local_rendezvous) = self.local_rendezvous.get_mut(&visit.name) else { return };
        let answer = if local_rendezvous.roster.enter(key, rank) {
            RosterAnswer::Entered
        } else {
            RosterAnswer::Apart
        };
        let _ = visit.connection.say(&answer.encode());
        if answer == RosterAnswer::Apart {
            self.leave_local_rendezvous(key);
        }
    }

    fn ask_local_rendezvous(&mut self, key: u64, ranks: u32) {
        let process_listener = self.process_listener;
        let Some(Endpoint::AtLocalRendezvous(visit)) = self.endpoints.get_mut(&key) else { return };
        let name = visit.name;
        let course = self
            .local_rendezvous
            .get_mut(&name)
            .and_then(|local_rendezvous| local_rendezvous.roster.ask(key, ranks));
        let Some(course) = course else { return self.leave_local_rendezvous(key) };
        log::debug!("host-local rendezvous {name:?} of {ranks} ranks: {course:?}");
        let answer = match course {
            RosterCourse::Meet { place, .. } => RosterAnswer::Complete { place, process_listener },
            RosterCourse::Apart => RosterAnswer::Apart,
        };
        // Before anybody can come.
        if let RosterCourse::Meet { expected: Some(ranks), .. } = course {
            self.await_ranks(Expected { call: name, ranks, lives: Vec::new() });
        }
        let Some(Endpoint::AtLocalRendezvous(visit)) = self.endpoints.get_mut(&key) else { return };
        // Who hears it no more may have declined: that is read before its end.
        let _ = visit.connection.say(&answer.encode());
    }

    fn leave_local_rendezvous(&mut self, key: u64) {
        let Some(Endpoint::AtLocalRendezvous(visit)) = self.endpoints.remove(&key) else { return };
        let name = visit.name;
        let Some(local_rendezvous) = self.local_rendezvous.get_mut(&name) else { return };
        local_rendezvous.connections -= 1;
        let missing = local_rendezvous.roster.left(key, visit.last);
        self.end_local_rendezvous_if_left(name);
        // A call that is over waits for nobody.
        if let Some((place, missing)) = missing.filter(|_| self.arrivals_by_call.contains_key(&name)) {
            log::debug!("host-local rendezvous {name:?} place {place} {missing:?}");
            self.does_not_come(name, place, missing);
        }
    }

    /// Who is on its way here is refused, and comes to the next.
    fn end_local_rendezvous_if_left(&mut self, name: Token) {
        if self.local_rendezvous.get(&name).is_some_and(|local_rendezvous| local_rendezvous.connections == 0)
            && let Some(local_rendezvous) = self.local_rendezvous.remove(&name)
        {
            self.endpoints.remove(&local_rendezvous.listener);
        }
    }

    /// Where a rank declines the others have what NCCL gave them; where its process died, they are told.
    fn does_not_come(&mut self, name: Token, place: u32, missing: Missing) {
        let child = children::child(name, 0);
        let arrivals = self.arrivals(name);
        match missing {
            Missing::Dies => arrivals.died(place),
            Missing::Declines => {
                arrivals.comes_for(child);
                arrivals.spoke(place);
                self.sessions
                    .entry(child)
                    .or_insert_with(|| Session::of_call(name, children::comm_token(child)));
                let said = FromRank::Decline(SessionOutcome::OnNccl(FallbackReason::Apart));
                self.happen(child, Event::Said(ConnectionId(NOBODYS_KEY), said));
            }
        }
        self.look_at(name);
    }
}

/// Of no connection.
const NOBODYS_KEY: u64 = 0;

enum Said {
    /// Nothing yet.
    Nothing,
    /// Nothing any more.
    Closed,
    Greeting(u32),
    Message(RosterMessage),
}
