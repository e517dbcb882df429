//! The sessions that this process hosts: who comes to their ports, and what the agreement makes of it.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use crate::negotiated::Token;
use windlass_base::descriptor;

use super::wanting::Want;
use super::{Endpoint, NewSession, Reactor};
use crate::agreement::{Agreement, ConnectionId, Event};
use crate::children::NOBODY;
use crate::connection::{self, Connection, Line};
use crate::counts::Counts;
use crate::id_tag::{self, Id};
use crate::message::{self, Caller, FROM_RANK_BYTES_MAX, FromRank, GREETING_BYTES};
use crate::place;
use crate::poll::Watched;
use crate::relay::{Relay, RelayState};
use windlass_base::stats::segment;

/// Descriptors that this process needs before its ranks may go to NCCL. Three relay a connection to NCCL's root: both ends here, and
/// the root's own. Two are for what a rank of NCCL's in this process opens first.
const OF_A_RELAY: usize = 5;
/// The newest release whose bootstrap was read (2.30.7).
const BOOTSTRAP_READ_UP_TO: i32 = 23007;
/// How often a root is looked at that was about to close; after that the sweep does.
const CLOSING_LOOKS: u32 = 50;
/// Sessions looked at, at each new one, for whether NCCL's root is gone. With 256 open ones a dead one stays open for 16
/// inits at most; each look costs a microsecond or two.
const SWEEP: usize = 16;

#[derive(Debug)]
pub(super) struct Session {
    agreement: Agreement,
    kind: Kind,
    listener: Option<u64>,
    newcomers: VecDeque<u64>,
    /// Ranks' connections.
    present: usize,
    relays: usize,
    /// Connections that are not relayed yet.
    waiting: usize,
    /// Connections of NCCL's that came and went in good order.
    relayed: u32,
}

#[derive(Debug)]
enum Kind {
    /// Of an id, as NCCL made it, and where its root is.
    Id { id: Id, root: SocketAddr },
    /// Of a call that makes communicators from another, with the connections that have not sent a message, and whose they
    /// are. Kept until nobody can come any more.
    Call { call: Token, silent: Vec<(u64, u32)> },
    /// Of such a call, and all who could come have come.
    Complete,
}

impl Session {
    fn new(comm: Token, kind: Kind, listener: Option<u64>) -> Session {
        Session {
            // Without a name of its own it tells nobody last.
            agreement: Agreement::new(comm, place::process().unwrap_or(NOBODY)),
            kind,
            listener,
            newcomers: VecDeque::new(),
            present: 0,
            relays: 0,
            waiting: 0,
            relayed: 0,
        }
    }

    pub(super) fn of_call(call: Token, comm: Token) -> Session {
        Session::new(comm, Kind::Call { call, silent: Vec::new() }, None)
    }

    /// Takes a connection of a rank of the parent in, if there is room.
    pub(super) fn enter(&mut self, key: u64, rank: u32, present_max: usize) -> Option<()> {
        if self.present >= present_max {
            return None;
        }
        self.present += 1;
        if let Kind::Call { silent, .. } = &mut self.kind {
            silent.push((key, rank));
        }
        Some(())
    }

    /// The first message of a connection: of which call, and whose.
    pub(super) fn arrived(&mut self, key: u64) -> Option<(Token, u32)> {
        let Kind::Call { call, silent } = &mut self.kind else { return None };
        let index = silent.iter().position(|(silent, _)| *silent == key)?;
        Some((*call, silent.swap_remove(index).1))
    }

    /// How many ranks are waited for that have not reported.
    pub(super) fn missing(&self) -> Option<u32> {
        self.agreement.missing()
    }

    /// Whether nobody is there.
    pub(super) fn is_left(&self) -> bool {
        self.present == 0
    }

    /// All who could come have come.
    pub(super) fn nobody_comes(&mut self) {
        self.kind = Kind::Complete;
    }

