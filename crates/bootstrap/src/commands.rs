//! The commands that callers send to the background thread, and the state that both share.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::negotiated::Token;

use super::approach::{self, Hindrance, HostAt};
use super::counts::Counts;
use super::id_tag::Id;
use super::limits::Limits;
use super::outcome::{Failure, SessionOutcome};
use super::poll::Flag;
use super::process_listener;
use super::spare::Spares;
use super::waiter::Waiter;
use windlass_base::descriptor::Ours;
use windlass_base::lock::Mutex;

/// The key of the flag that wakes the thread. The keys after it belong to callers.
pub(crate) const WAKE: u64 = 0;

/// A command to the background thread.
#[derive(Debug)]
pub(crate) enum Command {
    Open(NewSession),
    /// There are too many sessions: retire those that can go.
    Sweep,
    Retire(Token),
    Join(Host, Reporting),
    /// The host's own rank makes this call.
    Expect(Expected),
    /// This process keeps the host-local rendezvous of this name, with this listener.
    LocalRendezvous(Token, Ours),
    /// A message to a process listener, from a rank that does not wait for an answer.
    Tell(Token, Vec<u8>),
    Say(u64, Vec<u8>),
    Leave(u64),
    End,
}

/// Where the host of a session is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Host {
    /// At the port of an id.
    Port(SocketAddr),
    /// At the process listener with this secret.
    ProcessListener(Token),
}

impl Host {
    /// The kind of place. A port counts as another process's.
    pub(crate) fn at(&self) -> HostAt {
        match self {
            Host::Port(_) => HostAt::Port,
            Host::ProcessListener(_) => HostAt::ProcessListener,
        }
    }
}

/// A rank to be connected to the host of its session or round.
#[derive(Debug)]
pub(crate) struct Reporting {
    /// The key of its connection.
    pub key: u64,
    /// Hears what happens.
    pub waiter: Arc<dyn Waiter>,
    /// Its greeting and its message, to be sent.
    pub words: Vec<u8>,
}

/// A call that makes communicators from another, as the rank whose process hosts their sessions sees it.
#[derive(Debug)]
pub(crate) struct Expected {
    /// The call's name.
    pub call: Token,
    /// The ranks that make it, one bit each.
    pub ranks: u64,
    /// What tells the ends of other ranks' processes.
    pub lives: Vec<(u32, Ours)>,
}

/// A session that this process hosts from now on.
#[derive(Debug)]
pub(crate) struct NewSession {
    pub token: Token,
    pub comm: Token,
    /// The id as NCCL made it.
    pub id: Id,
    pub listener: Ours,
    pub root: SocketAddr,
}

/// What callers and the thread share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// None once the thread has ended. Held for a push or a swap. Taken after the lock of a participant's ranks; no
    /// lock is taken while it is held.
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

    /// Keeps an id that no rank uses.
    pub(crate) fn spare(&self, id: Id) {
        if !self.spares.put(id) {
            Counts::up(&self.counts.ids_dropped);
        }
    }

    /// A new key for a connection of a caller.
    pub(crate) fn new_key(&self) -> u64 {
        self.next_key.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn send(&self, command: Command) {
        let mut commands = self.commands.lock();
        if let Some(commands) = commands.as_mut() {
            commands.push(command);
            self.wake.raise();
        } else {
            drop(commands);
            lost(command);
        }
    }

    /// The commands since the last call.
    pub(crate) fn take(&self) -> Vec<Command> {
        self.wake.lower();
        self.commands.lock().as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// At the end of the thread: commands that were not handled, and all later ones, are lost.
    pub(crate) fn close(&self) {
        let late = self.commands.lock().take();
        // The lock is no longer held: ranks' locks come before it.
        late.into_iter().flatten().for_each(lost);
    }
}

/// Handles a command without the thread. No host has heard of these ranks. At a process listener a rank is waited for
/// while its process lives, so the caller says there that it does not come.
fn lost(command: Command) {
    match command {
        Command::Join(host, Reporting { waiter, words, .. }) => {
            let hindrance = Hindrance::Unreached { words: "the background thread has ended".into() };
            approach::tell(&*waiter, &approach::next(host.at(), hindrance));
            process_listener::withdraw_alone(&*waiter, &words);
        }
        Command::Tell(process_listener, words) => process_listener::tell_alone(process_listener, &words),
        _ => {}
    }
}

/// Ends a rank's wait from another thread, for `ncclCommAbort`.
#[derive(Clone, Debug)]
pub struct Canceller {
    waiter: Arc<dyn Waiter>,
    key: u64,
    shared: Arc<Shared>,
}

impl Canceller {
    pub(super) fn new(waiter: Arc<dyn Waiter>, key: u64, shared: Arc<Shared>) -> Canceller {
        Canceller { waiter, key, shared }
    }

    /// Makes the rank fail with [`Failure::Aborted`] at once, unless its session is over. Its peers hear that it left.
    pub fn abort(&self) {
        self.waiter.end(SessionOutcome::Failed(Failure::Aborted));
        if self.waiter.is_over() {
            self.shared.send(Command::Leave(self.key));
        }
    }
}
