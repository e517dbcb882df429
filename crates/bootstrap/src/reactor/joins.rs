//! The ranks of this process on their way to their sessions, and what is said where no rank goes.

use std::net::SocketAddr;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use super::hosting::Sessions;
use super::joining::{JoinStage, Joining};
use super::sockets::{Endpoint, Sockets};
use super::wanting::Want;
use crate::children::{self, GREETING_BYTES};
use crate::commands::Reporting;
use crate::connection::{self, Connection, Line};
use crate::message;
use crate::negotiated::Token;
use crate::outcome::{Failure, FallbackReason, SessionOutcome, bounded};
use crate::process_listener::{self, Knock};
use crate::waiter::Need;
use windlass_base::descriptor;

/// What could not be said at a process listener, or a port, yet.
#[derive(Debug)]
enum Knocking {
    Telling(Token, Vec<u8>),
    Joining(Token, Reporting),
    /// At the port of an id of this process.
    AtPort(SocketAddr, Reporting),
}

/// What is tried again.
#[derive(Debug, Default)]
pub(super) struct Joins {
    knocking: Vec<Knocking>,
}

impl Joins {
    /// Whether something is tried again later.
    pub(super) fn is_knocking(&self) -> bool {
        !self.knocking.is_empty()
    }

    pub(super) fn join(
        &mut self,
        sockets: &mut Sockets,
        sessions: &mut Sessions,
        address: &SocketAddr,
        reporting: Reporting,
    ) {
        let Reporting { key, waiter, words } = reporting;
        let connect = || connection::connect(address);
        let begun = descriptor::even_of_reserve(connect).and_then(|socket| {
            let mut watched = sockets.poll.watch_as(socket, key);
            watched.want(EventFlags::OUT)?;
            Ok(watched)
        });
        match begun {
            Ok(watched) => {
                let connection = Connection::new(watched);
                let joining = Joining::new(connection, waiter, JoinStage::Connecting, words);
                sockets.endpoints.insert(key, Endpoint::Joining(joining));
            }
            // NCCL could do no better in this process, and others who come would find nobody.
            Err(error) if descriptor::is_want(error) && hosts(sessions, &words) => {
                if sockets.lacks("come to its own session", error) == Want::Later {
                    let reporting = Reporting { key, waiter, words };
                    return self.knocking.push(Knocking::AtPort(*address, reporting));
                }
                waiter.lost(Failure::Short);
                message::token_of(&words)
                    .into_iter()
                    .for_each(|token| sessions.refuse_session(sockets, token));
            }
            Err(error) => waiter.end(unreachable(address, error)),
        }
    }

    /// Whoever finds nobody there has lost its host; whoever cannot come in goes on trying.
    pub(super) fn join_at_process_listener(
        &mut self,
        sockets: &mut Sockets,
        process_listener: Token,
        reporting: Reporting,
    ) {
        let Reporting { key, waiter, words } = reporting;
        let begun =
            process_listener::connect(process_listener).map(|socket| sockets.poll.watch_as(socket, key));
        match begun {
            Ok(mut watched) => {
                if watched.want(EventFlags::OUT).is_err() {
                    return waiter.lost(Failure::HostLost);
                }
                let connection = Connection::new(watched);
                let joining = Joining::new(connection, waiter, JoinStage::Entering, words);
                sockets.endpoints.insert(key, Endpoint::Joining(joining));
            }
            Err(Knock::Later(error)) => match sockets.lacks("reach a process listener", error) {
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

    pub(super) fn knock_again(&mut self, sockets: &mut Sockets, sessions: &mut Sessions) {
        for knocking in std::mem::take(&mut self.knocking) {
            match knocking {
                Knocking::Telling(process_listener, bytes) => self.tell(sockets, process_listener, bytes),
                Knocking::Joining(process_listener, reporting) => {
                    self.join_at_process_listener(sockets, process_listener, reporting)
                }
                Knocking::AtPort(address, reporting) if hosts(sessions, &reporting.words) => {
                    self.join(sockets, sessions, &address, reporting);
                }
                // It was refused meanwhile.
                Knocking::AtPort(_, reporting) => reporting.waiter.lost(Failure::Short),
            }
        }
    }

    pub(super) fn leave_session(&mut self, sockets: &mut Sockets, key: u64) {
        let unsaid = match sockets.endpoints.remove(&key) {
            Some(Endpoint::Joining(joining)) => joining.unsaid().to_vec(),
            _ => self.stop_knocking(key),
        };
        // The host of a call waits for a message of each rank, and the report has not gone out.
        if let Some((process_listener, words)) = children::withdrawal(&unsaid) {
            self.tell(sockets, process_listener, words);
        }
    }

    /// The thread ends, and with it these connections.
    pub(super) fn say_what_was_not_said(&mut self, sockets: &Sockets) {
        for endpoint in sockets.endpoints.values() {
            if let Endpoint::Joining(joining) = endpoint {
                joining.withdraw_alone();
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
                    process_listener::withdraw_alone(&*waiter, &words);
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

    /// Says something at a process listener to which no rank of this process goes, as soon as it can be.
    pub(super) fn tell(&mut self, sockets: &mut Sockets, process_listener: Token, bytes: Vec<u8>) {
        match process_listener::connect(process_listener) {
            Ok(socket) => {
                let mut connection = Connection::new(sockets.poll.watch(socket));
                let key = connection.watched.key();
                if connection.last_message(&bytes) == Line::Open {
                    sockets.endpoints.insert(key, Endpoint::Telling(connection));
                }
            }
            // Others wait for it: it is tried as long as the process lives.
            Err(Knock::Later(error)) => {
                sockets.lacks("reach a process listener", error);
                self.knocking.push(Knocking::Telling(process_listener, bytes));
            }
            // Nobody is left who would wait for it.
            Err(Knock::Gone) => {}
        }
    }
}

/// What a rank of this process has to say in its session goes there.
pub(super) fn say(sockets: &mut Sockets, key: u64, bytes: &[u8]) {
    let Some(Endpoint::Joining(joining)) = sockets.endpoints.get_mut(&key) else { return };
    if joining.say(bytes) == Need::Nothing {
        sockets.endpoints.remove(&key);
    }
}

/// The connection of a rank of this process has something.
pub(super) fn joining(sockets: &mut Sockets, key: u64) {
    let Some(Endpoint::Joining(joining)) = sockets.endpoints.get_mut(&key) else { return };
    if joining.turn() == Need::Nothing {
        sockets.endpoints.remove(&key);
    }
}

/// What is told at a process listener goes on, until it has arrived.
pub(super) fn telling(sockets: &mut Sockets, key: u64) {
    let Some(Endpoint::Telling(connection)) = sockets.endpoints.get_mut(&key) else { return };
    let line = connection.fill(GREETING_BYTES);
    connection.input.clear();
    if line == Line::Closed || connection.flush() == Line::Closed {
        sockets.endpoints.remove(&key);
    }
}

/// Whether these are the words of a rank in a session of this process.
fn hosts(sessions: &Sessions, words: &[u8]) -> bool {
    message::token_of(words).is_some_and(|token| sessions.get(token).is_some())
}

fn unreachable(address: &SocketAddr, error: Errno) -> SessionOutcome {
    SessionOutcome::OnNccl(FallbackReason::Unreachable { words: bounded(&format!("{address}: {error}")) })
}
