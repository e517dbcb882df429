//! Grows the rings of a connection. The sender's process asks the receiver's, which lends memory for the ring, tells its own kernels and
//! answers with that memory. The sender maps it and tells its kernels. All of this runs on the background workers of both, while calls and
//! kernels go on. Each ring grows once. A receiver that gives none may still be in its init, or lack memory: it is asked again, ever more
//! seldom. Its answer may also have been lost, so it gives the same ring again. Where the memory cannot be mapped, the ring stays as it is.
//!
//! A communicator that goes to sleep forgets all larger rings. After that tags begin again, so its rings grow into zeros.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use windlass_base::lock::Mutex;
use windlass_base::thread;
use windlass_bootstrap::request_socket::Answer;
use windlass_transport::heap::{self, Heap, Holds, LeaseId, Peer, PeerRegion, Place, Region};
use windlass_transport::p2p::{Direction, P2p, Wire};

use super::requests::Others;

/// After how long a receiver that gave no ring is asked again: at first, and at most. Twice as long each time.
const AGAIN_AFTER: Duration = Duration::from_millis(500);
const AGAIN_AFTER_MOST: Duration = Duration::from_secs(60);
/// How often to look for senders without room, who say so after as long: so many times after a send was issued, and later. Sends of graphs, and
/// those behind other work, run at any time; the worker may not ask the driver, which may wait for the program.
const STALLED_EVERY: Duration = Duration::from_millis(250);
const STALLED_EVERY_LATER: Duration = Duration::from_secs(1);
const LOOKS: u32 = 5;
/// How long the worker waits for zeros. A device fills a ring in a tenth of a millisecond, unless it is full of waiting kernels.
const ZEROED_SOON: Duration = Duration::from_millis(2);

/// The growth of a rank's rings. A large message asks for its ring at once. A sender without room says so in memory that the worker reads.
#[derive(Debug)]
pub(super) struct Growing {
    others: Others,
    holds: Arc<Holds>,
    asked: AskedRings,
    /// How many looks for senders without room are still to come soon; 0 where nothing was ever sent.
    looks: AtomicU32,
    /// Taken when the peer group ends. Before, only the background worker uses it, also across driver calls.
    grown: Mutex<Grown>,
}

/// A ring at a peer, or for its messages: by wire and peer.
type Ring = (usize, u32);

/// The rings that were asked for. Only the background worker uses it.
#[derive(Debug, Default)]
struct AskedRings(Mutex<BTreeMap<Ring, Asked>>);

#[derive(Debug)]
struct Asked {
    /// When to ask again; none while an answer may come, and once it has come.
    again: Option<Instant>,
    /// How long after the next answer that gives none.
    after: Duration,
}

/// The memory that rings grew into: lent by this rank, and mapped from peers.
#[derive(Debug, Default)]
pub(super) struct Grown {
    regions: BTreeMap<Ring, Region>,
    peers: Vec<PeerRegion>,
    sleeps: bool,
    /// How often all rings were forgotten. Answers to questions from before are void.
    forgotten: u64,
}

fn index(wire: Wire) -> usize {
    match wire {
        Wire::Ll128 => 0,
        Wire::Bulk => 1,
    }
}

impl Grown {
    /// Called once no kernel of this rank uses the rings. Returns the leases of the lent regions.
    pub(super) fn end(self) -> Vec<LeaseId> {
        self.regions.values().map(|region| region.lease).collect()
    }
}

impl AskedRings {
    /// Returns whether to ask for a ring now, and counts it as asked for.
    fn ask(&self, ring: Ring, now: Instant) -> bool {
        let mut rings = self.0.lock();
        let asked = rings.entry(ring).or_insert(Asked { again: Some(now), after: AGAIN_AFTER });
        asked.again.take_if(|again| *again <= now).is_some()
    }

