//! What a communicator has for those made from it: how many calls have begun, and who waits in them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::background::life::Life;
use crate::forward::init::{Ctas, Policy};
use windlass_base::descriptor::Ours;
use windlass_bootstrap::Canceller;
use windlass_bootstrap::children::{Making, NOBODY};
use windlass_bootstrap::negotiated::{Member, NegotiatedConfig, Token, capability};
use windlass_transport::sequencer::Graphs;

/// What a communicator has for those made from it, for as long as any of them is being made.
#[derive(Debug)]
pub struct Lineage {
    /// Of which the names of those made from it are made.
    pub(super) comm: Token,
    pub(super) rank: u32,
    /// Of ranks that have met.
    negotiated: Option<Arc<NegotiatedConfig>>,
    /// Of the others of these.
    lives: Vec<Arc<Life>>,
    /// Whether those made from it may be lazy, so that its ranks speak before.
    pub(super) has_rounds: bool,
    /// What its configuration said of kernels, which holds for those made from it unless theirs says otherwise.
    pub(super) ctas: Ctas,
    /// Held for a few stores.
    counted: Mutex<BTreeMap<Kind, Counted>>,
    /// Held for a few stores; the bootstrap's locks come after it.
    waiting: Mutex<Waits>,
}

/// Calls that are counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Split,
    /// By who is excluded, as the name of the first such one: an excluded rank knows nothing of the others' shrink.
    Shrink(Token),
}

impl Kind {
    /// Of the first call like this one on the parent with this token.
    pub(super) fn of(first: &Making, comm: Token) -> Kind {
        match first {
            Making::Split { .. } => Kind::Split,
            Making::Shrink { .. } => Kind::Shrink(first.name(comm)),
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counted {
    /// How many have begun.
    pub(super) begun: u32,
    /// How many had when this rank last said in a round that it goes to NCCL. NCCL may have refused that call: then the
    /// word is out for the next.
    pub(super) hurried: Option<u32>,
}

impl Counted {
    /// Whether this rank has sent its message for the next call.
    pub(super) fn has_hurried(&self) -> bool {
        self.hurried == Some(self.begun)
    }
}

#[derive(Debug, Default)]
struct Waits {
    ended: bool,
    next: u64,
    cancellers: BTreeMap<u64, Canceller>,
}

impl Lineage {
    /// Of one with a peer group.
    pub(in crate::peers) fn of_peer_group(
        negotiated: &Arc<NegotiatedConfig>,
        rank: u32,
        lives: Vec<Arc<Life>>,
        graphs: Graphs,
    ) -> Arc<Lineage> {
        let (counted, waiting) = Default::default();
        Arc::new(Lineage {
            comm: negotiated.comm,
            rank,
            negotiated: Some(negotiated.clone()),
            lives,
            has_rounds: negotiated.may_have_lazy_children(),
            ctas: ctas_of(negotiated, graphs),
            counted,
            waiting,
        })
    }

    /// Of one without, whose ranks all have this name for it.
    pub(super) fn of_parent_on_nccl(name: Token, rank: u32, ctas: Ctas) -> Arc<Lineage> {
        let (counted, waiting) = Default::default();
        let (negotiated, lives) = (None, Vec::new());
        Arc::new(Lineage { comm: name, rank, negotiated, lives, has_rounds: false, ctas, counted, waiting })
    }

    /// The parent ends: nobody waits for its children.
    pub fn end(&self) {
        let mut waiting = self.waiting();
        waiting.ended = true;
        let cancellers = std::mem::take(&mut waiting.cancellers);
        drop(waiting);
        cancellers.values().for_each(Canceller::abort);
    }

    /// Whether it has.
    pub fn has_ended(&self) -> bool {
        self.waiting().ended
    }

    /// What was counted before the change.
    pub(super) fn counted(&self, kind: Kind, change: impl FnOnce(&mut Counted)) -> Counted {
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let counted = counted.entry(kind).or_default();
        let before = *counted;
        change(counted);
        before
    }

    /// This rank's place among those with a bit, and all of theirs.
    pub(super) fn among(&self, ranks: u64) -> (u32, Vec<u32>) {
        let ranks: Vec<u32> =
            (0..self.members().len() as u32).filter(|rank| ranks & (1 << rank) != 0).collect();
        (ranks.iter().position(|rank| *rank == self.rank).unwrap_or_default() as u32, ranks)
    }

    /// The first of these ranks at whose process others can come.
    pub(super) fn host(&self, ranks: &[u32]) -> Option<&Member> {
        let mut members = ranks.iter().filter_map(|rank| self.members().get(*rank as usize));
        members.find(|member| member.process_listener != NOBODY)
    }

    /// Our own descriptors of the processes of these ranks.
    pub(super) fn watched(&self, ranks: u64) -> Vec<(u32, Ours)> {
        let alive = self.lives.iter().filter(|life| ranks & (1 << life.rank) != 0);
        alive.filter_map(|life| Some((life.rank, copy(life.rank, life.ends.as_ref()?)?))).collect()
    }

    pub(super) fn members(&self) -> &[Member] {
        self.negotiated.as_ref().map_or(&[], |negotiated| &negotiated.members)
    }

    fn waiting(&self) -> MutexGuard<'_, Waits> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a communicator's configuration said of kernels, for one that is made from it and says nothing.
fn ctas_of(negotiated: &NegotiatedConfig, graphs: Graphs) -> Ctas {
    let policy = match negotiated.capabilities & capability::UNBOUND {
        0 => Policy::Own,
        _ => Policy::Default,
    };
    Ctas { max: negotiated.ctas_max, policy, graphs }
}

fn copy(rank: u32, life: &Ours) -> Option<Ours> {
    let copied = rustix::io::fcntl_dupfd_cloexec(life, 0).and_then(Ours::new);
    // Nothing is lost but that the end of its process is not seen before it has come.
    copied.inspect_err(|error| log::warn!("rank {rank} is not watched: {error}")).ok()
}

/// A wait that ends with its parent.
#[derive(Debug)]
pub(crate) struct Wait {
    lineage: Arc<Lineage>,
    number: u64,
}

impl Wait {
    pub(super) fn new(lineage: &Arc<Lineage>, canceller: Canceller) -> Wait {
        let mut waiting = lineage.waiting();
        let number = waiting.next;
        waiting.next += 1;
        if waiting.ended {
            drop(waiting);
            canceller.abort();
        } else {
            waiting.cancellers.insert(number, canceller);
        }
        Wait { lineage: lineage.clone(), number }
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        self.lineage.waiting().cancellers.remove(&self.number);
    }
}
