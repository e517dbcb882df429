//! The caller's side of a session: a rank waits here while the background thread sends and receives.
//!
//! No lock is held while a thread waits, prepares or calls NCCL. A [`Canceller`] ends a rank's wait from any thread.

use std::sync::{Arc, Condvar, PoisonError};

use crate::negotiated::{NegotiatedConfig, Token};
use windlass_base::lock::{Mutex, MutexGuard};
use windlass_base::thread;

use super::commands::{Canceller, Command, Reporting, Shared};
use super::descriptors::DescriptorSocket;
use super::facts::Facts;
use super::message::{FromHost, FromRank};
use super::outcome::{Failure, FallbackReason, SessionOutcome, bounded};
use super::participation::{Participation, Stage, WithoutHost};
use super::poll::Flag;
use super::waiter::{Need, Waiter};

/// What the background thread and the waiting caller share.
#[derive(Debug)]
struct OneRank {
    /// Held for a few stores; no other lock is held when it is taken. [`Shared`]'s commands come after it.
    participation: Mutex<Participation>,
    changed: Condvar,
    /// Raised when the rank's wait has ended or the host has said stop: preparing is pointless from then on.
    stop: Flag,
}

impl OneRank {
    /// Waits until `is_due`.
    fn wait(&self, is_due: impl Fn(&Participation) -> bool) -> MutexGuard<'_, Participation> {
        let waits = |participation: &mut Participation| !is_due(participation);
        self.changed.wait_while(self.participation.lock(), waits).unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state of the rank. Returns whether its connection is still needed.
    fn change(&self, change: impl FnOnce(&mut Participation)) -> Need {
        let mut participation = self.participation.lock();
        change(&mut participation);
        let over = participation.is_over();
        let pointless = participation.is_pointless();
        drop(participation);
        if pointless {
            self.stop.raise();
        }
        self.changed.notify_all();
        if over { Need::Nothing } else { Need::Connection }
    }
}

impl Waiter for OneRank {
    fn heard(&self, message: FromHost) -> Need {
        self.change(|participation| participation.heard(message))
    }

    fn lost(&self, failure: Failure) {
        self.change(|participation| participation.lost(failure));
    }

    fn end(&self, outcome: SessionOutcome) {
        self.change(|participation| participation.end(outcome));
    }

    fn declines_elsewhere(&self) -> bool {
        self.participation.lock().without_host == WithoutHost::GoesToNccl
    }

    fn is_over(&self) -> bool {
        self.participation.lock().is_over()
    }
}

/// The outcome of a session for one rank.
#[derive(Debug)]
pub enum Outcome {
    /// The rank is in a peer group with this negotiated config. Its connection to the host has ended.
    PeerGroup(Arc<NegotiatedConfig>),
    /// The rank goes to NCCL.
    OnNccl(FallbackReason),
    /// The rank's init fails.
    Failed(Failure),
}

/// What a caller needs to prepare its rank of a session.
#[derive(Debug)]
pub struct Preparation<'a> {
    /// What the ranks agree on if all confirm.
    pub negotiated: &'a Arc<NegotiatedConfig>,
    /// The rank that this caller prepares.
    pub rank: u32,
    /// The session's token.
    pub token: Token,
    /// Where descriptors for this rank arrive.
    pub descriptor_socket: &'a DescriptorSocket,
    /// Readable as soon as preparing is pointless.
    pub stop: &'a Flag,
}

impl Preparation<'_> {
    /// The descriptor sockets of all other participants, in the negotiated config's order.
    pub fn peers(&self) -> Vec<Token> {
        let sockets = self.negotiated.members.iter().map(|member| member.descriptor_socket);
        sockets.filter(|descriptor_socket| *descriptor_socket != self.descriptor_socket.name).collect()
    }
}

/// A rank in a session. Its report has been handed to the background thread.
#[derive(Debug)]
pub struct Participant {
    own: Arc<OneRank>,
    key: u64,
    rank: u32,
    shared: Arc<Shared>,
    token: Token,
    descriptor_socket: DescriptorSocket,
}

