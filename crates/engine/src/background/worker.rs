//! The background worker: one thread of the process that gives [chores](Chore) their turns while nobody calls, and speaks with other
//! ranks' processes. Another than the bootstrap's own, because chores call the driver, and an init must not wait for that.
//!
//! It sleeps in one poll, as long as no chore is due. Nothing of it is in a call's way.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use windlass_base::descriptor;
use windlass_base::guard;
use windlass_base::thread;
use windlass_bootstrap::negotiated::Token;
use windlass_bootstrap::poll::Flag;
use windlass_bootstrap::request_socket::{Answer, Answered, RequestSocket};

use crate::background::life::Life;
use crate::background::process_exit;

/// How often a chore looks that follows what kernels do just now.
pub(crate) const BUSY_TICK: Duration = Duration::from_millis(5);
/// How often where something is to go back to the driver soon, or is compared.
pub(crate) const SOON_TICK: Duration = Duration::from_millis(50);
/// How often otherwise.
pub(crate) const IDLE_TICK: Duration = Duration::from_millis(100);
/// At the process's end.
const END_WITHIN: Duration = Duration::from_secs(1);

/// Something that is done while nobody calls. None of it waits for another rank.
pub(crate) trait Chore: Send {
    /// In how long it is to have a turn; none: once something wakes the worker.
    fn due(&self) -> Option<Duration> {
        None
    }

    /// Other ranks, the end of whose processes wakes the worker.
    fn lives(&self) -> Vec<Arc<Life>> {
        Vec::new()
    }

    /// A process has ended. Once for each.
    fn ended(&mut self, _process: u64) {}

    /// Does what is due.
    fn turn(&mut self) {}

    /// Answers another process; none if the question is not for this chore, or it has no answer.
    fn answer(&mut self, _words: &[u8]) -> Option<Answer> {
        None
    }

    /// The thread ends.
    fn end(&mut self) {}
}

/// What is done with the answer of another process, on the worker.
type Heard = Box<dyn FnOnce(Answered) + Send>;

/// A question to another process.
struct Request {
    /// Where it is asked.
    to: Token,
    words: Vec<u8>,
    /// Not before.
    due: Instant,
    heard: Heard,
}

struct Worker {
    request_socket: Token,
    chores: fn() -> Vec<Box<dyn Chore>>,
    /// Held for a push or a swap.
    requests: Mutex<Vec<Request>>,
    wake: Flag,
    ending: AtomicBool,
    /// How often it has begun.
    beginnings: AtomicU64,
    /// Whether the thread may hold peer groups, which then end a moment after their owners have let go of them.
    looking: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl fmt::Debug for Worker {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Worker").field("request_socket", &self.request_socket).finish_non_exhaustive()
    }
}

static WORKER: OnceCell<Arc<Worker>> = OnceCell::new();

/// Where this process answers other ranks' requests. The first call starts the thread, which does these chores.
pub(crate) fn request_socket(chores: fn() -> Vec<Box<dyn Chore>>) -> std::io::Result<Token> {
    process_exit::go_on();
    WORKER.get_or_try_init(|| Worker::start(chores)).map(|worker| worker.request_socket)
}

/// Asks the process that has this request socket; whether there is a worker that does. What is to be done with the answer is dropped where
/// the process ends before.
pub(crate) fn ask(
    to: Token,
    words: Vec<u8>,
    due: Instant,
    heard: impl FnOnce(Answered) + Send + 'static,
) -> bool {
    process_exit::go_on();
    let Some(worker) = WORKER.get() else { return false };
    worker.requests().push(Request { to, words, due, heard: Box::new(heard) });
    worker.wake.raise();
    true
}

/// Something is there to look at.
pub(crate) fn wake() {
    WORKER.get().into_iter().for_each(|worker| worker.wake.raise());
}

/// Whether its thread may hold peer groups just now.
pub(crate) fn is_looking() -> bool {
    WORKER.get().is_some_and(|worker| worker.looking.load(Ordering::Acquire))
}

