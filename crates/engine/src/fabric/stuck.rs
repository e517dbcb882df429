//! A wait for a rank that is dead, or that said that it has failed, ends when nothing has moved for a configured time: then
//! the kernels leave, and the communicator has an asynchronous error. Death alone is no failure: what the dead had sent
//! arrives all the same.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nccl_sys::ncclRemoteError;

use crate::config::config;
use crate::mailbox::Progress;
use crate::turns::Turns;

use super::Fabric;
use super::boxes::Boxes;

/// How often a fabric with a dead rank is asked.
const ASK_EVERY: Duration = Duration::from_millis(250);
/// A kernel sees an abort within microseconds.
pub(super) const LEAVES_WITHIN: Duration = Duration::from_secs(2);

/// How far all is.
#[derive(Debug, PartialEq, Eq)]
struct Moved {
    /// Groups and calls issued.
    runs: u64,
    /// Units that collectives have received.
    received: u64,
    messages: Vec<Progress>,
}

/// A fabric with a dead rank, or one that has failed.
#[derive(Debug, Default)]
pub(super) struct Watched {
    asked: Option<Instant>,
    /// Since when nothing has moved, and how far all was then.
    still: Option<(Instant, Moved)>,
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
                if since.elapsed() >= config().stuck_after {
                    self.over = true;
                    end(fabric, turns, dead, since.elapsed());
                }
            }
            _ => self.still = Some((Instant::now(), moved)),
        }
    }
}

fn end(fabric: &Fabric, turns: &Turns, dead: &[u32], still_for: Duration) {
    fabric.fail(ncclRemoteError);
    turns.abort();
    let place = match turns.wait_idle(LEAVES_WITHIN).and_then(|()| turns.stuck()) {
        Ok(stuck) => stuck.to_string(),
        Err(refusal) => format!("where is not known: {refusal}"),
    };
    log::error!(
        "rank {} of {}: rank {dead:?} is dead or has failed, and nothing has moved for {} ms: {place}",
        fabric.rank,
        fabric.contract.members.len(),
        still_for.as_millis()
    );
}
