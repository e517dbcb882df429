//! NCCL's connections that came to ports of this process: they wait here, and go to NCCL's roots through relays.

use std::collections::VecDeque;
use std::net::SocketAddr;

use rustix::event::epoll::EventFlags;

use super::hosting::Sessions;
use super::sockets::{Endpoint, Sockets};
use crate::agreement::Event;
use crate::connection::{self, Connection};
use crate::counts::Counts;
use crate::negotiated::Token;
use crate::poll::Watched;
use crate::relay::{Relay, RelayState};
use windlass_base::descriptor;

/// How often a root that was about to close is checked. Later [`Sessions::sweep`] does it.
const CLOSING_LOOKS: u32 = 50;

/// Connections that wait to be relayed, and roots that are about to close.
#[derive(Debug, Default)]
pub(super) struct Relaying {
    /// Sessions to which all of NCCL's ranks have come, and how often their root was checked since.
    closing: Vec<(Token, u32)>,
    /// Connections to be relayed once there is room, in the order in which they came. The thread does not poll them:
    /// most clients have closed, which the kernel would report again and again.
    waiting: VecDeque<(Connection, Token)>,
}

impl Relaying {
    /// Whether a connection waits, or a root is still to be checked.
    pub(super) fn is_pending(&self) -> bool {
        !self.waiting.is_empty() || !self.closing.is_empty()
    }

    /// Takes a connection of NCCL's. It is relayed as soon as possible and never dropped for want of a resource. Its
    /// client has often sent all and closed, NCCL does not connect again, and its root would wait for that rank for
    /// ever.
    pub(super) fn came(
        &mut self,
        sockets: &mut Sockets,
        sessions: &mut Sessions,
        mut connection: Connection,
        token: Token,
    ) {
        let Some(session) = sessions.get_mut(token) else { return };
        let first = session.agreement.outcome().is_none();
        // Fails only for a socket that is not polled.
        let _ = connection.watched.want(EventFlags::empty());
        session.waiting += 1;
        self.waiting.push_back((connection, token));
        if first {
            log::debug!("bootstrap {token:?} a rank went to NCCL: all go there");
            sessions.happen(sockets, token, Event::NonWindlass);
        }
        self.relay_waiting(sockets, sessions);
    }

    /// Relays waiting connections while there is room and descriptors.
    pub(super) fn relay_waiting(&mut self, sockets: &mut Sockets, sessions: &mut Sessions) {
        let mut lacking = false;
        for (connection, token) in std::mem::take(&mut self.waiting) {
            let Some(session) = sessions.get(token) else { continue };
            let Some(root) = session.root().copied() else { continue };
            if lacking || !session.has_room(sockets.relays, &sockets.limits) {
                self.waiting.push_back((connection, token));
                continue;
            }
            // Without a relay no descriptor will come back, so the reserve is used.
            let root = match sockets.relays {
                0 => descriptor::even_of_reserve(|| reach(sockets, &root)),
                _ => reach(sockets, &root),
            };
            if let Err(error) = &root
                && connection::is_lack(*error)
            {
                sockets.lacks("reach NCCL's root", *error);
                lacking = true;
                self.waiting.push_back((connection, token));
                continue;
            }
            if let Some(session) = sessions.get_mut(token) {
                session.waiting -= 1;
            }
            match root {
                Ok(root) => relay(sockets, sessions, connection, root, token),
                Err(_) => Counts::up(&sockets.shared.counts.relays_broken),
            }
        }
    }

    /// Handles an event of one socket of a relay.
    pub(super) fn relayed(&mut self, sockets: &mut Sockets, sessions: &mut Sessions, key: u64, ready: u64) {
        let Some(Endpoint::Relayed(relay, _)) = sockets.endpoints.get_mut(&key) else { return };
        let course = relay.turn(ready);
        if course == RelayState::Running {
            return;
        }
        let Some(Endpoint::Relayed(relay, token)) = sockets.endpoints.remove(&key) else { return };
        sockets.endpoints.remove(&relay.root_key());
        sockets.relays -= 1;
        let (forth, back) = relay.bytes();
        drop(relay);
        Counts::add(&sockets.shared.counts.relayed_bytes, forth + back);
        let Some(session) = sessions.get_mut(token) else { return };
        session.relays -= 1;
        if course == RelayState::Broken {
            Counts::up(&sockets.shared.counts.relays_broken);
        } else {
            session.relayed += 1;
        }
        let all_came = session.agreement.ranks.is_none_or(|ranks| session.relayed >= ranks);
        if all_came && !session.is_relaying() && !self.closing.iter().any(|(closing, _)| *closing == token) {
            self.closing.push((token, 0));
        }
        sessions.forget_if_empty(token);
        // This may have made room: first for connections that wait.
        self.relay_waiting(sockets, sessions);
        sessions.resume(sockets);
    }

    /// Retires sessions whose roots have closed. NCCL's root closes a moment after its last rank; no rank can come
    /// after that.
    pub(super) fn close_behind_roots(&mut self, sockets: &mut Sockets, sessions: &mut Sessions) {
        for (token, looks) in std::mem::take(&mut self.closing) {
            let Some(session) = sessions.get(token) else { continue };
            if session.root_is_gone() {
                sessions.retire(sockets, token);
            } else if looks < CLOSING_LOOKS {
                self.closing.push((token, looks + 1));
            }
        }
    }
}

/// Begins to relay a connection.
fn relay(
    sockets: &mut Sockets,
    sessions: &mut Sessions,
    connection: Connection,
    root: Watched,
    token: Token,
) {
    let Some(session) = sessions.get_mut(token) else { return };
    let (key, root_key) = (connection.watched.key(), root.key());
    let mut relay = Relay::new(connection.watched, root, connection.input);
    if relay.start().is_err() {
        return Counts::up(&sockets.shared.counts.relays_broken);
    }
    session.relays += 1;
    sockets.relays += 1;
    Counts::up(&sockets.shared.counts.relays);
    sockets.endpoints.insert(key, Endpoint::Relayed(relay, token));
    sockets.endpoints.insert(root_key, Endpoint::Root(key));
}

/// Begins to connect to a root. The root is in this process and needs a descriptor of its own to accept.
fn reach(sockets: &mut Sockets, root: &SocketAddr) -> rustix::io::Result<Watched> {
    connection::free_for_root(1)?;
    sockets.poll.watch_for(connection::connect(root)?, EventFlags::OUT)
}