impl Participant {
    /// A rank that is about to report. It gets the key of its connection.
    pub(super) fn new(
        shared: Arc<Shared>,
        token: Token,
        descriptor_socket: DescriptorSocket,
        mut facts: Facts,
        without_host: WithoutHost,
    ) -> rustix::io::Result<Participant> {
        facts.member.descriptor_socket = descriptor_socket.name;
        let (key, rank) = (shared.new_key(), facts.member.rank);
        let participation = Mutex::new(Participation::new(facts, without_host));
        let own = Arc::new(OneRank { participation, changed: Condvar::new(), stop: Flag::new()? });
        Ok(Participant { own, key, rank, shared, token, descriptor_socket })
    }

    /// The greeting and report of the rank, for the background thread.
    pub(super) fn report(&self, greeting: &[u8]) -> Reporting {
        let mut words = greeting.to_vec();
        words.extend(FromRank::Report(Box::new(self.own.participation.lock().facts.clone())).encode());
        Reporting { key: self.key, waiter: self.own.clone(), words }
    }

    /// What ends the rank's wait.
    pub fn canceller(&self) -> Canceller {
        Canceller::new(self.own.clone(), self.key, self.shared.clone())
    }

    /// Waits for the other ranks, prepares, confirms and waits for the outcome on the caller's thread, without a time
    /// limit. `prepare` runs at most once, without a lock. Its error says in a few words why this caller cannot
    /// prepare.
    pub fn complete(self, prepare: impl FnOnce(&Preparation<'_>) -> Result<(), String>) -> Outcome {
        let decided = self.own.wait(|own| own.is_over() || matches!(own.stage, Stage::Preparing(_)));
        let stage = decided.stage.clone();
        drop(decided);
        if let Stage::Preparing(negotiated) = &stage {
            let Participant { rank, token, ref descriptor_socket, .. } = self;
            let stop = &self.own.stop;
            match prepare(&Preparation { negotiated, rank, token, descriptor_socket, stop }) {
                Ok(()) => self.confirm(),
                Err(words) => self.refuse(&words),
            }
        }
        match self.own.wait(Participation::is_over).stage.clone() {
            Stage::PeerGroup(negotiated) => Outcome::PeerGroup(negotiated),
            Stage::Over(SessionOutcome::OnNccl(reason)) => Outcome::OnNccl(reason),
            Stage::Over(SessionOutcome::Failed(failure)) => Outcome::Failed(failure),
            // Not reached: a rank's state does not change once it is over.
            _ => Outcome::Failed(Failure::Unreadable),
        }
    }

    fn confirm(&self) {
        let mut own = self.own.participation.lock();
        if own.confirm() {
            self.shared.send(Command::Say(self.key, FromRank::Confirm.encode()));
        }
    }

    fn refuse(&self, words: &str) {
        let own = self.own.participation.lock();
        if !own.is_over() {
            self.shared.send(Command::Say(self.key, FromRank::Refuse(bounded(words)).encode()));
        }
    }
}

impl Drop for Participant {
    fn drop(&mut self) {
        self.shared.send(Command::Leave(self.key));
    }
}

/// Completes several participants at once, as a group does: no session waits for another, whatever the order in which
/// other processes go to theirs. The first runs on the caller's thread, each further one on a thread that ends with
/// this call. Each comes with what prepares it.
pub fn complete_all<P>(participants: Vec<(Participant, P)>) -> Vec<Outcome>
where
    P: FnOnce(&Preparation<'_>) -> Result<(), String> + Send,
{
    let mut participants = participants.into_iter();
    let Some((first, prepare)) = participants.next() else { return Vec::new() };
    std::thread::scope(|scope| {
        let begin = |(participant, prepare): (Participant, P)| {
            let canceller = participant.canceller();
            (canceller, thread::spawn_scoped(scope, "windlass-init", move || participant.complete(prepare)))
        };
        let rest: Vec<_> = participants.map(begin).collect();
        let mut outcomes = vec![first.complete(prepare)];
        outcomes.extend(rest.into_iter().map(|(canceller, begun)| {
            let joined = begun.ok().and_then(|thread| thread.join().ok());
            joined.unwrap_or_else(|| {
                // The thread could not start, or `prepare` panicked on it. This rank fails, and its peers hear it.
                canceller.abort();
                Outcome::Failed(Failure::Aborted)
            })
        }));
        outcomes
    })
}
