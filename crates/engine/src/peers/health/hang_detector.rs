//! A wait for a rank that is dead, or that said that it has failed, ends when nothing has moved for a configured time: then
//! the kernels leave, and the communicator has an asynchronous error. Death alone is no failure: what the dead had sent
//! arrives all the same, however long the application's own work before it takes.
//!
//! So the hang detector has to tell a kernel that waits from one that has not begun, and no kernel says that it begins. Every wait
//! looks for data first, though, and only after many looks in vain at the word that tells it to leave. So that word is set for a moment. A kernel that
//! waits reports what for and leaves. One that has not begun sees nothing of it, and gets its data if it begins just then. What a kernel
//! loses that begins in this moment and waits for a living rank is lost by mistake; the moment comes once in the configured time.
//! It is short at first, as a GPU's threads hear it within microseconds, and longer after each in which nobody reported: threads of the
//! simulator, or of a GPU that others use too, may not run for a while.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_sys::ncclRemoteError;

use windlass_base::config::config;
use windlass_bootstrap::negotiated::Token;
use windlass_bootstrap::request_socket::Answer;
use windlass_transport::p2p::Progress;
use windlass_transport::sequencer::{Sequencer, Stuck};

use crate::background::life::Life;
use crate::background::worker::{BUSY_TICK, Chore};
use crate::peers::group::PeerGroup;
use crate::peers::health::error_propagation::Loss;
use crate::peers::registry;
use crate::peers::setup::transports::{LEAVES_WITHIN, Transports};

/// How often a peer group with a dead rank is asked.
const ASK_EVERY: Duration = Duration::from_millis(250);
/// As long as kernels are asked who waits: at first, and at most. It grows by this factor.
const ASKED_FOR: Duration = Duration::from_millis(10);
const ASKED_FOR_MOST: Duration = Duration::from_millis(500);
const LONGER: u32 = 8;
/// As long as a kernel may take to leave that has heard the question.
const LEFT_AFTER: Duration = ASK_EVERY;

/// How far all is.
#[derive(Debug, PartialEq, Eq)]
struct Moved {
    /// Groups and calls issued.
    runs: u64,
    /// Packets that collectives have received.
    received: u64,
    messages: Vec<Progress>,
}

/// Whether kernels are asked who waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Asking {
    #[default]
    No,
    /// Since then.
    Open(Instant),
    /// No longer since then, but a kernel may have heard it just before.
    Closed(Instant),
}

/// The question, and how long the next one will be.
#[derive(Debug)]
struct Probe {
    asking: Asking,
    lasts: Duration,
    /// For so long nothing had moved before.
    still_for: Duration,
}

/// What is to be done about a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    /// It is open, and nothing is read: that may wait behind copies of the application's.
    Wait,
    /// It ends.
    Close,
    /// Answers may come.
    Read,
    /// All who heard it have left.
    ReadLast,
}

impl Default for Probe {
    fn default() -> Probe {
        Probe { asking: Asking::No, lasts: ASKED_FOR, still_for: Duration::ZERO }
    }
}

impl Probe {
    fn open(&mut self, now: Instant, still_for: Duration) {
        (self.asking, self.still_for) = (Asking::Open(now), still_for);
    }

    fn close(&mut self, now: Instant) {
        self.asking = Asking::Closed(now);
    }

    /// Nobody has answered.
    fn end(&mut self) {
        self.asking = Asking::No;
        self.lasts = (self.lasts * LONGER).min(ASKED_FOR_MOST);
    }

    fn is_open(&self) -> bool {
        matches!(self.asking, Asking::Open(_))
    }

    fn due(&self, now: Instant) -> Option<Due> {
        let passed = |since| now.saturating_duration_since(since);
        match self.asking {
            Asking::No => None,
            Asking::Open(since) if passed(since) < self.lasts => Some(Due::Wait),
            Asking::Open(_) => Some(Due::Close),
            Asking::Closed(since) if passed(since) < LEFT_AFTER => Some(Due::Read),
            Asking::Closed(_) => Some(Due::ReadLast),
        }
    }
}

