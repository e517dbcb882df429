//! The host's side of a session as a pure state machine: events in, answers out, no clock and no sockets.
//!
//! One machine decides once, and all ranks hear copies of that decision. [`super`] says why no two ranks ever act on
//! different outcomes.

use crate::negotiated::{RANKS_MAX, Token, capability};

use super::decision;
use super::facts::Facts;
use super::message::{FromHost, FromRank};
use super::outcome::{Failure, FallbackReason, SessionOutcome};

/// A rank's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnectionId(pub u64);

/// What happens to a session.
#[derive(Clone, Debug)]
pub enum Event {
    /// A rank sent a message.
    Said(ConnectionId, FromRank),
    /// A rank's connection has closed.
    Left(ConnectionId),
    /// A rank without Windlass, or one that went to NCCL, connected.
    NonWindlass,
    /// A rank that has not reported will never report.
    Absent(Failure),
}

/// A message for one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToRank {
    /// The rank's connection.
    pub to: ConnectionId,
    /// The message.
    pub message: FromHost,
}

#[derive(Debug)]
struct Present {
    connection: ConnectionId,
    facts: Facts,
    stance: Stance,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stance {
    Here,
    Confirmed,
    Refused,
    Gone,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    Arriving,
    Preparing,
    /// A rank could not prepare, for this reason. The other ranks stop preparing, and each still confirms or refuses.
    Stopping(FallbackReason),
    Over(SessionOutcome),
}

/// The state of a session.
#[derive(Debug)]
pub struct Agreement {
    comm: Token,
    /// The process that hosts the session.
    host: Token,
    /// Whether the host has the descriptors that NCCL's ranks need there.
    has_room: bool,
    phase: Phase,
    /// The communicator's ranks, as the first report says.
    pub ranks: Option<u32>,
    /// The ranks that have reported, each once.
    present: Vec<Present>,
    /// The negotiated config's capabilities, once there is one.
    capabilities: u64,
}

impl Agreement {
    /// A session without reports, hosted by the process `host`. `comm` will be the token of its negotiated config.
    pub fn new(comm: Token, host: Token) -> Agreement {
        Agreement {
            comm,
            host,
            has_room: true,
            phase: Phase::Arriving,
            ranks: None,
            present: Vec::new(),
            capabilities: 0,
        }
    }

