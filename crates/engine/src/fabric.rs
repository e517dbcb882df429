//! What the ranks of a communicator share once they have met: each lends a slice of its device's memory and maps the
//! others', and the mailboxes over these. Not with `WINDLASS_FABRIC=off`.
//!
//! [`ask`] begins a birth and waits for nobody; [`join`] waits for the others, prepares and brings each rank's [`Fate`]. A
//! [`Fabric`] is kept with its communicator. Dropping it closes this rank; the slice goes back when all others have
//! closed or died, which [`settle`] looks for: after the end of a communicator, and on the background thread when
//! something was heard.

mod aliases;
mod attempts;
mod beside;
mod boxes;
pub mod checking;
mod closing;
mod derived;
mod failing;
mod giving;
mod growing;
mod ids;
mod leaving;
mod line;
mod offers;
mod pages;
mod preparing;
mod recycling;
pub mod registering;
mod releasing;
mod room;
mod staging;
mod stuck;
mod substitutes;
mod tuned;
mod watch;
mod willing;
pub mod windows;
mod wish;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::Duration;

use nccl_sys::{ncclInternalError, ncclResult_t, ncclSuccess};
use once_cell::sync::OnceCell;

use crate::arena::{Arena, Holds, PeerSlice, Slice};
use crate::config::{Switch, config};
use crate::contract::{Contract, Token};
use crate::error::refuse;
use crate::fast::Task;
use crate::forward::birth::Ctas;
use crate::forward::configuration;
use crate::gpu::{self, Address, StreamHandle};
use crate::mailbox::Operation;
use crate::page::Page;
use crate::pool;
use crate::process;
use crate::rendezvous::card::{Card, Id};
use crate::rendezvous::verdict::{Failure, Reason};
use crate::rendezvous::{self, Canceller, Outcome, Party, decision, place};
use crate::stats::{count, fabric};
use crate::tuning::Limits;

pub use crate::rendezvous::colors::{Course, Others, Parent, Willing};
pub use crate::rendezvous::facts::Waiting;
use attempts::Attempts;
use boxes::{Boxes, Share};
use checking::Checking;
pub use closing::settle;
use closing::{Closing, Life, Word};
pub use derived::{Configured, Derivation, Deriving, Newborn, Standing, Wanted};
use derived::{Line, Wait};
use failing::{Refused, Went};
use growing::Growing;
use ids::Ids;
use leaving::Leaving;
pub use offers::common as common_offer;
use preparing::Prepared;
pub use recycling::{free_leaving, let_go, look_after_pool, make_room, trim_pool};
use registering::Registering;
pub use releasing::{StillRegistered, register_nothing};
use windows::Windows;
pub use wish::{Patience, Wish};

/// What a communicator's birth came to.
#[derive(Debug)]
pub enum Fate {
    /// All ranks confirmed.
    Fabric(Arc<Fabric>),
    /// NCCL does everything.
    Plain(Reason),
    /// There is no communicator.
    Failed(Failure),
}

/// What all agreed on, and what this rank has of it.
#[derive(Debug)]
pub struct Fabric {
    contract: Arc<Contract>,
    rank: u32,
    /// None while being dropped: the first to go.
    boxes: Option<Boxes>,
    limits: Limits,
    /// What communicators made from this one need.
    line: Arc<Line>,
    /// By rank, none at this rank's place. Dropped before the others hear that this rank has closed.
    peers: Vec<Option<PeerSlice>>,
    growing: Growing,
    /// With which NCCL's communicators are made later: rank 0's.
    ids: Ids,
    attempts: Attempts,
    configuration: OnceCell<configuration::Kept>,
    /// None where the ranks do not, or this process has ended.
    registering: Option<Arc<Registering>>,
    /// Where the contract keeps windows.
    windows: Option<Arc<Windows>>,
    /// Where the contract compares calls.
    checking: Option<Arc<Checking>>,
    /// None while being dropped.
    own: Option<(Slice, Closing)>,
    holds: Arc<Holds>,
    lives: Vec<Arc<Life>>,
    /// Where the contract has one.
    page: Option<Arc<Page>>,
    /// Turns that were taken.
    runs: AtomicU64,
    /// Collectives that ran, those of a batch as one.
    collectives: AtomicU64,
    /// Peers of groups that may not be done, a bit each.
    awaited: AtomicU64,
    /// Ranks that said that they have failed, a bit each.
    lost: AtomicU64,
    /// The asynchronous error; `ncclSuccess` while there is none.
    failed: AtomicI32,
}

