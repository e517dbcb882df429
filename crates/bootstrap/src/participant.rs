//! The caller's side of a session: the ranks that one caller brings wait here while the background thread sends and
//! receives.
//!
//! No lock is held while a thread waits, prepares or calls NCCL. A [`Canceller`] ends a rank's wait from any thread.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::negotiated::{NegotiatedConfig, Token};
use windlass_base::thread;

use super::canceller::Canceller;
use super::commands::{Command, Reporting, Shared};
use super::descriptors::DescriptorSocket;
use super::facts::Facts;
use super::message::{FromHost, FromRank};
use super::outcome::{Failure, FallbackReason, SessionOutcome, bounded};
use super::participation::{Participation, Stage, Turn, WithoutHost, Worth};
use super::poll::Flag;
use super::waiter::{Need, Waiter};

/// What the background thread and the waiting caller share of a participant.
#[derive(Debug)]
struct Ranks {
    /// The state of each rank. Held for a few stores; no other lock is held when it is taken. [`Shared`]'s commands
    /// come after it.
    standing: Mutex<Vec<Participation>>,
    changed: Condvar,
    /// Raised when a rank's wait has ended or the host has said stop: preparing is pointless from then on.
    stop: Flag,
}

impl Ranks {
    fn new(facts: Vec<Facts>, without_host: WithoutHost) -> rustix::io::Result<Ranks> {
        let join = |facts| Participation::new(facts, without_host);
        let standing = Mutex::new(facts.into_iter().map(join).collect());
        Ok(Ranks { standing, changed: Condvar::new(), stop: Flag::new()? })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Participation>> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, standing: MutexGuard<'a, Vec<Participation>>) -> MutexGuard<'a, Vec<Participation>> {
        self.changed.wait(standing).unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state of a rank. Returns whether its connection is still needed.
    fn change(&self, index: usize, change: impl FnOnce(&mut Participation)) -> Need {
        let mut standing = self.lock();
        let Some(participation) = standing.get_mut(index) else { return Need::Nothing };
        change(participation);
        let over = participation.is_over();
        let pointless = participation.preparing() == Worth::Pointless;
        drop(standing);
        if pointless {
            self.stop.raise();
        }
        self.changed.notify_all();
        if over { Need::Nothing } else { Need::Connection }
    }
}

/// One rank of a participant, by its index there.
#[derive(Debug)]
struct OneRank {
    ranks: Arc<Ranks>,
    index: usize,
}

impl Waiter for OneRank {
    fn heard(&self, message: FromHost) -> Need {
        self.ranks.change(self.index, |participation| participation.heard(message))
    }

    fn lost(&self, failure: Failure) {
        self.ranks.change(self.index, |participation| participation.lost(failure));
    }

    fn end(&self, outcome: SessionOutcome) {
        self.ranks.change(self.index, |participation| participation.end(outcome));
    }

    fn declines_elsewhere(&self) -> bool {
        self.ranks.lock()[self.index].without_host() == WithoutHost::GoesToNccl
    }

    fn is_over(&self) -> bool {
        self.ranks.lock()[self.index].is_over()
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

/// What a caller needs to prepare its ranks of one session.
#[derive(Debug)]
pub struct Preparation<'a> {
    /// What the ranks agree on if all confirm.
    pub negotiated: &'a Arc<NegotiatedConfig>,
    /// The ranks that this caller prepares.
    pub ranks: &'a [u32],
    /// The session's token.
    pub token: Token,
    /// Where descriptors for these ranks arrive.
    pub descriptor_socket: &'a DescriptorSocket,
    /// Readable as soon as preparing is pointless.
    pub stop: &'a Flag,
}

impl Preparation<'_> {
    /// The descriptor sockets of all other participants, in the negotiated config's order.
    pub fn peers(&self) -> Vec<Token> {
        self.negotiated
            .descriptor_sockets()
            .into_iter()
            .filter(|descriptor_socket| *descriptor_socket != self.descriptor_socket.name())
            .collect()
    }
}

/// The ranks that one caller brings to one session. Their reports have been handed to the background thread.
#[derive(Debug)]
pub struct Participant {
    ranks: Arc<Ranks>,
    keys: Vec<u64>,
    numbers: Vec<u32>,
    shared: Arc<Shared>,
    token: Token,
    descriptor_socket: DescriptorSocket,
}

impl Participant {
    /// Ranks that are about to report. Each gets the key of its connection.
    pub(super) fn new(
        shared: Arc<Shared>,
        token: Token,
        descriptor_socket: DescriptorSocket,
        mut facts: Vec<Facts>,
        without_host: WithoutHost,
    ) -> rustix::io::Result<Participant> {
        facts.iter_mut().for_each(|facts| facts.member.descriptor_socket = descriptor_socket.name());
        let keys = facts.iter().map(|_| shared.new_key()).collect();
        let numbers = facts.iter().map(|facts| facts.member.rank).collect();
        Ok(Participant {
            ranks: Arc::new(Ranks::new(facts, without_host)?),
            keys,
            numbers,
            shared,
            token,
            descriptor_socket,
        })
    }

    /// The greeting and report of each rank, for the background thread.
    pub(super) fn reports(&self, greeting: &[u8]) -> Vec<Reporting> {
        let standing = self.ranks.lock();
        let report = |(index, participation): (usize, &Participation)| {
            let mut words = greeting.to_vec();
            words.extend(FromRank::Report(Box::new(participation.facts().clone())).encode());
            Reporting { key: self.keys[index], waiter: self.waiter(index), words }
        };
        standing.iter().enumerate().map(report).collect()
    }

    fn waiter(&self, index: usize) -> Arc<dyn Waiter> {
        Arc::new(OneRank { ranks: self.ranks.clone(), index })
    }

    /// One canceller for each rank, in the order in which the caller brought them.
    pub fn cancellers(&self) -> Vec<Canceller> {
        let canceller =
            |(index, key): (usize, &u64)| Canceller::new(self.waiter(index), *key, self.shared.clone());
        self.keys.iter().enumerate().map(canceller).collect()
    }

    /// Waits for the other ranks, prepares, confirms and waits for the outcome on the caller's thread, without a time
    /// limit. `prepare` runs at most once, without a lock. Its error says in a few words why this caller cannot
    /// prepare.
    pub fn complete(self, prepare: impl FnOnce(&Preparation<'_>) -> Result<(), String>) -> Vec<Outcome> {
        match self.await_decision() {
            Some(negotiated) => {
                let preparation = Preparation {
                    negotiated: &negotiated,
                    ranks: &self.numbers,
                    token: self.token,
                    descriptor_socket: &self.descriptor_socket,
                    stop: &self.ranks.stop,
                };
                match prepare(&preparation) {
                    Ok(()) => self.confirm(),
                    Err(words) => self.refuse(&words),
                }
            }
            // A rank of this caller has ended already, so the session of the others cannot end well. They refuse,
            // because the caller returns only when all of its ranks have ended.
            None => self.refuse("another rank of this process is out"),
        }
        self.await_outcome()
    }

    /// Waits for the negotiated config. None once a rank has ended.
    fn await_decision(&self) -> Option<Arc<NegotiatedConfig>> {
        let mut standing = self.ranks.lock();
        loop {
            if standing.iter().any(Participation::is_over) {
                return None;
            }
            let prepared =
                standing.iter().all(|participation| matches!(participation.stage(), Stage::Preparing(_)));
            if let (true, Some(Stage::Preparing(negotiated))) =
                (prepared, standing.first().map(Participation::stage))
            {
                return Some(negotiated.clone());
            }
            standing = self.ranks.wait(standing);
        }
    }

    fn confirm(&self) {
        let mut standing = self.ranks.lock();
        // If one rank has ended, the others stay silent: the host has heard of it or soon will.
        for (participation, key) in standing.iter_mut().zip(&self.keys) {
            if participation.confirm() == Turn::Speak {
                self.shared.send(Command::Say(*key, FromRank::Confirm.encode()));
            }
        }
    }

    fn refuse(&self, words: &str) {
        let message = FromRank::Refuse(bounded(words)).encode();
        for (participation, key) in self.ranks.lock().iter().zip(&self.keys) {
            if !participation.is_over() {
                self.shared.send(Command::Say(*key, message.clone()));
            }
        }
    }

    fn await_outcome(&self) -> Vec<Outcome> {
        let mut standing = self.ranks.lock();
        while !standing.iter().all(Participation::is_over) {
            standing = self.ranks.wait(standing);
        }
        let stages: Vec<Stage> = standing.iter().map(|participation| participation.stage().clone()).collect();
        drop(standing);
        stages.into_iter().map(outcome).collect()
    }
}

fn outcome(stage: Stage) -> Outcome {
    match stage {
        Stage::PeerGroup(negotiated) => Outcome::PeerGroup(negotiated),
        Stage::Over(SessionOutcome::OnNccl(reason)) => Outcome::OnNccl(reason),
        Stage::Over(SessionOutcome::Failed(failure)) => Outcome::Failed(failure),
        // Not reached: `is_over` held, and a rank's state does not change after that.
        _ => Outcome::Failed(Failure::Unreadable),
    }
}

impl Drop for Participant {
    fn drop(&mut self) {
        self.keys.iter().for_each(|key| self.shared.send(Command::Leave(*key)));
    }
}

/// Completes several participants at once, as a group does: no session waits for another, whatever the order in which
/// other processes go to theirs. The first runs on the caller's thread, each further one on a thread that ends with
/// this call.
pub fn complete_all(
    participants: Vec<Participant>,
    prepare: &(dyn Fn(&Preparation<'_>) -> Result<(), String> + Sync),
) -> Vec<Vec<Outcome>> {
    let mut participants = participants.into_iter();
    let Some(first) = participants.next() else { return Vec::new() };
    std::thread::scope(|scope| {
        let rest: Vec<_> = participants
            .map(|participant| {
                let count = participant.numbers.len();
                let cancellers = participant.cancellers();
                let begun =
                    thread::spawn_scoped(scope, "windlass-init", move || participant.complete(prepare));
                (count, cancellers, begun)
            })
            .collect();
        let mut outcomes = vec![first.complete(prepare)];
        outcomes.extend(rest.into_iter().map(|(count, cancellers, begun)| {
            let joined = begun.ok().and_then(|thread| thread.join().ok());
            joined.unwrap_or_else(|| {
                // The thread could not start, or `prepare` panicked on it. These ranks fail, and their peers hear it.
                cancellers.iter().for_each(Canceller::abort);
                (0..count).map(|_| Outcome::Failed(Failure::Aborted)).collect()
            })
        }));
        outcomes
    })
}
