//! The background thread: every socket of every meeting of this process, waited for in one place.
//!
//! It owns all sockets; callers hand it commands and are told through [`Ranks`]. Nothing here waits for one
//! connection: what cannot go on is left until its socket is ready.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use crate::contract::Token;

use super::Limits;
use super::agreement::{Agreement, Event, Seat};
use super::connection::{self, Connection, Line};
use super::counts::Counts;
use super::message::{self, FROM_HOST_BYTES_MAX, FROM_RANK_BYTES_MAX, FromHost, FromRank, GREETING_BYTES};
use super::ours::Ours;
use super::party::{Need, Ranks};
use super::poll::{Flag, Poll, Watched};
use super::relay::{Course, Relay};
use super::verdict::{Failure, Reason, Verdict};

/// Wakes the thread; numbers from here on belong to callers, those above [`FIRST_OWN_KEY`] to the thread.
const WAKE: u64 = 0;
const FIRST_OWN_KEY: u64 = 1 << 63;
/// How soon a listener that could not accept is tried again, and a root that was about to close is looked at.
const RETRY_MS: u32 = 100;
/// How often a root is looked at that was about to close; after that the sweep does.
const CLOSING_LOOKS: u32 = 50;
/// Meetings looked at, at each new one, for whether NCCL's root is gone.
const SWEEP: usize = 4;

/// What callers ask of the thread.
#[derive(Debug)]
pub enum Command {
    Open(NewMeeting),
    /// There are too many meetings: look whether some can go.
    Sweep,
    Retire(Token),
    Attend(SocketAddr, Vec<(u64, Arc<Ranks>, usize, Vec<u8>)>),
    Say(u64, Vec<u8>),
    Leave(u64),
    End,
}

/// A meeting that this process hosts from now on.
#[derive(Debug)]
pub struct NewMeeting {
    pub token: Token,
    pub birth: Token,
    pub magic: [u8; 8],
    pub listener: Ours,
    pub root: SocketAddr,
}

/// What callers and the thread share.
#[derive(Debug)]
pub struct Shared {
    /// None once the thread is gone. Held for a push or a swap; comes after [`Ranks`]'s lock and before none.
    commands: Mutex<Option<Vec<Command>>>,
    wake: Flag,
    next_key: AtomicU64,
    pub counts: Counts,
}

impl Shared {
    pub fn new() -> rustix::io::Result<Shared> {
        Ok(Shared {
            commands: Mutex::new(Some(Vec::new())),
            wake: Flag::new()?,
            next_key: AtomicU64::new(WAKE + 1),
            counts: Counts::default(),
        })
    }

    pub fn new_key(&self) -> u64 {
        self.next_key.fetch_add(1, Ordering::Relaxed)
    }

    pub fn send(&self, command: Command) {
        let mut commands = self.commands();
        if let Some(commands) = commands.as_mut() {
            commands.push(command);
            self.wake.raise();
        } else {
            drop(commands);
            lost(command);
        }
    }

