//! Connects the ranks of this process to the hosts of their sessions and rounds, and sends messages of ranks that
//! decline.

use rustix::event::epoll::EventFlags;

use super::hosting::Sessions;
use super::joining::Joining;
use super::sockets::{Endpoint, Sockets};
use crate::approach::{self, Hindrance, HostAt, Next, Want};
use crate::children::{self, GREETING_BYTES};
use crate::commands::{Host, Reporting};
use crate::connection::{self, Connection, Line};
use crate::message;
use crate::negotiated::Token;
use crate::outcome::Failure;
use crate::poll::Watched;
use crate::process_listener::{self, Knock};
use crate::waiter::Need;
use windlass_base::descriptor::{self, Ours};

/// An attempt to connect that is repeated.
#[derive(Debug)]
enum Knocking {
    /// A message for the process listener with this secret.
    Telling(Token, Vec<u8>),
    Joining(Host, Reporting),
}

/// All attempts that are repeated.
#[derive(Debug, Default)]
pub(super) struct Joins {
    knocking: Vec<Knocking>,
}

impl Joins {
    /// Whether an attempt will be repeated.
    pub(super) fn is_knocking(&self) -> bool {
        !self.knocking.is_empty()
    }

    /// Connects a rank of this process to the host of its session or round.
    pub(super) fn join(
        &mut self,
        sockets: &mut Sockets,
        sessions: &mut Sessions,
        host: Host,
        reporting: Reporting,
    ) {
        let place = place(host, sessions, &reporting.words);
        match begin(sockets, host, place, reporting.key) {
            Ok(watched) => {
                let Reporting { key, waiter, words } = reporting;
                sockets.endpoints.insert(key, Endpoint::Joining(Joining::new(watched, host, waiter, words)));
            }
            Err(hindrance) => self.hindered(sockets, sessions, host, reporting, hindrance),
        }
    }

    /// Does what [follows](approach::next) for a rank that cannot reach its host or has lost it.
    fn hindered(
        &mut self,
        sockets: &mut Sockets,
        sessions: &mut Sessions,
        host: Host,
        reporting: Reporting,
        hindrance: Hindrance,
    ) {
        let next = approach::next(place(host, sessions, &reporting.words), hindrance);
        approach::tell(&*reporting.waiter, &next);
        match next {
            Next::TryAgain => self.knocking.push(Knocking::Joining(host, reporting)),
            Next::GoToNccl { .. } | Next::Fail(_) => {}
            Next::FailWithSession(_) => {
                let token = message::token_of(&reporting.words);
                token.into_iter().for_each(|token| sessions.refuse_session(sockets, token));
            }
            Next::FailAndWithdraw(_) => {
                let withdrawal = children::withdrawal(&reporting.words);
                let telling = withdrawal.map(|(listener, words)| Knocking::Telling(listener, words));
                self.knocking.extend(telling);
            }
        }
    }

    /// Repeats all attempts.
    pub(super) fn knock_again(&mut self, sockets: &mut Sockets, sessions: &mut Sessions) {
        for knocking in std::mem::take(&mut self.knocking) {
            match knocking {
                Knocking::Telling(process_listener, bytes) => self.tell(sockets, process_listener, bytes),
                Knocking::Joining(host, reporting) => match place(host, sessions, &reporting.words) {
                    // This process no longer hosts the session.
                    HostAt::Port => {
                        self.hindered(sockets, sessions, host, reporting, Hindrance::Short(Want::Refused));
                    }
                    _ => self.join(sockets, sessions, host, reporting),
                },
            }
        }
    }

    /// A rank waits no more: closes its connection or ends its attempts.
    pub(super) fn leave_session(&mut self, sockets: &mut Sockets, key: u64) {
        let unsaid = match sockets.endpoints.remove(&key) {
            Some(Endpoint::Joining(joining)) => joining.reporting().words,
            _ => self.stop_knocking(key),
        };
        // The host of a call waits for a message of each rank, so a rank whose report has not gone out declines.
        if let Some((process_listener, words)) = children::withdrawal(&unsaid) {
            self.tell(sockets, process_listener, words);
        }
    }

    /// At the end of the thread: declines for ranks whose reports have not gone out, and sends what was still to be
    /// sent.
    pub(super) fn say_what_was_not_said(&mut self, sockets: &Sockets) {
        for endpoint in sockets.endpoints.values() {
            if let Endpoint::Joining(joining) = endpoint {
                let Reporting { waiter, words, .. } = joining.reporting();
                process_listener::withdraw_alone(&*waiter, &words);
            }
        }
        for knocking in std::mem::take(&mut self.knocking) {
            match knocking {
                Knocking::Telling(process_listener, words) => {
                    process_listener::tell_alone(process_listener, &words)
                }
                Knocking::Joining(_, Reporting { waiter, words, .. }) => {
                    waiter.lost(Failure::HostLost);
                    process_listener::withdraw_alone(&*waiter, &words);
                }
            }
        }
    }

