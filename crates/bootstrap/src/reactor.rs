//! The background thread: every socket of every session of this process, waited for in one place.
//!
//! It owns all sockets; callers hand it commands and are told through [`Waiter`]s. Nothing here waits for one
//! connection: what cannot go on is left until its socket is ready.

mod hosting;
mod joining;
mod local_rendezvous;
mod process_listener;
mod rounds;
mod wanting;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::negotiated::Token;

use super::Limits;
use super::arrivals::Arrivals;
use super::children::NOBODY;
use super::connection::Connection;
use super::counts::Counts;
use super::id_tag::Id;
use super::outcome::{Failure, FallbackReason, SessionOutcome};
use super::poll::{Flag, Poll, Watched};
use super::relay::Relay;
use super::round::Round;
use super::spare::{Room, Spares};
use super::waiter::Waiter;
use hosting::Session;
use joining::Joining;
use local_rendezvous::{LocalRendezvous, Visit};
use process_listener::Knocking;
use windlass_base::descriptor::{self, Ours};

pub(crate) use process_listener::ProcessListener;

/// Wakes the thread; numbers from here on belong to callers, those above [`FIRST_OWN_KEY`] to the thread.
const WAKE: u64 = 0;
const FIRST_OWN_KEY: u64 = 1 << 63;
/// How soon a listener that could not accept is tried again, and a connection that could not be relayed, and a root that
/// was about to close is looked at.
const RETRY_MS: u64 = 100;

/// What callers ask of the thread.
#[derive(Debug)]
pub(crate) enum Command {
    Open(NewSession),
    /// There are too many sessions: look whether some can go.
    Sweep,
    Retire(Token),
    Join(Host, Vec<Reporting>),
    /// A rank of ours is the host's in this call.
    Expect(Expected),
    /// This process keeps the host-local rendezvous of this name.
    LocalRendezvous(Token, Ours),
    /// Something is to be said at a process listener by a rank that does not wait for an answer.
    Tell(Token, Vec<u8>),
    Say(u64, Vec<u8>),
    Leave(u64),
    End,
}

/// Where a session is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Host {
    /// At the port of an id.
    Port(SocketAddr),
    /// At the process listener that this opens.
    ProcessListener(Token),
}

/// A rank that goes to a session, or to a round.
#[derive(Debug)]
pub(crate) struct Reporting {
    /// Of its connection.
    pub key: u64,
    /// Who waits.
    pub waiter: Waiter,
    /// Its greeting, and its report or word.
    pub words: Vec<u8>,
}

/// A call that makes communicators from another, as seen by the rank whose process hosts their sessions.
#[derive(Debug)]
pub(crate) struct Expected {
    /// Its name.
    pub call: Token,
    /// The ranks that make it, one bit each.
    pub ranks: u64,
    /// Pidfds of the processes of other ranks.
    pub lives: Vec<(u32, Ours)>,
}

/// A session that this process hosts from now on.
#[derive(Debug)]
pub(crate) struct NewSession {
    pub token: Token,
    pub comm: Token,
    /// As NCCL made it.
    pub id: Id,
    pub listener: Ours,
    pub root: SocketAddr,
}

/// What callers and the thread share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// None once the thread is gone. Held for a push or a swap; comes after the lock of [`super::participant::Ranks`] and before none.
    commands: Mutex<Option<Vec<Command>>>,
    wake: Flag,
    next_key: AtomicU64,
    pub spares: Spares,
    pub counts: Counts,
}

impl Shared {
    pub(crate) fn new(limits: &Limits) -> rustix::io::Result<Shared> {
        Ok(Shared {
            commands: Mutex::new(Some(Vec::new())),
            wake: Flag::new()?,
            next_key: AtomicU64::new(WAKE + 1),
            spares: Spares::new(limits.spare_ids_max),
            counts: Counts::default(),
        })
    }

    /// Keeps an id that nobody uses.
    pub(crate) fn spare(&self, id: Id) {
        if self.spares.put(id) == Room::Full {
            Counts::up(&self.counts.ids_dropped);
        }
    }