    /// Notes that the receiver gave none.
    fn deny(&self, ring: Ring, now: Instant) {
        if let Some(asked) = self.0.lock().get_mut(&ring) {
            asked.again = Some(now + asked.after);
            asked.after = AGAIN_AFTER_MOST.min(2 * asked.after);
        }
    }

    /// The time until a ring is to be asked for again.
    fn due(&self) -> Option<Duration> {
        let again = self.0.lock().values().filter_map(|asked| asked.again).min();
        again.map(|again| again.saturating_duration_since(Instant::now()))
    }
}

impl Growing {
    /// The growth of a rank whose graphs keep memory through `holds`.
    pub(super) fn new(others: Others, holds: Arc<Holds>) -> Growing {
        let (asked, looks, grown) = Default::default();
        Growing { others, holds, asked, looks, grown }
    }

    /// Notes that sends have been issued. Returns whether the background worker must be woken to look soon.
    pub(super) fn note_sends(&self) -> bool {
        self.looks.swap(LOOKS, Ordering::Relaxed) <= 1
    }

    /// The time until the next look for rings that should grow.
    pub(super) fn due(&self) -> Option<Duration> {
        let stalled = match self.looks.load(Ordering::Relaxed) {
            0 => None,
            1 => Some(STALLED_EVERY_LATER),
            _ => Some(STALLED_EVERY),
        };
        stalled.into_iter().chain(self.asked.due()).min()
    }

    /// Takes all grown memory, for the end of the peer group.
    pub(super) fn take(&mut self) -> Grown {
        std::mem::take(self.grown.get_mut())
    }

    /// Forgets all larger rings, and gives none while the communicator sleeps. No kernel runs on any rank. Graphs have no address of a ring.
    pub(super) fn sleep(&self, p2p: &P2p) {
        let mut grown = self.grown.lock();
        (grown.sleeps, grown.forgotten) = (true, grown.forgotten + 1);
        self.asked.0.lock().clear();
        p2p.forget_growth();
        grown.peers.drain(..).for_each(PeerRegion::end);
        // A failure was logged; the driver keeps the memory then.
        std::mem::take(&mut grown.regions).into_values().for_each(|region| drop(region.end()));
    }

    /// Lets rings grow again.
    pub(super) fn wake(&self) {
        self.grown.lock().sleeps = false;
    }

    /// How often all rings were forgotten.
    pub(super) fn forgotten(&self) -> u64 {
        self.grown.lock().forgotten
    }

    /// Bytes of the rings that this rank has lent.
    pub(super) fn lent_bytes(&self) -> u64 {
        self.grown.lock().regions.values().map(Region::bytes).sum()
    }

