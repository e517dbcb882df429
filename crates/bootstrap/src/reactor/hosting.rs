//! The sessions that this process hosts: accepts connections at their ports, and passes messages to and from their
//! agreements.

use std::collections::{HashMap, VecDeque};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use super::session::Session;
use super::sockets::{Endpoint, Sockets};
use crate::agreement::{ConnectionId, Event};
use crate::approach::Want;
use crate::children;
use crate::commands::NewSession;
use crate::connection::{self, Connection, Line};
use crate::counts::Counts;
use crate::id_tag;
use crate::limits::OF_A_RANK_OF_NCCL;
use crate::message::{self, Caller, GREETING_BYTES};
use crate::negotiated::Token;
use crate::outcome::Failure;
use windlass_base::config::nccl;
use windlass_base::descriptor;

/// Descriptors that this process must have free before its ranks may go to NCCL. A relayed connection takes three: both
/// ends here and the root's own.
const OF_A_RELAY: usize = 3 + OF_A_RANK_OF_NCCL;
/// The newest release of NCCL whose bootstrap was read (2.30.7).
const BOOTSTRAP_READ_UP_TO: i32 = 23007;
/// How many sessions are checked at each new one for whether NCCL's root is gone. With 256 open sessions a dead one
/// stays open for 16 inits at most. Each check takes 1 to 2 us.
const SWEEP: usize = 16;

/// All sessions of this process, by their tokens.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    sessions: HashMap<Token, Session>,
    /// The order in which [`Sessions::sweep`] checks them.
    sweeping: VecDeque<Token>,
}

/// The state of a rank's connection after its messages were handled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heard {
    /// For a rank in a session of a call, at its first message or its end: the call, the rank, and whether it spoke
    /// (`Open`).
    pub arrived: Option<(Token, u32, Line)>,
    line: Line,
}

impl Sessions {
    /// Opens a session.
    pub(super) fn open(&mut self, sockets: &mut Sockets, new: NewSession) {
        self.sweep(sockets);
        let NewSession { token, comm, id, listener, root } = new;
        let mut watched = sockets.poll.watch(listener);
        if let Err(error) = watched.want(EventFlags::IN) {
            log::warn!("bootstrap cannot wait for a listener: {error}");
        }
        let key = watched.key();
        sockets.endpoints.insert(key, Endpoint::Port(watched, token));
        self.sessions.insert(token, Session::of_id(id, root, comm, key));
        self.sweeping.push_back(token);
    }

    /// Checks the next [`SWEEP`] sessions and retires those whose root is gone: no rank of NCCL can come there, and no
    /// rank waits.
    pub(super) fn sweep(&mut self, sockets: &mut Sockets) {
        for _ in 0..SWEEP.min(self.sweeping.len()) {
            let Some(token) = self.sweeping.pop_front() else { return };
            let Some(session) = self.sessions.get(&token) else { continue };
            if session.listener.is_none() {
                continue;
            }
            let idle = !session.is_relaying() && session.newcomers.is_empty();
            let waited_for = session.present > 0 && session.agreement.outcome().is_none();
            if idle && !waited_for && session.root_is_gone() {
                self.retire(sockets, token);
            } else {
                self.sweeping.push_back(token);
            }
        }
    }

    /// Closes a session's port and newcomers: no connection can come any more. Ranks that wait for an outcome lose
    /// their host.
    pub(super) fn retire(&mut self, sockets: &mut Sockets, token: Token) {
        let Some(session) = self.sessions.get_mut(&token) else { return };
        if let Some(key) = session.listener.take() {
            sockets.endpoints.remove(&key);
            Counts::down(&sockets.shared.counts.sessions_open);
        }
        for key in std::mem::take(&mut session.newcomers) {
            sockets.endpoints.remove(&key);
        }
        if session.agreement.outcome().is_none() {
            session.present = 0;
            sockets
                .endpoints
                .retain(|_, endpoint| !matches!(endpoint, Endpoint::Present(_, of) if *of == token));
        }
        self.forget_if_empty(token);
    }

    /// Closes a lazy session and keeps its id as a spare one. All ranks have confirmed that they go to NCCL only later,
    /// with another id, so nobody goes to this id's root:
    ///
    /// - Not a rank that dies, leaves or loses the host before it hears the outcome: a rank that has reported goes
    ///   nowhere without the host's message, and its init fails.
    /// - Not a rank of NCCL's that came before: its connection would have made the session end on NCCL.
    /// - Not a connection that comes from now on, as no rank is missing. It is refused, as by NCCL's root after its
    ///   last rank.
    ///
    /// Done before any rank hears the outcome: whoever asks for an id after the init finds this one.
    fn recycle(&mut self, sockets: &mut Sockets, token: Token) {
        let Some(session) = self.sessions.get(&token) else { return };
        if let Some(id) = session.id().copied() {
            self.retire(sockets, token);
            sockets.shared.spare(id);
        }
    }