/// The process ends: the thread lets go of all that it holds.
pub(crate) fn end() {
    let Some(worker) = WORKER.get() else { return };
    worker.ending.store(true, Ordering::Release);
    worker.wake.raise();
    let thread = worker.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
    let until = Instant::now() + END_WITHIN;
    while thread.as_ref().is_some_and(|thread| !thread.is_finished()) && Instant::now() < until {
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// What [`end`] has ended goes on: others know this process's request socket by its name.
pub(crate) fn begin_again() {
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
    fn start(chores: fn() -> Vec<Box<dyn Chore>>) -> std::io::Result<Arc<Worker>> {
        let request_socket = RequestSocket::open()?;
        let worker = Arc::new(Worker {
            request_socket: request_socket.name(),
            chores,
            requests: Mutex::default(),
            wake: Flag::new()?,
            ending: AtomicBool::new(false),
            beginnings: AtomicU64::new(0),
            looking: AtomicBool::new(true),
            thread: Mutex::default(),
        });
        Worker::begin(&worker, request_socket)?;
        Ok(worker)
    }

    fn begin(worker: &Arc<Worker>, request_socket: RequestSocket) -> std::io::Result<()> {
        worker.ending.store(false, Ordering::Relaxed);
        worker.looking.store(true, Ordering::Release);
        let round = Round {
            worker: worker.clone(),
            beginning: worker.beginnings.fetch_add(1, Ordering::AcqRel) + 1,
            chores: (worker.chores)(),
            request_socket,
            asked: BTreeMap::new(),
            next: 0,
            dead: BTreeSet::new(),
        };
        let thread = thread::spawn("windlass-worker", move || round.run())?;
        *worker.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(())
    }

    fn requests(&self) -> MutexGuard<'_, Vec<Request>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the thread has.
struct Round {
    worker: Arc<Worker>,
    /// Which of its beginnings.
    beginning: u64,
    chores: Vec<Box<dyn Chore>>,
    request_socket: RequestSocket,
    /// What is on its way, by key.
    asked: BTreeMap<u64, Heard>,
    next: u64,
    /// Processes of peers that have ended.
    dead: BTreeSet<u64>,
}

impl Round {
    fn run(mut self) {
        while !self.worker.ending.load(Ordering::Acquire) {
            let lives = self.lives();
            let Ok(ended) = self.wait(&lives) else {
                log::error!(
                    "the background worker cannot wait: rings stay as they are, and so do waits for the dead"
                );
                break;
            };
            drop(lives);
            for process in ended.into_iter().filter(|process| self.dead.insert(*process)) {
                self.chores.iter_mut().for_each(|chore| chore.ended(process));
            }
            for chore in &mut self.chores {
                // What panics leaves a peer group as it was.
                guard::or_else(|| (), || chore.turn());
            }
            guard::or_else(|| (), || self.speak());
            descriptor::fill_reserve();
        }
        let Round { worker, beginning, mut chores, request_socket, asked, .. } = self;
        // First: one that begins again takes the name, and whoever waits for an answer asks again.
        drop((request_socket, asked));
        for chore in &mut chores {
            guard::or_else(|| (), || chore.end());
        }
        drop(chores);
        // One that has begun since says that for itself.
        if worker.beginnings.load(Ordering::Acquire) == beginning {
            worker.looking.store(false, Ordering::Release);
        }
    }

    /// The peers' processes that live, each once.
    fn lives(&self) -> Vec<Arc<Life>> {
        let mut lives: BTreeMap<u64, Arc<Life>> = BTreeMap::new();
        for life in self.chores.iter().flat_map(|chore| chore.lives()) {
            if life.ends.is_some() && !self.dead.contains(&life.process) {
                lives.entry(life.process).or_insert(life);
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
        let due = self.chores.iter().filter_map(|chore| chore.due());
        let knocks = self.request_socket.knocks().then_some(BUSY_TICK);
        let asks = (!self.worker.requests().is_empty()).then_some(IDLE_TICK);
        let tick = due.chain(knocks).chain(asks).min();
        let tick = tick.map(|tick| Timespec { tv_sec: 0, tv_nsec: tick.as_nanos() as i64 });
        // It has let go of them all.
        self.worker.looking.store(false, Ordering::Release);
        match poll(&mut polled, tick.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        self.worker.looking.store(true, Ordering::Release);
        self.worker.wake.lower();
        let ended = lives.iter().zip(&polled[first..]);
        Ok(ended.filter(|(_, ends)| !ends.revents().is_empty()).map(|(life, _)| life.process).collect())
    }

    /// Asks what is due, and answers.
    fn speak(&mut self) {
        let now = Instant::now();
        let due: Vec<Request> = self.worker.requests().extract_if(.., |one| one.due <= now).collect();
        for Request { to, words, heard, .. } in due {
            self.next += 1;
            self.asked.insert(self.next, heard);
            self.request_socket.ask(to, words, self.next);
        }
        let chores = &mut self.chores;
        // What panics keeps no other answer from who waits for it.
        let answer = |words: &[u8]| {
            chores.iter_mut().find_map(|chore| guard::or_else(|| None, || chore.answer(words)))
        };
        for (key, answer) in self.request_socket.turn(answer) {
            if let Some(heard) = self.asked.remove(&key) {
                guard::or_else(|| (), || heard(answer));
            }
        }
    }
}