/// The detectors of this process's peer groups, and what is known of other ranks' ends.
#[derive(Debug, Default)]
pub(in crate::peers) struct HangDetectors {
    of: BTreeMap<(Token, u32), HangDetector>,
    /// Processes that have ended.
    dead: BTreeSet<u64>,
}

impl Chore for HangDetectors {
    fn due(&self) -> Option<Duration> {
        self.of.values().any(HangDetector::is_asking).then_some(BUSY_TICK)
    }

    fn lives(&self) -> Vec<Arc<Life>> {
        registry::alive().flat_map(|peer_group| peer_group.ranks().lives().to_vec()).collect()
    }

    fn ended(&mut self, process: u64) {
        self.dead.insert(process);
    }

    fn turn(&mut self) {
        let mut names = BTreeSet::new();
        for peer_group in registry::alive() {
            let name = (peer_group.negotiated().comm, peer_group.rank());
            names.insert(name);
            let dead = self.dead_of(&peer_group);
            if !dead.is_empty() {
                // One at a time: what another one waits for must not keep a question open.
                let may_ask = !self.of.values().any(HangDetector::has_asked);
                self.of.entry(name).or_default().look(&peer_group, &dead, may_ask);
            }
        }
        self.of.retain(|name, _| names.contains(name));
    }

    fn answer(&mut self, words: &[u8]) -> Option<Answer> {
        let Loss { comm, from, to } = Loss::decode(words)?;
        let peer_group = registry::find(comm, to)?;
        log::debug!("rank {to}: rank {from} says that it has failed");
        peer_group.ranks().lose(from);
        Some(Answer { words: vec![1], descriptor: None })
    }

    /// What kernels are asked ends with the thread: they may go on behind it.
    fn end(&mut self) {
        let asking = self.of.iter_mut().filter_map(|((comm, rank), detector)| {
            Some((registry::find(*comm, *rank)?, detector)).filter(|(_, detector)| detector.has_asked())
        });
        let asking: Vec<_> = asking.collect();
        if asking.is_empty() {
            return;
        }
        for (peer_group, _) in &asking {
            peer_group.transports().iter().for_each(|transports| transports.sequencer.ask_no_more());
        }
        std::thread::sleep(LEFT_AFTER);
        for (peer_group, detector) in asking {
            detector.take_back(&peer_group, &dead_of(&self.dead, &peer_group));
        }
    }
}

impl HangDetectors {
    fn dead_of(&self, peer_group: &PeerGroup) -> Vec<u32> {
        dead_of(&self.dead, peer_group)
    }
}

/// Ranks whose processes have ended, or that have said that they have failed.
fn dead_of(dead: &BTreeSet<u64>, peer_group: &PeerGroup) -> Vec<u32> {
    let is_dead = |life: &&Arc<Life>| dead.contains(&life.process) || peer_group.ranks().has_lost(life.rank);
    peer_group.ranks().lives().iter().filter(is_dead).map(|life| life.rank).collect()
}

/// Of a peer group with a dead rank, or one that has failed.
#[derive(Debug, Default)]
struct HangDetector {
    asked: Option<Instant>,
    /// Since when nothing has moved, and how far all was then.
    still: Option<(Instant, Moved)>,
    probe: Probe,
    /// Its kernels were told to leave.
    over: bool,
}

