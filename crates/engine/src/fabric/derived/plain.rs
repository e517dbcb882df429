//! Communicators made from one without a fabric: their ranks [muster](crate::rendezvous::muster) on their host before NCCL
//! makes them, and where all are there they meet as those of a parent with a fabric.
//!
//! So a world of several hosts, or of more ranks than a fabric has, has none, and what is split of it on one host does. Shrinks and what
//! is made in a group have none.

use std::sync::Arc;

use crate::contract::{RANKS_MAX, Token};
use crate::fabric::hosting::rendezvous;
use crate::fabric::wish;
use crate::forward::birth::Ctas;
use crate::forward::configuration;
use crate::rendezvous::Mustered;
use crate::rendezvous::colors::Parent;
use crate::rendezvous::derived::{Invitation, Making, child};
use crate::rendezvous::facts::Waiting;
use crate::rendezvous::muster::Answer;
use crate::rendezvous::verdict::Reason;

use super::taken::{Ahead, Derivation, Due};
use super::waits::{Kind, Line};

/// What a communicator without a fabric keeps for those made from it. It waits where its own calls do.
#[derive(Debug)]
pub struct Plain {
    line: Arc<Line>,
    configuration: configuration::Kept,
}

impl Plain {
    /// Of one whose ranks all have this name for it, and nobody else.
    pub fn new(name: Token, rank: u32, ctas: Ctas, configuration: configuration::Kept) -> Arc<Plain> {
        Arc::new(Plain { line: Line::of_plain(name, rank, ctas), configuration })
    }

    /// Its configuration.
    pub fn configuration(&self) -> &configuration::Kept {
        &self.configuration
    }

    /// Before NCCL is asked for a split: this rank enters the muster of its color. None if it goes without, and so do all who have it
    /// with them.
    pub fn muster(&self, color: i32, waiting: Option<Waiting>) -> Option<Mustering> {
        wish::check_derived(Some(waiting.unwrap_or(Waiting::Blocking))).ok()?;
        let count = self.line.counted(Kind::Split, |_| ()).begun;
        let name = child(Making::Split { count }.name(self.line.birth), color);
        let mustered = rendezvous().and_then(|rendezvous| rendezvous.muster(name, self.line.rank));
        match mustered {
            Ok(mustered) => Some(Mustering { line: self.line.clone(), name, mustered }),
            Err(error) => {
                log::warn!(
                    "a communicator that is split off has no fabric: this rank cannot say that it comes, {error}"
                );
                None
            }
        }
    }

    /// NCCL has taken a split, as it has on all ranks.
    pub fn splits(&self) {
        self.line.counted(Kind::Split, |counted| counted.begun += 1);
    }

    /// Ends what waits for communicators made from this one.
    pub fn end(&self) {
        self.line.end();
    }
}

/// A rank that is in a muster while NCCL makes its communicator.
#[derive(Debug)]
pub struct Mustering {
    line: Arc<Line>,
    name: Token,
    mustered: Mustered,
}

impl Mustering {
    /// What those made from the new communicator go by, where it has no fabric itself.
    pub fn plain(&self, rank: u32, ctas: Option<Ctas>, configuration: configuration::Kept) -> Arc<Plain> {
        Plain::new(self.name, rank, ctas.unwrap_or(self.line.ctas), configuration)
    }

    /// NCCL has made it, of so many ranks: if all are here, this one's way to their meeting.
    pub fn derivation(self, ranks: u32) -> Result<Derivation, Reason> {
        let Mustering { line, name, mustered } = self;
        if ranks < 2 {
            return Err(Reason::OneRank);
        }
        if ranks as usize > RANKS_MAX {
            return Err(Reason::ManyRanks);
        }
        match mustered.ask(ranks) {
            Ok(Answer::Complete { place, lobby }) => {
                let invitation = Invitation { lobby, call: name, child: child(name, 0), rank: place };
                Ok(Derivation {
                    line,
                    invitation,
                    ranks: (1 << ranks) - 1,
                    parent: Parent::Built,
                    color: Some(0),
                    ahead: Ahead::Nccl,
                    due: Due::Word,
                    mustered: Some(mustered),
                })
            }
            Ok(_) => Err(Reason::Apart),
            // Nobody can have a fabric without this rank's report; if the others meet, they miss that process, too.
            Err(error) => Err(Reason::Unreachable { words: error.to_string() }),
        }
    }
}