    fn root(&self) -> Option<&SocketAddr> {
        match &self.kind {
            Kind::Id { root, .. } => Some(root),
            _ => None,
        }
    }

    /// Whether a connection goes to its root, or waits for that.
    fn is_relaying(&self) -> bool {
        self.relays > 0 || self.waiting > 0
    }

    fn root_is_gone(&self) -> bool {
        self.root().is_some_and(connection::is_free)
    }
}

impl Reactor {
    pub(super) fn open(&mut self, new: NewSession) {
        self.sweep();
        let NewSession { token, comm, id, listener, root } = new;
        let mut watched = self.poll.watch(listener);
        if let Err(error) = watched.want(EventFlags::IN) {
            log::warn!("bootstrap cannot wait for a listener: {error}");
        }
        let key = watched.key();
        self.endpoints.insert(key, Endpoint::Port(watched, token));
        self.sessions.insert(token, Session::new(comm, Kind::Id { id, root }, Some(key)));
        self.sweeping.push_back(token);
    }

    /// Looks at a few of the oldest sessions: one whose root is gone takes no NCCL rank any more, and nobody waits in
    /// it.
    pub(super) fn sweep(&mut self) {
        for _ in 0..SWEEP.min(self.sweeping.len()) {
            let Some(token) = self.sweeping.pop_front() else { return };
            let Some(session) = self.sessions.get(&token) else { continue };
            if session.listener.is_none() {
                continue;
            }
            let idle = !session.is_relaying() && session.newcomers.is_empty();
            let waited_for = session.present > 0 && session.agreement.outcome().is_none();
            if idle && !waited_for && session.root_is_gone() {
                self.retire(token);
            } else {
                self.sweeping.push_back(token);
            }
        }
    }

    /// Nobody can come any more. Ranks that wait for an outcome lose their host.
    pub(super) fn retire(&mut self, token: Token) {
        let Some(session) = self.sessions.get_mut(&token) else { return };
        if let Some(key) = session.listener.take() {
            self.endpoints.remove(&key);
            Counts::down(&self.shared.counts.sessions_open);
        }
        for key in std::mem::take(&mut session.newcomers) {
            self.endpoints.remove(&key);
        }
        if session.agreement.outcome().is_none() {
            session.present = 0;
            self.endpoints
                .retain(|_, endpoint| !matches!(endpoint, Endpoint::Present(_, of) if *of == token));
        }
        self.forget_if_empty(token);
    }

    /// All ranks have confirmed that they go to NCCL later only, and with another id: so nobody goes to the root of this
    /// one. Also not
    ///
    /// - a rank that dies, leaves or loses us before it hears the outcome: whoever has reported goes nowhere without the
    ///   host's message, its init fails;
    /// - anybody who has been there: the first connection that is relayed makes the session end on NCCL, so none was;
    /// - whoever else connects from now on: no rank is missing. It is refused, as by NCCL's root once all have been there.
    ///
    /// The port goes, and the id goes to those that are given out again. That comes before
    /// anybody hears the outcome: whoever asks for an id after the init finds this one.
    fn recycle(&mut self, token: Token) {
        let Some(session) = self.sessions.get(&token) else { return };
        if let Kind::Id { id, .. } = session.kind {
            self.retire(token);
            self.shared.spare(id);
        }
    }

    pub(super) fn forget_if_empty(&mut self, token: Token) {
        let empty = |session: &Session| {
            let awaited = session.listener.is_some() || matches!(session.kind, Kind::Call { .. });
            !awaited && session.present == 0 && !session.is_relaying()
        };
        if self.sessions.get(&token).is_some_and(empty) {
            self.sessions.remove(&token);
            self.sweeping.retain(|other| *other != token);
        }
    }

