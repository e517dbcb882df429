//! What the ranks of a communicator share once they have met: each lends a slice of its device's memory and maps the
//! others'. With `WINDLASS_FABRIC=on` only.
//!
//! [`ask`] begins a birth and never waits; [`join`] waits for the others, prepares and brings each rank's [`Fate`]. A
//! [`Fabric`] is kept with its communicator. Dropping it closes this rank; the slice goes back when all others have
//! closed or died, which [`settle`] looks for: after the end of a communicator, and on the background thread when
//! something was heard.

mod closing;
mod derived;
mod preparing;
mod wish;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Once, PoisonError};

use crate::arena::{Arena, PeerSlice, Slice};
use crate::config::{Switch, config};
use crate::contract::{Contract, Token};
use crate::process;
use crate::rendezvous::card::{Card, Id};
use crate::rendezvous::verdict::{Failure, Reason};
use crate::rendezvous::{self, Canceller, Outcome, Party, decision, place};
use crate::stats::{count, fabric};

pub use crate::rendezvous::facts::Waiting;
pub use closing::settle;
use closing::{Closing, Word};
pub use derived::{Configured, Derivation, Deriving, Newborn, Wanted};
use derived::{Line, Wait};
use preparing::Prepared;
pub use wish::Wish;

/// What a communicator's birth came to.
#[derive(Debug)]
pub enum Fate {
    /// All ranks confirmed.
    Fabric(Box<Fabric>),
    /// NCCL does everything.
    Plain(Reason),
    /// There is no communicator.
    Failed(Failure),
}

/// What is kept with a communicator.
#[derive(Debug)]
pub enum Kept {
    /// Its fabric.
    Fabric(Box<Fabric>),
    /// Its meeting is not over: an abort ends this rank's wait.
    Waiting(Canceller),
}

/// What all agreed on, and what this rank has of it.
#[derive(Debug)]
pub struct Fabric {
    contract: Arc<Contract>,
    rank: u32,
    /// What communicators made from this one need.
    line: Arc<Line>,
    /// By rank, none at this rank's place. Dropped before the others hear that this rank has closed.
    peers: Vec<Option<PeerSlice>>,
    /// None while being dropped.
    own: Option<(Slice, Closing)>,
}

impl Fabric {
    fn new(contract: Arc<Contract>, rank: u32, word: Word, prepared: Prepared) -> Box<Fabric> {
        let Prepared { slice, peers, lives } = prepared;
        let closing = Closing::new(&slice, word, lives);
        let line = Line::new(contract.clone(), rank);
        Box::new(Fabric { contract, rank, line, peers, own: Some((slice, closing)) })
    }

    /// What all agreed on.
    pub fn contract(&self) -> &Arc<Contract> {
        &self.contract
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// This rank's slice.
    pub fn slice(&self) -> Option<&Slice> {
        self.own.as_ref().map(|(slice, _)| slice)
    }

    /// The slice of a peer, as mapped here.
    pub fn peer(&self, rank: u32) -> Option<&PeerSlice> {
        self.peers.get(rank as usize)?.as_ref()
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        self.line.end();
        self.peers.clear();
        if let Some((slice, closing)) = self.own.take() {
            drop(slice);
            closing.begin();
        }
    }
}

/// Whether births are looked at here.
pub fn is_on() -> bool {
    config().fabric == Switch::On && !rendezvous::is_in_child()
}

/// Gives the id that ranks must get instead of NCCL's own; the same one where there will be no meeting.
pub fn host(id: &Id) -> Id {
    if !is_on() || config().nccl.comm_id == Switch::On {
        return *id;
    }
    let hosted = rendezvous().and_then(|rendezvous| rendezvous.host(id));
    hosted.unwrap_or_else(|error| {
        log::info!("no meeting for a new id: {error}");
        *id
    })
}

/// The rendezvous of this process, with all that it needs of us.
fn rendezvous() -> std::io::Result<&'static rendezvous::Rendezvous> {
    static BEGUN: Once = Once::new();
    BEGUN.call_once(|| {
        process::on_fork(in_child);
        rendezvous::on_news(settle);
    });
    rendezvous::process()
}

extern "C" fn in_child() {
    rendezvous::in_child();
}

/// A rank that has reported to its meeting.
#[derive(Debug)]
pub struct Asked {
    party: Party,
    token: Token,
    rank: u32,
    arena: Arc<Arena>,
    /// Of a communicator made from another: its wait ends with that one.
    until: Option<Wait>,
}

impl Asked {
    /// What ends its wait.
    pub fn canceller(&self) -> Option<Canceller> {
        self.party.cancellers().into_iter().next()
    }
}

/// Begins a rank's birth with this thread's current device. Never waits; the reason says that NCCL does it alone.
pub fn ask(wish: &Wish) -> Result<Asked, Reason> {
    let card = wish.check()?;
    let (arena, mut facts) = wish::current()?;
    facts.ranks = wish.ranks as u32;
    facts.member.rank = wish.rank as u32;
    facts.ctas_max = wish.ctas_max;
    closing::at_exit_too();
    // Room that is over must not keep a birth from having any.
    settle();
    let rank = facts.member.rank;
    let party = rendezvous().and_then(|rendezvous| rendezvous.attend(&wish.id, vec![facts]));
    Ok(Asked { party: party.map_err(unreachable)?, token: card.token, rank, arena, until: None })
}

fn unreachable(error: std::io::Error) -> Reason {
    Reason::Unreachable { words: error.to_string() }
}

