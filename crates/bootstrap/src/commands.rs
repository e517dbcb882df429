//! What callers ask of the background thread, and what both share.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::negotiated::Token;

use super::approach::{self, Hindrance, HostAt};
use super::counts::Counts;
use super::id_tag::Id;
use super::limits::Limits;
use super::poll::Flag;
use super::process_listener;
use super::spare::{Room, Spares};
use super::waiter::Waiter;
use windlass_base::descriptor::Ours;

/// Wakes the thread; the numbers behind it belong to callers.
pub(crate) const WAKE: u64 = 0;

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

impl Host {
    /// Of what kind that is. Whose port it is, is not asked.
    pub(crate) fn at(&self) -> HostAt {
        match self {
            Host::Port(_) => HostAt::Port,
            Host::ProcessListener(_) => HostAt::ProcessListener,
        }
    }
}

/// A rank that goes to a session, or to a round.
#[derive(Debug)]
pub(crate) struct Reporting {
    /// Of its connection.
    pub key: u64,
    /// Who waits.
    pub waiter: Arc<dyn Waiter>,
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
    /// None once the thread is gone. Held for a push or a swap; comes after the lock of a participant's ranks and before none.
    commands: Mutex<Option<Vec<Command>>>,
    pub wake: Flag,
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

    /// For a connection of a caller.
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

    /// What has been asked since the last time.
    pub(crate) fn take(&self) -> Vec<Command> {
        self.wake.lower();
        self.commands().as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// The thread ends: what comes from now on is lost at once.
    pub(crate) fn close(&self) {
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
        Command::Join(host, reports) => {
            for Reporting { waiter, words, .. } in reports {
                let hindrance = Hindrance::Unreached { words: "the background thread has ended".into() };
                approach::tell(&*waiter, &approach::next(host.at(), hindrance));
                process_listener::withdraw_alone(&*waiter, &words);
            }
        }
        Command::Tell(process_listener, words) => process_listener::tell_alone(process_listener, &words),
        _ => {}
    }
}