    pub(super) fn accept(&mut self, listener: u64, token: Token) {
        for _ in 0..self.limits.accepts_per_turn {
            if !self.accepts(token) {
                return self.pause(listener);
            }
            let Some(Endpoint::Port(watched, _)) = self.endpoints.get(&listener) else { return };
            // The last one is for the root to which something is relayed now.
            let spared = if self.relays > 0 { free_for(1) } else { Ok(()) };
            let accept = || connection::accept(watched);
            let accepted = match spared.and_then(|()| descriptor::even_of_reserve(accept)) {
                Ok(accepted) => accepted,
                Err(Errno::AGAIN) => return,
                // Those who gave up while they waited.
                Err(Errno::CONNABORTED | Errno::INTR | Errno::PERM | Errno::INVAL) => continue,
                Err(error) => {
                    return match self.lacks("accept", error) {
                        Want::Later => self.pause(listener),
                        Want::Refused => self.refuse_session(token),
                    };
                }
            };
            let mut watched = self.poll.watch(accepted);
            let key = watched.key();
            if watched.want(EventFlags::IN).is_err() {
                continue;
            }
            self.endpoints.insert(key, Endpoint::Newcomer(Connection::new(watched), token));
            let Some(session) = self.sessions.get_mut(&token) else { return };
            session.newcomers.push_back(key);
            if session.newcomers.len() > self.limits.newcomers_max
                && let Some(oldest) = session.newcomers.pop_front()
            {
                // It has been silent for longest; nothing honest connects in order to say nothing.
                self.endpoints.remove(&oldest);
                Counts::up(&self.shared.counts.turned_away);
            }
        }
    }

    pub(super) fn pause(&mut self, listener: u64) {
        if let Some(
            Endpoint::Port(watched, _)
            | Endpoint::ProcessListener(watched)
            | Endpoint::LocalRendezvous(watched, _),
        ) = self.endpoints.get_mut(&listener)
        {
            let _ = watched.want(EventFlags::empty());
            self.paused.push(listener);
        }
    }

    pub(super) fn resume(&mut self) {
        for key in std::mem::take(&mut self.paused) {
            let full = match self.endpoints.get(&key) {
                Some(Endpoint::Port(_, token)) => !self.accepts(*token),
                _ => false,
            };
            if full {
                self.paused.push(key);
            } else if let Some(
                Endpoint::Port(watched, _)
                | Endpoint::ProcessListener(watched)
                | Endpoint::LocalRendezvous(watched, _),
            ) = self.endpoints.get_mut(&key)
            {
                let _ = watched.want(EventFlags::IN);
            }
        }
    }

    /// Whether a session takes connections now: whoever came would only wait, with a descriptor of ours.
    fn accepts(&self, token: Token) -> bool {
        self.sessions.get(&token).is_none_or(|session| session.waiting == 0 && self.has_room(session))
    }

    fn has_room(&self, session: &Session) -> bool {
        session.relays < self.limits.relays_max && self.relays < self.limits.relays_of_all_max
    }

    pub(super) fn newcomer(&mut self, key: u64) {
        let Some(Endpoint::Newcomer(connection, token)) = self.endpoints.get_mut(&key) else { return };
        let token = *token;
        let line = connection.fill(GREETING_BYTES);
        let Some(Kind::Id { id, .. }) = self.sessions.get(&token).map(|session| &session.kind) else {
            return;
        };
        let caller = message::identify(&connection.input, token, &id_tag::magic(id));
        if caller == Caller::Unclear && line == Line::Open {
            return;
        }
        let Some(Endpoint::Newcomer(mut connection, _)) = self.endpoints.remove(&key) else { return };
        let Some(session) = self.sessions.get_mut(&token) else { return };
        session.newcomers.retain(|newcomer| *newcomer != key);
        match caller {
            Caller::Rank if session.present < self.limits.present_max => {
                connection.input.clear();
                session.present += 1;
                self.endpoints.insert(key, Endpoint::Present(connection, token));
                self.present(key, token);
            }
            Caller::Nccl => self.nccl_came(connection, token),
            // It may be a rank: none may be lost.
            Caller::Unknown if is_nccl_newer() => self.nccl_came(connection, token),
            // Closed before it said who it is, nobody's, or one of too many. NCCL's root drops these, too, where they do not end it.
            _ => {
                log::debug!("bootstrap {token:?} dropped a connection, {caller:?}");
                Counts::up(&self.shared.counts.turned_away);
            }
        }
    }

