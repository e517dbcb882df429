//! A wait for a rank that is dead, or that said that it has failed, ends when nothing has moved for a configured time: then
//! the kernels leave, and the communicator has an asynchronous error. Death alone is no failure: what the dead had sent
//! arrives all the same, however long the application's own work before it takes.
//!
//! So the hang detector has to tell a kernel that waits from one that has not begun, and no kernel says that it begins. Every wait
//! looks for data first, though, and only after many looks in vain at the word that tells it to leave. So that word is set for a moment. A kernel that
//! waits reports what for and leaves. One that has not begun sees nothing of it, and gets its data if it begins just then. What a kernel
//! loses that begins in this moment and waits for a living rank is lost by mistake; the moment comes once in the configured time.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nccl_sys::ncclRemoteError;

use crate::config::config;
use crate::mailbox::Progress;
use crate::turns::{Stuck, Turns};

use super::Fabric;
use super::boxes::Boxes;

/// How often a fabric with a dead rank is asked.
const ASK_EVERY: Duration = Duration::from_millis(250);
/// A kernel sees an abort within microseconds.
pub(super) const LEAVES_WITHIN: Duration = Duration::from_secs(2);
/// As long as kernels are asked who waits: threads of the simulator may not run for a while.
const ASKED_FOR: Duration = Duration::from_millis(500);

/// How far all is.
#[derive(Debug, PartialEq, Eq)]
struct Moved {
    /// Groups and calls issued.
    runs: u64,
    /// Units that collectives have received.
    received: u64,
    messages: Vec<Progress>,
}

/// Whether kernels are asked who waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Probe {
    #[default]
    None,
    /// Since then; for so long nothing had moved.
    Open(Instant, Duration),
    /// No longer, but a kernel may have heard it just before.
    Closed(Duration),
}

/// A fabric with a dead rank, or one that has failed.
#[derive(Debug, Default)]
pub(super) struct Watched {
    asked: Option<Instant>,
    /// Since when nothing has moved, and how far all was then.
    still: Option<(Instant, Moved)>,
    probe: Probe,
    /// Its kernels were told to leave.
    over: bool,
}

impl Watched {
    /// Looks whether work is in flight and moves.
    pub fn look(&mut self, fabric: &Fabric, dead: &[u32]) {
        let Some(Boxes { mailbox, fast, turns, lacks: _ }) = &fabric.boxes else { return };
        if self.over || self.asked.is_some_and(|asked| asked.elapsed() < ASK_EVERY) {
            return;
        }
        self.asked = Some(Instant::now());
        if let Some((stuck, still_for)) = self.hear(turns) {
            self.over = true;
            return end(fabric, turns, dead, stuck, still_for);
        }
        let runs = fabric.runs.load(Ordering::Relaxed);
        // Taken before it is asked: what is called meanwhile adds itself.
        let awaited = fabric.awaited.swap(0, Ordering::Acquire);
        let idle = turns.is_idle();
        // What graphs once captured they may run again, and nothing tells when.
        if idle != Ok(true) || turns.is_captured() {
            fabric.awaited.fetch_or(awaited, Ordering::Relaxed);
        }
        // Of what is in flight none may be with the dead: then it is not they who are waited for.
        let awaited = fabric.awaited.load(Ordering::Relaxed);
        let with_dead = dead.iter().any(|rank| awaited & (1 << rank) != 0);
        if idle == Ok(true) {
            self.still = None;
            return;
        }
        let received = fast.as_ref().map_or(Ok(0), |fast| fast.progress());
        let moved = match (idle, mailbox.progress(), received) {
            (Ok(false), Ok(messages), Ok(received)) if with_dead => Moved { runs, received, messages },
            // Nothing waits; or the driver answers nothing, and its owner will see that.
            _ => {
                self.still = None;
                return;
            }
        };
        match &self.still {
            Some((since, before)) if *before == moved => {
                if since.elapsed() >= config().hang_timeout && self.probe == Probe::None {
                    self.probe = Probe::Open(Instant::now(), since.elapsed());
                    turns.ask_who_waits();
                }
            }
            _ => self.still = Some((Instant::now(), moved)),
        }
    }

    /// What kernels have answered, and how long nothing had moved before. Without an answer for a while none waits, and all begins anew.
    fn hear(&mut self, turns: &Turns) -> Option<(Stuck, Duration)> {
        let (is_over, still_for) = match self.probe {
            Probe::None => return None,
            Probe::Open(since, still_for) => (since.elapsed() >= ASKED_FOR, still_for),
            Probe::Closed(still_for) => (true, still_for),
        };
        match turns.stuck() {
            Ok(stuck) if !stuck.is_empty() => return Some((stuck, still_for)),
            Ok(_) if !is_over => return None,
            // Nobody has answered; or the driver answers nothing, and its owner will see that.
            _ => {}
        }
        self.probe = match self.probe {
            Probe::Open(..) => {
                turns.ask_no_more();
                Probe::Closed(still_for)
            }
            _ => {
                turns.have_asked();
                Probe::None
            }
        };
        self.still = None;
        None
    }
}

fn end(fabric: &Fabric, turns: &Turns, dead: &[u32], stuck: Stuck, still_for: Duration) {
    fabric.fail(ncclRemoteError);
    turns.abort();
    // Others of its kernels may report, too.
    let place = turns.wait_idle(LEAVES_WITHIN).and_then(|()| turns.stuck()).unwrap_or(stuck);
    log::error!(
        "rank {} of {}: rank {dead:?} is dead or has failed, and nothing has moved for {} ms: {place}",
        fabric.rank,
        fabric.contract.members.len(),
        still_for.as_millis()
    );
}
