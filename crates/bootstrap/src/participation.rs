//! A rank's side of a session as a pure machine.

use std::sync::Arc;

use crate::negotiated::NegotiatedConfig;

use super::facts::Facts;
use super::message::FromHost;
use super::outcome::{Failure, FallbackReason, SessionOutcome};

/// Where a rank stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It reported, or is about to.
    Asked,
    /// All are there: it prepares.
    Preparing(Arc<NegotiatedConfig>),
    /// It is prepared and waits for the outcome.
    Confirmed(Arc<NegotiatedConfig>),
    /// All confirmed.
    PeerGroup(Arc<NegotiatedConfig>),
    /// There is no peer group, or no communicator.
    Over(SessionOutcome),
}

/// A rank in a session.
#[derive(Clone, Debug)]
pub struct Participation {
    facts: Facts,
    without_host: WithoutHost,
    stage: Stage,
    preparing: Worth,
}

/// What becomes of a rank that loses its host before it has confirmed: until then none has a peer group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WithoutHost {
    /// It has no communicator: whose process hosts, makes it with the others.
    Fails,
    /// It has NCCL's, which is there already.
    GoesToNccl,
}

/// Whether preparing can still lead to a peer group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Worth {
    Worthwhile,
    Pointless,
}

impl Participation {
    /// A rank that is about to report this.
    pub fn new(facts: Facts, without_host: WithoutHost) -> Participation {
        Participation { facts, without_host, stage: Stage::Asked, preparing: Worth::Worthwhile }
    }

    /// What becomes of it without its host, before it has confirmed.
    pub fn without_host(&self) -> WithoutHost {
        self.without_host
    }

    /// Where it stands.
    pub fn stage(&self) -> &Stage {
        &self.stage
    }

    /// Whether preparing is worth while.
    pub fn preparing(&self) -> Worth {
        if matches!(self.stage, Stage::Over(_)) { Worth::Pointless } else { self.preparing }
    }

    /// What it reports.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Whether there is nothing left to wait for.
    pub fn is_over(&self) -> bool {
        matches!(self.stage, Stage::PeerGroup(_) | Stage::Over(_))
    }

    /// The host said something. What is out of turn makes this rank fail: it has no outcome that it could trust.
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
            // It may cross this rank's own word.
            (Stage::Preparing(_) | Stage::Confirmed(_), FromHost::Stop) => {
                self.preparing = Worth::Pointless;
                return;
            }
            (Stage::PeerGroup(_) | Stage::Over(_), _) => return,
            _ => Stage::Over(SessionOutcome::Failed(Failure::Unreadable)),
        };
    }

    /// This rank is prepared. Silence if it is no longer, or not yet, its turn.
    #[must_use]
    pub fn confirm(&mut self) -> Turn {
        match &self.stage {
            Stage::Preparing(negotiated) => {
                self.stage = Stage::Confirmed(negotiated.clone());
                Turn::Speak
            }
            _ => Turn::Silence,
        }
    }

    /// The connection is gone, or what came cannot be read. After the outcome that is no failure.
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

    /// Ends this rank's waiting, unless it has ended.
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

/// Whether a rank may say what it wants to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Turn {
    Speak,
    Silence,
}
