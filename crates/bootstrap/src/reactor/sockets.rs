//! All sockets of the background thread by their keys, its one `Poll`, and the handling of missing descriptors.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Once};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use super::joining::Joining;
use super::visit::Visit;
use crate::Limits;
use crate::approach::Want;
use crate::children::{self, NOBODY};
use crate::commands::{Shared, WAKE};
use crate::connection::{self, Connection, Line};
use crate::counts::Counts;
use crate::message::{FROM_RANK_BYTES_MAX, FromRank};
use crate::negotiated::Token;
use crate::poll::{Poll, Watched};
use crate::process_listener::ProcessListener;
use crate::relay::Relay;
use rustix::process::{Resource, getrlimit};
use std::time::{Duration, Instant};
use windlass_base::descriptor::{self, Ours, WANTED_FOR};

/// [`WANTED_FOR`] while connections of NCCL's are relayed to a root of this process: they give their descriptors back.
const OF_NCCL_WITHIN: Duration = Duration::from_secs(60);

fn say_once(error: Errno, waited: Duration) {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        let limit = getrlimit(Resource::Nofile).current;
        let limit = limit.map_or_else(|| "none".to_owned(), |limit| limit.to_string());
        log::error!(
            "no file descriptor could be opened for {} s ({error}; RLIMIT_NOFILE {limit}): communicators that need this process fail",
            waited.as_secs()
        );
    });
}

/// Keys above it belong to the thread, those below to callers.
const FIRST_OWN_KEY: u64 = 1 << 63;

/// The use of a socket.
#[derive(Debug)]
pub(super) enum Endpoint {
    Port(Watched, Token),
    /// Accepted at a port. Its first bytes will say who connected.
    Newcomer(Connection, Token),
    /// A rank in a session that this process hosts.
    Present(Connection, Token),
    /// A rank in a round that this process hosts: the round's name and the rank in the parent.
    InRound(Connection, Token, u32),
    /// A rank of this process, connected to its session or round.
    Joining(Joining),
    /// The connection to the root of the relay with this key.
    Root(u64),
    Relayed(Relay, Token),
    /// The process listener, to which ranks of child communicators connect.
    ProcessListener(Watched),
    /// Accepted at the process listener, without a greeting yet.
    Visitor(Connection),
    /// A message to a process listener that has no answer, until it has arrived.
    Telling(Connection),
    /// The listener of the host-local rendezvous of this name.
    LocalRendezvous(Watched, Token),
    AtLocalRendezvous(Visit),
    /// What tells the end of the process of a rank that has not come in a call yet.
    Life {
        _end: Watched,
        call: Token,
        rank: u32,
    },
}

impl Endpoint {
    /// The socket, if it accepts connections.
    fn listener(&mut self) -> Option<&mut Watched> {
        match self {
            Endpoint::Port(watched, _)
            | Endpoint::ProcessListener(watched)
            | Endpoint::LocalRendezvous(watched, _) => Some(watched),
            _ => None,
        }
    }
}

/// All sockets, and the limits on them.
#[derive(Debug)]
pub(super) struct Sockets {
    pub shared: Arc<Shared>,
    pub limits: Limits,
    pub poll: Poll,
    pub endpoints: HashMap<u64, Endpoint>,
    /// The keys of listeners that could not accept.
    pub paused: Vec<u64>,
    /// How many connections are relayed now.
    pub relays: usize,
    /// The secret of this process's process listener.
    pub process_listener: Token,
    /// Since when operations have failed for want of a resource, if they do.
    pub lacks_since: Option<Instant>,
}

