//! Ends a wait for a rank that is dead or has failed, once nothing has moved for `WINDLASS_HANG_TIMEOUT`: the kernels leave, and the
//! communicator has an asynchronous error. A death alone is no failure: what the dead rank had sent still arrives, however late.
//!
//! The detector must tell a waiting kernel from one that has not begun, and kernels do not report that they begin. But each wait first looks
//! for data, and only after many vain looks reads the word that tells it to leave. So the detector sets that word for a moment. A kernel
//! that waits reports its wait and leaves. One that has not begun misses the word, or finds its data if it begins just then. A kernel that
//! begins in that moment and waits for a living rank is lost by mistake; the moment comes once in the timeout.
//! The moment is short at first, as GPU threads see the word within microseconds. It grows after each without a report, since threads of the
//! simulator or of a shared GPU may not run for a while. All of this runs on the background worker, which does nothing else in that moment: its
//! other chores may take hundreds of milliseconds.

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
use crate::background::worker::Chore;
use crate::peers::group::PeerGroup;
use crate::peers::registry;
use crate::peers::requests::{Matter, Request};
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

/// The question to the kernels who waits for a rank, and how long the next one will last.
#[derive(Debug)]
struct Probe {
    /// Since when kernels are asked no longer, though one may have heard the question just before. None without a question.
    closed: Option<Instant>,
    lasts: Duration,
    /// How long nothing had moved before the question.
    still_for: Duration,
}

impl Default for Probe {
    fn default() -> Probe {
        Probe { closed: None, lasts: ASKED_FOR, still_for: Duration::ZERO }
    }
}

impl Probe {
    /// Asks for its time. Reads nothing meanwhile: a read may wait behind the program's copies.
    fn ask(&mut self, still_for: Duration, open: impl FnOnce(), close: impl FnOnce()) {
        open();
        std::thread::sleep(self.lasts);
        close();
        (self.closed, self.still_for) = (Some(Instant::now()), still_for);
    }

    /// Whether all kernels that heard the question have left.
    fn is_heard(&self) -> bool {
        self.closed.is_some_and(|closed| closed.elapsed() >= LEFT_AFTER)
    }

    /// Ends a question that no kernel has answered.
    fn end(&mut self) {
        self.closed = None;
        self.lasts = (self.lasts * LONGER).min(ASKED_FOR_MOST);
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
        self.of.values().any(|detector| !detector.over).then_some(ASK_EVERY)
    }

    fn lives(&self) -> Vec<Arc<Life>> {
        registry::alive().flat_map(|peer_group| peer_group.ranks.lives.to_vec()).collect()
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
                // One question at a time, as each takes the worker's time.
                let may_ask = !self.of.values().any(HangDetector::has_asked);
                self.of.entry(name).or_default().look(&peer_group, &dead, may_ask);
            }
        }
        self.of.retain(|name, _| names.contains(name));
    }

    fn answer(&mut self, words: &[u8]) -> Option<Answer> {
        let Request { comm, from, to, matter: Matter::Failed } = Request::decode(words)? else { return None };
        let peer_group = registry::find(comm, to)?;
        log::debug!("rank {to}: rank {from} says that it has failed");
        peer_group.ranks.lose(from);
        // Its next turn is due then.
        self.of.entry((comm, to)).or_default();
        Some(Answer { words: vec![1], descriptor: None })
    }

    /// Reads the last answers with the worker's thread, since kernels may go on after it.
    fn end(&mut self) {
        let asking = self.of.iter_mut().filter_map(|((comm, rank), detector)| {
            Some((registry::find(*comm, *rank)?, detector)).filter(|(_, detector)| detector.has_asked())
        });
        let asking: Vec<_> = asking.collect();
        if asking.is_empty() {
            return;
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
    let is_dead = |life: &&Arc<Life>| dead.contains(&life.process) || peer_group.ranks.has_lost(life.rank);
    peer_group.ranks.lives.iter().filter(is_dead).map(|life| life.rank).collect()
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
        let is_early = self.asked.is_some_and(|asked| asked.elapsed() < ASK_EVERY);
        if self.over || is_early {
            return;
        }
        self.asked = Some(Instant::now());
        if self.probe.closed.is_some() {
            self.hear(peer_group, sequencer, dead);
            return;
        }
        let runs = peer_group.ranks.runs();
        // Taken before `is_idle`, so that calls issued meanwhile add their peers again.
        let mut awaited = peer_group.ranks.take_awaited();
        let idle = sequencer.is_idle();
        // A captured graph may run at any time again, without notice.
        if idle != Ok(true) || sequencer.is_captured() {
            awaited = peer_group.ranks.awaits_still(awaited);
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
                    self.probe.ask(since.elapsed(), || sequencer.ask_who_waits(), || sequencer.ask_no_more());
                    self.hear(peer_group, sequencer, dead);
                }
            }
            _ => {
                self.still = Some((Instant::now(), moved));
                // The unanswered questions concerned work that has moved since.
                self.probe.lasts = ASKED_FOR;
            }
        }
    }

    /// Whether kernels were asked who waits, and answers may still come.
    fn has_asked(&self) -> bool {
        !self.over && self.probe.closed.is_some()
    }

    /// Reads the last answers when the worker ends. The question was closed [`LEFT_AFTER`] ago.
    fn take_back(&mut self, peer_group: &PeerGroup, dead: &[u32]) {
        let Some(Transports { sequencer, .. }) = peer_group.transports() else { return };
        self.hear(peer_group, sequencer, dead);
    }

    /// Reads the kernels' answers, and ends the peer group's work if there is one. If there is none in the end, the timeout starts anew.
    fn hear(&mut self, peer_group: &PeerGroup, sequencer: &Sequencer, dead: &[u32]) {
        // Looked at first: what has left by then has reported.
        let is_heard = self.probe.is_heard();
        match sequencer.stuck() {
            Ok(stuck) if !stuck.is_empty() => {
                self.over = true;
                end(peer_group, sequencer, dead, stuck, self.probe.still_for);
            }
            Ok(_) if !is_heard => {}
            // All have left. Or the driver answers nothing, which the program will see itself.
            _ => {
                sequencer.have_asked();
                self.probe.end();
                self.still = None;
            }
        }
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
    use std::cell::Cell;

    /// A question is closed by itself, whenever the worker looks next. Answers are read until all kernels that heard it have left. A question
    /// lasts longer after each without an answer, within bounds.
    #[test]
    fn asks() {
        let mut probe = Probe::default();
        assert!(!probe.is_heard());
        for lasts_ms in [10, 80] {
            let (opened, closed) = (Cell::new(None), Cell::new(None));
            let now = || Some(Instant::now());
            probe.ask(Duration::from_secs(60), || opened.set(now()), || closed.set(now()));
            let lasted = closed.get().unwrap() - opened.get().unwrap();
            assert!(lasted >= Duration::from_millis(lasts_ms), "{lasted:?}");
            probe.closed = probe.closed.map(|closed| closed - LEFT_AFTER);
            assert!(probe.is_heard());
            probe.end();
            assert!(!probe.is_heard());
        }
        for _ in 0..2 {
            assert_eq!(probe.lasts, ASKED_FOR_MOST);
            probe.end();
        }
    }
}