    pub(crate) fn new_key(&self) -> u64 {
        self.next_key.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn send(&self, command: Command) {
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

/// Without the thread nobody has heard of these ranks. At a process listener they are waited for as long as their process lives: so the
/// caller says there that they do not come.
fn lost(command: Command) {
    match command {
        Command::Join(Host::Port(_), reports) => {
            let words = "the background thread has ended";
            let outcome = || SessionOutcome::OnNccl(FallbackReason::Unreachable { words: words.into() });
            reports.iter().for_each(|reporting| reporting.waiter.end(outcome()));
        }
        Command::Join(Host::ProcessListener(_), reports) => {
            for Reporting { waiter, words, .. } in reports {
                waiter.lost(Failure::HostLost);
                process_listener::withdraw_alone(&waiter, &words);
            }
        }
        Command::Tell(process_listener, words) => process_listener::tell_alone(process_listener, &words),
        _ => {}
    }
}

#[derive(Debug)]
enum Endpoint {
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

/// The thread's state.
#[derive(Debug)]
pub(crate) struct Reactor {
    shared: Arc<Shared>,
    limits: Limits,
    poll: Poll,
    endpoints: HashMap<u64, Endpoint>,
    sessions: HashMap<Token, Session>,
    /// Each also has its arrivals by its name.
    rounds: HashMap<Token, Round>,
    /// The order in which [`Reactor::sweep`] looks at sessions.
    sweeping: VecDeque<Token>,
    /// Listeners that could not accept.
    paused: Vec<u64>,
    /// Sessions where all of NCCL's ranks have been, and how often their root was looked at since.
    closing: Vec<(Token, u32)>,
    /// When to look again at those, and at who waits or knocks; none while there is nobody.
    due: Option<Instant>,
    relays: usize,
    /// Connections to be relayed once there is room or what they lack, in the order in which they came. Out of the wait:
    /// their clients have mostly closed, which the kernel would report again and again.
    waiting: VecDeque<(Connection, Token)>,
    /// The secret of our process listener.
    process_listener: Token,
    /// Calls whose sessions are at our process listener, rounds before calls, and the order in which they came.
    arrivals_by_call: HashMap<Token, Arrivals>,
    calls: VecDeque<Token>,
    visitors: VecDeque<u64>,
    /// Those that this process keeps.
    local_rendezvous: HashMap<Token, LocalRendezvous>,
    /// What is to be said at process listeners that could not be entered.
    knocking: Vec<Knocking>,
    /// Since when something could not be done for want of descriptors.
    wanting: Option<Instant>,
    running: bool,
}

impl Reactor {
    pub(crate) fn new(
        shared: Arc<Shared>,
        limits: Limits,
        process_listener: Option<ProcessListener>,
    ) -> rustix::io::Result<Reactor> {
        let poll = Poll::new(FIRST_OWN_KEY)?;
        poll.add(&shared.wake, WAKE)?;
        let mut reactor = Reactor {
            shared,
            limits,
            poll,
            endpoints: HashMap::new(),
            sessions: HashMap::new(),
            rounds: HashMap::new(),
            sweeping: VecDeque::new(),
            paused: Vec::new(),
            closing: Vec::new(),
            due: None,
            relays: 0,
            waiting: VecDeque::new(),
            process_listener: NOBODY,
            arrivals_by_call: HashMap::new(),
            calls: VecDeque::new(),
            visitors: VecDeque::new(),
            local_rendezvous: HashMap::new(),
            knocking: Vec::new(),
            wanting: None,
            running: true,
        };
        descriptor::fill_reserve();
        process_listener
            .map_or(Ok(()), |process_listener| reactor.open_process_listener(process_listener))?;
        Ok(reactor)
    }

    pub(crate) fn run(mut self) {
        while self.running {
            let timeout_ms =
                self.due.map(|due| due.saturating_duration_since(Instant::now()).as_millis() + 1);
            match self.poll.wait(timeout_ms.map(|ms| ms as u32)) {
                Ok(keys) => keys.into_iter().for_each(|key| self.ready(key)),
                Err(error) => {
                    log::error!("bootstrap cannot wait: {error}, every session of this process ends");
                    return;
                }
            }
            self.look_again();
        }
    }

    /// What can only be tried again is, at most once in [`RETRY_MS`]. While there is nothing of the kind the thread
    /// sleeps until something happens.
    fn look_again(&mut self) {
        if self.due.is_some_and(|due| due <= Instant::now()) {
            self.due = None;
            self.look_at_reserve();
            self.open_process_listener_again();
            self.relay_waiting();
            self.resume();
            self.close_behind_roots();
            self.knock_again();
        }
        let nothing = self.paused.is_empty()
            && self.waiting.is_empty()
            && self.closing.is_empty()
            && self.knocking.is_empty()
            && self.wanting.is_none();
        if self.due.is_none() && !nothing {
            self.due = Some(Instant::now() + Duration::from_millis(RETRY_MS));
        }
    }

    fn ready(&mut self, key: u64) {
        if key == WAKE {
            let commands = self.shared.take();
            commands.into_iter().for_each(|command| self.command(command));
            return;
        }
        match self.endpoints.get(&key) {
            Some(Endpoint::Port(_, token)) => self.accept(key, *token),
            Some(Endpoint::Newcomer(..)) => self.newcomer(key),
            Some(Endpoint::Present(_, token)) => self.present(key, *token),
            Some(Endpoint::InRound(..)) => self.in_round(key),
            Some(Endpoint::Joining(_)) => self.joining(key),
            Some(Endpoint::Root(relay)) => self.relayed(*relay, key),
            Some(Endpoint::Relayed(..)) => self.relayed(key, key),
            Some(Endpoint::ProcessListener(_)) => self.accept_visitors(key),
            Some(Endpoint::Visitor(_)) => self.visitor(key),
            Some(Endpoint::Telling(_)) => self.telling(key),
            Some(Endpoint::LocalRendezvous(_, name)) => self.accept_at_local_rendezvous(key, *name),
            Some(Endpoint::AtLocalRendezvous(_)) => self.at_local_rendezvous(key),
            Some(Endpoint::Life { .. }) => self.died(key),
            None => {}
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Open(session) => self.open(session),
            Command::Sweep => self.sweep(),
            Command::Retire(token) => self.retire(token),
            Command::Join(Host::Port(address), reports) => {
                reports.into_iter().for_each(|reporting| self.join(&address, reporting));
            }
            Command::Join(Host::ProcessListener(process_listener), reports) => {
                reports
                    .into_iter()
                    .for_each(|reporting| self.join_at_process_listener(process_listener, reporting));
            }
            Command::Expect(expected) => self.await_ranks(expected),
            Command::LocalRendezvous(name, listener) => self.open_local_rendezvous(name, listener),
            Command::Tell(process_listener, bytes) => self.tell(process_listener, bytes),
            Command::Say(key, bytes) => self.say(key, &bytes),
            Command::Leave(key) => self.leave_session(key),
            Command::End => self.running = false,
        }
    }
}

impl Drop for Reactor {
    /// However the thread ends, nobody waits for it.
    fn drop(&mut self) {
        // Whoever would come in here, also of this process, finds nobody.
        self.endpoints.retain(|_, endpoint| !matches!(endpoint, Endpoint::ProcessListener(_)));
        self.shared.close();
        self.say_what_was_not_said();
    }
}