impl Fabric {
    fn new(contract: Arc<Contract>, rank: u32, word: Word, prepared: Prepared) -> Option<Arc<Fabric>> {
        let Prepared { slice, peers, lives, holds, boxes, line: _, lines, page } = prepared;
        let ranks = contract.members.len() as u32;
        let registers = page.clone().filter(|_| contract.registers());
        let registering = registers.and_then(|page| Registering::new(page, rank, ranks, slice.device()));
        let windows = Windows::new(&contract, page.as_ref(), rank, slice.device());
        let checking = Checking::new(&contract, page.as_ref(), rank);
        checking::say_who_does_not(&contract, rank);
        let boxes = Some(boxes?);
        let closing = Closing::new(&slice, word, lives.clone(), holds.clone());
        lines.into_iter().for_each(|line| line.keep(rank));
        let line = derived::Line::new(contract.clone(), rank);
        tuned::say(&contract);
        let fabric = Arc::new(Fabric {
            limits: Limits::of(&contract, tuned::table()),
            contract,
            rank,
            boxes,
            peers,
            growing: Growing::default(),
            ids: Ids::default(),
            attempts: Attempts::default(),
            configuration: OnceCell::new(),
            registering,
            windows,
            checking,
            line,
            own: Some((slice, closing)),
            holds,
            lives,
            page,
            runs: AtomicU64::new(0),
            collectives: AtomicU64::new(0),
            awaited: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            failed: AtomicI32::new(ncclSuccess.0),
        });
        watch::begin(&fabric);
        Some(fabric)
    }