    /// A rank's. It is relayed as soon as it can be, and never dropped for want of anything: its client has often said all and gone,
    /// NCCL does not come again, and its root would wait for that rank for ever.
    fn nccl_came(&mut self, mut connection: Connection, token: Token) {
        let Some(session) = self.sessions.get_mut(&token) else { return };
        let first = session.agreement.outcome().is_none();
        // Fails only for what is not in the wait.
        let _ = connection.watched.want(EventFlags::empty());
        session.waiting += 1;
        self.waiting.push_back((connection, token));
        if first {
            log::debug!("bootstrap {token:?} a rank went to NCCL: all go there");
            self.happen(token, Event::NonWindlass);
        }
        self.relay_waiting();
    }

    /// Relays those that wait, as far as there is room and what they need.
    pub(super) fn relay_waiting(&mut self) {
        let mut lacking = false;
        for (connection, token) in std::mem::take(&mut self.waiting) {
            let Some(session) = self.sessions.get(&token) else { continue };
            let Some(root) = session.root().copied() else { continue };
            if lacking || !self.has_room(session) {
                self.waiting.push_back((connection, token));
                continue;
            }
            let reach = |reactor: &mut Reactor| reactor.reach(&root);
            // Where none goes nothing comes back either.
            let root = match self.relays {
                0 => descriptor::even_of_reserve(|| reach(self)),
                _ => reach(self),
            };
            if let Err(error) = &root
                && connection::is_lack(*error)
            {
                self.lacks("reach NCCL's root", *error);
                lacking = true;
                self.waiting.push_back((connection, token));
                continue;
            }
            if let Some(session) = self.sessions.get_mut(&token) {
                session.waiting -= 1;
            }
            match root {
                Ok(root) => self.relay(connection, root, token),
                Err(_) => Counts::up(&self.shared.counts.relays_broken),
            }
        }
    }

    /// Begins to connect to a root, which needs a descriptor of its own to accept: it is in this process.
    fn reach(&mut self, root: &SocketAddr) -> rustix::io::Result<Watched> {
        free_for(1)?;
        let mut watched = self.poll.watch(connection::connect(root)?);
        watched.want(EventFlags::OUT)?;
        Ok(watched)
    }

    fn relay(&mut self, connection: Connection, root: Watched, token: Token) {
        let Some(session) = self.sessions.get_mut(&token) else { return };
        let (key, root_key) = (connection.watched.key(), root.key());
        let mut relay = Relay::new(connection.watched, root, connection.input);
        if relay.start().is_err() {
            return Counts::up(&self.shared.counts.relays_broken);
        }
        session.relays += 1;
        self.relays += 1;
        Counts::up(&self.shared.counts.relays);
        self.endpoints.insert(key, Endpoint::Relayed(relay, token));
        self.endpoints.insert(root_key, Endpoint::Root(key));
    }

    pub(super) fn relayed(&mut self, key: u64, ready: u64) {
        let Some(Endpoint::Relayed(relay, _)) = self.endpoints.get_mut(&key) else { return };
        let course = relay.turn(ready);
        if course == RelayState::Running {
            return;
        }
        let Some(Endpoint::Relayed(relay, token)) = self.endpoints.remove(&key) else { return };
        self.endpoints.remove(&relay.root_key());
        self.relays -= 1;
        let (forth, back) = relay.bytes();
        drop(relay);
        Counts::add(&self.shared.counts.relayed_bytes, forth + back);
        let Some(session) = self.sessions.get_mut(&token) else { return };
        session.relays -= 1;
        if course == RelayState::Broken {
            Counts::up(&self.shared.counts.relays_broken);
        } else {
            session.relayed += 1;
        }
        let all_came = session.agreement.ranks().is_none_or(|ranks| session.relayed >= ranks);
        if all_came && !session.is_relaying() && !self.closing.iter().any(|(closing, _)| *closing == token) {
            self.closing.push((token, 0));
        }
        self.forget_if_empty(token);
        // There is room again, if that was missing: first for those that have come.
        self.relay_waiting();
        self.resume();
    }

