//! A communicator gives its memory back (`ncclCommSuspend`) and takes it again at the same addresses (`ncclCommResume`), so that graphs stay
//! valid. Both are calls of all its ranks, which agree step by step ([`plan`], [`ballot`]). Reservations, host words, events, kernels and
//! sockets stay.
//!
//! To wake is an init of the memory: all ranks fill theirs with zeros, then map each other's and test it, then launch. No count is saved:
//! zeros on all ranks are the state after an init. `crates/kernels/README.md` has the proof.

mod ballot;
mod exploring;
mod plan;

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use nccl_sys::{
    ncclInternalError, ncclInvalidUsage, ncclRemoteError, ncclResult_t, ncclSuccess, ncclUnhandledCudaError,
};

use super::group::PeerGroup;
use super::requests::Matter;
use crate::background::{own_thread, process_exit, side_thread};
use crate::features::page_layout::{CLOSED_AT, LEFT_AT, SLEEP_AT};
use crate::features::recycling;
use crate::peers::health::error_propagation::is_of_capture;
use crate::peers::setup::preparing::{self, ZEROED_WITHIN};
use crate::peers::shutdown::draining::Mapped;
use crate::peers::shutdown::room;
use ballot::{Ballot, Objection, Outcome};
use plan::{SleepPlan, SleepStep};
use windlass_base::error::refuse;
use windlass_base::lock::{Mutex, MutexGuard};
use windlass_base::thread;
use windlass_bootstrap::request_socket::Answer;
use windlass_transport::TransportError;
use windlass_transport::heap::{self, HeapError, Place};

/// How long a rank waits for its own work and for the other ranks before anything was given back.
const QUIET_WITHIN: Duration = Duration::from_secs(60);
/// How often it looks what the others say, and after how long ever less often.
const LOOK_EVERY: Duration = Duration::from_micros(20);
const LOOK_SELDOM: Duration = Duration::from_millis(1);
/// How often it checks whether the others live, and asks again for their memory.
const LIVES_EVERY: Duration = Duration::from_millis(50);

/// What suspends and resumes have done on this rank.
#[derive(Debug, Default)]
pub(super) struct Sleep {
    /// Suspends and resumes in which the ranks met; equal on all.
    calls: AtomicU32,
    sleeps: AtomicBool,
    /// While this rank's memory may be asked for.
    wakes: AtomicBool,
    /// Whether NCCL's part sleeps.
    nccl_sleeps: AtomicBool,
    /// Held by a suspend or resume, and while a thread reads the ranks' memory.
    memory: Mutex<()>,
}

impl Sleep {
    /// Keeps the memory awake, if it is, and says how many suspends and resumes came before.
    pub(super) fn awake(&self) -> Option<(MutexGuard<'_, ()>, u32)> {
        let memory = self.memory.try_lock()?;
        let calls = self.calls.load(Ordering::Relaxed);
        (!self.sleeps.load(Ordering::Acquire)).then_some((memory, calls))
    }
}

/// A suspend or resume on this rank.
struct SleepCall<'a> {
    peer_group: &'a PeerGroup,
    mapped: &'a Mapped,
    word: &'a AtomicU64,
    until: Instant,
}

impl PeerGroup {
    /// Whether its memory has been given back.
    pub fn sleeps(&self) -> bool {
        self.sleep.sleeps.load(Ordering::Acquire)
    }

    /// Whether NCCL's part has been given back.
    pub fn nccl_sleeps(&self) -> bool {
        self.sleep.nccl_sleeps.load(Ordering::Acquire)
    }

    /// Notes whether NCCL's part has been given back.
    pub fn set_nccl_sleeps(&self, sleeps: bool) {
        self.sleep.nccl_sleeps.store(sleeps, Ordering::Release);
    }

    /// Whether it takes its memory again now, so that other ranks ask for it.
    pub(super) fn wakes(&self) -> bool {
        self.sleep.wakes.load(Ordering::Acquire)
    }

    /// Bytes of this rank's device memory that it takes, or took before it went to sleep.
    pub fn memory_bytes(&self) -> u64 {
        self.region().map_or(0, |region| region.bytes()) + self.growing.lent_bytes()
    }

    /// Gives the memory back, or takes it again, together with all ranks. Waits for work of this rank and for the other ranks.
    pub fn suspend_or_resume(&self, resumes: bool) -> ncclResult_t {
        process_exit::go_on();
        if self.error() != ncclSuccess {
            return refuse(self.error(), format_args!("the communicator has failed"));
        }
        let found = self.mapped().and_then(|mapped| {
            let word = (**mapped.closing.page()?).as_ref().get(SLEEP_AT)?;
            Some(SleepCall { peer_group: self, mapped, word, until: Instant::now() + QUIET_WITHIN })
        });
        let Some(call) = found else { return ncclInternalError };
        let is_aborted = || call.mapped.transports.sequencer.is_aborted();
        let mut memory = None;
        // A reader may wait for the driver for as long as kernels run.
        thread::wait_while(QUIET_WITHIN, LOOK_SELDOM, || {
            memory = self.sleep.memory.try_lock();
            memory.is_none() && !is_aborted()
        });
        if memory.is_none() {
            // The other ranks count this call.
            self.sleep.calls.fetch_add(1, Ordering::Relaxed);
            let why = if is_aborted() { Objection::Aborted } else { Objection::Busy };
            return self.objected(resumes, self.rank(), why);
        }
        if self.sleeps() != resumes {
            return refuse(ncclInvalidUsage, format_args!("the communicator is in that state already"));
        }
        let result = own_thread::run(|| call.run(resumes));
        result.err().map_or(ncclSuccess, |(by, why)| self.objected(resumes, by, why))
    }