    /// Ends the attempts of a rank. Returns the bytes that were to be sent.
    fn stop_knocking(&mut self, key: u64) -> Vec<u8> {
        let joins = |knocking: &mut Knocking| match knocking {
            Knocking::Joining(_, other) => other.key == key,
            Knocking::Telling(..) => false,
        };
        match self.knocking.extract_if(.., joins).next() {
            Some(Knocking::Joining(_, reporting)) => reporting.words,
            _ => Vec::new(),
        }
    }

    /// Sends a message of a rank of this process in its session.
    pub(super) fn say(&mut self, sockets: &mut Sockets, sessions: &mut Sessions, key: u64, bytes: &[u8]) {
        self.turn(sockets, sessions, key, |joining| joining.say(bytes));
    }

    /// Handles an event of the connection of a rank of this process.
    pub(super) fn joining(&mut self, sockets: &mut Sockets, sessions: &mut Sessions, key: u64) {
        self.turn(sockets, sessions, key, Joining::turn);
    }

    /// Lets a begun connection go on. It is never [short](Hindrance::Short) of a resource, so no attempt is repeated.
    fn turn(
        &mut self,
        sockets: &mut Sockets,
        sessions: &mut Sessions,
        key: u64,
        turn: impl FnOnce(&mut Joining) -> Result<Need, Hindrance>,
    ) {
        let Some(Endpoint::Joining(joining)) = sockets.endpoints.get_mut(&key) else { return };
        let (host, reporting, hindrance) = match turn(joining) {
            Ok(Need::Connection) => return,
            Ok(Need::Nothing) => return drop(sockets.endpoints.remove(&key)),
            Err(hindrance) => (joining.host, joining.reporting(), hindrance),
        };
        // First: the end of the connection would tell the waiter that the host is lost.
        self.hindered(sockets, sessions, host, reporting, hindrance);
        sockets.endpoints.remove(&key);
    }

    /// Sends a message to a process listener to which no rank of this process connects, as soon as possible.
    pub(super) fn tell(&mut self, sockets: &mut Sockets, process_listener: Token, bytes: Vec<u8>) {
        match process_listener::connect(process_listener) {
            Ok(socket) => {
                let mut connection = Connection::new(sockets.poll.watch(socket));
                let key = connection.watched.key();
                if connection.last_message(&bytes) == Line::Open {
                    sockets.endpoints.insert(key, Endpoint::Telling(connection));
                }
            }
            // Other ranks wait for the message, so it is tried for as long as that process lives.
            Err(Knock::Later(error)) => {
                sockets.lacks("reach a process listener", error);
                self.knocking.push(Knocking::Telling(process_listener, bytes));
            }
            // No process is left that waits for the message.
            Err(Knock::Gone) => {}
        }
    }
}

/// Goes on with a message to a process listener, until it has arrived.
pub(super) fn telling(sockets: &mut Sockets, key: u64) {
    let Some(Endpoint::Telling(connection)) = sockets.endpoints.get_mut(&key) else { return };
    let line = connection.fill(GREETING_BYTES);
    connection.input.clear();
    if line == Line::Closed || connection.flush() == Line::Closed {
        sockets.endpoints.remove(&key);
    }
}

/// Where the host is to which these words go, as far as this process knows.
fn place(host: Host, sessions: &Sessions, words: &[u8]) -> HostAt {
    match host.at() {
        HostAt::Port if message::token_of(words).is_some_and(|token| sessions.get(token).is_some()) => {
            HostAt::OwnPort
        }
        place => place,
    }
}

/// Begins to connect to a host.
fn begin(sockets: &mut Sockets, host: Host, place: HostAt, key: u64) -> Result<Watched, Hindrance> {
    match host {
        Host::Port(address) => {
            let socket = descriptor::even_of_reserve(|| connection::connect(&address));
            let begun = socket.and_then(|socket| watch(sockets, socket, key));
            begun.map_err(|error| match place {
                HostAt::OwnPort if descriptor::is_want(error) => {
                    Hindrance::Short(sockets.lacks("come to its own session", error))
                }
                _ => Hindrance::Unreached { words: format!("{address}: {error}") },
            })
        }
        Host::ProcessListener(process_listener) => match process_listener::connect(process_listener) {
            Ok(socket) => {
                watch(sockets, socket, key).map_err(|error| Hindrance::Unreached { words: error.to_string() })
            }
            Err(Knock::Later(error)) => {
                Err(Hindrance::Short(sockets.lacks("reach a process listener", error)))
            }
            Err(Knock::Gone) => Err(Hindrance::Unreached { words: "its process is gone".into() }),
        },
    }
}

/// Lets the thread wait until a begun connection stands.
fn watch(sockets: &Sockets, socket: Ours, key: u64) -> rustix::io::Result<Watched> {
    let mut watched = sockets.poll.watch_as(socket, key);
    watched.want(EventFlags::OUT)?;
    Ok(watched)
}
