//! The ranks of this process in their sessions, wherever those are hosted.

use std::net::SocketAddr;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use super::process_listener::{self, Knock, Knocking};
use super::wanting::Want;
use super::{Endpoint, Reactor, Reporting};
use crate::children;
use crate::connection::{self, Connection, Line};
use crate::message::{self, FROM_HOST_BYTES_MAX, FromHost};
use crate::negotiated::Token;
use crate::outcome::{Failure, FallbackReason, SessionOutcome, bounded};
use crate::waiter::{Need, Waiter};
use windlass_base::descriptor;

#[derive(Debug)]
pub(super) struct Joining {
    connection: Connection,
    waiter: Waiter,
    state: JoinStage,
    /// What has not gone out.
    words: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JoinStage {
    Connecting,
    /// At a process listener.
    Entering,
    Talking,
}

impl Reactor {
    pub(super) fn join(&mut self, address: &SocketAddr, reporting: Reporting) {
        let Reporting { key, waiter, words } = reporting;
        let connect = || connection::connect(address);
        let begun = descriptor::even_of_reserve(connect).and_then(|socket| {
            let mut watched = self.poll.watch_as(socket, key);
            watched.want(EventFlags::OUT)?;
            Ok(watched)
        });
        match begun {
            Ok(watched) => {
                let connection = Connection::new(watched);
                let joining = Joining { connection, waiter, state: JoinStage::Connecting, words };
                self.endpoints.insert(key, Endpoint::Joining(joining));
            }
            // NCCL could do no better in this process, and others who come would find nobody.
            Err(error) if descriptor::is_want(error) && self.hosts(&words) => {
                if self.lacks("come to its own session", error) == Want::Later {
                    let reporting = Reporting { key, waiter, words };
                    return self.knocking.push(Knocking::AtPort(*address, reporting));
                }
                waiter.lost(Failure::Short);
                message::token_of(&words).into_iter().for_each(|token| self.refuse_session(token));
            }
            Err(error) => waiter.end(unreachable(address, error)),
        }
    }

    /// Whether these are the words of a rank in a session of this process.
    fn hosts(&self, words: &[u8]) -> bool {
        message::token_of(words).is_some_and(|token| self.sessions.contains_key(&token))
    }

    /// Whoever finds nobody there has lost its host; whoever cannot come in goes on trying.
    pub(super) fn join_at_process_listener(&mut self, process_listener: Token, reporting: Reporting) {
        let Reporting { key, waiter, words } = reporting;
        let begun = process_listener::connect(process_listener).map(|socket| self.poll.watch_as(socket, key));
        match begun {
            Ok(mut watched) => {
                if watched.want(EventFlags::OUT).is_err() {
                    return waiter.lost(Failure::HostLost);
                }
                let connection = Connection::new(watched);
                let joining = Joining { connection, waiter, state: JoinStage::Entering, words };
                self.endpoints.insert(key, Endpoint::Joining(joining));
            }
            Err(Knock::Later(error)) => match self.lacks("reach a process listener", error) {
                Want::Later => {
                    self.knocking.push(Knocking::Joining(process_listener, Reporting { key, waiter, words }));
                }
                Want::Refused => {
                    waiter.lost(Failure::Short);
                    // Who cannot say that it does not come goes on trying.
                    if let Some((process_listener, words)) = children::withdrawal(&words) {
                        self.knocking.push(Knocking::Telling(process_listener, words));
                    }
                }
            },
            Err(Knock::Gone) => waiter.lost(Failure::HostLost),
        }
    }

    pub(super) fn knock_again(&mut self) {
        for knocking in std::mem::take(&mut self.knocking) {
            match knocking {
                Knocking::Telling(process_listener, bytes) => self.tell(process_listener, bytes),
                Knocking::Joining(process_listener, reporting) => {
                    self.join_at_process_listener(process_listener, reporting)
                }
                Knocking::AtPort(address, reporting) if self.hosts(&reporting.words) => {
                    self.join(&address, reporting);
                }
                // It was refused meanwhile.
                Knocking::AtPort(_, reporting) => reporting.waiter.lost(Failure::Short),
            }
        }
    }