impl Sockets {
    /// No sockets but the process listener, if there is one.
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
            lacks_since: None,
        };
        descriptor::fill_reserve();
        if let Some(ProcessListener { secret, listener }) = process_listener {
            sockets.process_listener = secret;
            sockets.listen_at_process_listener(listener)?;
        }
        Ok(sockets)
    }

    /// Notes that an operation failed with this error. Returns whether to try again.
    ///
    /// At first the thread waits, since descriptors come back. After a time it refuses, since other ranks would wait for ever. Ranks that
    /// wait to be accepted hear that by the end of their connections, which takes no descriptor. A rank that can reach no host fails, and
    /// goes on trying to decline. Two descriptors are held in reserve for that ([`descriptor::even_of_reserve`]).
    pub(super) fn lacks(&mut self, what: &str, error: Errno) -> Want {
        Counts::up(&self.shared.counts.starved);
        log::debug!("bootstrap cannot {what}: {error}, trying again soon");
        let since = *self.lacks_since.get_or_insert_with(Instant::now);
        let within = if self.relays > 0 { OF_NCCL_WITHIN } else { WANTED_FOR };
        if !descriptor::is_want(error) || since.elapsed() < within {
            return Want::Later;
        }
        say_once(error, since.elapsed());
        Want::Refused
    }

    /// Ends the want if the reserve is full and there are descriptors to accept with.
    pub(super) fn look_at_reserve(&mut self) {
        // As many as an accepted connection needs: beside a relay one more, for the root.
        let needed = if self.relays > 0 { 2 } else { 1 };
        if descriptor::fill_reserve() && descriptor::are_free(needed) {
            self.lacks_since = None;
        }
    }

    /// Reads the messages of a rank's connection in a session or round, and sends what waits.
    pub(super) fn hear(&mut self, key: u64) -> Option<(Vec<FromRank>, Line)> {
        let Some(Endpoint::Present(connection, of) | Endpoint::InRound(connection, of, _)) =
            self.endpoints.get_mut(&key)
        else {
            return None;
        };
        let (messages, mut line, complaint) = connection.messages(FROM_RANK_BYTES_MAX, FromRank::decode);
        if line == Line::Open {
            line = connection.flush();
        }
        if let Some(complaint) = complaint {
            log::warn!("bootstrap {of:?} {complaint} from a rank: closing its connection");
            Counts::up(&self.shared.counts.unreadable);
        }
        Some((messages, line))
    }

    /// Enters the connection of a rank that has sent its greeting, in a session that this process hosts.
    pub(super) fn seat(&mut self, mut connection: Connection, token: Token) {
        connection.input.clear();
        self.endpoints.insert(connection.watched.key(), Endpoint::Present(connection, token));
    }

    /// Closes the oldest of these connections if there are too many: it has been silent for longest, and no rank connects and
    /// stays silent.
    pub(super) fn turn_oldest_away(&mut self, silent: &mut VecDeque<u64>) {
        if silent.len() > self.limits.newcomers_max
            && let Some(oldest) = silent.pop_front()
        {
            self.endpoints.remove(&oldest);
            Counts::up(&self.shared.counts.turned_away);
        }
    }

    /// Lets a listener accept no connections for now.
    pub(super) fn pause(&mut self, listener: u64) {
        if let Some(watched) = self.endpoints.get_mut(&listener).and_then(Endpoint::listener) {
            let _ = watched.want(EventFlags::empty());
            self.paused.push(listener);
        }
    }

    /// Lets a paused listener accept connections again.
    pub(super) fn resume(&mut self, listener: u64) {
        if let Some(watched) = self.endpoints.get_mut(&listener).and_then(Endpoint::listener) {
            let _ = watched.want(EventFlags::IN);
        }
    }

    /// Accepts the next connection at the process listener or a host-local rendezvous. None if none waits or can be
    /// accepted now.
    pub(super) fn next_visitor(&mut self, listener: u64) -> Option<Watched> {
        loop {
            let Some(Endpoint::ProcessListener(watched) | Endpoint::LocalRendezvous(watched, _)) =
                self.endpoints.get(&listener)
            else {
                return None;
            };
            match connection::accept_locally(watched) {
                Ok(accepted) => {
                    if let Ok(watched) = self.poll.watch_for(accepted, EventFlags::IN) {
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

    /// Opens the process listener anew, because it cannot accept. Ranks that wait there lose their host; later ones can
    /// connect.
    fn refuse_visitors(&mut self, listener: u64) {
        if let Some(Endpoint::ProcessListener(_)) = self.endpoints.get(&listener) {
            self.endpoints.remove(&listener);
            self.open_process_listener_again();
        }
    }

    /// Opens the process listener again, if it had to be closed.
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

    /// Closes the process listener. Ranks that connect to it, also of this process, are refused.
    pub(super) fn close_process_listener(&mut self) {
        self.endpoints.retain(|_, endpoint| !matches!(endpoint, Endpoint::ProcessListener(_)));
    }

    fn listen_at_process_listener(&mut self, listener: Ours) -> rustix::io::Result<()> {
        let watched = self.poll.watch_for(listener, EventFlags::IN)?;
        self.endpoints.insert(watched.key(), Endpoint::ProcessListener(watched));
        Ok(())
    }
}
