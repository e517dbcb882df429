//! The background thread `windlass` of a process: one loop that waits for all sockets of all its sessions.
//!
//! The thread owns all sockets. Callers send it commands and hear results through [`Waiter`](super::waiter::Waiter)s.
//! The thread never waits for one connection: work that cannot go on is left until its socket is ready.
//!
//! Its parts, from the lowest: all [sockets], the [sessions](hosting) hosted here, what is [relayed](relaying) to
//! NCCL's roots, the [calls] whose ranks come to the process listener, the [rosters](local_rendezvous), and the [ranks
//! of this process](joins). Each part has its own state and uses only parts below it. This file hands them on.

mod calls;
mod hosting;
mod joining;
mod joins;
mod local_rendezvous;
mod relaying;
mod session;
mod sockets;
mod visit;

use std::sync::Arc;
use std::time::{Duration, Instant};

use calls::Calls;
use hosting::Sessions;
use joins::Joins;
use local_rendezvous::Rosters;
use relaying::Relaying;
use sockets::{Endpoint, Sockets};

use super::commands::{Command, Shared, WAKE};
use super::limits::Limits;
use super::process_listener::ProcessListener;

/// How soon these are tried again: a listener that could not accept, a connection that could not be relayed, and a look
/// at a root that was about to close.
const RETRY_MS: u64 = 100;

/// The thread's state. Each part has methods of its own and gets the parts below it as arguments.
#[derive(Debug)]
pub(crate) struct Reactor {
    sockets: Sockets,
    sessions: Sessions,
    relaying: Relaying,
    calls: Calls,
    rosters: Rosters,
    joins: Joins,
    /// When failed attempts are repeated. None while there are none.
    due: Option<Instant>,
    running: bool,
}

impl Reactor {
    pub(crate) fn new(
        shared: Arc<Shared>,
        limits: Limits,
        process_listener: Option<ProcessListener>,
    ) -> rustix::io::Result<Reactor> {
        Ok(Reactor {
            sockets: Sockets::new(shared, limits, process_listener)?,
            sessions: Sessions::default(),
            relaying: Relaying::default(),
            calls: Calls::default(),
            rosters: Rosters::default(),
            joins: Joins::default(),
            due: None,
            running: true,
        })
    }

    pub(crate) fn run(mut self) {
        while self.running {
            let timeout_ms =
                self.due.map(|due| due.saturating_duration_since(Instant::now()).as_millis() + 1);
            match self.sockets.poll.wait(timeout_ms.map(|ms| ms as u32)) {
                Ok(keys) => keys.into_iter().for_each(|key| self.ready(key)),
                Err(error) => {
                    log::error!("bootstrap cannot wait: {error}, every session of this process ends");
                    return;
                }
            }
            self.look_again();
        }
    }

    /// Repeats failed attempts, at most once in [`RETRY_MS`]. While there are none the thread sleeps until an event
    /// comes.
    fn look_again(&mut self) {
        let Reactor { sockets, sessions, relaying, joins, .. } = self;
        if self.due.is_some_and(|due| due <= Instant::now()) {
            self.due = None;
            sockets.look_at_reserve();
            sockets.open_process_listener_again();
            relaying.relay_waiting(sockets, sessions);
            sessions.resume(sockets);
            relaying.close_behind_roots(sockets, sessions);
            joins.knock_again(sockets, sessions);
        }
        let something = !sockets.paused.is_empty()
            || relaying.is_pending()
            || joins.is_knocking()
            || sockets.lacks_since.is_some();
        if self.due.is_none() && something {
            self.due = Some(Instant::now() + Duration::from_millis(RETRY_MS));
        }
    }

    fn ready(&mut self, key: u64) {
        if key == WAKE {
            let commands = self.sockets.shared.take();
            commands.into_iter().for_each(|command| self.command(command));
            return;
        }
        let Reactor { sockets, sessions, relaying, calls, rosters, joins, .. } = self;
        match sockets.endpoints.get(&key) {
            Some(Endpoint::Port(_, token)) => sessions.accept(sockets, key, *token),
            Some(Endpoint::Newcomer(..)) => {
                if let Some((connection, token)) = sessions.newcomer(sockets, key) {
                    relaying.came(sockets, sessions, connection, token);
                }
            }
            Some(Endpoint::Present(_, token)) => calls.present(sockets, sessions, key, *token),
            Some(Endpoint::InRound(..)) => calls.in_round(sockets, sessions, key),
            Some(Endpoint::Joining(_)) => joins.joining(sockets, sessions, key),
            Some(Endpoint::Root(relay)) => relaying.relayed(sockets, sessions, *relay, key),
            Some(Endpoint::Relayed(..)) => relaying.relayed(sockets, sessions, key, key),
            Some(Endpoint::ProcessListener(_)) => calls.accept_visitors(sockets, key),
            Some(Endpoint::Visitor(_)) => calls.visitor(sockets, sessions, key),
            Some(Endpoint::Telling(_)) => joins::telling(sockets, key),
            Some(Endpoint::LocalRendezvous(_, name)) => rosters.accept(sockets, key, *name),
            Some(Endpoint::AtLocalRendezvous(_)) => rosters.visit(sockets, sessions, calls, key),
            Some(Endpoint::Life { .. }) => calls.died(sockets, sessions, key),
            None => {}
        }
    }

    fn command(&mut self, command: Command) {
        let Reactor { sockets, sessions, calls, rosters, joins, .. } = self;
        match command {
            Command::Open(session) => sessions.open(sockets, session),
            Command::Sweep => sessions.sweep(sockets),
            Command::Retire(token) => sessions.retire(sockets, token),
            Command::Join(host, reporting) => joins.join(sockets, sessions, host, reporting),
            Command::Expect(expected) => calls.await_ranks(sockets, sessions, expected),
            Command::LocalRendezvous(name, listener) => rosters.open(sockets, name, listener),
            Command::Tell(process_listener, bytes) => joins.tell(sockets, process_listener, bytes),
            Command::Say(key, bytes) => joins.say(sockets, sessions, key, &bytes),
            Command::Leave(key) => joins.leave_session(sockets, key),
            Command::End => self.running = false,
        }
    }
}

impl Drop for Reactor {
    /// Whatever ends the thread, its waiters hear that it has ended.
    fn drop(&mut self) {
        // Closed first: ranks that would connect from now on, also of this process, must be refused.
        self.sockets.close_process_listener();
        self.sockets.shared.close();
        self.joins.say_what_was_not_said(&self.sockets);
    }
}
