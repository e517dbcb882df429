//! Ends a wait for a rank that is dead or has failed, once nothing has moved for `WINDLASS_HANG_TIMEOUT`: the kernels leave, and the
//! communicator has an asynchronous error. A death alone is no failure: what the dead rank had sent still arrives, however late.
//!
//! The detector must tell a waiting kernel from one that has not begun, and kernels do not report that they begin. But each wait first looks
//! for data, and only after many vain looks reads the word that tells it to leave. So the detector sets that word for a moment. A kernel
//! that waits reports its wait and leaves. One that has not begun misses the word, or finds its data if it begins just then. A kernel that
//! begins in that moment and waits for a living rank is lost by mistake; the moment comes once in the timeout.
//! The moment is short at first, as GPU threads see the word within microseconds. It grows after each without a report, since threads of the
//! simulator or of a shared GPU may not run for a while. All of this runs on the background worker.

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

/// How often a peer group with a dead rank is looked at.
const ASK_EVERY: Duration = Duration::from_millis(250);
/// How long kernels are asked who waits: at first, at most, and the factor by which it grows.
const ASKED_FOR: Duration = Duration::from_millis(10);
const ASKED_FOR_MOST: Duration = Duration::from_millis(500);
const LONGER: u32 = 8;
/// How long a kernel that has heard the question may take to leave.
const LEFT_AFTER: Duration = ASK_EVERY;

/// How far the work of a peer group has come.
#[derive(Debug, PartialEq, Eq)]
struct Moved {
    /// Groups and calls issued.
    runs: u64,
    /// Packets that collectives have received.
    received: u64,
    messages: Vec<Progress>,
}

/// Whether kernels are asked who waits for a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Asking {
    #[default]
    No,
    /// They are asked since then.
    Open(Instant),
    /// They are asked no longer since then, but a kernel may have heard the question just before.
    Closed(Instant),
}

/// The question to the kernels, and how long the next one will last.
#[derive(Debug)]
struct Probe {
    asking: Asking,
    lasts: Duration,
    /// How long nothing had moved before the question.
    still_for: Duration,
}

/// The next step of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    /// Leave the question open, and read nothing: a read may wait behind the program's copies.
    Wait,
    /// End the question.
    Close,
    /// Read answers that may still come.
    Read,
    /// Read the last answers: all kernels that heard the question have left.
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

    /// Ends a question that no kernel has answered.
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

/// The hang detectors of this process's peer groups, and which processes have ended.
#[derive(Debug, Default)]
pub(in crate::peers) struct HangDetectors {
    of: BTreeMap<(Token, u32), HangDetector>,
    /// Processes that have ended.
    dead: BTreeSet<u64>,
}

impl Chore for HangDetectors {
    fn due(&self) -> Option<Duration> {
        let looks = |one: &HangDetector| if one.is_asking() { BUSY_TICK } else { ASK_EVERY };
        self.of.values().filter(|one| !one.over).map(looks).min()
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
                // One question at a time: its end must not be late because another peer group is looked at.
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
        // Its next turn is due then.
        self.of.entry((comm, to)).or_default();
        Some(Answer { words: vec![1], descriptor: None })
    }

    /// Ends open questions with the worker's thread, since kernels may go on after it.
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

/// The detector of a peer group with a rank that is dead or has failed.
#[derive(Debug, Default)]
struct HangDetector {
    asked: Option<Instant>,
    /// Since when nothing has moved, and how far the work was then.
    still: Option<(Instant, Moved)>,
    probe: Probe,
    /// Whether its kernels were told to leave for good.
    over: bool,
}

impl HangDetector {
    /// Looks whether work is in flight and whether it moves. Without `may_ask`, a question to the kernels waits for a later look.
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
        // Taken before `is_idle`, so that calls issued meanwhile add their peers again.
        let mut awaited = peer_group.ranks().take_awaited();
        let idle = sequencer.is_idle();
        // A captured graph may run at any time again, without notice.
        if idle != Ok(true) || sequencer.is_captured() {
            awaited = peer_group.ranks().awaits_still(awaited);
        }
        if idle == Ok(true) {
            self.still = None;
            return;
        }
        // If no work in flight involves a dead rank, the wait is for a living one.
        let with_dead = dead.iter().any(|rank| awaited & (1 << rank) != 0);
        let received = native.as_ref().map_or(Ok(0), |native| native.progress());
        let moved = match (idle, p2p.progress(), received) {
            (Ok(false), Ok(messages), Ok(received)) if with_dead => Moved { runs, received, messages },
            // Nothing waits. Or the driver answers nothing, which the program will see itself.
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
                // The unanswered questions concerned work that has moved since.
                self.probe.lasts = ASKED_FOR;
            }
        }
    }

    /// Whether a question is open. The worker then ticks often, to close it in time.
    fn is_asking(&self) -> bool {
        self.probe.is_open()
    }

    /// Whether kernels are asked who waits, or were within [`LEFT_AFTER`].
    fn has_asked(&self) -> bool {
        !self.over && self.probe.asking != Asking::No
    }

    /// Reads the last answers when the worker ends. The question was closed [`LEFT_AFTER`] ago.
    fn take_back(&mut self, peer_group: &PeerGroup, dead: &[u32]) {
        let Some(Transports { sequencer, .. }) = peer_group.transports() else { return };
        if let Some(stuck) = self.hear(sequencer, Due::ReadLast) {
            end(peer_group, sequencer, dead, stuck, self.probe.still_for);
        }
    }

    /// Does the next step of a question, and returns the kernels' answers. If there is none in the end, the timeout starts anew.
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
            // The driver answers nothing, which the program will see itself.
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
    // More kernels may report while they leave.
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

    /// Kernels are asked for a moment, and longer after each question without an answer, within bounds. Answers are
    /// read once the question is closed, until all kernels that heard it have left.
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
