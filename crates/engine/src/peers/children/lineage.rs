//! [`Lineage`]: what a communicator keeps for its children: how many child calls have begun, and who waits in them.

use std::collections::BTreeMap;
use std::sync::Arc;

use once_cell::sync::OnceCell;

use crate::background::life::Life;
use crate::forward::configuration;
use crate::forward::init::Ctas;
use windlass_base::descriptor::Ours;
use windlass_base::lock::Mutex;
use windlass_bootstrap::Canceller;
use windlass_bootstrap::children::NOBODY;
use windlass_bootstrap::negotiated::{Member, NegotiatedConfig, Token, capability};
use windlass_transport::sequencer::Graphs;

/// What a communicator keeps for its children. It lives as long as any child is being made.
#[derive(Debug)]
pub struct Lineage {
    /// The token from which the names of the children are derived.
    pub(super) comm: Token,
    /// This rank.
    pub rank: u32,
    /// None for a parent without a peer group.
    negotiated: Option<Arc<NegotiatedConfig>>,
    /// The processes of the other ranks.
    lives: Vec<Arc<Life>>,
    /// Whether children may be lazy, so that the ranks have a round before each call.
    pub(super) has_rounds: bool,
    /// What the parent's configuration says of kernels. It holds for children whose own configuration says nothing.
    pub(super) ctas: Ctas,
    /// The communicator's own configuration.
    configuration: OnceCell<configuration::Kept>,
    /// Calls that exclude the same ranks have one count: an excluded rank does not know of the others' shrink. Locked for a few stores.
    counted: Mutex<BTreeMap<Token, Counted>>,
    /// Locked for a few stores. The bootstrap's locks come after it.
    waiting: Mutex<Waits>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counted {
    /// How many calls have begun.
    pub(super) begun: u32,
    /// The value of `begun` when this rank last told a round that it goes to NCCL. If NCCL refused that call, the message stands for
    /// the next one.
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
    /// The lineage of a communicator with a peer group.
    pub(in crate::peers) fn of_peer_group(
        negotiated: &Arc<NegotiatedConfig>,
        rank: u32,
        lives: Vec<Arc<Life>>,
        graphs: Graphs,
    ) -> Arc<Lineage> {
        let configuration = OnceCell::new();
        let has_rounds = negotiated.may_have_lazy_children();
        let (counted, waiting) = Default::default();
        let (comm, ctas, negotiated) =
            (negotiated.comm, ctas_of(negotiated, graphs), Some(negotiated.clone()));
        Arc::new(Lineage { comm, rank, negotiated, lives, has_rounds, ctas, configuration, counted, waiting })
    }

    /// What all ranks of the communicator call it.
    pub fn name(&self) -> u64 {
        self.comm.number()
    }

    /// The lineage of a communicator without a peer group. `comm` is the same on all its ranks, and on no other communicator's. Its ranks wait
    /// for each other only where its own calls are blocking.
    pub(super) fn on_nccl(
        comm: Token,
        rank: u32,
        ctas: Ctas,
        configuration: configuration::Kept,
    ) -> Arc<Lineage> {
        let (negotiated, lives, has_rounds, configuration) = (None, Vec::new(), false, configuration.into());
        let (counted, waiting) = Default::default();
        Arc::new(Lineage { comm, rank, negotiated, lives, has_rounds, ctas, configuration, counted, waiting })
    }

    /// Whether the communicator has a peer group.
    pub(super) fn has_peer_group(&self) -> bool {
        self.negotiated.is_some()
    }

    /// Notes the communicator's configuration. Only the first call counts.
    pub fn keep_configuration(&self, configuration: configuration::Kept) {
        let _ = self.configuration.set(configuration);
    }

    /// The communicator's configuration.
    pub fn configuration(&self) -> &configuration::Kept {
        self.configuration.get().unwrap_or(&configuration::Kept::Unknown)
    }

    /// Ends all waits for children, and those that begin later, because the parent ends.
    pub fn end(&self) {
        let mut waiting = self.waiting.lock();
        waiting.ended = true;
        let cancellers = std::mem::take(&mut waiting.cancellers);
        drop(waiting);
        cancellers.values().for_each(Canceller::abort);
    }

    /// Whether the parent has ended.
    pub fn has_ended(&self) -> bool {
        self.waiting.lock().ended
    }

    /// Changes the count of a kind, and returns the count before the change.
    pub(super) fn counted(&self, kind: Token, change: impl FnOnce(&mut Counted)) -> Counted {
        let mut counted = self.counted.lock();
        let counted = counted.entry(kind).or_default();
        let before = *counted;
        change(counted);
        before
    }

    /// The first of these ranks whose process has a process listener.
    pub(super) fn host(&self, ranks: &[u32]) -> Option<&Member> {
        let mut members = ranks.iter().filter_map(|rank| self.members().get(*rank as usize));
        members.find(|member| member.process_listener != NOBODY)
    }

    /// Duplicates of what tells the ends of these ranks' processes.
    pub(super) fn watched(&self, ranks: u64) -> Vec<(u32, Ours)> {
        let alive = self.lives.iter().filter(|life| ranks & (1 << life.rank) != 0);
        let ends = alive.flat_map(|life| {
            life.ends.get().into_iter().flat_map(|ends| ends.iter()).map(|end| (life.rank, end))
        });
        ends.filter_map(|(rank, end)| Some((rank, copy(rank, end)?))).collect()
    }

    pub(super) fn members(&self) -> &[Member] {
        self.negotiated.as_ref().map_or(&[], |negotiated| &negotiated.members)
    }
}

/// What a parent's configuration says of kernels, for children whose own configuration says nothing.
fn ctas_of(negotiated: &NegotiatedConfig, graphs: Graphs) -> Ctas {
    let has_policy = negotiated.capabilities & capability::UNBOUND == 0;
    Ctas { max: negotiated.ctas_max, has_policy, graphs, are_ordered: false }
}

fn copy(rank: u32, life: &Ours) -> Option<Ours> {
    let copied = Ours::open(|| rustix::io::fcntl_dupfd_cloexec(life, 0));
    // Without the copy, only a process that ends before it has come to the session goes unseen.
    copied.inspect_err(|error| log::warn!("rank {rank} is not watched: {error}")).ok()
}

/// A wait that ends with the parent.
#[derive(Debug)]
pub(crate) struct Wait {
    lineage: Arc<Lineage>,
    number: u64,
}

impl Wait {
    pub(super) fn new(lineage: &Arc<Lineage>, canceller: Canceller) -> Wait {
        let mut waiting = lineage.waiting.lock();
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
        self.lineage.waiting.lock().cancellers.remove(&self.number);
    }
}