    /// Forgets a session that has no connections and to which none can come.
    pub(super) fn forget_if_empty(&mut self, token: Token) {
        if self.sessions.get(&token).is_some_and(Session::is_empty) {
            self.sessions.remove(&token);
            self.sweeping.retain(|other| *other != token);
        }
    }

    /// Accepts connections that wait at a port.
    pub(super) fn accept(&mut self, sockets: &mut Sockets, listener: u64, token: Token) {
        for _ in 0..sockets.limits.accepts_per_turn {
            if !self.accepts(sockets, token) {
                return sockets.pause(listener);
            }
            let Some(Endpoint::Port(watched, _)) = sockets.endpoints.get(&listener) else { return };
            // The last free descriptor is for the root to which a connection is relayed now.
            let spared = if sockets.relays > 0 { connection::free_for_root(1) } else { Ok(()) };
            // Not of the reserve: whoever connects has shown no token yet.
            let accepted = match spared.and_then(|()| connection::accept(watched)) {
                Ok(accepted) => accepted,
                Err(Errno::AGAIN) => return,
                // The client gave up while it waited.
                Err(Errno::CONNABORTED | Errno::INTR | Errno::PERM | Errno::INVAL) => continue,
                Err(error) => {
                    return match sockets.lacks("accept", error) {
                        Want::Later => sockets.pause(listener),
                        Want::Refused => self.refuse_session(sockets, token),
                    };
                }
            };
            let Ok(watched) = sockets.poll.watch_for(accepted, EventFlags::IN) else { continue };
            let key = watched.key();
            sockets.endpoints.insert(key, Endpoint::Newcomer(Connection::new(watched), token));
            let Some(session) = self.sessions.get_mut(&token) else { return };
            session.newcomers.push_back(key);
            sockets.turn_oldest_away(&mut session.newcomers);
        }
    }

    /// Resumes paused listeners, except ports whose sessions accept none now.
    pub(super) fn resume(&mut self, sockets: &mut Sockets) {
        for key in std::mem::take(&mut sockets.paused) {
            match sockets.endpoints.get(&key) {
                Some(Endpoint::Port(_, token)) if !self.accepts(sockets, *token) => sockets.paused.push(key),
                _ => sockets.resume(key),
            }
        }
    }

    /// Whether a session accepts connections now. If not, a new connection would only wait, and hold a descriptor.
    fn accepts(&self, sockets: &Sockets, token: Token) -> bool {
        self.sessions
            .get(&token)
            .is_none_or(|session| session.waiting == 0 && session.has_room(sockets.relays, &sockets.limits))
    }

    /// Handles input of a newcomer at a port. Returns the connection if it is to be relayed to NCCL's root, and its
    /// session.
    #[must_use]
    pub(super) fn newcomer(&mut self, sockets: &mut Sockets, key: u64) -> Option<(Connection, Token)> {
        let Some(Endpoint::Newcomer(connection, token)) = sockets.endpoints.get_mut(&key) else {
            return None;
        };
        let token = *token;
        let line = connection.fill(GREETING_BYTES);
        let id = self.sessions.get(&token).and_then(Session::id)?;
        let caller = message::identify(&connection.input, token, &id_tag::magic(id));
        if caller == Caller::Unclear && line == Line::Open {
            return None;
        }
        let Some(Endpoint::Newcomer(connection, _)) = sockets.endpoints.remove(&key) else { return None };
        let session = self.sessions.get_mut(&token)?;
        session.newcomers.retain(|newcomer| *newcomer != key);
        match caller {
            Caller::Rank if session.enter(key, None, sockets.limits.present_max) => {
                sockets.seat(connection, token);
                self.present(sockets, key, token);
            }
            Caller::Nccl => return Some((connection, token)),
            // It may be a rank of NCCL's, and none may be lost.
            Caller::Unknown if is_nccl_newer() => return Some((connection, token)),
            // Closed before it was identified, unknown, or one too many. NCCL's root drops such connections, too,
            // unless they end it.
            _ => {
                log::debug!("bootstrap {token:?} dropped a connection, {caller:?}");
                Counts::up(&sockets.shared.counts.turned_away);
            }
        }
        None
    }

