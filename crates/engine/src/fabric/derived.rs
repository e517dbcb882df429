//! Communicators made from one that has a fabric. NCCL makes them first; then their ranks meet in the lobby of a rank of
//! the parent ([`crate::rendezvous::derived`]), and the rest is as at any birth.
//!
//! Before the real call: [`Fabric::derive`]. Once NCCL took it: [`Deriving::begun`], as often on every rank and in the
//! same order, since NCCL counts so, too. When NCCL has made the communicator: one word of each rank, which is the host's
//! due: [`Derivation::ask`], `pass_by` or `decline`. A derivation that is dropped without one declines.
//!
//! Where communicators made from this one may be promises ([`Deriving::has_round`]), the ranks of a call first tell each
//! other where they go, so that they know which of them need NCCL at all: [`Deriving::begun`] and [`Derivation::round`]
//! come before the real call then, and who has a promise meets by [`Derivation::ask_promise`]. A rank that cannot wait, or
//! whose call NCCL may refuse, says so by [`Deriving::go_to_nccl`] and goes on as ever; NCCL makes all then.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::contract::{Contract, Token};
use crate::descriptor::Ours;
use crate::forward::configuration;
use crate::gpu::Ordinal;
use crate::rendezvous::Canceller;
use crate::rendezvous::colors::{Course, Parent, Willing, Word};
use crate::rendezvous::derived::{Invitation, Making, NOBODY, child};
use crate::rendezvous::facts::Waiting;
use crate::rendezvous::verdict::{Failure, Reason, Verdict};

use crate::forward::birth::Ctas;

use super::birth::cannot_reach;
use super::hosting::rendezvous;
use super::{Asked, Fabric, Patience, settle, wish};

/// What is asked for.
#[derive(Clone, Debug)]
pub enum Wanted {
    /// The ranks with this color; none takes part and is in none.
    Split(Option<i32>),
    /// All but these ranks, in any order.
    Shrink(Vec<i32>),
}

/// Whether NCCL has built the parent here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// As on all ranks, as far as is known.
    Built,
    /// It has not.
    Promised,
    /// It has, but not on a rank that said so.
    Lost,
}

/// What a communicator has for those made from it, for as long as any of them is being made.
#[derive(Debug)]
pub(super) struct Line {
    contract: Arc<Contract>,
    rank: u32,
    /// Held for a few stores.
    counted: Mutex<BTreeMap<Kind, Counted>>,
    /// Held for a few stores; the rendezvous' locks come after it.
    waiting: Mutex<Waits>,
}

/// Calls that are counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Split,
    /// By who remains, one bit each: an excluded rank knows nothing of the others' shrink.
    Shrink(u64),
}

#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    /// How many have begun.
    begun: u32,
    /// How many had when this rank last said in a round that it goes to NCCL. NCCL may have refused that call: then the
    /// word is out for the next.
    hurried: Option<u32>,
}

impl Counted {
    /// Whether this rank has said its word for the next call.
    fn has_hurried(&self) -> bool {
        self.hurried == Some(self.begun)
    }
}

#[derive(Debug, Default)]
struct Waits {
    ended: bool,
    next: u64,
    cancellers: BTreeMap<u64, Canceller>,
}

impl Line {
    pub fn new(contract: Arc<Contract>, rank: u32) -> Arc<Line> {
        let (counted, waiting) = Default::default();
        Arc::new(Line { contract, rank, counted, waiting })
    }

    /// The parent ends: nobody waits for its children.
    pub fn end(&self) {
        let mut waiting = self.waiting();
        waiting.ended = true;
        let cancellers = std::mem::take(&mut waiting.cancellers);
        drop(waiting);
        cancellers.values().for_each(Canceller::abort);
    }

    /// What was counted before the change.
    fn counted(&self, kind: Kind, change: impl FnOnce(&mut Counted)) -> Counted {
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let counted = counted.entry(kind).or_default();
        let before = *counted;
        change(counted);
        before
    }

