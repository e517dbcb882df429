//! The sessions that this process hosts: who comes to their ports, and what their agreements make of it.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;

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
use crate::message::{self, Caller, FROM_RANK_BYTES_MAX, FromRank, GREETING_BYTES};
use crate::negotiated::Token;
use crate::outcome::Failure;
use windlass_base::descriptor;
use windlass_base::stats::segment;

/// Descriptors that this process needs before its ranks may go to NCCL. Three relay a connection to NCCL's root: both ends here, and
/// the root's own.
const OF_A_RELAY: usize = 3 + OF_A_RANK_OF_NCCL;
/// The newest release whose bootstrap was read (2.30.7).
const BOOTSTRAP_READ_UP_TO: i32 = 23007;
/// Sessions looked at, at each new one, for whether NCCL's root is gone. With 256 open ones a dead one stays open for 16
/// inits at most; each look costs a microsecond or two.
const SWEEP: usize = 16;

/// All sessions of this process, by their tokens.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    sessions: HashMap<Token, Session>,
    /// The order in which [`Sessions::sweep`] looks at them.
    sweeping: VecDeque<Token>,
}

/// What came over a rank's connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heard {
    /// Of a rank in a session of a call, at its first message or end: which call, whose it is, and whether it spoke.
    pub arrived: Option<(Token, u32, Line)>,
    line: Line,
}

impl Sessions {
    /// Hosts a session from now on.
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

    /// Looks at a few of the oldest sessions: one whose root is gone takes no NCCL rank any more, and nobody waits in
    /// it.
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

    /// Nobody can come any more. Ranks that wait for an outcome lose their host.
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
    fn recycle(&mut self, sockets: &mut Sockets, token: Token) {
        let Some(session) = self.sessions.get(&token) else { return };
        if let Some(id) = session.id().copied() {
            self.retire(sockets, token);
            sockets.shared.spare(id);
        }
    }

    /// Forgets a session that nobody is in or can come to.
    pub(super) fn forget_if_empty(&mut self, token: Token) {
        if self.sessions.get(&token).is_some_and(Session::is_empty) {
            self.sessions.remove(&token);
            self.sweeping.retain(|other| *other != token);
        }
    }

    /// Takes who waits at a port.
    pub(super) fn accept(&mut self, sockets: &mut Sockets, listener: u64, token: Token) {
        for _ in 0..sockets.limits.accepts_per_turn {
            if !self.accepts(sockets, token) {
                return sockets.pause(listener);
            }
            let Some(Endpoint::Port(watched, _)) = sockets.endpoints.get(&listener) else { return };
            // The last one is for the root to which something is relayed now.
            let spared = if sockets.relays > 0 { connection::free_for_root(1) } else { Ok(()) };
            let accept = || connection::accept(watched);
            let accepted = match spared.and_then(|()| descriptor::even_of_reserve(accept)) {
                Ok(accepted) => accepted,
                Err(Errno::AGAIN) => return,
                // Those who gave up while they waited.
                Err(Errno::CONNABORTED | Errno::INTR | Errno::PERM | Errno::INVAL) => continue,
                Err(error) => {
                    return match sockets.lacks("accept", error) {
                        Want::Later => sockets.pause(listener),
                        Want::Refused => self.refuse_session(sockets, token),
                    };
                }
            };
            let mut watched = sockets.poll.watch(accepted);
            let key = watched.key();
            if watched.want(EventFlags::IN).is_err() {
                continue;
            }
            sockets.endpoints.insert(key, Endpoint::Newcomer(Connection::new(watched), token));
            let Some(session) = self.sessions.get_mut(&token) else { return };
            session.newcomers.push_back(key);
            if session.newcomers.len() > sockets.limits.newcomers_max
                && let Some(oldest) = session.newcomers.pop_front()
            {
                // It has been silent for longest; nothing honest connects in order to say nothing.
                sockets.endpoints.remove(&oldest);
                Counts::up(&sockets.shared.counts.turned_away);
            }
        }
    }

    /// Listeners that were paused take connections again, but ports whose sessions take none now.
    pub(super) fn resume(&mut self, sockets: &mut Sockets) {
        for key in std::mem::take(&mut sockets.paused) {
            match sockets.endpoints.get(&key) {
                Some(Endpoint::Port(_, token)) if !self.accepts(sockets, *token) => sockets.paused.push(key),
                _ => sockets.resume(key),
            }
        }
    }

