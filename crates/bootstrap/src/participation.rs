//! A rank's side of a session as a pure state machine.

use std::sync::Arc;

use crate::negotiated::NegotiatedConfig;

use super::facts::Facts;
use super::message::FromHost;
use super::outcome::{Failure, FallbackReason, SessionOutcome};

/// The state of a rank in its session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The rank reported, or is about to.
    Asked,
    /// All ranks have reported; this one prepares.
    Preparing(Arc<NegotiatedConfig>),
    /// The rank is prepared and waits for the outcome.
    Confirmed(Arc<NegotiatedConfig>),
    /// All ranks confirmed.
    PeerGroup(Arc<NegotiatedConfig>),
    /// There is no peer group, or no communicator.
    Over(SessionOutcome),
}

/// A rank in a session.
#[derive(Clone, Debug)]
pub struct Participation {
    /// What the rank reports.
    pub facts: Facts,
    /// What happens if the rank loses its host before it has confirmed.
    pub without_host: WithoutHost,
    /// The rank's state.
    pub stage: Stage,
    has_stopped: bool,
}

/// What happens to a rank that loses its host before it has confirmed. Until then no rank has a peer group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WithoutHost {
    /// It fails: it has no communicator, and the rest cannot make one without the host's process.
    Fails,
    /// It uses NCCL's communicator, which exists already.
    GoesToNccl,
}

impl Participation {
    /// A rank that is about to report these facts.
    pub fn new(facts: Facts, without_host: WithoutHost) -> Participation {
        Participation { facts, without_host, stage: Stage::Asked, has_stopped: false }
    }

    /// Whether preparing can no longer lead to a peer group.
    pub fn is_pointless(&self) -> bool {
        self.has_stopped || matches!(self.stage, Stage::Over(_))
    }

    /// Whether the rank has its outcome.
    pub fn is_over(&self) -> bool {
        matches!(self.stage, Stage::PeerGroup(_) | Stage::Over(_))
    }

    /// Takes a message of the host. A message out of turn makes this rank fail: it could trust no outcome of such a
    /// host.
    pub fn heard(&mut self, message: FromHost) {
        self.stage = match (&self.stage, message) {
            (Stage::Asked, FromHost::Prepare(negotiated)) if self.is_mine(&negotiated) => {
                Stage::Preparing(Arc::new(negotiated))
            }
            (Stage::Confirmed(negotiated), FromHost::Outcome(SessionOutcome::PeerGroup)) => {
                Stage::PeerGroup(negotiated.clone())
            }
            (
                Stage::Asked | Stage::Preparing(_) | Stage::Confirmed(_),
                FromHost::Outcome(outcome @ (SessionOutcome::OnNccl(_) | SessionOutcome::Failed(_))),
            ) => Stage::Over(outcome),
            // The host's stop may cross this rank's confirmation.
            (Stage::Preparing(_) | Stage::Confirmed(_), FromHost::Stop) => {
                self.has_stopped = true;
                return;
            }
            (Stage::PeerGroup(_) | Stage::Over(_), _) => return,
            _ => Stage::Over(SessionOutcome::Failed(Failure::Unreadable)),
        };
    }

    /// This rank is prepared. Returns whether it may confirm: not before the negotiated config and not after the
    /// outcome.
    #[must_use]
    pub fn confirm(&mut self) -> bool {
        let Stage::Preparing(negotiated) = &self.stage else { return false };
        self.stage = Stage::Confirmed(negotiated.clone());
        true
    }

    /// The connection has closed, or a message cannot be read. No failure after the outcome.
    pub fn lost(&mut self, failure: Failure) {
        if self.without_host == WithoutHost::GoesToNccl
            && matches!(failure, Failure::HostLost | Failure::Short)
            && matches!(self.stage, Stage::Asked | Stage::Preparing(_))
        {
            self.end(SessionOutcome::OnNccl(FallbackReason::Unreachable { words: failure.to_string() }));
        } else {
            self.end(SessionOutcome::Failed(failure));
        }
    }

    /// Ends this rank's wait with this outcome, unless it has one.
    pub fn end(&mut self, outcome: SessionOutcome) {
        if !self.is_over() {
            self.stage = Stage::Over(outcome);
        }
    }

    fn is_mine(&self, negotiated: &NegotiatedConfig) -> bool {
        negotiated.members.len() == self.facts.ranks as usize
            && negotiated.options == self.facts.options
            && negotiated.members.get(self.facts.member.rank as usize) == Some(&self.facts.member)
    }
}