    /// This rank's place among those with a bit, and all of theirs.
    fn among(&self, ranks: u64) -> (u32, Vec<u32>) {
        let all = 0..self.contract.members.len() as u32;
        let ranks: Vec<u32> = all.filter(|rank| ranks & (1 << rank) != 0).collect();
        (ranks.iter().position(|rank| *rank == self.rank).unwrap_or_default() as u32, ranks)
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
    pub fn derive(&self, wanted: &Wanted, standing: Standing) -> Option<Deriving> {
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
        let parent = match (wanted, standing) {
            (_, Standing::Built) => Parent::Built,
            (Wanted::Split(_), Standing::Promised) => Parent::Promised,
            (Wanted::Split(_), Standing::Lost) => Parent::Lost,
            // Those who are excluded do not come, or those who lack it.
            (Wanted::Shrink(_), _) => Parent::Unbuildable,
        };
        let lives = if host.rank == self.rank { self.watched(ranks) } else { Vec::new() };
        Some(Deriving {
            line: self.line.clone(),
            lobby: host.lobby,
            hosts: host.rank,
            ranks,
            shrinks,
            parent,
            color,
            lives,
        })
    }

    /// Ends what waits for communicators made from this one.
    pub fn end_derived(&self) {
        self.line.end();
    }

    /// Whether they are: communicators made from this one are waited for no more.
    pub fn has_ended_derived(&self) -> bool {
        self.line.waiting().ended
    }

    /// Our own descriptors of the processes of these ranks.
    fn watched(&self, ranks: u64) -> Vec<(u32, Ours)> {
        let alive = self.lives.iter().filter(|life| ranks & (1 << life.rank) != 0);
        alive.filter_map(|life| Some((life.rank, copy(life.rank, life.ends.as_ref()?)?))).collect()
    }
}

fn copy(rank: u32, life: &Ours) -> Option<Ours> {
    let copied = rustix::io::fcntl_dupfd_cloexec(life, 0).and_then(Ours::new);
    // Nothing is lost but that the end of its process is not seen before it has come.
    copied.inspect_err(|error| log::warn!("rank {rank} is not watched: {error}")).ok()
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
    parent: Parent,
    color: Option<i32>,
    lives: Vec<(u32, Ours)>,
}

impl Deriving {
    /// Whether this is a call that NCCL cannot make, as far as this rank knows: it has no parent, and will have none.
    pub fn is_without_parent(&self) -> bool {
        self.parent == Parent::Unbuildable
    }

    /// Whether the ranks of this call tell each other where they go, which all find alike.
    pub fn has_round(&self) -> bool {
        self.line.contract.may_promise_children()
    }

    /// Whether NCCL has built the parent here and not everywhere.
    pub fn has_lost_parent(&self) -> bool {
        self.parent == Parent::Lost
    }

    /// This rank does not wait for the others of a round, so that NCCL makes all communicators of this call. Before the
    /// real call; if NCCL refuses that, the word stands for the next one. Never waits.
    pub fn go_to_nccl(&self) {
        let Ok(rendezvous) = rendezvous() else { return };
        if !self.has_round() {
            return;
        }
        let before = self.line.counted(self.kind(), |counted| counted.hurried = Some(counted.begun));
        if before.has_hurried() {
            return;
        }
        let invitation = self.invitation(before.begun);
        self.await_round(&invitation);
        let (place, ranks) = self.line.among(self.ranks);
        rendezvous.go_to_nccl(&invitation, place, ranks.len() as u32, self.parent);
    }

    /// NCCL has taken the call; or, of one with a round, nothing keeps it from being made.
    pub fn begun(self) -> Derivation {
        let before = self.line.counted(self.kind(), |counted| counted.begun += 1);
        let invitation = self.invitation(before.begun);
        let is_due = self.has_round() && !before.has_hurried();
        let ahead = if is_due { Ahead::Round } else { Ahead::Nccl };
        if is_due {
            self.await_round(&invitation);
        }
        let Deriving { line, hosts, ranks, parent, color, lives, .. } = self;
        if hosts == line.rank
            && let Ok(rendezvous) = rendezvous()
        {
            rendezvous.await_ranks(invitation.call, ranks, lives);
        }
        Derivation { line, invitation, ranks, parent, color, ahead, due: Due::Word }
    }

    fn kind(&self) -> Kind {
        if self.shrinks.is_none() { Kind::Split } else { Kind::Shrink(self.ranks) }
    }

    /// To the call before which so many of its kind came.
    fn invitation(&self, count: u32) -> Invitation {
        let making = match &self.shrinks {
            None => Making::Split { count },
            Some(excluded) => Making::Shrink { count, excluded: excluded.clone() },
        };
        let call = making.name(self.line.contract.birth);
        let child = self.color.map_or(NOBODY, |color| child(call, color));
        Invitation { lobby: self.lobby, call, child, rank: self.line.rank }
    }