impl HangDetector {
    /// Looks whether work is in flight and moves. Unless it may ask kernels now, that comes at a later look.
    fn look(&mut self, peer_group: &PeerGroup, dead: &[u32], may_ask: bool) {
        let Some(Transports { p2p, native, sequencer, lacks: _ }) = peer_group.transports() else { return };
        let is_early = !self.is_asking() && self.asked.is_some_and(|asked| asked.elapsed() < ASK_EVERY);
        if self.over || is_early {
            return;
        }
        self.asked = Some(Instant::now());
        if let Some(due) = self.probe.due(Instant::now()) {
            if let Some(stuck) = self.hear(sequencer, due) {
                self.over = true;
                end(peer_group, sequencer, dead, stuck, self.probe.still_for);
            }
            return;
        }
        let runs = peer_group.ranks().runs();
        // Taken before it is asked: what is called meanwhile adds itself.
        let mut awaited = peer_group.ranks().take_awaited();
        let idle = sequencer.is_idle();
        // What graphs once captured they may run again, and nothing tells when.
        if idle != Ok(true) || sequencer.is_captured() {
            awaited = peer_group.ranks().awaits_still(awaited);
        }
        if idle == Ok(true) {
            self.still = None;
            return;
        }
        // Of what is in flight none may be with the dead: then it is not they who are waited for.
        let with_dead = dead.iter().any(|rank| awaited & (1 << rank) != 0);
        let received = native.as_ref().map_or(Ok(0), |native| native.progress());
        let moved = match (idle, p2p.progress(), received) {
            (Ok(false), Ok(messages), Ok(received)) if with_dead => Moved { runs, received, messages },
            // Nothing waits; or the driver answers nothing, and its owner will see that.
            _ => {
                self.still = None;
                return;
            }
        };
        match &self.still {
            Some((since, before)) if *before == moved => {
                if may_ask && since.elapsed() >= config().hang_timeout {
                    self.probe.open(Instant::now(), since.elapsed());
                    sequencer.ask_who_waits();
                }
            }
            _ => {
                self.still = Some((Instant::now(), moved));
                // What nobody answered for lay behind something that has moved since.
                self.probe.lasts = ASKED_FOR;
            }
        }
    }

    /// Whether kernels are asked who waits: not for longer than need be.
    fn is_asking(&self) -> bool {
        self.probe.is_open()
    }

    /// Whether kernels are asked who waits, or were a moment ago.
    fn has_asked(&self) -> bool {
        !self.over && self.probe.asking != Asking::No
    }

    /// The worker ends, and kernels may go on: who waits was asked no more a moment ago.
    fn take_back(&mut self, peer_group: &PeerGroup, dead: &[u32]) {
        let Some(Transports { sequencer, .. }) = peer_group.transports() else { return };
        if let Some(stuck) = self.hear(sequencer, Due::ReadLast) {
            end(peer_group, sequencer, dead, stuck, self.probe.still_for);
        }
    }

    /// What kernels have answered. Without an answer none waits, and all begins anew.
    fn hear(&mut self, sequencer: &Sequencer, due: Due) -> Option<Stuck> {
        if due == Due::Wait {
            return None;
        }
        if due == Due::Close {
            sequencer.ask_no_more();
            self.probe.close(Instant::now());
        }
        match (sequencer.stuck(), due) {
            (Ok(stuck), _) if !stuck.is_empty() => return Some(stuck),
            (Ok(_), Due::ReadLast) => {}
            (Ok(_), _) => return None,
            // The driver answers nothing, and its owner will see that.
            (Err(_), _) => {}
        }
        sequencer.have_asked();
        self.probe.end();
        self.still = None;
        None
    }
}

fn end(peer_group: &PeerGroup, sequencer: &Sequencer, dead: &[u32], stuck: Stuck, still_for: Duration) {
    peer_group.fail(ncclRemoteError);
    sequencer.abort();
    // Others of its kernels may report, too.
    let place = sequencer.wait_idle(LEAVES_WITHIN).and_then(|()| sequencer.stuck()).unwrap_or(stuck);
    log::error!(
        "rank {} of {}: rank {dead:?} is dead or has failed, and nothing has moved for {} ms: {place}",
        peer_group.rank(),
        peer_group.negotiated().members.len(),
        still_for.as_millis()
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kernels are asked for a moment, and for longer after each in which nobody answered, within bounds; what they answer is
    /// read when the question is over, until all who heard it have left.
    #[test]
    fn asks() {
        let mut probe = Probe::default();
        let mut now = Instant::now();
        assert_eq!(probe.due(now), None);
        for lasts_ms in [10, 80, 500, 500] {
            let lasts = Duration::from_millis(lasts_ms);
            probe.open(now, Duration::from_secs(60));
            assert!(probe.is_open());
            assert_eq!(probe.due(now + lasts - Duration::from_millis(1)), Some(Due::Wait));
            now += lasts;
            assert_eq!(probe.due(now), Some(Due::Close));
            probe.close(now);
            assert!(!probe.is_open());
            assert_eq!(probe.due(now), Some(Due::Read));
            now += LEFT_AFTER;
            assert_eq!(probe.due(now), Some(Due::ReadLast));
            probe.end();
            assert_eq!(probe.due(now), None);
        }
    }
}
