//! What the background [worker] does for the peer groups of this process: these chores, in this order.

use std::time::{Duration, Instant};

#[cfg(any(test, feature = "fuzzing"))]
use windlass_bootstrap::awaited::{Awaited, Question};
use windlass_bootstrap::negotiated::Token;
use windlass_bootstrap::request_socket::Answer;

use crate::features::memory::pool;
use windlass_base::observers::profiler::times;
use windlass_base::scoped::Counted;
use windlass_base::stats::count;

use super::registry;
use super::requests::{Matter, Request};
use crate::background::worker;
use crate::background::worker::{BUSY_TICK, Chore, IDLE_TICK, SOON_TICK};
use crate::features::recycling;
use crate::features::registration::registering;
use crate::features::windows;
use crate::peers::health::awaited::AwaitedRanks;
use crate::peers::health::hang_detector::HangDetectors;
use crate::peers::shutdown::{closing, draining};

/// So many pending launches are many.
const MANY_LAUNCHES: usize = 64;

/// The request socket of this process, where other ranks send requests. The first call starts the worker.
pub(super) fn request_socket() -> std::io::Result<Token> {
    times::settle_by(worker::wake);
    worker::request_socket(all).inspect(|name| count::request_socket(name.0))
}

fn all() -> Vec<Box<dyn Chore>> {
    vec![
        Box::new(Growth),
        Box::<HangDetectors>::default(),
        Box::new(Answers),
        Box::new(AwaitedRanks),
        // Frees blocks that leave the pool, once their windows are deregistered.
        Box::new(Plain { due: || pool::is_any_leaving().then_some(SOON_TICK), turn: windows::look }),
        Box::new(KeptMemory::new()),
        Box::<Drained>::default(),
        Box::new(Plain { due: times_due, turn: times::settle }),
        // Frees the memory of peer groups that this rank has closed, once the other ranks have closed them, too.
        Box::new(Plain { due: || closing::waits().then_some(IDLE_TICK), turn: closing::settle }),
    ]
}

/// Soon where many launches are pending: a device has few events that are cheap to make.
fn times_due() -> Option<Duration> {
    match times::pending() {
        0 => None,
        1..MANY_LAUNCHES => Some(BUSY_TICK),
        _ => Some(BUSY_TICK / 5),
    }
}

/// A chore that keeps nothing.
struct Plain {
    due: fn() -> Option<Duration>,
    turn: fn(),
}

impl Chore for Plain {
    fn due(&self) -> Option<Duration> {
        (self.due)()
    }

    fn turn(&mut self) {
        (self.turn)();
    }
}

/// Grows the rings whose senders lack room.
struct Growth;

impl Chore for Growth {
    fn due(&self) -> Option<Duration> {
        registry::alive().filter_map(|peer_group| peer_group.growing.due()).min()
    }

    fn turn(&mut self) {
        for peer_group in registry::alive() {
            let Some(transports) = peer_group.transports() else { continue };
            let (comm, from) = (peer_group.negotiated().comm, peer_group.rank());
            let asked_at = peer_group.growing.forgotten();
            for (to, wire) in peer_group.growing.wanted(&transports.p2p) {
                peer_group.others.ask(to, Matter::Ring(wire), move |answer| {
                    let Some(peer_group) = registry::find(comm, from) else { return };
                    let Some((p2p, heap)) = peer_group.p2p_and_heap() else { return };
                    peer_group.growing.answered((to, wire), asked_at, answer.ok(), p2p, heap);
                });
            }
        }
    }
}

/// Answers what other ranks' processes ask and tell. [`HangDetectors`] hears of failures.
struct Answers;

impl Chore for Answers {
    fn answer(&mut self, words: &[u8]) -> Option<Answer> {
        let Request { comm, from, to, matter } = Request::decode(words)?;
        let peer_group = registry::find(comm, to)?;
        match matter {
            Matter::Failed => None,
            Matter::Id(number) => peer_group.ids.answer(number),
            Matter::Ring(wire) => {
                let (p2p, heap) = peer_group.p2p_and_heap()?;
                peer_group.growing.grant(from, wire, p2p, heap)
            }
            Matter::Region if !peer_group.wakes() => None,
            Matter::Region => peer_group.others.announced(peer_group.region()?, from).ok(),
            Matter::LostAttempt(attempt) => {
                log::debug!(
                    "rank {to}: rank {from} says that its attempt {attempt} to have NCCL build a lazy communicator failed"
                );
                peer_group.attempts.hear_of_lost(attempt);
                Some(Answer { words: vec![1], descriptor: None })
            }
        }
    }
}

/// Deregisters memory that the program has freed; frees kept memory and ends cached communicators, by shortage and by age.
struct KeptMemory {
    looked: Instant,
    /// The pool keeps memory only while this value exists, that is while the worker runs.
    _looked_after: Counted<'static>,
}

impl KeptMemory {
    fn new() -> KeptMemory {
        KeptMemory { looked: Instant::now(), _looked_after: pool::look_after() }
    }
}

impl Chore for KeptMemory {
    fn due(&self) -> Option<Duration> {
        let is_any = recycling::is_any_to_look_after() || registering::alive().any(|one| one.has_entries());
        is_any.then_some(SOON_TICK)
    }

    fn turn(&mut self) {
        // Others may be due each millisecond, and a look at registered memory asks the driver.
        if self.looked.elapsed() >= SOON_TICK && self.due().is_some() {
            registering::alive().for_each(|one| one.look());
            recycling::look();
            self.looked = Instant::now();
        }
    }
}

/// Closes peer groups that have ended, once their kernels have left.
#[derive(Default)]
struct Drained {
    is_more: bool,
}

impl Chore for Drained {
    fn due(&self) -> Option<Duration> {
        self.is_more.then_some(BUSY_TICK)
    }

    fn turn(&mut self) {
        self.is_more = draining::look();
    }
}

/// For fuzzing: reads a request as chores do.
#[cfg(any(test, feature = "fuzzing"))]
pub fn fuzz_request(words: &[u8]) {
    if let Some(request) = Request::decode(words) {
        assert_eq!(request.encode(), words);
    }
    if let Some(question) = Question::decode(words) {
        assert_eq!(question.encode(), words);
    }
    let awaited = Awaited::decode(words);
    assert!(words.starts_with(&Awaited::encode(&awaited)));
}