    /// The host's rank comes to a round.
    fn await_round(&self, invitation: &Invitation) {
        if self.hosts == self.line.rank
            && let Ok(rendezvous) = rendezvous()
        {
            let lives = self.lives.iter().filter_map(|(rank, life)| Some((*rank, copy(*rank, life)?)));
            rendezvous.await_ranks(invitation.to_round().child, self.ranks, lives.collect());
        }
    }
}

/// What comes before the communicators of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ahead {
    /// This rank's word, and then all others'.
    Round,
    /// NCCL's own split, of all.
    Nccl,
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
    /// The ranks of the parent that take part, one bit each.
    ranks: u64,
    parent: Parent,
    color: Option<i32>,
    ahead: Ahead,
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
#[derive(Clone, Debug)]
pub struct Configured {
    /// Whether the caller waits, where the configuration says.
    pub waiting: Option<Waiting>,
    /// What the configuration says of blocks; the parent's holds where there is none.
    pub ctas: Option<Ctas>,
    /// All of it.
    pub configuration: configuration::Kept,
    /// Whether NCCL lets it use its parent's resources.
    pub shares: bool,
}

impl Derivation {
    /// The call, by a name that its ranks share.
    pub fn call(&self) -> Token {
        self.invitation.call
    }

    /// The communicator that this rank will be in, by a name that its ranks share.
    pub fn child(&self) -> Token {
        self.invitation.child
    }

    /// Tells the other ranks of the call where this one goes (its key orders a split; a shrink's is 0), waits until all
    /// have spoken, and says what this rank does next; of a new communicator with its ranks in the parent. Ends with the parent. Where
    /// this rank has said that it goes to NCCL, or there is no round, nobody is waited for. Once.
    pub fn round(&mut self, key: i32, willing: Willing) -> Result<Course, Failure> {
        // The thread was there when the parent was born.
        let rendezvous = rendezvous().map_err(|_| Failure::HostLost)?;
        if std::mem::replace(&mut self.ahead, Ahead::Nccl) == Ahead::Nccl {
            return Ok(self.alone());
        }
        let word = Word { color: self.color, key, willing, parent: self.parent };
        let (place, ranks) = self.line.among(self.ranks);
        let inquiry = rendezvous.ask_round(&self.invitation, place, ranks.len() as u32, word);
        let wait = Wait::new(&self.line, inquiry.canceller());
        let table = inquiry.wait();
        drop(wait);
        let in_parent = |places: Vec<u32>| {
            places.iter().filter_map(|place| ranks.get(*place as usize).copied()).collect()
        };
        Ok(match table?.course(place) {
            Course::Promise { rank, ranks, others } => {
                Course::Promise { rank, ranks: in_parent(ranks), others }
            }
            Course::Apart { rank, ranks } => Course::Apart { rank, ranks: in_parent(ranks) },
            course => course,
        })
    }

