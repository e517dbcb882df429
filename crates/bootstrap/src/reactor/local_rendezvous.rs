//! The host-local rendezvous whose rosters this process keeps: ranks enter, ask and leave.

use std::collections::HashMap;

use rustix::event::epoll::EventFlags;

use super::calls::Calls;
use super::hosting::Sessions;
use super::sockets::{Endpoint, Sockets};
use super::visit::{Said, Visit};
use crate::children;
use crate::children::local_rendezvous::{Missing, Roster, RosterAnswer, RosterCourse, RosterMessage};
use crate::commands::Expected;
use crate::connection::Connection;
use crate::counts::Counts;
use crate::negotiated::Token;
use crate::outcome::{FallbackReason, SessionOutcome};
use windlass_base::descriptor::Ours;

/// A host-local rendezvous, which ends with its last connection.
#[derive(Debug)]
struct LocalRendezvous {
    listener: u64,
    /// All connections, also those without a greeting yet.
    connections: usize,
    roster: Roster,
}

/// The host-local rendezvous that this process keeps, by their names.
#[derive(Debug, Default)]
pub(super) struct Rosters(HashMap<Token, LocalRendezvous>);

impl Rosters {
    pub(super) fn open(&mut self, sockets: &mut Sockets, name: Token, listener: Ours) {
        let watched = match sockets.poll.watch_for(listener, EventFlags::IN) {
            Ok(watched) => watched,
            // The listener closes, and ranks that connect are refused.
            Err(error) => return log::warn!("bootstrap cannot listen at a host-local rendezvous: {error}"),
        };
        let local_rendezvous =
            LocalRendezvous { listener: watched.key(), connections: 0, roster: Roster::default() };
        sockets.endpoints.insert(watched.key(), Endpoint::LocalRendezvous(watched, name));
        self.0.insert(name, local_rendezvous);
    }

    pub(super) fn accept(&mut self, sockets: &mut Sockets, listener: u64, name: Token) {
        for _ in 0..sockets.limits.accepts_per_turn {
            let Some(watched) = sockets.next_visitor(listener) else { break };
            let newcomers_max = sockets.limits.newcomers_max;
            let Some(local_rendezvous) = self.0.get_mut(&name) else { return };
            // No rank connects and stays silent.
            if local_rendezvous.connections - local_rendezvous.roster.present() >= newcomers_max {
                Counts::up(&sockets.shared.counts.turned_away);
                continue;
            }
            local_rendezvous.connections += 1;
            let visit = Visit::new(Connection::new(watched), name);
            sockets.endpoints.insert(visit.connection.watched.key(), Endpoint::AtLocalRendezvous(visit));
        }
        // The rendezvous ends if none of these connections could be kept.
        if !sockets.paused.contains(&listener) {
            self.end_if_left(sockets, name);
        }
    }

    /// Handles input of a connection.
    pub(super) fn visit(
        &mut self,
        sockets: &mut Sockets,
        sessions: &mut Sessions,
        calls: &mut Calls,
        key: u64,
    ) {
        // Messages that arrived before the connection closed count.
        while let Some(Endpoint::AtLocalRendezvous(visit)) = sockets.endpoints.get_mut(&key) {
            match visit.next_said() {
                Said::Nothing => return,
                Said::Closed => return self.leave(sockets, sessions, calls, key),
                Said::Unreadable => {
                    Counts::up(&sockets.shared.counts.turned_away);
                    return self.leave(sockets, sessions, calls, key);
                }
                Said::Greeting(rank) => {
                    visit.has_entered = true;
                    let Some(local_rendezvous) = self.0.get_mut(&visit.name) else { continue };
                    let enters = local_rendezvous.roster.enter(key, rank);
                    let answer = if enters { RosterAnswer::Entered } else { RosterAnswer::Apart };
                    let _ = visit.connection.say(&answer.encode());
                    if !enters {
                        self.leave(sockets, sessions, calls, key);
                    }
                }
                Said::Message(RosterMessage::Ask { ranks }) => self.ask(sockets, sessions, calls, key, ranks),
                Said::Message(last) => visit.last = Some(last),
            }
        }
    }

    fn ask(
        &mut self,
        sockets: &mut Sockets,
        sessions: &mut Sessions,
        calls: &mut Calls,
        key: u64,
        ranks: u32,
    ) {
        let process_listener = sockets.process_listener;
        let Some(Endpoint::AtLocalRendezvous(visit)) = sockets.endpoints.get(&key) else { return };
        let name = visit.name;
        let course =
            self.0.get_mut(&name).and_then(|local_rendezvous| local_rendezvous.roster.ask(key, ranks));
        let Some(course) = course else { return self.leave(sockets, sessions, calls, key) };
        log::debug!("host-local rendezvous {name:?} of {ranks} ranks: {course:?}");
        let answer = match course {
            RosterCourse::Meet { place, .. } => RosterAnswer::Complete { place, process_listener },
            RosterCourse::Apart => RosterAnswer::Apart,
        };
        // Done before a rank can come to the session.
        if let RosterCourse::Meet { expected: Some(ranks), .. } = course {
            calls.await_ranks(sockets, sessions, Expected { call: name, ranks, lives: Vec::new() });
        }
        let Some(Endpoint::AtLocalRendezvous(visit)) = sockets.endpoints.get_mut(&key) else { return };
        // A rank that does not hear the answer may have declined. Its message is read before its end.
        let _ = visit.connection.say(&answer.encode());
    }

    fn leave(&mut self, sockets: &mut Sockets, sessions: &mut Sessions, calls: &mut Calls, key: u64) {
        let Some(Endpoint::AtLocalRendezvous(visit)) = sockets.endpoints.remove(&key) else { return };
        let name = visit.name;
        let Some(local_rendezvous) = self.0.get_mut(&name) else { return };
        local_rendezvous.connections -= 1;
        let missing = local_rendezvous.roster.left(key, visit.last);
        self.end_if_left(sockets, name);
        // A call that is over waits for no rank.
        let Some((place, missing)) = missing.filter(|_| calls.has(name)) else { return };
        log::debug!("host-local rendezvous {name:?} place {place} {missing:?}");
        match missing {
            Missing::Dies => calls.lose(sockets, sessions, name, place),
            // The other ranks have NCCL's communicator.
            Missing::Declines => {
                let outcome = SessionOutcome::OnNccl(FallbackReason::Apart);
                calls.decline(sockets, sessions, name, children::child(name, 0), place, outcome);
            }
        }
    }

    /// Closes a rendezvous without connections. A rank on its way here is refused and opens the next one.
    fn end_if_left(&mut self, sockets: &mut Sockets, name: Token) {
        if self.0.get(&name).is_some_and(|local_rendezvous| local_rendezvous.connections == 0)
            && let Some(local_rendezvous) = self.0.remove(&name)
        {
            sockets.endpoints.remove(&local_rendezvous.listener);
        }
    }
}