    /// NCCL's code for a call that a rank has refused.
    fn objected(&self, resumes: bool, by: u32, why: Objection) -> ncclResult_t {
        let (code, words) = match why {
            Objection::Busy => (ncclInvalidUsage, "has work that did not end within 60 s"),
            Objection::Captured => (ncclInvalidUsage, "captures a graph"),
            Objection::Late => (ncclInvalidUsage, "did not come within 60 s"),
            Objection::NoMemory => (ncclUnhandledCudaError, "has too little memory; it may be tried again"),
            Objection::Failed => (ncclUnhandledCudaError, "could not; its log says why"),
            Objection::Aborted => (ncclRemoteError, "was aborted"),
            Objection::Missed if resumes => (ncclUnhandledCudaError, "came when another had refused"),
            Objection::Missed => (ncclInvalidUsage, "came when another had refused"),
            Objection::Gone => (ncclRemoteError, "has ended or failed, or waits for a rank that has"),
        };
        if why == Objection::Gone {
            self.fail(code);
        }
        let call = if resumes { "ncclCommResume" } else { "ncclCommSuspend" };
        refuse(code, format_args!("{call}: rank {by} {words}"))
    }
}

impl SleepCall<'_> {
    fn run(&self, resumes: bool) -> Result<(), (u32, Objection)> {
        let Sleep { calls, sleeps, wakes, .. } = &self.peer_group.sleep;
        wakes.store(resumes, Ordering::Release);
        let call = calls.fetch_add(1, Ordering::Relaxed) + 1;
        let mut step = SleepStep::first(resumes);
        loop {
            let began = Instant::now();
            let vote = self.act(step, step.number(call));
            let agreed = self.agree(step, step.number(call), vote);
            let (rank, ms) = (self.peer_group.rank(), began.elapsed().as_millis());
            log::debug!("rank {rank}: {step:?} after {ms} ms: {vote:?}, all: {agreed:?}");
            match step.then(agreed) {
                SleepPlan::Go(next) => step = next,
                SleepPlan::End { sleeps: stays, result } => {
                    wakes.store(false, Ordering::Release);
                    if stays && resumes {
                        let _ = self.let_go();
                    } else if !stays {
                        self.peer_group.growing.wake();
                    }
                    sleeps.store(stays, Ordering::Release);
                    return result;
                }
            }
        }
    }

    fn act(&self, step: SleepStep, number: u32) -> Result<(), Objection> {
        match step {
            SleepStep::Quiet => self.quiet(),
            SleepStep::LetGo => self.let_go(),
            SleepStep::Make => self.make(),
            SleepStep::Map => self.map(number),
        }
    }

    /// Waits for this rank's work: of the communicator, then of the context, whose graphs may run its kernels without notice.
    fn quiet(&self) -> Result<(), Objection> {
        let left = || self.until.saturating_duration_since(Instant::now());
        self.mapped.transports.sequencer.wait_idle(left()).map_err(|error| match error {
            TransportError::Aborted { .. } => Objection::Aborted,
            TransportError::Busy { .. } => Objection::Busy,
            _ => Objection::Failed,
        })?;
        let heap = self.mapped.region.heap.clone();
        // The driver waits without end.
        let synchronized = side_thread::run(Some(left()), move || {
            let _entered = heap.home.enter()?;
            heap.home.driver.synchronize()
        });
        synchronized.ok_or(Objection::Busy)?.map_err(|failure| match is_of_capture(&failure) {
            true => Objection::Captured,
            false => Objection::Failed,
        })
    }

    /// Gives back what this rank has mapped, then its own memory. No kernel runs on any rank.
    fn let_go(&self) -> Result<(), Objection> {
        self.peer_group.growing.sleep(&self.mapped.transports.p2p);
        self.mapped.peers.iter().flatten().for_each(|peer| peer.let_go());
        self.mapped.region.let_go().map_err(|_| Objection::Failed)
    }

    /// Takes memory again, filled with zeros. That which ended communicators hold makes room, as at an init.
    fn make(&self) -> Result<(), Objection> {
        let Mapped { region, .. } = self.mapped;
        let heap = &region.heap;
        let make_room = |is_enough: &mut dyn FnMut() -> bool| room::make_soon(heap.device(), is_enough);
        recycling::lend(heap, make_room, || region.take_again()).map_err(|error| {
            log::warn!("ncclCommResume, rank {}: {error}", self.peer_group.rank());
            match error {
                HeapError::Cuda(failure) if failure.is_out_of_memory() => Objection::NoMemory,
                _ => Objection::Failed,
            }
        })?;
        region.wait_zeroed(ZEROED_WITHIN).map_err(|_| Objection::Failed)?;
        let marked = preparing::mark(self.peer_group.negotiated(), self.peer_group.rank(), region);
        marked.map_err(|_| Objection::Failed)
    }

    /// Maps the memory of all peers again, each for this rank's device, and tests it. All ranks have made theirs.
    fn map(&self, number: u32) -> Result<(), Objection> {
        let (peer_group, heap) = (self.peer_group, &self.mapped.region.heap);
        for (rank, peer) in (0..).zip(&self.mapped.peers) {
            let Some(peer) = peer else { continue };
            let answer = self.ask(rank, number)?;
            let mapped = || {
                let place = answer.words[..].try_into().map_err(|_| "an answer that says nothing")?;
                let place = Place::from_wire(place);
                let mapped = match &answer.descriptor {
                    Some(memory) => peer.map_again(place, memory.as_fd(), heap),
                    None => heap::reach(place, heap).map(drop),
                };
                mapped.map_err(|error| error.to_string())?;
                preparing::probe(peer_group.negotiated(), (peer_group.rank(), rank), heap, peer)
            };
            mapped().map_err(|words: String| {
                log::warn!("ncclCommResume, rank {}: memory of rank {rank}: {words}", peer_group.rank());
                Objection::Failed
            })?;
        }
        Ok(())
    }

    /// Asks another rank's process for its memory, again and again unless the call fails meanwhile.
    fn ask(&self, to: u32, number: u32) -> Result<Answer, Objection> {
        loop {
            let (tell, answer) = sync_channel(1);
            // This rank may have stopped waiting.
            let heard = move |answer| drop(tell.try_send(answer));
            if !self.peer_group.others.ask(to, Matter::Region, heard) {
                return Err(Objection::Failed);
            }
            loop {
                match answer.recv_timeout(LIVES_EVERY) {
                    Ok(Ok(answer)) => return Ok(answer),
                    Err(RecvTimeoutError::Timeout) if self.objection().is_none() => process_exit::go_on(),
                    _ => break,
                }
            }
            if let Some((_, why)) = self.objection() {
                return Err(why);
            } else if self.ballot().is_over(number) {
                return Err(Objection::Failed);
            }
            std::thread::sleep(LOOK_SELDOM);
        }
    }

    /// Says what this rank votes, and waits for the others.
    fn agree(
        &self,
        step: SleepStep,
        number: u32,
        vote: Result<(), Objection>,
    ) -> Result<(), (u32, Objection)> {
        let (rank, ranks) = (self.peer_group.rank(), self.peer_group.negotiated().members.len() as u32);
        let (mut has_voted, began, mut looked) = (false, Instant::now(), Instant::now());
        loop {
            if !has_voted {
                has_voted = self.change(|ballot| ballot.vote(number, (rank, ranks), vote)).is_ok();
            }
            let mut outcome = Outcome::Open;
            if has_voted {
                let _ = self.change(|ballot| {
                    let (after, seen) = ballot.see(number, rank);
                    outcome = seen;
                    Some(after)
                });
            }
            match outcome {
                Outcome::Passed => return Ok(()),
                Outcome::Refused(by, why) => return Err((by, why)),
                Outcome::Open => {}
            }
            if looked.elapsed() >= LIVES_EVERY {
                looked = Instant::now();
                let late = || (self.ballot().missing(ranks).trailing_zeros(), Objection::Late);
                let is_late = step.has_deadline() && has_voted && looked >= self.until;
                if let Some((by, why)) = self.objection().or_else(|| is_late.then(late)) {
                    if !has_voted {
                        return Err((by, why));
                    }
                    let _ = self.change(|ballot| Some(ballot.refuse(number, by, why)));
                }
            }
            let is_new = began.elapsed() < LOOK_SELDOM;
            std::thread::sleep(if is_new { LOOK_EVERY } else { LOOK_SELDOM });
        }
    }

    /// What ends the wait for other ranks at any step.
    fn objection(&self) -> Option<(u32, Objection)> {
        if self.mapped.transports.sequencer.is_aborted() {
            return Some((self.peer_group.rank(), Objection::Aborted));
        }
        let page = self.mapped.closing.page().map(|page| (**page).as_ref());
        let bits =
            |at: usize| page.and_then(|words| words.get(at)).map_or(0, |word| word.load(Ordering::Acquire));
        let gone = self.peer_group.ranks.gone() | bits(CLOSED_AT) | bits(LEFT_AT);
        (gone != 0).then(|| (gone.trailing_zeros(), Objection::Gone))
    }

    fn ballot(&self) -> Ballot {
        Ballot::of(self.word.load(Ordering::Acquire))
    }

    fn change(&self, mut change: impl FnMut(Ballot) -> Option<Ballot>) -> Result<u64, u64> {
        let to_word = |word| change(Ballot::of(word)).map(Ballot::word);
        self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, to_word)
    }
}