    /// Looks for rings that should grow and are to be asked for now; marks them as asked. Calls no driver.
    pub(super) fn wanted(&self, p2p: &P2p) -> Vec<(u32, Wire)> {
        let _ = self
            .looks
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |looks| (looks > 1).then(|| looks - 1));
        let (stalled, early) = (p2p.wants_growth(), p2p.asks_early());
        let now = Instant::now();
        let of = |wire, peers| {
            let asks = self.others.among(peers).filter(move |to| self.asked.ask((index(wire), *to), now));
            asks.map(move |to| (to, wire))
        };
        let of_ll128 = of(Wire::Ll128, stalled.ll128 | early.ll128);
        of_ll128.chain(of(Wire::Bulk, stalled.bulk | early.bulk)).collect()
    }

    /// On the receiver: lends the larger ring, tells this rank's kernels, and returns what the sender needs to map it. Before the first sleep the
    /// ring is not cleared (`growth` of the kernels crate says why), so nothing has to run on the device, which may be full of waiting kernels.
    /// Later it is given once it holds zeros, which the sender asks for again. Nothing is freed for a ring: without it messages go on.
    pub(super) fn grant(&self, from: u32, wire: Wire, p2p: &P2p, heap: &Arc<Heap>) -> Option<Answer> {
        self.lend(from, wire, p2p, heap)
            .inspect_err(|words| log::warn!("no larger ring for messages of rank {from}: {words}"))
            .ok()?
    }

    fn lend(&self, from: u32, wire: Wire, p2p: &P2p, heap: &Arc<Heap>) -> Result<Option<Answer>, String> {
        let Grown { regions, sleeps, forgotten, .. } = &mut *self.grown.lock();
        if *sleeps {
            return Ok(None);
        }
        let region = match regions.entry((index(wire), from)) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(place) => {
                let bytes = p2p.growth_bytes(wire);
                let lent = match *forgotten {
                    0 => heap.lend_as_it_is(bytes, &self.holds),
                    _ => heap.lend(bytes, &self.holds),
                };
                place.insert(lent.map_err(words)?)
            }
        };
        let is_late = || region.is_zeroed().is_ok_and(|is_zeroed| !is_zeroed);
        if !thread::wait_while(ZEROED_SOON, ZEROED_SOON / 40, is_late) {
            return Ok(None);
        }
        let answer = self.others.announced(region, from)?;
        if !p2p.has_grown(Direction::Receive, from, wire) {
            p2p.grow(Direction::Receive, from, wire, region.address(), p2p.growth_slots(wire))
                .map_err(words)?;
        }
        log::debug!("a larger ring for messages of rank {from}: {} bytes", p2p.growth_bytes(wire));
        Ok(Some(answer))
    }

    /// On the sender: maps the larger ring and tells this rank's kernels. `asked_at` is how often rings had been forgotten when it asked.
    pub(super) fn answered(
        &self,
        (to, wire): (u32, Wire),
        asked_at: u64,
        answer: Option<Answer>,
        p2p: &P2p,
        heap: &Arc<Heap>,
    ) {
        let mut grown = self.grown.lock();
        let taken = match answer.filter(|_| grown.forgotten == asked_at) {
            Some(answer) => self.map((to, wire), &answer, (p2p, heap), &mut grown),
            None => {
                log::debug!("no larger ring for messages to rank {to} yet: its process gives none");
                self.asked.deny((index(wire), to), Instant::now());
                Ok(())
            }
        };
        if let Err(words) = taken {
            log::warn!("no larger ring for messages to rank {to}: {words}");
        }
    }

    fn map(
        &self,
        (to, wire): (u32, Wire),
        answer: &Answer,
        (p2p, heap): (&P2p, &Arc<Heap>),
        grown: &mut Grown,
    ) -> Result<(), String> {
        let receiver = self.others.member(to)?;
        let place = Place::from_wire(answer.words[..].try_into().map_err(|_| "an answer that says nothing")?);
        let peer = Peer { process: receiver.process.number(), device_uuid: receiver.device.uuid };
        let memory = answer.descriptor.as_ref().map(AsFd::as_fd);
        let region = heap::map(peer, place, memory, heap, &self.holds).map_err(words)?;
        let (address, bytes) = (region.address, region.bytes);
        grown.peers.push(region);
        let expected = p2p.growth_bytes(wire);
        if bytes < expected {
            return Err(format!("it lends {bytes} bytes, expected {expected}"));
        }
        p2p.grow(Direction::Send, to, wire, address, p2p.growth_slots(wire)).map_err(words)
    }
}

fn words(error: impl std::fmt::Display) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A receiver that gave no ring is asked again ever more seldom, down to once a minute. While an answer may come, nobody asks.
    #[test]
    fn asked_again() {
        let (asked, mut now, moment) = (AskedRings::default(), Instant::now(), Duration::from_millis(1));
        for after_ms in [500, 1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000] {
            assert!(asked.ask((1, 3), now) && !asked.ask((1, 3), now + AGAIN_AFTER_MOST));
            asked.deny((1, 3), now);
            now += Duration::from_millis(after_ms);
            assert!(!asked.ask((1, 3), now - moment));
        }
        assert!(asked.ask((0, 3), now) && asked.ask((1, 2), now), "each ring for itself");
    }
}
