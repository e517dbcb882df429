//! The background worker: one thread of the process that runs [chores](Chore), and exchanges requests with other ranks' processes.
//! It is not the bootstrap's thread, because chores call the driver, and an init must not wait for that.
//!
//! It sleeps in one poll until a chore is due. No call waits for it. No chore is due because a communicator lives: what begins wakes the worker.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use windlass_base::lock::Mutex;
use windlass_base::{descriptor, guard, thread};
use windlass_bootstrap::negotiated::Token;
use windlass_bootstrap::poll::Flag;
use windlass_bootstrap::request_socket::{Answer, Answered, RequestSocket};

use crate::background::life::Life;
use crate::background::process_exit;

/// The interval of chores that follow running kernels.
pub(crate) const BUSY_TICK: Duration = Duration::from_millis(5);
/// The interval of chores that will soon free memory, or compare calls.
pub(crate) const SOON_TICK: Duration = Duration::from_millis(50);
/// The interval of chores that wait for what ends.
pub(crate) const IDLE_TICK: Duration = Duration::from_millis(100);
/// How long the end of the process waits for the worker.
const END_WITHIN: Duration = Duration::from_secs(1);

/// A task of the worker. It must not wait for another rank.
pub(crate) trait Chore: Send {
    /// The time until its next turn; none: when something wakes the worker.
    fn due(&self) -> Option<Duration> {
        None
    }

    /// Other ranks: the end of one of their processes wakes the worker.
    fn lives(&self) -> Vec<Arc<Life>> {
        Vec::new()
    }

    /// Called once for each process that has ended.
    fn ended(&mut self, _process: u64) {}

    /// Does what is due now.
    fn turn(&mut self) {}

    /// Answers a request of another process; none if the request is not for this chore, or there is no answer.
    fn answer(&mut self, _words: &[u8]) -> Option<Answer> {
        None
    }

    /// Called when the thread ends.
    fn end(&mut self) {}
}

/// The callback for another process's answer, called on the worker.
type Heard = Box<dyn FnOnce(Answered) + Send>;

/// A request to another process.
struct Request {
    /// The request socket of that process.
    to: Token,
    words: Vec<u8>,
    /// When to send it.
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
    /// How often the thread has begun.
    beginnings: AtomicU64,
    /// Whether the thread may hold references to peer groups, which then end a moment after their owners have dropped them.
    looking: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

static WORKER: OnceCell<Arc<Worker>> = OnceCell::new();

/// The socket at which this process answers other ranks' requests. The first call starts the thread with these chores.
pub(crate) fn request_socket(chores: fn() -> Vec<Box<dyn Chore>>) -> std::io::Result<Token> {
    process_exit::go_on();
    WORKER.get_or_try_init(|| Worker::start(chores)).map(|worker| worker.request_socket)
}

/// Sends a request to the process with this request socket, and calls `heard` on the worker with the answer. Does not wait. False without
/// a worker. `heard` is dropped if this process ends before.
pub(crate) fn ask(
    to: Token,
    words: Vec<u8>,
    due: Instant,
    heard: impl FnOnce(Answered) + Send + 'static,
) -> bool {
    process_exit::go_on();
    let Some(worker) = WORKER.get() else { return false };
    worker.requests.lock().push(Request { to, words, due, heard: Box::new(heard) });
    worker.wake.raise();
    true
}

/// Wakes the worker, so that all chores get a turn.
pub(crate) fn wake() {
    WORKER.get().into_iter().for_each(|worker| worker.wake.raise());
}

/// Whether a side thread reads for an answer of the worker's, and holds a reference to a peer group.
pub(crate) static READS: AtomicBool = AtomicBool::new(false);

/// Whether the worker, or a side thread for it, may hold references to peer groups now.
pub(crate) fn is_looking() -> bool {
    READS.load(Ordering::Acquire) || WORKER.get().is_some_and(|worker| worker.looking.load(Ordering::Acquire))
}

/// Ends the thread, which drops all that it holds. Waits for it at most [`END_WITHIN`].
pub(crate) fn end() {
    let Some(worker) = WORKER.get() else { return };
    worker.ending.store(true, Ordering::Release);
    worker.wake.raise();
    let thread = worker.thread.lock().take();
    let runs = || thread.as_ref().is_some_and(|thread| !thread.is_finished());
    thread::wait_while(END_WITHIN, Duration::from_micros(200), runs);
}

/// Starts the thread again after [`end`], with the same name of the request socket, which other processes know.
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
            request_socket: request_socket.name,
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
        *worker.thread.lock() = Some(thread);
        Ok(())
    }
}

