//! Every socket of the thread, the one place where they are waited for, and what is done where descriptors for more are wanting.

use std::collections::HashMap;
use std::sync::Arc;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use super::joining::Joining;
use super::visit::Visit;
use super::wanting::Wanting;
use crate::approach::Want;
use crate::children::{self, NOBODY};
use crate::commands::{Shared, WAKE};
use crate::connection::{self, Connection};
use crate::counts::Counts;
use crate::limits::Limits;
use crate::negotiated::Token;
use crate::poll::{Poll, Watched};
use crate::process_listener::ProcessListener;
use crate::relay::Relay;
use windlass_base::descriptor::{self, Ours};

/// Numbers above it belong to the thread, those below to callers.
const FIRST_OWN_KEY: u64 = 1 << 63;

/// What a socket is for.
#[derive(Debug)]
pub(super) enum Endpoint {
    Port(Watched, Token),
    /// Accepted; who it is stands in its first bytes.
    Newcomer(Connection, Token),
    /// A rank in a session of ours.
    Present(Connection, Token),
    /// A rank in a round of ours, by the round and its rank in the parent.
    InRound(Connection, Token, u32),
    /// A rank of this process in its session, or in a round.
    Joining(Joining),
    /// The connection to the root of the relay with this key.
    Root(u64),
    Relayed(Relay, Token),
    /// Where ranks of communicators made from others come.
    ProcessListener(Watched),
    /// Accepted there.
    Visitor(Connection),
    /// What is said at a process listener without an answer, until it has arrived.
    Telling(Connection),
    /// Where the ranks of this host come before NCCL makes the communicator of this name.
    LocalRendezvous(Watched, Token),
    AtLocalRendezvous(Visit),
    /// The process of a rank that has not come in a call yet.
    Life {
        _pidfd: Watched,
        call: Token,
        rank: u32,
    },
}

impl Endpoint {
    /// Its socket, if others connect to it.
    fn listener(&mut self) -> Option<&mut Watched> {
        match self {
            Endpoint::Port(watched, _)
            | Endpoint::ProcessListener(watched)
            | Endpoint::LocalRendezvous(watched, _) => Some(watched),
            _ => None,
        }
    }
}

/// The sockets, by their keys, and what bounds them.
#[derive(Debug)]
pub(super) struct Sockets {
    pub shared: Arc<Shared>,
    pub limits: Limits,
    pub poll: Poll,
    pub endpoints: HashMap<u64, Endpoint>,
    /// Listeners that could not accept.
    pub paused: Vec<u64>,
    /// Connections that are relayed now.
    pub relays: usize,
    /// The secret of our process listener.
    pub process_listener: Token,
    wanting: Wanting,
}

impl Sockets {
    /// None but the process listener, if there is one.
    pub(super) fn new(
        shared: Arc<Shared>,
        limits: Limits,
        process_listener: Option<ProcessListener>,
    ) -> rustix::io::Result<Sockets> {
        let poll = Poll::new(FIRST_OWN_KEY)?;
        poll.add(&shared.wake, WAKE)?;
        let mut sockets = Sockets {
            shared,
            limits,
            poll,
            endpoints: HashMap::new(),
            paused: Vec::new(),
            relays: 0,
            process_listener: NOBODY,
            wanting: Wanting::default(),
        };
        descriptor::fill_reserve();
        if let Some(ProcessListener { secret, listener }) = process_listener {
            sockets.process_listener = secret;
            sockets.listen_at_process_listener(listener)?;
        }
        Ok(sockets)
    }

    /// Something could not be done for this error.
    pub(super) fn lacks(&mut self, what: &str, error: Errno) -> Want {
        Counts::up(&self.shared.counts.starved);
        self.wanting.lacks(what, error, self.relays)
    }

    /// Whether something could not be done, and there may not be enough yet.
    pub(super) fn is_wanting(&self) -> bool {
        self.wanting.is_wanting()
    }

    /// Whether there is enough again.
    pub(super) fn look_at_reserve(&mut self) {
        self.wanting.look_at_reserve(self.relays);
    }

    /// A connection of a rank that has said who it is, in a session of ours.
    pub(super) fn seat(&mut self, mut connection: Connection, token: Token) {
        connection.input.clear();
        self.endpoints.insert(connection.watched.key(), Endpoint::Present(connection, token));
    }

    /// A listener takes nobody for now.
    pub(super) fn pause(&mut self, listener: u64) {
        if let Some(watched) = self.endpoints.get_mut(&listener).and_then(Endpoint::listener) {
            let _ = watched.want(EventFlags::empty());
            self.paused.push(listener);
        }
    }

    /// A listener that was paused takes connections again.
    pub(super) fn resume(&mut self, listener: u64) {
        if let Some(watched) = self.endpoints.get_mut(&listener).and_then(Endpoint::listener) {
            let _ = watched.want(EventFlags::IN);
        }
    }

    /// The next who waits at the process listener or a host-local rendezvous: none if nobody does, or none can be let in now.
    pub(super) fn next_visitor(&mut self, listener: u64) -> Option<Watched> {
        loop {
            let Some(Endpoint::ProcessListener(watched) | Endpoint::LocalRendezvous(watched, _)) =
                self.endpoints.get(&listener)
            else {
                return None;
            };
            match connection::accept_locally(watched) {
                Ok(accepted) => {
                    let mut watched = self.poll.watch(accepted);
                    if watched.want(EventFlags::IN).is_ok() {
                        return Some(watched);
                    }
                }
                Err(Errno::AGAIN) => return None,
                Err(Errno::CONNABORTED | Errno::INTR) => {}
                Err(error) => {
                    self.pause(listener);
                    if self.lacks("accept a process of this host", error) == Want::Refused {
                        self.refuse_visitors(listener);
                    }
                    return None;
                }
            }
        }
    }

    /// Nobody can be let in to the process listener. Those who wait there lose their host; it opens again for others.
    fn refuse_visitors(&mut self, listener: u64) {
        if let Some(Endpoint::ProcessListener(_)) = self.endpoints.get(&listener) {
            self.endpoints.remove(&listener);
            self.open_process_listener_again();
        }
    }

    /// Opens the process listener, if it had to be closed.
    pub(super) fn open_process_listener_again(&mut self) {
        let is_open =
            self.endpoints.values().any(|endpoint| matches!(endpoint, Endpoint::ProcessListener(_)));
        if is_open || self.process_listener == NOBODY {
            return;
        }
        let address = children::address(self.process_listener);
        let listener = address.and_then(|address| connection::listen_locally(&address));
        if let Err(error) = listener.and_then(|listener| self.listen_at_process_listener(listener)) {
            self.lacks("open its process listener again", error);
        }
    }

    /// Whoever would come there, also of this process, finds nobody.
    pub(super) fn close_process_listener(&mut self) {
        self.endpoints.retain(|_, endpoint| !matches!(endpoint, Endpoint::ProcessListener(_)));
    }

    fn listen_at_process_listener(&mut self, listener: Ours) -> rustix::io::Result<()> {
        let mut watched = self.poll.watch(listener);
        watched.want(EventFlags::IN)?;
        self.endpoints.insert(watched.key(), Endpoint::ProcessListener(watched));
        Ok(())
    }
}