    /// Handles input of a rank's connection in a session at a port.
    fn present(&mut self, sockets: &mut Sockets, key: u64, token: Token) {
        if let Some(heard) = self.hear(sockets, key, token) {
            self.leave_if_closed(sockets, key, token, heard);
        }
    }

    /// Passes the messages of a rank's connection to the agreement.
    pub(super) fn hear(&mut self, sockets: &mut Sockets, key: u64, token: Token) -> Option<Heard> {
        let (messages, line) = sockets.hear(key)?;
        let spoke = if messages.is_empty() { line } else { Line::Open };
        let silent = messages.is_empty() && line == Line::Open;
        for message in messages {
            self.happen(sockets, token, Event::Said(ConnectionId(key), message));
        }
        let session = self.sessions.get_mut(&token).filter(|_| !silent);
        let arrived = session.and_then(|session| session.arrived(key));
        Some(Heard { arrived: arrived.map(|(call, rank)| (call, rank, spoke)), line })
    }

    /// The rank has left if its connection has closed, after its messages were [heard](Sessions::hear).
    pub(super) fn leave_if_closed(&mut self, sockets: &mut Sockets, key: u64, token: Token, heard: Heard) {
        if heard.line == Line::Closed {
            self.leave(sockets, key, token);
        }
    }

    /// The session of a communicator that this call makes. Its first rank opens it.
    pub(super) fn of_call(&mut self, call: Token, child: Token) -> &mut Session {
        self.sessions.entry(child).or_insert_with(|| Session::of_call(call, children::comm_token(child)))
    }

    /// The session with this token, while it is kept.
    pub(super) fn get(&self, token: Token) -> Option<&Session> {
        self.sessions.get(&token)
    }

    /// The session with this token, mutable.
    pub(super) fn get_mut(&mut self, token: Token) -> Option<&mut Session> {
        self.sessions.get_mut(&token)
    }

    /// Fails a session because its port cannot accept any more. Ranks that are there hear so, later ones are refused.
    pub(super) fn refuse_session(&mut self, sockets: &mut Sockets, token: Token) {
        self.happen(sockets, token, Event::Absent(Failure::Short));
        self.retire(sockets, token);
    }

    /// All ranks that could come to this session of a call have come.
    pub(super) fn nobody_comes(&mut self, token: Token) {
        if let Some(session) = self.sessions.get_mut(&token) {
            session.nobody_comes();
        }
        self.forget_if_empty(token);
    }

    fn leave(&mut self, sockets: &mut Sockets, key: u64, token: Token) {
        if sockets.endpoints.remove(&key).is_none() {
            return;
        }
        if let Some(session) = self.sessions.get_mut(&token) {
            session.present -= 1;
        }
        self.happen(sockets, token, Event::Left(ConnectionId(key)));
    }

    /// Gives an event to the agreement and sends its answers. A rank that cannot be reached has left.
    pub(super) fn happen(&mut self, sockets: &mut Sockets, token: Token, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let Some(session) = self.sessions.get_mut(&token) else { return };
            let undecided = session.agreement.outcome().is_none();
            if undecided && session.root().is_some() {
                // The ranks' connections here will be free after the outcome. Looks twice: a descriptor that another
                // thread held for a moment is free then. Descriptors that the reserve gave up do not count as room.
                let needed = OF_A_RELAY + descriptor::missing_of_reserve();
                let needed = needed.saturating_sub(session.present);
                session.agreement.has_room((0..2).any(|_| descriptor::are_free(needed)));
            }
            let answers = session.agreement.step(event);
            if let (true, Some(outcome)) = (undecided, session.agreement.outcome()) {
                sockets.shared.counts.outcome(outcome);
                log::debug!("bootstrap {token:?} outcome {outcome:?}");
                if session.agreement.is_lazy() {
                    self.recycle(sockets, token);
                }
            }
            let Some(session) = self.sessions.get_mut(&token) else { return };
            for answer in answers {
                let Some(Endpoint::Present(connection, _)) = sockets.endpoints.get_mut(&answer.to.0) else {
                    continue;
                };
                let bytes = answer.message.encode();
                let last = answer.message.is_last();
                let line = if last { connection.last_message(&bytes) } else { connection.say(&bytes) };
                if line == Line::Closed {
                    sockets.endpoints.remove(&answer.to.0);
                    session.present -= 1;
                    events.push_back(Event::Left(answer.to));
                }
            }
        }
        self.forget_if_empty(token);
    }
}

/// Whether this NCCL is newer than the releases whose bootstrap was read: its connections may begin with other bytes.
fn is_nccl_newer() -> bool {
    nccl::version() > BOOTSTRAP_READ_UP_TO
}
