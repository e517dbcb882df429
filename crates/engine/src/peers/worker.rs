//! The background worker looks after peer groups while nobody calls: it lets rings grow, ends waits for the dead, and gives back what
//! graphs held. Another than the rendezvous' own, because it calls the driver, and an init must not wait for that.
//!
//! It sleeps in one poll. While sends and receives are being issued it looks every few milliseconds at words in the host's
//! memory; else rarely. Nothing of it is in a call's way.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::pool;
use windlass_base::descriptor;
use windlass_base::guard;
use windlass_base::thread;
use windlass_bootstrap::negotiated::{Member, Token};
use windlass_bootstrap::poll::Flag;
use windlass_bootstrap::request_socket::{Answer, Answered, RequestSocket};

use super::attempts::LostAttempt;
use super::closing::Life;
use super::error_propagation::{Loss, Telling};
use super::growing::Question;
use super::hang_detector::HangDetector;
use super::ids::{self, Asking};
use super::registering::Registering;
use super::windows::Windows;
use super::{PeerGroup, cached, closing, draining, process_exit, recycling, settle, windows};

/// How often it looks while sends and receives are issued, and for how long after the last.
const BUSY_TICK: Duration = Duration::from_millis(5);
const BUSY_FOR: Duration = Duration::from_secs(1);
/// How often it looks otherwise.
const IDLE_TICK: Duration = Duration::from_millis(100);
/// How often where buffers are registered, or freed ones kept: so soon memory goes back to the driver. And where calls are compared.
const REGISTERED_TICK: Duration = Duration::from_millis(50);
/// At the process's end.
const END_WITHIN: Duration = Duration::from_secs(1);