    /// Whether a session takes connections now: whoever came would only wait, with a descriptor of ours.
    fn accepts(&self, sockets: &Sockets, token: Token) -> bool {
        self.sessions
            .get(&token)
            .is_none_or(|session| session.waiting == 0 && session.has_room(sockets.relays, &sockets.limits))
    }

    /// Somebody at a port has said something. Gives the connection of a rank of NCCL's, and its session.
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
            // It may be a rank: none may be lost.
            Caller::Unknown if is_nccl_newer() => return Some((connection, token)),
            // Closed before it said who it is, nobody's, or one of too many. NCCL's root drops these, too, where they do not end it.
            _ => {
                log::debug!("bootstrap {token:?} dropped a connection, {caller:?}");
                Counts::up(&sockets.shared.counts.turned_away);
            }
        }
        None
    }

    /// A rank's connection has something, of a session at a port.
    fn present(&mut self, sockets: &mut Sockets, key: u64, token: Token) {
        if let Some(heard) = self.hear(sockets, key, token) {
            self.leave_if_closed(sockets, key, token, heard);
        }
    }

    /// What a rank's connection has goes to the agreement.
    pub(super) fn hear(&mut self, sockets: &mut Sockets, key: u64, token: Token) -> Option<Heard> {
        let Some(Endpoint::Present(connection, _)) = sockets.endpoints.get_mut(&key) else { return None };
        let (messages, mut line, complaint) = connection.messages(FROM_RANK_BYTES_MAX, FromRank::decode);
        if line == Line::Open {
            line = connection.flush();
        }
        if let Some(complaint) = complaint {
            log::warn!("bootstrap {token:?} {complaint} from a rank: closing its connection");
            Counts::up(&sockets.shared.counts.unreadable);
        }
        let spoke = if messages.is_empty() { line } else { Line::Open };
        let silent = messages.is_empty() && line == Line::Open;
        for message in messages {
            self.happen(sockets, token, Event::Said(ConnectionId(key), message));
        }
        let session = self.sessions.get_mut(&token).filter(|_| !silent);
        let arrived = session.and_then(|session| session.arrived(key));
        Some(Heard { arrived: arrived.map(|(call, rank)| (call, rank, spoke)), line })
    }

    /// After what was [heard](Sessions::hear) a rank has left, if its line is closed.
    pub(super) fn leave_if_closed(&mut self, sockets: &mut Sockets, key: u64, token: Token, heard: Heard) {
        if heard.line == Line::Closed {
            self.leave(sockets, key, token);
        }
    }

    /// The session of a communicator that this call makes; its first comer opens it.
    pub(super) fn of_call(&mut self, call: Token, child: Token) -> &mut Session {
        self.sessions.entry(child).or_insert_with(|| Session::of_call(call, children::comm_token(child)))
    }

    /// The session with this token, while it is kept.
    pub(super) fn get(&self, token: Token) -> Option<&Session> {
        self.sessions.get(&token)
    }

    /// The same, to be changed.
    pub(super) fn get_mut(&mut self, token: Token) -> Option<&mut Session> {
        self.sessions.get_mut(&token)
    }

    /// Nobody can be let in to this session. Those who are there hear that it cannot be, the others that nobody is.
    pub(super) fn refuse_session(&mut self, sockets: &mut Sockets, token: Token) {
        self.happen(sockets, token, Event::Absent(Failure::Short));
        self.retire(sockets, token);
    }

    /// All who could come to this session of a call have come.
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

    /// Steps the agreement and sends its answers; whoever cannot be reached has left.
    pub(super) fn happen(&mut self, sockets: &mut Sockets, token: Token, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let Some(session) = self.sessions.get_mut(&token) else { return };
            let undecided = session.agreement.outcome().is_none();
            if undecided && session.root().is_some() {
                // Those who are there go once the outcome is known. Twice: one that was missing just now is there.
                // By a reserve that was given up for them no room came to be.
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

/// Whether this NCCL is newer than those whose bootstrap was read, so that its ranks may begin with other bytes.
fn is_nccl_newer() -> bool {
    segment::current().nccl_version.load(Ordering::Relaxed) > BOOTSTRAP_READ_UP_TO
}