    /// NCCL's root closes a moment after the last rank has been there; nobody can come after that.
    pub(super) fn close_behind_roots(&mut self) {
        for (token, looks) in std::mem::take(&mut self.closing) {
            let Some(session) = self.sessions.get(&token) else { continue };
            if session.root_is_gone() {
                self.retire(token);
            } else if looks < CLOSING_LOOKS {
                self.closing.push((token, looks + 1));
            }
        }
    }

    pub(super) fn present(&mut self, key: u64, token: Token) {
        let Some(Endpoint::Present(connection, _)) = self.endpoints.get_mut(&key) else { return };
        let (messages, mut line, complaint) = connection.messages(FROM_RANK_BYTES_MAX, FromRank::decode);
        if line == Line::Open {
            line = connection.flush();
        }
        if let Some(complaint) = complaint {
            log::warn!("bootstrap {token:?} {complaint} from a rank: closing its connection");
            Counts::up(&self.shared.counts.unreadable);
        }
        let spoke = if messages.is_empty() { line } else { Line::Open };
        let silent = messages.is_empty() && line == Line::Open;
        for message in messages {
            self.happen(token, Event::Said(ConnectionId(key), message));
        }
        if !silent {
            self.arrived(key, token, spoke);
        }
        if line == Line::Closed {
            self.leave(key, token);
        }
    }

    fn leave(&mut self, key: u64, token: Token) {
        if self.endpoints.remove(&key).is_none() {
            return;
        }
        if let Some(session) = self.sessions.get_mut(&token) {
            session.present -= 1;
        }
        self.happen(token, Event::Left(ConnectionId(key)));
    }

    /// Steps the agreement and sends its answers; whoever cannot be reached has left.
    pub(super) fn happen(&mut self, token: Token, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let Some(session) = self.sessions.get_mut(&token) else { return };
            let undecided = session.agreement.outcome().is_none();
            if undecided && session.root().is_some() {
                // Those who are there go once the outcome is known. Twice: one that was missing just now is there.
                let needed = OF_A_RELAY.saturating_sub(session.present);
                session.agreement.has_room((0..2).any(|_| descriptor::are_free(needed)));
            }
            let answers = session.agreement.step(event);
            if let (true, Some(outcome)) = (undecided, session.agreement.outcome()) {
                self.shared.counts.outcome(outcome);
                log::debug!("bootstrap {token:?} outcome {outcome:?}");
                if session.agreement.is_lazy() {
                    self.recycle(token);
                }
            }
            let Some(session) = self.sessions.get_mut(&token) else { return };
            for answer in answers {
                let Some(Endpoint::Present(connection, _)) = self.endpoints.get_mut(&answer.to.0) else {
                    continue;
                };
                let bytes = answer.message.encode();
                let last = answer.message.is_last();
                let line = if last { connection.last_message(&bytes) } else { connection.say(&bytes) };
                if line == Line::Closed {
                    self.endpoints.remove(&answer.to.0);
                    session.present -= 1;
                    events.push_back(Event::Left(answer.to));
                }
            }
        }
        self.forget_if_empty(token);
    }
}

/// Whether this NCCL is newer than those whose bootstrap was read, so that its ranks may begin with other bytes.
fn is_nccl_newer() -> bool {
    segment::current().nccl_version.load(Ordering::Relaxed) > BOOTSTRAP_READ_UP_TO
}

/// Whether there are so many descriptors, and one more for NCCL's root.
fn free_for(ours: usize) -> rustix::io::Result<()> {
    if descriptor::are_free(ours + 1) { Ok(()) } else { Err(Errno::MFILE) }
}