struct Worker {
    request_socket: Token,
    /// Held for a push or a copy.
    peer_groups: Mutex<Vec<Weak<PeerGroup>>>,
    /// What peers are to hear. Held for a push or a swap.
    tellings: Mutex<Vec<Telling>>,
    /// What threads wait to hear. Held for a push or a swap.
    askings: Mutex<Vec<Asking>>,
    wake: Flag,
    ending: AtomicBool,
    /// Whether the thread may hold peer groups, which then end a moment after their owners have let go of them.
    looking: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

static WORKER: OnceCell<Arc<Worker>> = OnceCell::new();

/// Where this process answers other ranks' questions. The first call starts the thread.
pub(super) fn request_socket() -> std::io::Result<Token> {
    process_exit::go_on();
    WORKER.get_or_try_init(Worker::start).map(|worker| worker.request_socket)
}

/// From now on a peer group is looked after.
pub(super) fn begin(peer_group: &Arc<PeerGroup>) {
    if let Some(worker) = WORKER.get() {
        worker.peer_groups().push(Arc::downgrade(peer_group));
        worker.wake.raise();
    }
}

/// This rank has failed: its peers hear of it, also if its owner ends it at once.
pub(super) fn tell_peers(peer_group: &PeerGroup) {
    let (comm, from) = (peer_group.negotiated.comm, peer_group.rank);
    tell_each(peer_group, |to| Loss { comm, from, to }.encode());
}

/// This rank has failed at an attempt to have NCCL build its communicator.
pub(super) fn tell_of_attempt(peer_group: &PeerGroup, attempt: u64) {
    let (comm, from) = (peer_group.negotiated.comm, peer_group.rank);
    tell_each(peer_group, |to| LostAttempt { comm, from, to, attempt }.encode());
}

fn tell_each(peer_group: &PeerGroup, words: impl Fn(u32) -> Vec<u8>) {
    process_exit::go_on();
    let Some(worker) = WORKER.get() else { return };
    let peers = peer_group.negotiated.members.iter().filter(|member| member.rank != peer_group.rank);
    let tellings = peers.filter_map(|peer| Some(Telling::new(words(peer.rank), request_socket_of(peer)?)));
    worker.tellings().extend(tellings);
    worker.wake.raise();
}

/// Looks at what each peer group of this process registers.
pub(super) fn each_registering(mut look: impl FnMut(&Arc<Registering>)) {
    let Some(worker) = WORKER.get() else { return };
    worker.alive().iter().filter_map(Weak::upgrade).for_each(|peer_group| {
        peer_group.registering().into_iter().for_each(&mut look);
    });
}

/// Looks at what each peer group of this process has of windows.
pub(super) fn each_windows(mut look: impl FnMut(&Arc<Windows>)) {
    let Some(worker) = WORKER.get() else { return };
    worker.alive().iter().filter_map(Weak::upgrade).for_each(|peer_group| {
        peer_group.windows().into_iter().for_each(&mut look);
    });
}

/// Asks a rank's process for an id; whether the answer will come.
pub(super) fn ask_for_id(
    peer_group: &PeerGroup,
    question: ids::Question,
    answers: SyncSender<Answered>,
) -> bool {
    process_exit::go_on();
    let request_socket = peer_group.negotiated.members.get(question.of as usize).and_then(request_socket_of);
    let (Some(worker), Some(request_socket)) = (WORKER.get(), request_socket) else { return false };
    let mut askings = worker.askings.lock().unwrap_or_else(PoisonError::into_inner);
    askings.push(Asking { request_socket, question, answers });
    drop(askings);
    worker.wake.raise();
    true
}

/// Where the process of a rank is asked.
fn request_socket_of(member: &Member) -> Option<Token> {
    Some(Token(*member.attachment.first_chunk()?))
}

/// Something is there to look at.
pub(super) fn wake() {
    WORKER.get().into_iter().for_each(|worker| worker.wake.raise());
}

/// Whether its thread may hold peer groups just now.
pub(super) fn is_looking() -> bool {
    WORKER.get().is_some_and(|worker| worker.looking.load(Ordering::Acquire))
}

/// From now on no call of this process is told to other ranks.
pub(super) fn end_checking() {
    let Some(worker) = WORKER.get() else { return };
    worker.alive().iter().filter_map(Weak::upgrade).for_each(|peer_group| peer_group.end_checking());
}

/// The process ends: the thread lets go of all that it holds.
pub(super) fn end() {
    let Some(worker) = WORKER.get() else { return };
    // Before the report.
    end_checking();
    worker.ending.store(true, Ordering::Release);
    worker.wake.raise();
    let thread = worker.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
    let until = Instant::now() + END_WITHIN;
    while thread.as_ref().is_some_and(|thread| !thread.is_finished()) && Instant::now() < until {
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// What [`end`] has ended goes on: others know this process's request socket by its name.
pub(super) fn begin_again() {
    let Some(worker) = WORKER.get() else { return };
    if let Err(error) = RequestSocket::open_as(worker.request_socket)
        .and_then(|request_socket| Worker::begin(worker, request_socket))
    {
        log::error!(
            "the background worker cannot begin again: {error}, rings stay as they are, and nobody is answered"
        );
    }
}

impl Worker {
    fn start() -> std::io::Result<Arc<Worker>> {
        let request_socket = RequestSocket::open()?;
        let worker = Arc::new(Worker {
            request_socket: request_socket.name(),
            peer_groups: Mutex::default(),
            tellings: Mutex::default(),
            askings: Mutex::default(),
            wake: Flag::new()?,
            ending: AtomicBool::new(false),
            looking: AtomicBool::new(true),
            thread: Mutex::default(),
        });
        Worker::begin(&worker, request_socket)?;
        pool::look_after(true);
        Ok(worker)
    }

    fn begin(worker: &Arc<Worker>, request_socket: RequestSocket) -> std::io::Result<()> {
        worker.ending.store(false, Ordering::Relaxed);
        worker.looking.store(true, Ordering::Release);
        let round = Round {
            worker: worker.clone(),
            request_socket,
            asked: BTreeMap::new(),
            next: 0,
            busy: Busy::default(),
            dead: BTreeSet::new(),
            draining: false,
            asks: false,
            pressed: Instant::now(),
        };
        let thread = thread::spawn("windlass-worker", move || round.run())?;
        *worker.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(())
    }

    fn peer_groups(&self) -> MutexGuard<'_, Vec<Weak<PeerGroup>>> {
        self.peer_groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tellings(&self) -> MutexGuard<'_, Vec<Telling>> {
        self.tellings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those that are alive; each is let go of as soon as it has been looked at.
    fn alive(&self) -> Vec<Weak<PeerGroup>> {
        let mut peer_groups = self.peer_groups();
        peer_groups.retain(|peer_group| peer_group.strong_count() > 0);
        peer_groups.clone()
    }

    fn find(&self, comm: Token, rank: u32) -> Option<Arc<PeerGroup>> {
        let alive = self.alive();
        let mut peer_groups = alive.iter().filter_map(Weak::upgrade);
        peer_groups.find(|peer_group| peer_group.negotiated.comm == comm && peer_group.rank == rank)
    }
}

/// What the thread has.
struct Round {
    worker: Arc<Worker>,
    request_socket: RequestSocket,
    /// What is on its way, by key.
    asked: BTreeMap<u64, Asked>,
    next: u64,
    busy: Busy,
    /// Processes of peers that have ended.
    dead: BTreeSet<u64>,
    /// Whether kernels of peer groups that have ended have not left yet.
    draining: bool,
    /// Whether kernels are asked who waits.
    asks: bool,
    /// When it was looked whether memory is short.
    pressed: Instant,
}

/// What is asked of a peer's process.
enum Asked {
    Growth(Question),
    Heard(Telling),
    Id(SyncSender<Answered>),
}

/// Whether sends and receives are being issued.
#[derive(Default)]
struct Busy {
    runs: u64,
    since: Option<Instant>,
}

impl Round {
    fn run(mut self) {
        let mut detectors: BTreeMap<(Token, u32), HangDetector> = BTreeMap::new();
        while !self.worker.ending.load(Ordering::Acquire) {
            let lives = self.lives();
            let Ok(ended) = self.wait(&lives) else {
                log::error!(
                    "the background worker cannot wait: rings stay as they are, and so do waits for the dead"
                );
                pool::look_after(false);
                return self.take_back(detectors);
            };
            self.dead.extend(ended);
            drop(lives);
            // What panics leaves a peer group as it was.
            guard::or_else(|| (), || self.look(&mut detectors));
            self.draining = guard::or_else(|| false, draining::look);
            if recycling::is_any_to_look_after() && self.pressed.elapsed() >= REGISTERED_TICK {
                guard::or_else(|| (), recycling::look);
                self.pressed = Instant::now();
            }
            settle();
            descriptor::fill_reserve();
        }
        guard::or_else(|| (), || self.take_back(detectors));
        self.worker.looking.store(false, Ordering::Release);
    }

    /// The peers' processes that live, each once.
    fn lives(&self) -> Vec<Arc<Life>> {
        let mut lives: BTreeMap<u64, Arc<Life>> = BTreeMap::new();
        for peer_group in self.worker.alive().iter().filter_map(Weak::upgrade) {
            let far = peer_group.lives.iter().filter(|life| life.ends.is_some());
            for life in far.filter(|life| !self.dead.contains(&life.process)) {
                lives.entry(life.process).or_insert_with(|| life.clone());
            }
        }
        lives.into_values().collect()
    }

    /// Gives the processes that have ended.
    fn wait(&self, lives: &[Arc<Life>]) -> rustix::io::Result<Vec<u64>> {
        let mut polled = self.request_socket.polled();
        let first = polled.len() + 1;
        polled.push(PollFd::new(&self.worker.wake, PollFlags::IN));
        let ends = lives.iter().filter_map(|life| life.ends.as_ref());
        polled.extend(ends.map(|ends| PollFd::new(ends.as_ref(), PollFlags::IN)));
        let busy = self.busy.since.is_some() || self.request_socket.knocks() || self.draining || self.asks;
        let alive = self.worker.alive();
        let registers = |peer_group: Arc<PeerGroup>| {
            peer_group.checking().is_some() || peer_group.registering().is_some_and(|one| one.has_entries())
        };
        let tick = match busy {
            true => BUSY_TICK,
            false if recycling::is_any_to_look_after() || pool::is_any_leaving() => REGISTERED_TICK,
            false if alive.iter().filter_map(Weak::upgrade).any(registers) => REGISTERED_TICK,
            false => IDLE_TICK,
        };
        let idle = alive.is_empty() && !self.draining && !closing::waits();
        let idle =
            idle && self.worker.tellings().is_empty() && !self.request_socket.knocks() && pool::is_empty();
        let idle = idle && !cached::is_any();
        let tick = Timespec { tv_sec: 0, tv_nsec: tick.as_nanos() as i64 };
        // It has let go of them all.
        self.worker.looking.store(false, Ordering::Release);
        match poll(&mut polled, if idle { None } else { Some(&tick) }) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        self.worker.looking.store(true, Ordering::Release);
        self.worker.wake.lower();
        let ended = lives.iter().filter(|life| life.ends.is_some()).zip(&polled[first..]);
        Ok(ended.filter(|(_, ends)| !ends.revents().is_empty()).map(|(life, _)| life.process).collect())
    }

    fn look(&mut self, detectors: &mut BTreeMap<(Token, u32), HangDetector>) {
        let alive = self.worker.alive();
        let mut runs = 0;
        let mut names = Vec::new();
        for peer_group in alive.iter().filter_map(Weak::upgrade) {
            runs += peer_group.runs.load(Ordering::Relaxed);
            peer_group.registering().into_iter().for_each(|one| one.look());
            peer_group.checking().into_iter().for_each(|one| one.look(|| peer_group.gone()));
            for question in peer_group.ask_for_growth() {
                self.ask(&peer_group, question);
            }
            let name = (peer_group.negotiated.comm, peer_group.rank);
            names.push(name);
            let dead = self.dead_of(&peer_group);
            if !dead.is_empty() {
                detectors.entry(name).or_default().look(&peer_group, &dead);
            }
        }
        detectors.retain(|name, _| names.contains(name));
        self.asks = detectors.values().any(HangDetector::is_asking);
        windows::look(
            alive.iter().filter_map(Weak::upgrade).filter_map(|peer_group| peer_group.windows().cloned()),
        );
        self.busy.note(runs);
        self.tell();
        let worker = &self.worker;
        for (key, answer) in self.request_socket.turn(|words| reply(worker, words)) {
            match (self.asked.remove(&key), answer) {
                (Some(Asked::Growth(question)), answer) => {
                    if let Some(peer_group) = worker.find(question.comm, question.from) {
                        peer_group.take_growth(question, answer.ok());
                    }
                }
                (Some(Asked::Heard(telling)), Err(_)) => worker.tellings().extend(telling.again()),
                // Who asked may have stopped waiting.
                (Some(Asked::Id(answers)), answer) => drop(answers.try_send(answer)),
                (Some(Asked::Heard(_)), Ok(_)) | (None, _) => {}
            }
        }
    }

    /// Ranks that have ended or failed.
    fn dead_of(&self, peer_group: &PeerGroup) -> Vec<u32> {
        let lost = peer_group.lost.load(Ordering::Relaxed);
        let is_dead = |life: &&Arc<Life>| self.dead.contains(&life.process) || lost & (1 << life.rank) != 0;
        peer_group.lives.iter().filter(is_dead).map(|life| life.rank).collect()
    }

    /// What kernels are asked ends with the thread: they may go on behind it.
    fn take_back(&self, detectors: BTreeMap<(Token, u32), HangDetector>) {
        for ((comm, rank), mut watched) in detectors {
            if let Some(peer_group) = self.worker.find(comm, rank) {
                watched.take_back(&peer_group, &self.dead_of(&peer_group));
            }
        }
    }

    /// Says what is due.
    fn tell(&mut self) {
        let now = Instant::now();
        let due: Vec<Telling> = self.worker.tellings().extract_if(.., |one| one.due <= now).collect();
        for telling in due {
            let (request_socket, words) = (telling.request_socket, telling.words.clone());
            self.say(request_socket, words, Asked::Heard(telling));
        }
        let askings =
            std::mem::take(&mut *self.worker.askings.lock().unwrap_or_else(PoisonError::into_inner));
        for Asking { request_socket, question, answers } in askings {
            self.say(request_socket, question.encode(), Asked::Id(answers));
        }
    }

    fn ask(&mut self, peer_group: &PeerGroup, question: Question) {
        let Some(request_socket) =
            peer_group.negotiated.members.get(question.to as usize).and_then(request_socket_of)
        else {
            return;
        };
        self.say(request_socket, question.encode(), Asked::Growth(question));
    }

    fn say(&mut self, request_socket: Token, words: Vec<u8>, asked: Asked) {
        self.next += 1;
        self.asked.insert(self.next, asked);
        self.request_socket.ask(request_socket, words, self.next);
    }
}

fn reply(worker: &Worker, words: &[u8]) -> Option<Answer> {
    if let Some(Loss { comm, from, to }) = Loss::decode(words) {
        let peer_group = worker.find(comm, to)?;
        log::debug!("rank {to}: rank {from} says that it has failed");
        peer_group.lost.fetch_or(1 << from, Ordering::Relaxed);
        return Some(Answer { words: vec![1], descriptor: None });
    }
    if let Some(LostAttempt { comm, from, to, attempt }) = LostAttempt::decode(words) {
        let peer_group = worker.find(comm, to)?;
        log::debug!(
            "rank {to}: rank {from} says that its attempt {attempt} to have NCCL build a lazy communicator failed"
        );
        peer_group.hear_of_lost(attempt);
        return Some(Answer { words: vec![1], descriptor: None });
    }
    if let Some(ids::Question { comm, of, number }) = ids::Question::decode(words) {
        let id = worker.find(comm, of)?.make_id(number).ok()?;
        return Some(Answer { words: id.to_vec(), descriptor: None });
    }
    let question = Question::decode(words)?;
    worker.find(question.comm, question.to)?.grant_growth(question)
}

#[cfg(any(test, feature = "fuzzing"))]
/// Reads a request as [`reply`] does, for fuzzing.
pub fn fuzz_request(words: &[u8]) {
    let read = [
        Loss::decode(words).is_some(),
        LostAttempt::decode(words).is_some(),
        ids::Question::decode(words).is_some(),
        Question::decode(words).is_some(),
    ];
    // Of two kinds none is.
    assert!(read.iter().filter(|is_read| **is_read).count() < 2);
}

impl Busy {
    fn note(&mut self, runs: u64) {
        if runs != self.runs {
            (self.runs, self.since) = (runs, Some(Instant::now()));
        } else if self.since.is_some_and(|since| since.elapsed() > BUSY_FOR) {
            self.since = None;
        }
    }
}
