//! The process listener of this process: who comes for communicators that are made from others, and who never will.

use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{self, RecvFlags, SendFlags, Shutdown};

use crate::negotiated::Token;

use super::hosting::Session;
use super::wanting::Want;
use super::{Endpoint, Expected, Reactor};
use crate::agreement::Event;
use crate::arrivals::Arrivals;
use crate::children::{self, GREETING_BYTES, Invitation, Visitor};
use crate::connection::{self, Connection, Line};
use crate::counts::Counts;
use crate::outcome::Failure;
use crate::place;
use crate::poll::Watched;
use crate::round::Round;
use crate::waiter::Waiter;
use windlass_base::descriptor::{self, Ours};

/// For one that says something without the thread.
const ALONE_WITHIN: Duration = Duration::from_millis(900);

/// Where ranks of communicators that have one in this process may come.
#[derive(Debug)]
pub(crate) struct ProcessListener {
    pub secret: Token,
    pub listener: Ours,
}

impl ProcessListener {
    /// Listens under a new name.
    pub(crate) fn open() -> std::io::Result<ProcessListener> {
        let secret = place::random()?;
        Ok(ProcessListener { secret, listener: connection::listen_locally(&children::address(secret)?)? })
    }
}

impl Reactor {
    pub(super) fn open_process_listener(
        &mut self,
        process_listener: ProcessListener,
    ) -> rustix::io::Result<()> {
        self.process_listener = process_listener.secret;
        self.listen_at_process_listener(process_listener.listener)
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

    pub(super) fn accept_visitors(&mut self, process_listener: u64) {
        for _ in 0..self.limits.accepts_per_turn {
            let Some(watched) = self.next_visitor(process_listener) else { return };
            let key = watched.key();
            self.endpoints.insert(key, Endpoint::Visitor(Connection::new(watched)));
            self.visitors.push_back(key);
            if self.visitors.len() > self.limits.newcomers_max
                && let Some(oldest) = self.visitors.pop_front()
            {
                // It has been silent for longest; nothing honest connects in order to say nothing.
                self.endpoints.remove(&oldest);
                Counts::up(&self.shared.counts.turned_away);
            }
        }
    }

    pub(super) fn visitor(&mut self, key: u64) {
        let Some(Endpoint::Visitor(connection)) = self.endpoints.get_mut(&key) else { return };
        let line = connection.fill(GREETING_BYTES);
        let visitor = children::identify(&connection.input, self.process_listener);
        if visitor == Visitor::Unclear && line == Line::Open {
            return;
        }
        let Some(Endpoint::Visitor(connection)) = self.endpoints.remove(&key) else { return };
        self.visitors.retain(|visitor| *visitor != key);
        match visitor {
            Visitor::Invited(invitation) => self.welcome(connection, invitation),
            _ => Counts::up(&self.shared.counts.turned_away),
        }
    }

    fn welcome(&mut self, mut connection: Connection, invitation: Invitation) {
        let Invitation { call, child, rank, .. } = invitation;
        if child == children::round(call) {
            return self.enter_round(connection, child, rank);
        }
        let key = connection.watched.key();
        if !self.arrivals(call).comes_for(child) {
            return Counts::up(&self.shared.counts.turned_away);
        }
        let session =
            self.sessions.entry(child).or_insert_with(|| Session::of_call(call, children::comm_token(child)));
        if session.enter(key, rank, self.limits.present_max).is_none() {
            Counts::up(&self.shared.counts.turned_away);
            self.arrivals(call).died(rank);
            return self.look_at(call);
        }
        connection.input.clear();
        self.endpoints.insert(key, Endpoint::Present(connection, child));
        self.present(key, child);
    }

    pub(super) fn arrivals(&mut self, call: Token) -> &mut Arrivals {
        if !self.arrivals_by_call.contains_key(&call) {
            self.make_room();
            self.calls.push_back(call);
        }
        self.arrivals_by_call.entry(call).or_default()
    }

    /// A rank in a session of a call has sent its first message, or left without one.
    pub(super) fn arrived(&mut self, key: u64, child: Token, line: Line) {
        let Some((call, rank)) = self.sessions.get_mut(&child).and_then(|session| session.arrived(key))
        else {
            return;
        };
        let arrivals = self.arrivals(call);
        match line {
            Line::Open => arrivals.spoke(rank),
            Line::Closed => arrivals.died(rank),
        }
        self.look_at(call);
    }

    fn make_room(&mut self) {
        if self.arrivals_by_call.len() < self.limits.calls_max {
            return;
        }
        let awaited = |call: &&Token| {
            let child = self.arrivals_by_call.get(*call).and_then(Arrivals::child);
            let session = child.and_then(|child| self.sessions.get(&child));
            session.is_some_and(|session| !session.is_left())
                || self.rounds.get(*call).is_some_and(Round::is_awaited)
        };
        let oldest = self.calls.iter().find(|call| !awaited(call)).copied();
        if let Some(oldest) = oldest {
            log::warn!("bootstrap forgets call {oldest:?}, for which nobody waits: there are too many");
            Counts::up(&self.shared.counts.calls_forgotten);
            self.forget_call(oldest);
        }
    }

    /// The host's own rank makes the call: from now on the others are known, and those that die are seen.
    pub(super) fn await_ranks(&mut self, expected: Expected) {
        let Expected { call, ranks, lives } = expected;
        self.arrivals(call).await_ranks(ranks);
        for (rank, life) in lives {
            let mut watched = self.poll.watch(life);
            match watched.want(EventFlags::IN) {
                Ok(()) => {
                    drop(self.endpoints.insert(watched.key(), Endpoint::Life { _pidfd: watched, call, rank }))
                }
                Err(error) => log::warn!("bootstrap cannot watch the process of rank {rank}: {error}"),
            }
        }
        self.look_at(call);
    }

    pub(super) fn died(&mut self, key: u64) {
        if let Some(Endpoint::Life { call, rank, .. }) = self.endpoints.remove(&key)
            && let Some(arrivals) = self.arrivals_by_call.get_mut(&call)
        {
            log::debug!("bootstrap {call:?} the process of rank {rank} has died");
            arrivals.died(rank);
            self.look_at(call);
        }
    }

    /// Ends the session whose ranks cannot all come any more, or the round, and forgets the call when nobody can.
    pub(super) fn look_at(&mut self, call: Token) {
        let lost = self.arrivals_by_call.get(&call).and_then(Arrivals::lost);
        lost.into_iter().for_each(|rank| self.end_round(call, Failure::Absent { rank }));
        let Some(arrivals) = self.arrivals_by_call.get(&call) else { return };
        let Some(coming) = arrivals.coming() else { return };
        let (over, rank) = (arrivals.is_over(), arrivals.absent());
        let is_lost = |child: &Token| {
            let session = self.sessions.get(child);
            session.and_then(Session::missing).is_some_and(|missing| missing > coming)
        };
        if let Some(child) = arrivals.child().filter(is_lost) {
            self.happen(child, Event::Absent(Failure::Absent { rank }));
        }
        if over {
            self.forget_call(call);
        }
    }

    fn forget_call(&mut self, call: Token) {
        let Some(arrivals) = self.arrivals_by_call.remove(&call) else { return };
        self.forget_round(call);
        self.calls.retain(|other| *other != call);
        self.endpoints
            .retain(|_, endpoint| !matches!(endpoint, Endpoint::Life { call: of, .. } if *of == call));
        let Some(child) = arrivals.child() else { return };
        if let Some(session) = self.sessions.get_mut(&child) {
            session.nobody_comes();
        }
        self.forget_if_empty(child);
    }

    /// Says something at a process listener to which no rank of this process goes, as soon as it can be.
    pub(super) fn tell(&mut self, process_listener: Token, bytes: Vec<u8>) {
        match connect(process_listener) {
            Ok(socket) => {
                let mut connection = Connection::new(self.poll.watch(socket));
                let key = connection.watched.key();
                if connection.last_message(&bytes) == Line::Open {
                    self.endpoints.insert(key, Endpoint::Telling(connection));
                }
            }
            // Others wait for it: it is tried as long as the process lives.
            Err(Knock::Later(error)) => {
                self.lacks("reach a process listener", error);
                self.knocking.push(Knocking::Telling(process_listener, bytes));
            }
            // Nobody is left who would wait for it.
            Err(Knock::Gone) => {}
        }
    }

    pub(super) fn telling(&mut self, key: u64) {
        let Some(Endpoint::Telling(connection)) = self.endpoints.get_mut(&key) else { return };
        let line = connection.fill(GREETING_BYTES);
        connection.input.clear();
        if line == Line::Closed || connection.flush() == Line::Closed {
            self.endpoints.remove(&key);
        }
    }
}

/// Where there is no thread, the rank of a report that has not gone out says that it does not come.
pub(super) fn withdraw_alone(waiter: &Waiter, report: &[u8]) {
    if waiter.declines_elsewhere() {
        return;
    }
    if let Some((process_listener, words)) = children::withdrawal(report) {
        tell_alone(process_listener, &words);
    }
}

/// Says something at a process listener where there is no thread, and waits a moment until it has been read: closing first could
/// destroy what the host has not read.
pub(super) fn tell_alone(process_listener: Token, words: &[u8]) {
    let until = Instant::now() + ALONE_WITHIN;
    let left = || until.saturating_duration_since(Instant::now());
    let socket = loop {
        match connect(process_listener) {
            Ok(socket) => break socket,
            Err(Knock::Later(_)) if !left().is_zero() => std::thread::sleep(Duration::from_millis(1)),
            Err(Knock::Later(_)) => {
                return log::warn!("bootstrap has no thread and its host's queue is full: peers may wait");
            }
            Err(Knock::Gone) => return,
        }
    };
    // A new connection has room for so little.
    if net::send(&socket, words, SendFlags::NOSIGNAL) != Ok(words.len()) {
        log::warn!("bootstrap has no thread and its host does not hear: peers may wait");
    }
    let _ = net::shutdown(&socket, Shutdown::Write);
    let mut answer = [0; 512];
    while !left().is_zero() {
        let tick = Timespec { tv_sec: 0, tv_nsec: left().subsec_nanos().into() };
        let _ = poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&tick));
        match net::recv(&socket, &mut answer, RecvFlags::empty()) {
            Ok((_, 0)) => return,
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

/// What could not be said at a process listener, or a port, yet.
#[derive(Debug)]
pub(super) enum Knocking {
    Telling(Token, Vec<u8>),
    Joining(Token, super::Reporting),
    /// At the port of an id of this process.
    AtPort(std::net::SocketAddr, super::Reporting),
}

/// Why a process listener was not entered.
pub(super) enum Knock {
    /// Its queue is full, or this process has no descriptor to spare: it is there.
    Later(Errno),
    /// Its process is gone.
    Gone,
}

/// Connects to a process listener. Only a refusal says that nobody is there: whoever gave up for another reason would be waited
/// for.
pub(super) fn connect(process_listener: Token) -> Result<Ours, Knock> {
    let address = children::address(process_listener).map_err(|_| Knock::Gone)?;
    descriptor::even_of_reserve(|| connection::connect_locally(&address)).map_err(|error| match error {
        Errno::CONNREFUSED | Errno::NOENT => Knock::Gone,
        error => Knock::Later(error),
    })
}
