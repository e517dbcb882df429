//! The host's side of a session as a pure machine: events in, answers out, no clock and no sockets.
//!
//! One machine decides once; all that ranks hear are copies of that decision. The argument why no two ranks ever act
//! on different outcomes stands in [`super`].

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
    /// A rank says something.
    Said(ConnectionId, FromRank),
    /// A rank's connection is gone.
    Left(ConnectionId),
    /// Someone connected who is not one of us.
    NonWindlass,
    /// A rank that has not reported never will.
    Absent(Failure),
}

/// A message for one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToRank {
    /// Whose.
    pub to: ConnectionId,
    /// What.
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
    /// A rank could not prepare, for this reason; the others stop, and speak.
    Stopping(FallbackReason),
    Over(SessionOutcome),
}

/// A session.
#[derive(Debug)]
pub struct Agreement {
    comm: Token,
    /// The process that hosts.
    host: Token,
    /// Whether NCCL's ranks can come where it hosts.
    has_room: bool,
    phase: Phase,
    /// How many ranks there are, once one has said so.
    ranks: Option<u32>,
    /// At most one a rank.
    present: Vec<Present>,
    /// The negotiated config's capabilities, once there is one.
    capabilities: u64,
}

impl Agreement {
    /// A session to which nobody has come, at this process; its negotiated config will bear this name.
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

    /// How it ended, if it has.
    pub fn outcome(&self) -> Option<&SessionOutcome> {
        match &self.phase {
            Phase::Over(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// Whether it ended in a peer group whose ranks go to NCCL later only, and with another id.
    pub fn is_lazy(&self) -> bool {
        self.outcome() == Some(&SessionOutcome::PeerGroup) && self.capabilities & capability::LAZY != 0
    }

    /// How many ranks there are, if any has come.
    pub fn ranks(&self) -> Option<u32> {
        self.ranks
    }

    /// How many ranks have not reported yet; nothing where that is not known or not waited for.
    pub fn missing(&self) -> Option<u32> {
        match self.phase {
            Phase::Arriving => Some(self.ranks?.saturating_sub(self.present.len() as u32)),
            _ => None,
        }
    }

    /// From now on NCCL's ranks can come where it hosts, or not: then there is a peer group or no communicator.
    pub fn has_room(&mut self, has_room: bool) {
        self.has_room = has_room;
    }

    /// One step. Answers go out in this order.
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
            // Of another kind of talk.
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
            // Whoever comes after a peer group's outcome has a number that is taken.
            Phase::Over(SessionOutcome::PeerGroup) | Phase::Preparing | Phase::Stopping(_) => {
                self.refuse_newcomer(connection, Failure::Duplicate { rank })
            }
            Phase::Over(outcome) => {
                vec![ToRank { to: connection, message: FromHost::Outcome(outcome.clone()) }]
            }
            Phase::Arriving => self.gather(connection, facts),
        }
    }

    /// Somebody will not come. Where all have reported, that is none of them.
    fn without(&mut self, outcome: SessionOutcome) -> Vec<ToRank> {
        if self.phase == Phase::Arriving { self.end(outcome) } else { Vec::new() }
    }

    /// A rank says that it will not come, and may wait to hear where the others go.
    fn decline(&mut self, connection: ConnectionId, outcome: SessionOutcome) -> Vec<ToRank> {
        let mut answers = self.without(outcome.clone());
        // Where all have reported it is none of them, and goes its own way.
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
            // Its confirmation crossed the outcome, or it never reported and was told so.
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

    /// A refusal is a rank's own message; it may also be what it makes of a peer's death. So the outcome waits until all
    /// have spoken: whoever died never does, and is seen to have left.
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

    /// Before the outcome whoever leaves is lost, however it leaves. After it the host is needed no more.
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

    /// A rank with a claim that cannot be true holds the token all the same, so this is an error of the program, and
    /// all ranks hear of it while there is no outcome yet.
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
        // The host's own last: its process may be gone as soon as they have heard.
        there.sort_by_key(|present| present.facts.member.process == self.host);
        there.into_iter().map(|present| ToRank { to: present.connection, message: message.clone() }).collect()
    }
}