/// The state of the thread.
struct Round {
    worker: Arc<Worker>,
    /// The number of this start, as counted in `beginnings`.
    beginning: u64,
    chores: Vec<Box<dyn Chore>>,
    request_socket: RequestSocket,
    /// Requests without an answer so far, by key.
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
                // A panic in one chore must not stop the others.
                guard::or_else(|| (), || chore.turn());
            }
            guard::or_else(|| (), || self.speak());
        }
        let Round { worker, beginning, mut chores, request_socket, asked, .. } = self;
        // Dropped first: a thread that begins again takes the socket's name, and callers without an answer ask again.
        drop((request_socket, asked));
        for chore in &mut chores {
            guard::or_else(|| (), || chore.end());
        }
        drop(chores);
        // A thread that has begun since then sets the flag itself.
        if worker.beginnings.load(Ordering::Acquire) == beginning {
            worker.looking.store(false, Ordering::Release);
        }
    }

    /// The living processes of peers, each once.
    fn lives(&self) -> Vec<Arc<Life>> {
        let mut lives: BTreeMap<u64, Arc<Life>> = BTreeMap::new();
        for life in self.chores.iter().flat_map(|chore| chore.lives()) {
            if life.ends.get().is_some() && !self.dead.contains(&life.process) {
                lives.entry(life.process).or_insert(life);
            }
        }
        lives.into_values().collect()
    }

    /// Sleeps until a chore is due or something wakes the worker. Returns the processes that have ended.
    fn wait(&self, lives: &[Arc<Life>]) -> rustix::io::Result<Vec<u64>> {
        let mut polled = self.request_socket.polled();
        let first = polled.len() + 1;
        polled.push(PollFd::new(&self.worker.wake, PollFlags::IN));
        let ends = lives.iter().filter_map(|life| life.ends.get());
        polled.extend(ends.flat_map(|ends| ends.iter().map(|end| PollFd::new(end, PollFlags::IN))));
        let due = self.chores.iter().filter_map(|chore| chore.due());
        let knocks = self.request_socket.knocks().then_some(BUSY_TICK);
        let deaf = self.request_socket.is_deaf.then_some(IDLE_TICK);
        let now = Instant::now();
        let asks = self.worker.requests.lock().iter().map(|one| one.due.saturating_duration_since(now)).min();
        let reserve = (!descriptor::fill_reserve()).then_some(IDLE_TICK);
        let tick = due.chain(knocks).chain(deaf).chain(asks).chain(reserve).min();
        let tick =
            tick.map(|tick| Timespec { tv_sec: tick.as_secs() as i64, tv_nsec: tick.subsec_nanos().into() });
        // No chore holds a peer group between turns.
        self.worker.looking.store(false, Ordering::Release);
        match poll(&mut polled, tick.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        self.worker.looking.store(true, Ordering::Release);
        self.worker.wake.lower();
        let (ends, _) = polled[first..].as_chunks::<2>();
        let has_ended = |ends: &[PollFd<'_>]| ends.iter().any(|end| !end.revents().is_empty());
        Ok(lives
            .iter()
            .zip(ends)
            .filter(|(_, ends)| has_ended(*ends))
            .map(|(life, _)| life.process)
            .collect())
    }

    /// Sends requests that are due, and answers those of other processes.
    fn speak(&mut self) {
        let now = Instant::now();
        let due: Vec<Request> = self.worker.requests.lock().extract_if(.., |one| one.due <= now).collect();
        for Request { to, words, heard, .. } in due {
            self.next += 1;
            self.asked.insert(self.next, heard);
            self.request_socket.ask(to, words, self.next);
        }
        let chores = &mut self.chores;
        // A panic in one answer must not prevent the others.
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