/// Waits for all others, prepares and confirms: as long as it takes.
pub fn join(asked: Vec<Asked>) -> Vec<Fate> {
    let ranks: BTreeMap<(Token, u32), Arc<Arena>> =
        asked.iter().map(|asked| ((asked.token, asked.rank), asked.arena.clone())).collect();
    let keys: Vec<(Token, u32)> = asked.iter().map(|asked| (asked.token, asked.rank)).collect();
    // Held for a few stores; parties of a group prepare on several threads.
    let prepared: Mutex<BTreeMap<(Token, u32), Prepared>> = Mutex::default();
    let take = |key| prepared.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    let (parties, _until): (Vec<_>, Vec<_>) =
        asked.into_iter().map(|asked| (asked.party, asked.until)).unzip();
    let outcomes = rendezvous::join_all(parties, &|preparation| {
        // A party of ours has one rank.
        let rank = preparation.ranks.first().copied().unwrap_or_default();
        let key = (preparation.token, rank);
        let arena = ranks.get(&key).ok_or("this rank did not ask")?;
        let (made, result) = preparing::at_meeting(preparation, rank, arena)?;
        prepared.lock().unwrap_or_else(PoisonError::into_inner).insert(key, made);
        result
    });
    let fate = |(key, outcome)| match (outcome, take(key)) {
        (Outcome::Fabric(membership), Some(prepared)) => {
            let (contract, rank) = (membership.contract.clone(), membership.rank);
            Fate::Fabric(Fabric::new(contract, rank, Word::Meeting(membership), prepared))
        }
        // Nobody confirms without having prepared.
        (Outcome::Fabric(_), None) => Fate::Failed(Failure::Unreadable),
        (Outcome::Plain(reason), prepared) => {
            // All have spoken: nobody touches what was announced any more.
            prepared.into_iter().for_each(|prepared| prepared.abandon(Word::nobody()));
            Fate::Plain(reason)
        }
        (Outcome::Failed(failure), prepared) => {
            // Others may still be testing it: only their end says that they are not.
            prepared.into_iter().for_each(|prepared| prepared.abandon(Word::unheard()));
            Fate::Failed(failure)
        }
    };
    let fates = keys.iter().zip(outcomes.into_iter().flatten()).map(fate).collect();
    settle();
    fates
}

/// The fabric of ranks that are all in one hand, on these devices, in order.
pub fn all_here(devices: &[i32]) -> Vec<Fate> {
    closing::at_exit_too();
    all_here_or_reason(devices)
        .unwrap_or_else(|reason| devices.iter().map(|_| Fate::Plain(reason.clone())).collect())
}

fn all_here_or_reason(devices: &[i32]) -> Result<Vec<Fate>, Reason> {
    wish::check_all(devices.len())?;
    let (mut arenas, mut all) = (Vec::new(), Vec::new());
    for (rank, device) in devices.iter().enumerate() {
        let (arena, mut facts) = wish::on(*device)?;
        facts.ranks = devices.len() as u32;
        facts.member.rank = rank as u32;
        arenas.push(arena);
        all.push(facts);
    }
    let no_name = |error: std::io::Error| Reason::NoIdentity { words: error.to_string() };
    let contract = Arc::new(decision::decide(place::random().map_err(no_name)?, &all)?);
    let refused = |(rank, words): (u32, String)| Reason::Refused { rank, words };
    let prepared = preparing::in_one_hand(&contract, &arenas).map_err(refused)?;
    let closed = Word::in_one_hand();
    let fabric = |(rank, prepared)| {
        Fate::Fabric(Fabric::new(contract.clone(), rank, Word::here(&closed, rank), prepared))
    };
    Ok((0..).zip(prepared).map(fabric).collect())
}

/// Why a communicator that was made from another, or not seen at its birth, has no fabric.
pub fn derived() -> Reason {
    Reason::Derived
}

/// Counts and logs what a communicator's birth came to.
pub fn tell(counters: usize, fate: &Fate) {
    match fate {
        Fate::Fabric(fabric) => {
            let serial = count::fabric(counters, fabric::YES);
            let ranks = fabric.contract.members.len();
            log::info!(
                "communicator {serial} rank {} of {ranks} fabric {:016x}",
                fabric.rank,
                fabric.contract.hash()
            );
        }
        Fate::Plain(reason) => {
            let serial = count::fabric(counters, fabric::PLAIN + u32::from(reason.number()));
            log::info!("communicator {serial} plain, {reason}");
        }
        Fate::Failed(failure) => log::warn!("a communicator failed at birth: {failure}"),
    }
}

/// The card of an id, if it has one.
fn card(id: &Id) -> Option<Card> {
    Card::decode(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Readers of counters say what the reasons say.
    #[test]
    fn reasons_read_back() {
        let words = String::new;
        let reasons = [
            Reason::SwitchedOff,
            Reason::OneRank,
            Reason::ManyRanks,
            Reason::NonBlocking,
            Reason::CommId,
            Reason::ManyIds,
            Reason::PeerAccess,
            Reason::NoCard,
            Reason::OtherVersion,
            Reason::Unreachable { words: words() },
            Reason::NoIdentity { words: words() },
            Reason::Foreign,
            Reason::OtherHost { rank: 1, other: 0 },
            Reason::OtherNetwork { rank: 1, other: 0 },
            Reason::SameDevice { rank: 1, other: 0 },
            Reason::OtherOptions { rank: 1, other: 0 },
            Reason::Incapable { rank: 1 },
            Reason::Refused { rank: 1, words: words() },
            Reason::Derived,
        ];
        for reason in reasons {
            let text = fabric::text(fabric::PLAIN + u32::from(reason.number()));
            assert!(reason.to_string().starts_with(text), "{reason} and {text}");
        }
        assert_eq!((fabric::text(fabric::YES), fabric::text(fabric::NOT_ASKED)), ("yes", ""));
    }
}