    fn take(&self) -> Vec<Command> {
        self.wake.lower();
        self.commands().as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// The thread ends: what comes from now on is lost at once.
    fn close(&self) {
        let late = self.commands().take();
        // The lock is not held any more: ranks' locks come before it.
        late.into_iter().flatten().for_each(lost);
    }

    fn commands(&self) -> MutexGuard<'_, Option<Vec<Command>>> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Without the thread nobody has heard of these ranks.
fn lost(command: Command) {
    if let Command::Attend(_, reports) = command {
        let verdict =
            || Verdict::Plain(Reason::Unreachable { words: "the background thread has ended".into() });
        reports.iter().for_each(|(_, ranks, index, _)| ranks.end(*index, verdict()));
    }
}

#[derive(Debug)]
enum Endpoint {
    Listener(Watched, Token),
    /// Accepted; who it is stands in its first bytes.
    Newcomer(Connection, Token),
    /// A rank at a meeting of ours.
    Present(Connection, Token),
    /// A rank of this process at its meeting.
    Attending(Attending),
    /// The connection to the root of the relay with this key.
    Root(u64),
    Relayed(Relay, Token),
}

#[derive(Debug)]
struct Attending {
    connection: Connection,
    ranks: Arc<Ranks>,
    index: usize,
    state: Joining,
    report: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Joining {
    Connecting,
    Talking,
}

#[derive(Debug)]
struct Meeting {
    agreement: Agreement,
    magic: [u8; 8],
    root: SocketAddr,
    listener: Option<u64>,
    newcomers: VecDeque<u64>,
    /// Ranks' connections.
    present: usize,
    relays: usize,
    /// Connections of NCCL's that came and went in good order.
    relayed: u32,
}

/// The thread's state.
#[derive(Debug)]
pub struct Reactor {
    shared: Arc<Shared>,
    limits: Limits,
    poll: Poll,
    endpoints: HashMap<u64, Endpoint>,
    meetings: HashMap<Token, Meeting>,
    /// The order in which [`Reactor::sweep`] looks at meetings.
    sweeping: VecDeque<Token>,
    /// Listeners that could not accept.
    paused: Vec<u64>,
    /// Meetings where all of NCCL's ranks have been, and how often their root was looked at since.
    closing: Vec<(Token, u32)>,
    relays: usize,
    running: bool,
}

impl Reactor {
    pub fn new(shared: Arc<Shared>, limits: Limits) -> rustix::io::Result<Reactor> {
        let poll = Poll::new(FIRST_OWN_KEY)?;
        poll.add(&shared.wake, WAKE)?;
        Ok(Reactor {
            shared,
            limits,
            poll,
            endpoints: HashMap::new(),
            meetings: HashMap::new(),
            sweeping: VecDeque::new(),
            paused: Vec::new(),
            closing: Vec::new(),
            relays: 0,
            running: true,
        })
    }

    pub fn run(mut self) {
        while self.running {
            let idle = self.paused.is_empty() && self.closing.is_empty();
            for key in self.poll.wait((!idle).then_some(RETRY_MS)) {
                self.ready(key);
            }
            self.resume();
            self.close_behind_roots();
        }
    }

    fn ready(&mut self, key: u64) {
        if key == WAKE {
            let commands = self.shared.take();
            commands.into_iter().for_each(|command| self.command(command));
            return;
        }
        match self.endpoints.get(&key) {
            Some(Endpoint::Listener(_, token)) => self.accept(key, *token),
            Some(Endpoint::Newcomer(..)) => self.newcomer(key),
            Some(Endpoint::Present(_, token)) => self.present(key, *token),
            Some(Endpoint::Attending(_)) => self.attending(key),
            Some(Endpoint::Root(relay)) => self.relayed(*relay, key),
            Some(Endpoint::Relayed(..)) => self.relayed(key, key),
            None => {}
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Open(meeting) => self.open(meeting),
            Command::Sweep => self.sweep(),
            Command::Retire(token) => self.retire(token),
            Command::Attend(address, reports) => {
                reports.into_iter().for_each(|(key, ranks, index, report)| {
                    self.attend(&address, key, ranks, index, report);
                });
            }
            Command::Say(key, bytes) => self.say(key, &bytes),
            Command::Leave(key) => drop(self.endpoints.remove(&key)),
            Command::End => self.running = false,
        }
    }

    // Hosting.

    fn open(&mut self, new: NewMeeting) {
        self.sweep();
        let NewMeeting { token, birth, magic, listener, root } = new;
        let mut watched = self.poll.watch(listener);
        if let Err(error) = watched.want(EventFlags::IN) {
            log::warn!("rendezvous cannot wait for a listener: {error}");
        }
        let key = watched.key();
        self.endpoints.insert(key, Endpoint::Listener(watched, token));
        let meeting = Meeting {
            agreement: Agreement::new(birth),
            magic,
            root,
            listener: Some(key),
            newcomers: VecDeque::new(),
            present: 0,
            relays: 0,
            relayed: 0,
        };
        self.meetings.insert(token, meeting);
        self.sweeping.push_back(token);
    }

    /// Looks at a few of the oldest meetings: one whose root is gone takes no NCCL rank any more, and nobody waits in
    /// it.
    fn sweep(&mut self) {
        for _ in 0..SWEEP.min(self.sweeping.len()) {
            let Some(token) = self.sweeping.pop_front() else { return };
            let Some(meeting) = self.meetings.get(&token) else { continue };
            let idle = meeting.relays == 0 && meeting.newcomers.is_empty();
            let waited_for = meeting.present > 0 && meeting.agreement.verdict().is_none();
            if meeting.listener.is_some() && idle && !waited_for && connection::is_free(&meeting.root) {
                self.retire(token);
            }
            if self.meetings.contains_key(&token) {
                self.sweeping.push_back(token);
            }
        }
    }

    /// Nobody can come any more. Ranks of a fabric stay connected; ranks that wait for a verdict lose their host.
    fn retire(&mut self, token: Token) {
        let Some(meeting) = self.meetings.get_mut(&token) else { return };
        if let Some(key) = meeting.listener.take() {
            self.endpoints.remove(&key);
            Counts::down(&self.shared.counts.meetings_open);
        }
        for key in std::mem::take(&mut meeting.newcomers) {
            self.endpoints.remove(&key);
        }
        if meeting.agreement.verdict().is_none() {
            meeting.present = 0;
            self.endpoints
                .retain(|_, endpoint| !matches!(endpoint, Endpoint::Present(_, of) if *of == token));
        }
        self.forget_if_empty(token);
    }

    fn forget_if_empty(&mut self, token: Token) {
        let empty =
            |meeting: &Meeting| meeting.listener.is_none() && meeting.present == 0 && meeting.relays == 0;
        if self.meetings.get(&token).is_some_and(empty) {
            self.meetings.remove(&token);
            self.sweeping.retain(|other| *other != token);
        }
    }

    fn accept(&mut self, listener: u64, token: Token) {
        for _ in 0..self.limits.accepts_per_turn {
            if self.relays >= self.limits.relays_max {
                return self.pause(listener);
            }
            let Some(Endpoint::Listener(watched, _)) = self.endpoints.get(&listener) else { return };
            let accepted = match connection::accept(watched) {
                Ok(accepted) => accepted,
                Err(Errno::AGAIN) => return,
                // Those who gave up while they waited.
                Err(Errno::CONNABORTED | Errno::INTR | Errno::PERM | Errno::INVAL) => continue,
                Err(error) => {
                    log::warn!("rendezvous cannot accept: {error}, trying again in {RETRY_MS} ms");
                    return self.pause(listener);
                }
            };
            let mut watched = self.poll.watch(accepted);
            let key = watched.key();
            if watched.want(EventFlags::IN).is_err() {
                continue;
            }
            self.endpoints.insert(key, Endpoint::Newcomer(Connection::new(watched), token));
            let Some(meeting) = self.meetings.get_mut(&token) else { return };
            meeting.newcomers.push_back(key);
            if meeting.newcomers.len() > self.limits.newcomers_max
                && let Some(oldest) = meeting.newcomers.pop_front()
            {
                // It has been silent for longest; nothing honest connects in order to say nothing.
                self.endpoints.remove(&oldest);
                Counts::up(&self.shared.counts.turned_away);
            }
        }
    }

    fn pause(&mut self, listener: u64) {
        if let Some(Endpoint::Listener(watched, _)) = self.endpoints.get_mut(&listener) {
            let _ = watched.want(EventFlags::empty());
            self.paused.push(listener);
        }
    }

    fn resume(&mut self) {
        if self.relays >= self.limits.relays_max {
            return;
        }
        for key in std::mem::take(&mut self.paused) {
            if let Some(Endpoint::Listener(watched, _)) = self.endpoints.get_mut(&key) {
                let _ = watched.want(EventFlags::IN);
            }
        }
    }

    fn newcomer(&mut self, key: u64) {
        let Some(Endpoint::Newcomer(connection, token)) = self.endpoints.get_mut(&key) else { return };
        let token = *token;
        let line = connection.fill(GREETING_BYTES);
        let caller = message::identify(&connection.input, token);
        if caller == message::Caller::Unclear && line == Line::Open {
            return;
        }
        let Some(Endpoint::Newcomer(mut connection, _)) = self.endpoints.remove(&key) else { return };
        let Some(meeting) = self.meetings.get_mut(&token) else { return };
        meeting.newcomers.retain(|newcomer| *newcomer != key);
        match caller {
            message::Caller::Rank if meeting.present < self.limits.present_max => {
                connection.input.clear();
                meeting.present += 1;
                self.endpoints.insert(key, Endpoint::Present(connection, token));
                self.present(key, token);
            }
            message::Caller::Foreign => self.foreign(connection, token),
            // Closed before it said who it is, of another meeting, or one of too many.
            _ => Counts::up(&self.shared.counts.turned_away),
        }
    }

    fn foreign(&mut self, connection: Connection, token: Token) {
        let Some(meeting) = self.meetings.get_mut(&token) else { return };
        let first = meeting.agreement.verdict().is_none();
        let root = connection::connect(&meeting.root);
        if first {
            let speaks_nccl = connection.input.starts_with(&meeting.magic);
            log::debug!("rendezvous {token:?} foreign connection, nccl {speaks_nccl}: plain");
            self.happen(token, Event::Foreign);
        }
        let (Ok(root), Some(meeting)) = (root, self.meetings.get_mut(&token)) else {
            return Counts::up(&self.shared.counts.relays_broken);
        };
        let root = self.poll.watch(root);
        let (key, root_key) = (connection.watched.key(), root.key());
        let mut relay = Relay::new(connection.watched, root, connection.input);
        if relay.start().is_err() {
            return Counts::up(&self.shared.counts.relays_broken);
        }
        meeting.relays += 1;
        self.relays += 1;
        Counts::up(&self.shared.counts.relays);
        self.endpoints.insert(key, Endpoint::Relayed(relay, token));
        self.endpoints.insert(root_key, Endpoint::Root(key));
    }

    fn relayed(&mut self, key: u64, ready: u64) {
        let Some(Endpoint::Relayed(relay, _)) = self.endpoints.get_mut(&key) else { return };
        let course = relay.turn(ready);
        if course == Course::Running {
            return;
        }
        let Some(Endpoint::Relayed(relay, token)) = self.endpoints.remove(&key) else { return };
        self.endpoints.remove(&relay.root_key());
        self.relays -= 1;
        let (forth, back) = relay.bytes();
        drop(relay);
        Counts::add(&self.shared.counts.relayed_bytes, forth + back);
        let Some(meeting) = self.meetings.get_mut(&token) else { return };
        meeting.relays -= 1;
        if course == Course::Broken {
            Counts::up(&self.shared.counts.relays_broken);
        } else {
            meeting.relayed += 1;
        }
        let all_came = meeting.agreement.ranks().is_some_and(|ranks| meeting.relayed >= ranks);
        if all_came && meeting.relays == 0 && !self.closing.iter().any(|(closing, _)| *closing == token) {
            self.closing.push((token, 0));
        }
        self.forget_if_empty(token);
    }

    /// NCCL's root closes a moment after the last rank has been there; nobody can come after that.
    fn close_behind_roots(&mut self) {
        for (token, looks) in std::mem::take(&mut self.closing) {
            let Some(meeting) = self.meetings.get(&token) else { continue };
            if connection::is_free(&meeting.root) {
                self.retire(token);
            } else if looks < CLOSING_LOOKS {
                self.closing.push((token, looks + 1));
            }
        }
    }

    fn present(&mut self, key: u64, token: Token) {
        let Some(Endpoint::Present(connection, _)) = self.endpoints.get_mut(&key) else { return };
        let (messages, mut line, complaint) = connection.messages(FROM_RANK_BYTES_MAX, FromRank::decode);
        if line == Line::Open {
            line = connection.flush();
        }
        if let Some(complaint) = complaint {
            log::warn!("rendezvous {token:?} {complaint} from a rank: closing its connection");
            Counts::up(&self.shared.counts.unreadable);
        }
        for message in messages {
            self.happen(token, Event::Said(Seat(key), message));
        }
        if line == Line::Closed {
            self.leave(key, token);
        }
    }

    fn leave(&mut self, key: u64, token: Token) {
        if self.endpoints.remove(&key).is_none() {
            return;
        }
        if let Some(meeting) = self.meetings.get_mut(&token) {
            meeting.present -= 1;
        }
        self.happen(token, Event::Left(Seat(key)));
        self.forget_if_empty(token);
    }

    /// Steps the agreement and sends its answers; whoever cannot be reached has left.
    fn happen(&mut self, token: Token, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let Some(meeting) = self.meetings.get_mut(&token) else { return };
            let undecided = meeting.agreement.verdict().is_none();
            let answers = meeting.agreement.step(event);
            if let (true, Some(verdict)) = (undecided, meeting.agreement.verdict()) {
                self.shared.counts.verdict(verdict);
                log::debug!("rendezvous {token:?} verdict {verdict:?}");
            }
            for answer in answers {
                let Some(Endpoint::Present(connection, _)) = self.endpoints.get_mut(&answer.to.0) else {
                    continue;
                };
                let bytes = answer.message.encode();
                let last = answer.message.is_last();
                let line = if last { connection.last_words(&bytes) } else { connection.say(&bytes) };
                if line == Line::Closed {
                    self.endpoints.remove(&answer.to.0);
                    meeting.present -= 1;
                    events.push_back(Event::Left(answer.to));
                }
            }
        }
    }

    // Attending.

    fn attend(&mut self, address: &SocketAddr, key: u64, ranks: Arc<Ranks>, index: usize, report: Vec<u8>) {
        let begun = connection::connect(address).and_then(|socket| {
            let mut watched = self.poll.watch_as(socket, key);
            watched.want(EventFlags::OUT)?;
            Ok(watched)
        });
        match begun {
            Ok(watched) => {
                let connection = Connection::new(watched);
                let state = Joining::Connecting;
                let attending = Attending { connection, ranks, index, state, report };
                self.endpoints.insert(key, Endpoint::Attending(attending));
            }
            Err(error) => ranks.end(index, unreachable(address, error)),
        }
    }

    fn attending(&mut self, key: u64) {
        let Some(Endpoint::Attending(attending)) = self.endpoints.get_mut(&key) else { return };
        if attending.turn() == Need::Nothing {
            self.endpoints.remove(&key);
        }
    }

    fn say(&mut self, key: u64, bytes: &[u8]) {
        let Some(Endpoint::Attending(attending)) = self.endpoints.get_mut(&key) else { return };
        match attending.state {
            // Behind the report.
            Joining::Connecting => attending.report.extend_from_slice(bytes),
            // A line that closed while speaking is read to its end at the next turn: a verdict may lie in it.
            Joining::Talking => {
                if attending.connection.say(bytes) == Line::Closed && attending.turn() == Need::Nothing {
                    self.endpoints.remove(&key);
                }
            }
        }
    }
}

impl Attending {
    fn turn(&mut self) -> Need {
        if self.state == Joining::Connecting {
            if let Err(error) = connection::outcome(&self.connection.watched) {
                // Nobody has heard of this rank, so it may go to NCCL: whose root is there, or is not, for it too.
                let words = super::verdict::bounded(&error.to_string());
                self.ranks.end(self.index, Verdict::Plain(Reason::Unreachable { words }));
                return Need::Nothing;
            }
            self.state = Joining::Talking;
            let report = std::mem::take(&mut self.report);
            let _ = self.connection.say(&report);
        }
        let (messages, line, complaint) = self.connection.messages(FROM_HOST_BYTES_MAX, FromHost::decode);
        for message in messages {
            if self.ranks.heard(self.index, message) == Need::Nothing {
                return Need::Nothing;
            }
        }
        let line = if line == Line::Open { self.connection.flush() } else { line };
        if line == Line::Open {
            return Need::Connection;
        }
        let failure = if complaint.is_some() { Failure::Unreadable } else { Failure::HostLost };
        self.ranks.lost(self.index, failure);
        Need::Nothing
    }
}

fn unreachable(address: &SocketAddr, error: Errno) -> Verdict {
    Verdict::Plain(Reason::Unreachable { words: super::verdict::bounded(&format!("{address}: {error}")) })
}

impl Drop for Reactor {
    /// However the thread ends, nobody waits for it.
    fn drop(&mut self) {
        self.shared.close();
        for endpoint in self.endpoints.values() {
            if let Endpoint::Attending(attending) = endpoint {
                attending.ranks.lost(attending.index, Failure::HostLost);
            }
        }
    }
}