    /// What all agreed on.
    pub fn contract(&self) -> &Arc<Contract> {
        &self.contract
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Memory that all ranks share, zeros at first, by which they agree on calls whose buffers are registered and on windows: exactly
    /// where the contract [has it](Contract::has_page). Kept by whoever holds it, also beyond the fabric.
    pub fn page(&self) -> Option<&Arc<Page>> {
        self.page.as_ref()
    }

    /// Notes the communicator's configuration, once.
    pub fn keep_configuration(&self, configuration: configuration::Kept) {
        let _ = self.configuration.set(configuration);
    }

    /// The communicator's configuration.
    pub fn configuration(&self) -> &configuration::Kept {
        self.configuration.get().unwrap_or(&configuration::Kept::Unknown)
    }

    /// What this rank registers by itself.
    pub fn registering(&self) -> Option<&Arc<Registering>> {
        self.registering.as_ref()
    }

    /// The windows that it keeps.
    pub fn windows(&self) -> Option<&Arc<Windows>> {
        self.windows.as_ref()
    }

    /// What it tells the others of its calls.
    pub fn checking(&self) -> Option<&Arc<Checking>> {
        self.checking.as_ref()
    }

    /// From now on calls are not told any more.
    pub fn end_checking(&self) {
        self.checking.iter().for_each(|checking| checking.end(|| self.gone()));
    }

    /// Ranks whose processes have ended or that said that they have failed, a bit each.
    fn gone(&self) -> u64 {
        let dead = self.lives.iter().filter(|life| life.is_over());
        dead.fold(self.lost.load(Ordering::Relaxed), |gone, life| gone | 1 << life.rank)
    }

    /// The communicator ends. Its windows that the application has deregistered go, unless it is stopped: then all stay.
    pub fn end_windows(&self, aborts: bool) -> registering::End {
        let Some(windows) = &self.windows else { return registering::End::Clean };
        if aborts || self.has_failed() {
            return windows.abort();
        }
        windows.end_all();
        registering::End::Clean
    }

    /// Up to which size fast collectives serve it.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Runs tasks of collectives, in their order, then sends and receives as one kernel, on the first stream; what the other streams hold
    /// comes before, and what they get later after it.
    pub fn run(
        &self,
        tasks: &[Task],
        operations: &[Operation],
        stream: StreamHandle,
        others: &[StreamHandle],
    ) -> ncclResult_t {
        self.runs.fetch_add(1, Ordering::Relaxed);
        self.collectives.fetch_add(tasks.len() as u64, Ordering::Relaxed);
        if self.has_failed() {
            return refuse(self.error(), format_args!("the communicator has failed"));
        }
        let Some(boxes) = &self.boxes else { return ncclInternalError };
        let ran = boxes.turns.take(stream, others, |turn| -> Result<(), Refused> {
            let windows = self.windows.as_ref().filter(|windows| windows.are_asked_for());
            tasks.iter().try_for_each(|task| boxes.launch(turn, task, windows))?;
            match operations {
                [] => Ok(()),
                operations => Ok(boxes.mailbox.launch(turn, operations)?),
            }
        });
        let result = ran.map_or_else(|refused| self.refused(&refused, stream), |()| ncclSuccess);
        // After it was issued: who looks takes them before it asks whether all is done.
        let of_messages = operations.iter().fold(0, |peers, operation| peers | 1 << operation.peer);
        let of_collectives = if tasks.is_empty() { 0 } else { (1 << self.contract.members.len()) - 1 };
        self.awaited.fetch_or(of_messages | of_collectives, Ordering::Release);
        result
    }

    /// How many collectives this rank has called that ran here, modulo 2^31.
    fn collectives(&self) -> u32 {
        (self.collectives.load(Ordering::Relaxed) & 0x7fff_ffff) as u32
    }

    /// Reads words of this rank's device: allocates nothing, waits for a copy of ours.
    fn read(&self, at: Address, words: &mut [u64]) -> Result<(), Refused> {
        let Some(boxes) = &self.boxes else { return Ok(()) };
        Ok(boxes.turns.read(at, words)?)
    }

    #[cold]
    fn refused(&self, refused: &Refused, stream: StreamHandle) -> ncclResult_t {
        let result = refuse(refused.result(), format_args!("{refused}"));
        if failing::is_lost(refused, went(stream)) {
            self.fail(result);
        }
        result
    }

    /// Lets what comes next on a stream run after all that ran here.
    pub fn order(&self, stream: StreamHandle) -> ncclResult_t {
        let Some(Boxes { turns, .. }) = &self.boxes else { return ncclInternalError };
        turns.order(stream).map_or_else(|refusal| refusal.result(), |()| ncclSuccess)
    }

    /// The asynchronous error of what ran here; `ncclSuccess` if there is none.
    pub fn error(&self) -> ncclResult_t {
        ncclResult_t(self.failed.load(Ordering::Acquire))
    }

    fn has_failed(&self) -> bool {
        self.error() != ncclSuccess
    }

    /// The first error stays, and the peers hear of it.
    pub fn fail(&self, error: ncclResult_t) {
        let (none, relaxed) = (ncclSuccess.0, Ordering::Relaxed);
        if self.failed.compare_exchange(none, error.0, Ordering::Release, relaxed).is_ok() {
            self.windows.iter().for_each(|windows| windows.leave_alone());
            pool::distrust(self.device());
            watch::tell_peers(self);
        }
    }

    /// Frees the GPU of this rank's kernels at once, and refuses more. Any thread.
    pub fn abort(&self) {
        self.boxes.iter().for_each(|boxes| boxes.turns.abort());
    }

    /// Waits until all sends and receives are done, as NCCL does before it ends a communicator. An abort ends it; and where
    /// this rank has failed its peers may have given up what it waits for: that gets a moment.
    pub fn wait_idle(&self) {
        if self.has_failed() {
            self.boxes.iter().for_each(|boxes| drop(boxes.turns.wait_idle(stuck::LEAVES_WITHIN)));
            return self.abort();
        }
        // A driver that answers nothing any more has nothing in flight either.
        self.boxes.iter().for_each(|boxes| drop(boxes.turns.wait_idle(Duration::MAX)));
    }

    /// This rank's device, until its memory has been given back.
    pub fn device(&self) -> Option<i32> {
        self.own.as_ref().map(|(slice, _)| slice.device())
    }

    /// Bytes of this rank's device that nobody uses: two places for one byte each.
    pub fn scratch(&self) -> Option<[Address; 2]> {
        let (slice, _) = self.own.as_ref()?;
        Some(preparing::scratch(slice))
    }
}

/// Asked where something was refused only.
fn went(stream: StreamHandle) -> Went {
    match gpu::driver().and_then(|driver| driver.capture_of(stream)) {
        Ok(Some(_)) => Went::IntoCapture,
        _ => Went::ToStream,
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        self.line.end();
        let leaving = Leaving {
            boxes: self.boxes.take(),
            peers: std::mem::take(&mut self.peers),
            growing: std::mem::take(&mut self.growing),
            own: self.own.take(),
        };
        leaving.begin();
        watch::wake();
    }
}

/// The application is about to free this memory. Waits for nobody.
pub fn memory_is_freed(address: Address) {
    watch::each_registering(|one| one.is_freed(address));
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

/// An id that NCCL made here, as it made it, whose root nobody was at or will be: to be used instead of a new one. NCCL
/// makes none where NCCL_COMM_ID names the root.
pub fn spare_id() -> Option<Id> {
    if !is_on() || config().nccl.comm_id == Switch::On {
        return None;
    }
    rendezvous::started()?.spare_id()
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
    share: Share,
    /// Of a communicator made from another: its wait ends with that one.
    until: Option<Wait>,
}

impl Asked {
    /// What ends its wait.
    pub fn canceller(&self) -> Option<Canceller> {
        self.party.cancellers().into_iter().next()
    }
}

/// This thread's current device, where [`ask`] is called later than NCCL is.
pub fn device_now() -> Option<i32> {
    gpu::driver().ok()?.current_device().ok()?
}

/// Begins a rank's birth with the wish's device, or this thread's current one. Waits for no other rank, and only where
/// room is short for what has just ended on this one, for a while; the reason says that NCCL does it alone.
pub fn ask(wish: &Wish) -> Result<Asked, Reason> {
    let card = wish.check()?;
    closing::at_exit_too();
    // Room that is over must not keep a birth from having any.
    settle();
    let (ranks, ctas, patience) = (wish.ranks as u32, wish.ctas, wish.patience);
    let (arena, share, mut facts) = match wish.device {
        Some(device) => wish::on(device, ranks, ctas, patience)?,
        None => wish::current(ranks, ctas, patience)?,
    };
    facts.member.rank = wish.rank as u32;
    offers::put(&mut facts.member.attachment, &wish.parked);
    let rank = facts.member.rank;
    let party = rendezvous().and_then(|rendezvous| rendezvous.attend(&wish.id, vec![facts]));
    Ok(Asked { party: party.map_err(unreachable)?, token: card.token, rank, arena, share, until: None })
}

fn unreachable(error: std::io::Error) -> Reason {
    Reason::Unreachable { words: error.to_string() }
}

/// Waits for all others, prepares and confirms: as long as it takes.
pub fn join(asked: Vec<Asked>) -> Vec<Fate> {
    type Key = (Token, u32);
    let (mut keys, mut parties, mut shares) = (Vec::new(), Vec::new(), BTreeMap::new());
    let mut waits = Vec::new();
    for Asked { party, token, rank, arena, share, until } in asked {
        // Ends with its parent as long as it waits.
        waits.extend(until);
        keys.push((token, rank));
        parties.push(party);
        shares.insert((token, rank), (arena, share));
    }
    // Held for a few stores; parties of a group prepare on several threads.
    let shares: Mutex<BTreeMap<Key, (Arc<Arena>, Share)>> = Mutex::new(shares);
    let prepared: Mutex<BTreeMap<Key, Prepared>> = Mutex::default();
    let take = |key| prepared.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    let outcomes = rendezvous::join_all(parties, &|preparation| {
        // A party of ours has one rank.
        let rank = preparation.ranks.first().copied().unwrap_or_default();
        let key = (preparation.token, rank);
        let (arena, share) = shares
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&key)
            .ok_or("this rank did not ask")?;
        let (made, result) = preparing::at_meeting(preparation, rank, &arena, share)?;
        prepared.lock().unwrap_or_else(PoisonError::into_inner).insert(key, made);
        result
    });
    let fate = |(key, outcome)| match (outcome, take(key)) {
        (Outcome::Fabric(membership), Some(prepared)) => {
            let (contract, rank) = (membership.contract.clone(), membership.rank);
            let fabric = Fabric::new(contract, rank, Word::Meeting(membership), prepared);
            // Nobody confirms without mailboxes.
            fabric.map_or(Fate::Failed(Failure::Unreadable), Fate::Fabric)
        }
        // Nobody confirms without having prepared.
        (Outcome::Fabric(_), None) => Fate::Failed(Failure::Unreadable),
        // It comes at any moment: as if it had failed.
        (Outcome::Plain(Reason::Foreign), prepared) => {
            prepared.into_iter().for_each(|prepared| prepared.fail());
            Fate::Plain(Reason::Foreign)
        }
        (Outcome::Plain(reason), prepared) => {
            // All have spoken: nobody touches what was announced any more.
            prepared.into_iter().for_each(|prepared| prepared.abandon());
            Fate::Plain(reason)
        }
        (Outcome::Failed(failure), prepared) => {
            // Others may still be testing it: they let go of their lines when they are not.
            prepared.into_iter().for_each(|prepared| prepared.fail());
            Fate::Failed(failure)
        }
    };
    let fates = keys.iter().zip(outcomes.into_iter().flatten()).map(fate).collect();
    settle();
    fates
}

/// The fabric of ranks that are all in one hand, on these devices, in order.
pub fn all_here(devices: &[i32], patience: Patience) -> Vec<Fate> {
    closing::at_exit_too();
    all_here_or_reason(devices, patience)
        .unwrap_or_else(|reason| devices.iter().map(|_| Fate::Plain(reason.clone())).collect())
}

fn all_here_or_reason(devices: &[i32], patience: Patience) -> Result<Vec<Fate>, Reason> {
    wish::check_all(devices.len())?;
    let (mut arenas, mut shares, mut all) = (Vec::new(), Vec::new(), Vec::new());
    for (rank, device) in (0..).zip(devices) {
        let (arena, share, mut facts) = wish::on(*device, devices.len() as u32, Ctas::UNSAID, patience)?;
        facts.member.rank = rank;
        arenas.push(arena);
        shares.push(share);
        all.push(facts);
    }
    let no_name = |error: std::io::Error| Reason::NoIdentity { words: error.to_string() };
    let contract = Arc::new(decision::decide(place::random().map_err(no_name)?, &all)?);
    let refused = |(rank, words): (u32, String)| Reason::Refused { rank, words };
    let prepared = preparing::in_one_hand(&contract, &arenas, shares).map_err(refused)?;
    let closed = Word::in_one_hand();
    let fabric = |(rank, prepared)| {
        let fabric = Fabric::new(contract.clone(), rank, Word::here(&closed, rank), prepared);
        fabric.map_or(Fate::Failed(Failure::Unreadable), Fate::Fabric)
    };
    Ok((0..).zip(prepared).map(fabric).collect())
}

/// Whether so many ranks in one hand would be promises.
pub fn is_patient(ranks: usize) -> bool {
    Patience::AsConfigured.capability(ranks as u32) != 0
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
            fabric.checking.iter().for_each(|checking| checking.is_known_as(serial));
            log::info!(
                "communicator {serial} rank {} of {ranks} fabric {:016x}",
                fabric.rank,
                fabric.contract.hash()
            );
        }
        Fate::Plain(reason) => {
            let serial = count::fabric(counters, fabric::PLAIN + u32::from(reason.number()));
            log::info!("communicator {serial} plain, {reason}");
            checking::say_why_not(serial, reason);
        }
        Fate::Failed(failure) => log::warn!("a communicator failed at birth: {failure}"),
    }
}

/// Whether these communicators are all one.
pub fn is_one_meeting<'a>(wishes: impl Iterator<Item = &'a Wish>) -> bool {
    let mut ids: Vec<&Id> = wishes.map(|wish| &wish.id).collect();
    ids.dedup();
    ids.len() < 2
}

/// Why a communicator that was made in a group with others has none.
pub fn grouped() -> Reason {
    Reason::Grouped
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
            Reason::Grouped,
            Reason::Launches,
        ];
        for reason in reasons {
            let text = fabric::text(fabric::PLAIN + u32::from(reason.number()));
            assert!(reason.to_string().starts_with(text), "{reason} and {text}");
        }
        assert_eq!((fabric::text(fabric::YES), fabric::text(fabric::NOT_ASKED)), ("yes", ""));
    }
}
