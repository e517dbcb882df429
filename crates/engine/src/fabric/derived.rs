//! Communicators made from one that has a fabric. NCCL makes them first; then their ranks meet in the lobby of a rank of
//! the parent ([`crate::rendezvous::derived`]), and the rest is as at any birth.
//!
//! Before the real call: [`Fabric::derive`]. Once NCCL took it: [`Deriving::begun`], as often on every rank and in the
//! same order, since NCCL counts so, too. When NCCL has made the communicator: one word of each rank, which is the host's
//! due: [`Derivation::ask`], `pass_by` or `decline`. A derivation that is dropped without one declines.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::contract::{Contract, Token};
use crate::gpu::Ordinal;
use crate::rendezvous::Canceller;
use crate::rendezvous::derived::{Invitation, Making, NOBODY, child};
use crate::rendezvous::facts::Waiting;
use crate::rendezvous::ours::Ours;
use crate::rendezvous::verdict::{Failure, Reason, Verdict};

use super::{Asked, Fabric, Patience, closing, rendezvous, settle, unreachable, wish};

/// What is asked for.
#[derive(Clone, Debug)]
pub enum Wanted {
    /// The ranks with this color; none takes part and is in none.
    Split(Option<i32>),
    /// All but these ranks, in any order.
    Shrink(Vec<i32>),
}

/// What a communicator has for those made from it, for as long as any of them is being made.
#[derive(Debug)]
pub(super) struct Line {
    contract: Arc<Contract>,
    rank: u32,
    splits: AtomicU32,
    /// By who remains, one bit each: an excluded rank knows nothing of the others' shrink. Held for a few stores.
    shrinks: Mutex<BTreeMap<u64, u32>>,
    /// Held for a few stores; the rendezvous' locks come after it.
    waiting: Mutex<Waits>,
}

#[derive(Debug, Default)]
struct Waits {
    ended: bool,
    next: u64,
    cancellers: BTreeMap<u64, Canceller>,
}

impl Line {
    pub fn new(contract: Arc<Contract>, rank: u32) -> Arc<Line> {
        let (splits, shrinks, waiting) = Default::default();
        Arc::new(Line { contract, rank, splits, shrinks, waiting })
    }

    /// The parent ends: nobody waits for its children.
    pub fn end(&self) {
        let mut waiting = self.waiting();
        waiting.ended = true;
        let cancellers = std::mem::take(&mut waiting.cancellers);
        drop(waiting);
        cancellers.values().for_each(Canceller::abort);
    }

    fn count_shrink(&self, ranks: u64) -> u32 {
        let mut shrinks = self.shrinks.lock().unwrap_or_else(PoisonError::into_inner);
        let count = shrinks.entry(ranks).or_default();
        *count += 1;
        *count - 1
    }

    fn waiting(&self) -> MutexGuard<'_, Waits> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A wait that ends with its parent.
#[derive(Debug)]
pub(super) struct Wait {
    line: Arc<Line>,
    number: u64,
}

impl Wait {
    fn new(line: &Arc<Line>, canceller: Canceller) -> Wait {
        let mut waiting = line.waiting();
        let number = waiting.next;
        waiting.next += 1;
        if waiting.ended {
            drop(waiting);
            canceller.abort();
        } else {
            waiting.cancellers.insert(number, canceller);
        }
        Wait { line: line.clone(), number }
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        self.line.waiting().cancellers.remove(&self.number);
    }
}

impl Fabric {
    /// Before NCCL is asked. Nothing if there can be no meeting, which all ranks find alike.
    pub fn derive(&self, wanted: &Wanted) -> Option<Deriving> {
        let all = (1u64 << self.contract.members.len()) - 1;
        let (excluded, color) = match wanted {
            Wanted::Split(color) => (Vec::new(), *color),
            Wanted::Shrink(excluded) => (excluded.clone(), Some(0)),
        };
        let is_out = |rank: &u32| excluded.contains(&(*rank as i32));
        let excluded: Vec<u32> = (0..self.contract.members.len() as u32).filter(is_out).collect();
        let ranks = excluded.iter().fold(all, |ranks, rank| ranks & !(1 << rank));
        // Of a split all ranks are alive; of a shrink the excluded may not be.
        let host = self.contract.members.get(ranks.trailing_zeros() as usize)?;
        if host.lobby == NOBODY {
            return None;
        }
        let shrinks = matches!(wanted, Wanted::Shrink(_)).then_some(excluded);
        let lives = if host.rank == self.rank { self.watched(ranks) } else { Vec::new() };
        Some(Deriving {
            line: self.line.clone(),
            lobby: host.lobby,
            hosts: host.rank,
            ranks,
            shrinks,
            color,
            lives,
        })
    }

    /// Ends what waits for communicators made from this one.
    pub fn end_derived(&self) {
        self.line.end();
    }