    /// The outcome, once there is one.
    pub fn outcome(&self) -> Option<&SessionOutcome> {
        match &self.phase {
            Phase::Over(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// Whether it ended in a peer group whose ranks go to NCCL only later, and with another id.
    pub fn is_lazy(&self) -> bool {
        self.outcome() == Some(&SessionOutcome::PeerGroup) && self.capabilities & capability::LAZY != 0
    }

    /// How many ranks have not reported yet. None before the first report, and after the last one or the outcome.
    pub fn missing(&self) -> Option<u32> {
        match self.phase {
            Phase::Arriving => Some(self.ranks?.saturating_sub(self.present.len() as u32)),
            _ => None,
        }
    }

    /// Sets whether the host has the descriptors that NCCL's ranks need there. Without them the session ends in a peer
    /// group or fails, never on NCCL.
    pub fn has_room(&mut self, has_room: bool) {
        self.has_room = has_room;
    }

    /// Handles one event. The answers must be sent in this order.
    pub fn step(&mut self, event: Event) -> Vec<ToRank> {
        match event {
            Event::NonWindlass if self.outcome().is_none() => {
                self.end(SessionOutcome::OnNccl(FallbackReason::NonWindlass))
            }
            Event::NonWindlass => Vec::new(),
            Event::Absent(failure) => self.without(SessionOutcome::Failed(failure)),
            Event::Said(connection, FromRank::Decline(outcome)) => self.decline(connection, outcome),
            Event::Left(connection) => self.left(connection),
            Event::Said(connection, FromRank::Report(facts)) => self.report(connection, *facts),
            Event::Said(connection, FromRank::Confirm) => self.confirm(connection),
            Event::Said(connection, FromRank::Refuse(words)) => self.refuse(connection, words),
            // This message belongs to a round, not to a session.
            Event::Said(connection, FromRank::Split { .. }) => match self.of_connection(connection) {
                Some(Present { facts, .. }) => {
                    let rank = facts.member.rank;
                    self.disorder(rank)
                }
                None => Vec::new(),
            },
        }
    }

    fn report(&mut self, connection: ConnectionId, facts: Facts) -> Vec<ToRank> {
        let rank = facts.member.rank;
        if self.of_connection(connection).is_some() {
            return self.disorder(rank);
        }
        match &self.phase {
            // After the outcome *peer group* every rank number is taken.
            Phase::Over(SessionOutcome::PeerGroup) | Phase::Preparing | Phase::Stopping(_) => {
                self.refuse_newcomer(connection, Failure::Duplicate { rank })
            }
            Phase::Over(outcome) => {
                vec![ToRank { to: connection, message: FromHost::Outcome(outcome.clone()) }]
            }
            Phase::Arriving => self.gather(connection, facts),
        }
    }

    /// A rank will not report. If all ranks have reported, it is none of them.
    fn without(&mut self, outcome: SessionOutcome) -> Vec<ToRank> {
        if self.phase == Phase::Arriving { self.end(outcome) } else { Vec::new() }
    }

    /// A rank declines. Its answer says where the others go.
    fn decline(&mut self, connection: ConnectionId, outcome: SessionOutcome) -> Vec<ToRank> {
        let mut answers = self.without(outcome.clone());
        // If all ranks have reported, the declining one is none of them and gets the outcome that it named.
        let of_all = self.outcome().filter(|of_all| **of_all != SessionOutcome::PeerGroup);
        let heard = of_all.cloned().unwrap_or(outcome);
        answers.push(ToRank { to: connection, message: FromHost::Outcome(heard) });
        answers
    }

    fn gather(&mut self, connection: ConnectionId, facts: Facts) -> Vec<ToRank> {
        let (rank, ranks) = (facts.member.rank, facts.ranks);
        let expected = *self.ranks.get_or_insert(ranks);
        if ranks != expected || rank >= ranks {
            return self.refuse_newcomer(connection, Failure::Mismatch { rank, ranks, expected });
        }
        if self.present.iter().any(|present| present.facts.member.rank == rank) {
            return self.refuse_newcomer(connection, Failure::Duplicate { rank });
        }
        let conflict = if ranks as usize > RANKS_MAX {
            Some(FallbackReason::ManyRanks)
        } else {
            decision::conflict(&facts, self.present.iter().map(|present| &present.facts))
        };
        self.present.push(Present { connection, facts, stance: Stance::Here });
        if let Some(reason) = conflict {
            return self.end(SessionOutcome::OnNccl(reason));
        }
        if self.present.len() < ranks as usize {
            return Vec::new();
        }
        self.phase = Phase::Preparing;
        self.present.sort_by_key(|present| present.facts.member.rank);
        let negotiated = decision::negotiated(self.comm, self.present.iter().map(|present| &present.facts));
        self.capabilities = negotiated.capabilities;
        self.tell_all(&FromHost::Prepare(negotiated))
    }

    fn confirm(&mut self, connection: ConnectionId) -> Vec<ToRank> {
        let (may_speak, over) = (self.is_preparing(), self.outcome().is_some());
        match self.of_connection(connection) {
            // The confirmation crossed the outcome on the wire, or this rank never reported and was told so.
            _ if over => Vec::new(),
            Some(present) if may_speak && present.stance == Stance::Here => {
                present.stance = Stance::Confirmed;
                self.end_if_all_spoke()
            }
            Some(present) => {
                let rank = present.facts.member.rank;
                self.disorder(rank)
            }
            None => Vec::new(),
        }
    }

    /// A rank may refuse because a peer has died. So the outcome waits until all ranks have confirmed or refused: a
    /// dead rank does neither, and its connection closes.
    fn refuse(&mut self, connection: ConnectionId, words: String) -> Vec<ToRank> {
        let over = self.outcome().is_some();
        let Some(present) = self.of_connection(connection).filter(|_| !over) else { return Vec::new() };
        let rank = present.facts.member.rank;
        if present.stance != Stance::Here {
            return self.disorder(rank);
        }
        present.stance = Stance::Refused;
        let reason = FallbackReason::Refused { rank, words };
        match self.phase {
            Phase::Arriving => return self.end(SessionOutcome::OnNccl(reason)),
            Phase::Preparing => self.phase = Phase::Stopping(reason),
            _ => return self.end_if_all_spoke(),
        }
        let mut answers = self.end_if_all_spoke();
        if answers.is_empty() {
            answers = self.tell(&FromHost::Stop, |stance| stance == Stance::Here);
        }
        answers
    }

    fn is_preparing(&self) -> bool {
        matches!(self.phase, Phase::Preparing | Phase::Stopping(_))
    }

    fn end_if_all_spoke(&mut self) -> Vec<ToRank> {
        if self.present.iter().any(|present| present.stance == Stance::Here) {
            return Vec::new();
        }
        match &self.phase {
            Phase::Stopping(reason) => self.end(SessionOutcome::OnNccl(reason.clone())),
            _ => self.end(SessionOutcome::PeerGroup),
        }
    }

    /// A rank that leaves before the outcome is lost, whatever the reason. After the outcome it needs the host no more.
    fn left(&mut self, connection: ConnectionId) -> Vec<ToRank> {
        let Some(present) = self.of_connection(connection) else { return Vec::new() };
        let rank = present.facts.member.rank;
        let before = std::mem::replace(&mut present.stance, Stance::Gone);
        if before == Stance::Gone || self.outcome().is_some() {
            return Vec::new();
        }
        self.end(SessionOutcome::Failed(Failure::Lost { rank }))
    }

    fn of_connection(&mut self, connection: ConnectionId) -> Option<&mut Present> {
        self.present.iter_mut().find(|present| present.connection == connection)
    }

    fn disorder(&mut self, rank: u32) -> Vec<ToRank> {
        if self.outcome().is_some() {
            Vec::new()
        } else {
            self.end(SessionOutcome::Failed(Failure::Disorder { rank }))
        }
    }

    /// A report that cannot be true still showed the token, so this is an error of the program. All ranks hear of it
    /// while there is no outcome yet.
    fn refuse_newcomer(&mut self, connection: ConnectionId, failure: Failure) -> Vec<ToRank> {
        let outcome = SessionOutcome::Failed(failure);
        let mut answers = if self.outcome().is_none() { self.end(outcome.clone()) } else { Vec::new() };
        answers.push(ToRank { to: connection, message: FromHost::Outcome(outcome) });
        answers
    }

    fn end(&mut self, outcome: SessionOutcome) -> Vec<ToRank> {
        let outcome = match outcome {
            SessionOutcome::OnNccl(_) if !self.has_room => SessionOutcome::Failed(Failure::Short),
            outcome => outcome,
        };
        self.phase = Phase::Over(outcome.clone());
        self.tell_all(&FromHost::Outcome(outcome))
    }

    fn tell_all(&self, message: &FromHost) -> Vec<ToRank> {
        self.tell(message, |stance| stance != Stance::Gone)
    }

    fn tell(&self, message: &FromHost, whom: impl Fn(Stance) -> bool) -> Vec<ToRank> {
        let mut there: Vec<&Present> = self.present.iter().filter(|present| whom(present.stance)).collect();
        // The host's own rank comes last: its process may end as soon as that rank has heard.
        there.sort_by_key(|present| present.facts.member.process == self.host);
        there.into_iter().map(|present| ToRank { to: present.connection, message: message.clone() }).collect()
    }
}