    pub(super) fn leave_session(&mut self, key: u64) {
        let unsaid = match self.endpoints.remove(&key) {
            Some(Endpoint::Joining(joining)) => joining.words.clone(),
            _ => self.stop_knocking(key),
        };
        // The host of a call waits for a message of each rank, and the report has not gone out.
        if let Some((process_listener, words)) = children::withdrawal(&unsaid) {
            self.tell(process_listener, words);
        }
    }

    /// The thread ends, and with it these connections.
    pub(super) fn say_what_was_not_said(&mut self) {
        for endpoint in self.endpoints.values() {
            if let Endpoint::Joining(joining) = endpoint {
                process_listener::withdraw_alone(&joining.waiter, &joining.words);
            }
        }
        for knocking in std::mem::take(&mut self.knocking) {
            match knocking {
                Knocking::Telling(process_listener, words) => {
                    process_listener::tell_alone(process_listener, &words)
                }
                Knocking::AtPort(_, Reporting { waiter, .. }) => waiter.lost(Failure::HostLost),
                Knocking::Joining(_, Reporting { waiter, words, .. }) => {
                    waiter.lost(Failure::HostLost);
                    process_listener::withdraw_alone(&waiter, &words);
                }
            }
        }
    }

    /// Gives what was to be said.
    fn stop_knocking(&mut self, key: u64) -> Vec<u8> {
        let joins = |knocking: &mut Knocking| match knocking {
            Knocking::Joining(_, other) | Knocking::AtPort(_, other) => other.key == key,
            Knocking::Telling(..) => false,
        };
        match self.knocking.extract_if(.., joins).next() {
            Some(Knocking::Joining(_, reporting)) => reporting.words,
            _ => Vec::new(),
        }
    }

    pub(super) fn joining(&mut self, key: u64) {
        let Some(Endpoint::Joining(joining)) = self.endpoints.get_mut(&key) else { return };
        if joining.turn() == Need::Nothing {
            self.endpoints.remove(&key);
        }
    }

    pub(super) fn say(&mut self, key: u64, bytes: &[u8]) {
        let Some(Endpoint::Joining(joining)) = self.endpoints.get_mut(&key) else { return };
        match joining.state {
            // Behind the report.
            JoinStage::Connecting | JoinStage::Entering => joining.words.extend_from_slice(bytes),
            // A line that closed while speaking is read to its end at the next turn: an outcome may lie in it.
            JoinStage::Talking => {
                if joining.connection.say(bytes) == Line::Closed && joining.turn() == Need::Nothing {
                    self.endpoints.remove(&key);
                }
            }
        }
    }
}

impl Joining {
    fn turn(&mut self) -> Need {
        if self.state != JoinStage::Talking {
            if let Err(error) = connection::outcome(&self.connection.watched) {
                if self.state == JoinStage::Entering {
                    self.waiter.lost(Failure::HostLost);
                    return Need::Nothing;
                }
                // Nobody has heard of this rank, so it may go to NCCL: whose root is there, or is not, for it too.
                let words = bounded(&error.to_string());
                self.waiter.end(SessionOutcome::OnNccl(FallbackReason::Unreachable { words }));
                return Need::Nothing;
            }
            self.state = JoinStage::Talking;
            let words = std::mem::take(&mut self.words);
            let _ = self.connection.say(&words);
        }
        let (messages, line, complaint) = self.connection.messages(FROM_HOST_BYTES_MAX, FromHost::decode);
        for message in messages {
            if self.waiter.heard(message) == Need::Nothing {
                return Need::Nothing;
            }
        }
        let line = if line == Line::Open { self.connection.flush() } else { line };
        if line == Line::Open {
            return Need::Connection;
        }
        let failure = if complaint.is_some() { Failure::Unreadable } else { Failure::HostLost };
        self.waiter.lost(failure);
        Need::Nothing
    }
}

fn unreachable(address: &SocketAddr, error: Errno) -> SessionOutcome {
    SessionOutcome::OnNccl(FallbackReason::Unreachable { words: bounded(&format!("{address}: {error}")) })
}

impl Drop for Joining {
    /// However its connection ends, nobody waits for it.
    fn drop(&mut self) {
        self.waiter.lost(Failure::HostLost);
    }
}