    /// Our own descriptors of the processes of these ranks.
    fn watched(&self, ranks: u64) -> Vec<(u32, Ours)> {
        let alive = self.lives.iter().filter(|life| ranks & (1 << life.rank) != 0);
        alive.filter_map(|life| Some((life.rank, copy(life)?))).collect()
    }
}

fn copy(life: &closing::Life) -> Option<Ours> {
    let copied = rustix::io::fcntl_dupfd_cloexec(life.ends.as_ref()?, 0).and_then(Ours::new);
    // Nothing is lost but that the end of its process is not seen before it has come.
    copied.inspect_err(|error| log::warn!("rank {} is not watched: {error}", life.rank)).ok()
}

/// A call that NCCL has not taken yet.
#[derive(Debug)]
pub struct Deriving {
    line: Arc<Line>,
    lobby: Token,
    hosts: u32,
    ranks: u64,
    /// Of a shrink: the excluded ranks.
    shrinks: Option<Vec<u32>>,
    color: Option<i32>,
    lives: Vec<(u32, Ours)>,
}

impl Deriving {
    /// NCCL has taken the call.
    pub fn begun(self) -> Derivation {
        let Deriving { line, lobby, hosts, ranks, shrinks, color, lives } = self;
        let making = match shrinks {
            None => Making::Split { count: line.splits.fetch_add(1, Ordering::Relaxed) },
            Some(excluded) => Making::Shrink { count: line.count_shrink(ranks), excluded },
        };
        let call = making.name(line.contract.birth);
        if hosts == line.rank
            && let Ok(rendezvous) = rendezvous()
        {
            rendezvous.await_ranks(call, ranks, lives);
        }
        let child = color.map_or(NOBODY, |color| child(call, color));
        let invitation = Invitation { lobby, call, child, rank: line.rank };
        Derivation { line, invitation, due: Due::Word }
    }
}

/// Whether the host still waits for this rank's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    Word,
    Nothing,
}

/// A call that NCCL has taken.
#[derive(Debug)]
pub struct Derivation {
    line: Arc<Line>,
    invitation: Invitation,
    due: Due,
}

/// A rank of a communicator that NCCL has made.
#[derive(Clone, Copy, Debug)]
pub struct Newborn {
    /// Its device.
    pub device: Ordinal,
    /// Its rank there.
    pub rank: u32,
    /// How many ranks there are.
    pub ranks: u32,
}

/// What a configuration says of a communicator made from another.
#[derive(Clone, Copy, Debug)]
pub struct Configured {
    /// Whether the caller waits, where the configuration says.
    pub waiting: Option<Waiting>,
    /// The configuration's limit on blocks, 0 for none; the parent's where there is none.
    pub ctas_max: Option<u32>,
}

impl Derivation {
    /// The call, by a name that its ranks share.
    pub fn call(&self) -> Token {
        self.invitation.call
    }

    /// This rank is in no new communicator.
    pub fn pass_by(mut self) {
        self.due = Due::Nothing;
        if let Ok(rendezvous) = rendezvous() {
            rendezvous.pass_by(&self.invitation);
        }
    }

    /// This rank's communicator has no fabric, and so none of its peers' has.
    pub fn refuse(mut self, reason: Reason) {
        self.decline(Verdict::Plain(reason));
    }

    /// NCCL did not make this rank's.
    pub fn fail(self) {
        drop(self);
    }

    /// Begins the birth of this rank's communicator. Never waits; the reason says that NCCL does everything, for all its
    /// ranks.
    pub fn ask(mut self, newborn: Newborn, configured: Configured) -> Result<Asked, Reason> {
        if newborn.ranks < 2 {
            self.pass_by();
            return Err(Reason::OneRank);
        }
        let asked = self.report(newborn, configured);
        match &asked {
            Ok(_) => self.due = Due::Nothing,
            Err(reason) => self.decline(Verdict::Plain(reason.clone())),
        }
        asked
    }

    fn report(&self, newborn: Newborn, configured: Configured) -> Result<Asked, Reason> {
        wish::check_derived(configured.waiting)?;
        settle();
        let ctas_max = configured.ctas_max.unwrap_or(self.line.contract.ctas_max);
        let (arena, share, mut facts) = wish::on(newborn.device, newborn.ranks, ctas_max, Patience::None)?;
        facts.member.rank = newborn.rank;
        let party = rendezvous().and_then(|rendezvous| rendezvous.attend_invited(&self.invitation, facts));
        let party = party.map_err(unreachable)?;
        let until = party.cancellers().into_iter().next().map(|canceller| Wait::new(&self.line, canceller));
        Ok(Asked { party, token: self.invitation.child, rank: newborn.rank, arena, share, until })
    }

    fn decline(&mut self, verdict: Verdict) {
        self.due = Due::Nothing;
        if self.invitation.child == NOBODY {
            return rendezvous().into_iter().for_each(|rendezvous| rendezvous.pass_by(&self.invitation));
        }
        if let Ok(rendezvous) = rendezvous() {
            rendezvous.decline(&self.invitation, verdict);
        }
    }
}

impl Drop for Derivation {
    fn drop(&mut self) {
        if self.due == Due::Word {
            self.decline(Verdict::Failed(Failure::Absent { rank: self.invitation.rank }));
        }
    }
}