    /// What this rank does without having heard the others.
    pub fn alone(&self) -> Course {
        match self.parent {
            Parent::Unbuildable => {
                let (rank, ranks) = self.line.among(self.ranks);
                Course::Apart { rank, ranks }
            }
            Parent::Built | Parent::Promised | Parent::Lost => Course::Nccl,
        }
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

    /// Begins the birth of this rank's communicator. Waits for nobody; the reason says that NCCL does everything, for all its
    /// ranks.
    pub fn ask(self, newborn: Newborn, configured: Configured) -> Result<Asked, Reason> {
        self.ask_with(newborn, configured, Patience::None)
    }

    /// The same before NCCL has made it, where a round found that it is a promise.
    pub fn ask_promise(self, newborn: Newborn, configured: Configured) -> Result<Asked, Reason> {
        self.ask_with(newborn, configured, Patience::AsConfigured)
    }

    fn ask_with(
        mut self,
        newborn: Newborn,
        configured: Configured,
        patience: Patience,
    ) -> Result<Asked, Reason> {
        if newborn.ranks < 2 {
            self.pass_by();
            return Err(Reason::OneRank);
        }
        let asked = self.report(newborn, configured, patience);
        match &asked {
            Ok(_) => self.due = Due::Nothing,
            Err(reason) => self.decline(Verdict::Plain(reason.clone())),
        }
        asked
    }

    fn report(&self, newborn: Newborn, configured: Configured, patience: Patience) -> Result<Asked, Reason> {
        wish::check_derived(configured.waiting)?;
        settle();
        let ctas = configured.ctas.unwrap_or_else(|| wish::ctas_of(&self.line.contract));
        let (arena, share, mut facts) = wish::on(newborn.device, newborn.ranks, ctas, patience)?;
        facts.member.rank = newborn.rank;
        let party = rendezvous().and_then(|rendezvous| rendezvous.attend_invited(&self.invitation, facts));
        let party = party.map_err(cannot_reach)?;
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
        if self.ahead == Ahead::Round
            && let Ok(rendezvous) = rendezvous()
        {
            // The others of the round wait for it.
            match self.due {
                Due::Word => {
                    let absent = Failure::Absent { rank: self.invitation.rank };
                    rendezvous.decline(&self.invitation.to_round(), Verdict::Failed(absent));
                }
                Due::Nothing => {
                    let (place, ranks) = self.line.among(self.ranks);
                    rendezvous.go_to_nccl(&self.invitation, place, ranks.len() as u32, self.parent);
                }
            }
        }
        if self.due == Due::Word {
            self.decline(Verdict::Failed(Failure::Absent { rank: self.invitation.rank }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::{Device, Member, Version, capability};
    use crate::rendezvous::colors::Others;

    /// A parent of so many ranks, all of them here.
    fn parent(ranks: u32, capabilities: u64) -> Vec<Arc<Line>> {
        let lobby = rendezvous().unwrap().lobby();
        let member = |rank| Member {
            rank,
            process: Token([2; 16]),
            process_id: 1,
            device: Device { uuid: [rank as u8; 16], pci: (0, 0, 0), capability: 90, multiprocessors: 132 },
            door: NOBODY,
            lobby,
            tuning: 0,
            checks: false,
            attachment: Vec::new(),
        };
        let contract = Arc::new(Contract {
            birth: Token([7; 16]),
            version: Version::THIS,
            host: NOBODY,
            capabilities,
            options: 0,
            ctas_max: 0,
            members: (0..ranks).map(member).collect(),
        });
        (0..ranks).map(|rank| Line::new(contract.clone(), rank)).collect()
    }

    fn deriving(line: &Arc<Line>, color: Option<i32>) -> Deriving {
        Deriving {
            line: line.clone(),
            lobby: rendezvous().unwrap().lobby(),
            hosts: 0,
            ranks: (1 << line.contract.members.len()) - 1,
            shrinks: None,
            parent: Parent::Built,
            color,
            lives: Vec::new(),
        }
    }

    /// What each rank does next of those that wait.
    fn round(lines: &[Arc<Line>], color: impl Fn(u32) -> Option<i32>) -> Vec<Result<Course, Failure>> {
        let begun = lines.iter().map(|line| deriving(line, color(line.rank)).begun());
        let derivations: Vec<Derivation> = begun.collect();
        std::thread::scope(|scope| {
            let wait = |mut derivation: Derivation| scope.spawn(move || derivation.round(0, Willing::InPair));
            let threads: Vec<_> = derivations.into_iter().map(wait).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    const MAY: u64 = capability::PROMISED_CHILDREN;

    /// Pairs need no NCCL; a rank that cannot wait makes all go there, and the next round is as if it had not been.
    #[test]
    fn rounds_in_order() {
        let lines = parent(4, MAY);
        let pairs = |rank| Some(rank as i32 / 2);
        let promise = |rank, ranks: [u32; 2]| {
            Ok(Course::Promise { rank, ranks: ranks.to_vec(), others: Others::Nothing })
        };
        let promises = vec![promise(0, [0, 1]), promise(1, [0, 1]), promise(0, [2, 3]), promise(1, [2, 3])];
        assert_eq!(round(&lines, pairs), promises);
        for hurried in [3, 0] {
            let hurries = deriving(&lines[hurried], Some(9));
            hurries.go_to_nccl();
            let waiting: Vec<_> = lines.iter().filter(|line| line.rank != hurried as u32).cloned().collect();
            assert_eq!(round(&waiting, pairs), vec![Ok(Course::Nccl); 3]);
            // NCCL has taken the call.
            assert_eq!(hurries.begun().round(0, Willing::Always), Ok(Course::Nccl));
            assert_eq!(round(&lines, pairs), promises);
        }
    }

    /// NCCL refuses the call of a rank that went there, and the rank tries again: its word is out, and said once.
    #[test]
    fn refused_and_tried_again() {
        let lines = parent(2, MAY);
        deriving(&lines[1], Some(0)).go_to_nccl();
        deriving(&lines[1], Some(0)).go_to_nccl();
        assert_eq!(round(&lines, |_| Some(0)), vec![Ok(Course::Nccl); 2]);
        assert!(matches!(round(&lines, |_| Some(0))[0], Ok(Course::Promise { .. })));
    }

    /// A rank that gives its call up before its word ends the round for the others; one that is told that its communicator
    /// has no fabric goes to NCCL.
    #[test]
    fn given_up() {
        let lines = parent(2, MAY);
        deriving(&lines[1], Some(0)).begun().fail();
        assert_eq!(round(&lines[..1], |_| Some(0)), [Err(Failure::Absent { rank: 1 })]);
        deriving(&lines[1], Some(0)).begun().refuse(Reason::Grouped);
        assert_eq!(round(&lines[..1], |_| Some(0)), [Ok(Course::Nccl)]);
    }

    /// The end of the parent ends the wait of its rank, and of one that comes to wait later.
    #[test]
    fn parent_ends() {
        let lines = parent(3, MAY);
        let mut derivation = deriving(&lines[1], Some(0)).begun();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| derivation.round(0, Willing::Always));
            lines[1].end();
            assert_eq!(waiting.join().unwrap(), Err(Failure::Aborted));
        });
        assert_eq!(round(&lines[1..2], |_| Some(0)), [Err(Failure::Aborted)]);
    }

    /// Where no communicator can be a promise nobody is waited for.
    #[test]
    fn without_a_round() {
        let lines = parent(3, !MAY);
        let split = deriving(&lines[1], Some(0));
        assert!(!split.has_round());
        split.go_to_nccl();
        assert_eq!(split.begun().round(0, Willing::Always), Ok(Course::Nccl));
    }

    /// The survivors of a shrink tell each other, too, in the lobby of the lowest; other shrinks and splits count for
    /// themselves, and a word that is out stands for the next of its kind.
    #[test]
    fn shrinks() {
        let lines = parent(3, MAY);
        let shrink = |rank: usize| Deriving {
            hosts: 1,
            ranks: 0b110,
            shrinks: Some(vec![0]),
            ..deriving(&lines[rank], Some(0))
        };
        let both = || {
            let derivations = [shrink(1).begun(), shrink(2).begun()];
            std::thread::scope(|scope| {
                let wait =
                    |mut derivation: Derivation| scope.spawn(move || derivation.round(0, Willing::InPair));
                derivations.map(wait).map(|thread| thread.join().unwrap())
            })
        };
        let promise = |rank| Ok(Course::Promise { rank, ranks: vec![1, 2], others: Others::Nothing });
        assert_eq!(both(), [promise(0), promise(1)]);
        shrink(2).go_to_nccl();
        shrink(2).go_to_nccl();
        deriving(&lines[2], None).go_to_nccl();
        assert_eq!(both(), [Ok(Course::Nccl), Ok(Course::Nccl)]);
        assert_eq!(both(), [promise(0), promise(1)]);
        // One that has no parent is without it in any case; who has one learns that.
        let without = |rank| Deriving { parent: Parent::Unbuildable, ..shrink(rank) };
        let apart = |rank| Ok(Course::Apart { rank, ranks: vec![1, 2] });
        without(2).go_to_nccl();
        let (waits, mut hurried) = (shrink(1).begun(), without(2).begun());
        assert_eq!({ waits }.round(0, Willing::InPair), apart(0));
        assert_eq!((hurried.alone(), hurried.round(0, Willing::InPair)), (apart(1).unwrap(), apart(1)));
        // Who is left alone waits for nobody.
        let alone =
            Deriving { hosts: 2, ranks: 0b100, shrinks: Some(vec![0, 1]), ..deriving(&lines[2], Some(0)) };
        assert_eq!(alone.begun().round(0, Willing::Always), Ok(Course::Nccl));
    }
}
