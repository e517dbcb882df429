//! Grows the rings of a connection. The sender's process asks the receiver's, which lends memory for the ring, tells its own kernels and
//! answers with that memory. The sender maps it and tells its kernels. All of this runs on the background workers of both, while calls and
//! kernels go on. Each ring grows once. A receiver that gives none may still be in its init, or lack memory: it is asked again.
//! Where the memory cannot be mapped, the ring stays as it is.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use windlass_bootstrap::negotiated::Token;
use windlass_bootstrap::negotiated::bytes::{Reader, Writer};
use windlass_bootstrap::request_socket::Answer;
use windlass_transport::heap::{
    self, Heap, Holds, LeaseId, Member, Peer, PeerHeap, PeerRegion, Place, Region,
};
use windlass_transport::p2p::{Direction, P2p, Wire};

use super::requests::Others;
use crate::features::recycling;

/// After how long a receiver that gave no ring is asked again.
const AGAIN_AFTER: Duration = Duration::from_millis(500);

/// The growth of a rank's rings.
#[derive(Debug)]
pub(super) struct Growing {
    others: Others,
    holds: Arc<Holds>,
    asked: AskedRings,
    /// Locked for a push, and taken when the peer group ends.
    grown: Mutex<Grown>,
}

/// The rings that need not be asked for now.
#[derive(Debug, Default)]
struct AskedRings {
    /// Connections whose ring was asked for, one bit per peer: of LL128, then of TMA bulk.
    peers: [AtomicU64; 2],
    /// When a receiver gave no ring, by wire and peer. Only the background worker uses it.
    denied: Mutex<BTreeMap<(usize, u32), Instant>>,
}

/// The memory that rings grew into: lent by this rank, and mapped from peers.
#[derive(Debug, Default)]
pub(super) struct Grown {
    regions: Vec<Region>,
    peers: Vec<PeerRegion>,
}

/// A request for a larger ring, of the rank that sends over it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GrowthRequest {
    pub comm: Token,
    pub from: u32,
    pub to: u32,
    pub wire: Wire,
}

impl GrowthRequest {
    pub(super) fn encode(self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.token(self.comm).u32(self.from).u32(self.to).u8(index(self.wire) as u8);
        writer.finish()
    }

    pub(super) fn decode(words: &[u8]) -> Option<GrowthRequest> {
        let mut reader = Reader::new(words);
        let (comm, from, to) = (reader.token()?, reader.u32()?, reader.u32()?);
        let wire = match reader.u8()? {
            0 => Wire::Ll128,
            1 => Wire::Bulk,
            _ => return None,
        };
        reader.finish()?;
        Some(GrowthRequest { comm, from, to, wire })
    }
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
        self.regions.iter().map(Region::lease).collect()
    }
}

impl AskedRings {
    fn denied(&self, wire: Wire, peer: u32) {
        self.lock().insert((index(wire), peer), Instant::now());
    }

    /// Lets receivers be asked again that gave no ring at least [`AGAIN_AFTER`] ago.
    fn ask_again(&self, wire: Wire) {
        self.lock().retain(|(of, peer), at| {
            let again = *of == index(wire) && at.elapsed() >= AGAIN_AFTER;
            if again {
                self.peers[*of].fetch_and(!(1 << peer), Ordering::Relaxed);
            }
            !again
        });
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(usize, u32), Instant>> {
        self.denied.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Growing {
    /// The growth of a rank whose graphs keep memory through `holds`.
    pub(super) fn new(others: Others, holds: Arc<Holds>) -> Growing {
        Growing { others, holds, asked: AskedRings::default(), grown: Mutex::default() }
    }

    /// Takes all grown memory, for the end of the peer group.
    pub(super) fn take(&mut self) -> Grown {
        std::mem::take(self.grown.get_mut().unwrap_or_else(PoisonError::into_inner))
    }

    fn lock(&self) -> MutexGuard<'_, Grown> {
        self.grown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rings that should grow and have not been asked for; marks them as asked. Calls no driver.
    pub(super) fn wanted(&self, p2p: &P2p) -> Vec<GrowthRequest> {
        let (stalled, early) = (p2p.wants_growth(), p2p.asks_early());
        let mut questions = Vec::new();
        for (wire, stalled, early) in
            [(Wire::Ll128, stalled.ll128, early.ll128), (Wire::Bulk, stalled.bulk, early.bulk)]
        {
            let asked = &self.asked.peers[index(wire)];
            self.asked.ask_again(wire);
            let new = (early | stalled) & !asked.load(Ordering::Relaxed);
            if new == 0 {
                continue;
            }
            asked.fetch_or(new, Ordering::Relaxed);
            let question =
                |to| GrowthRequest { comm: self.others.comm(), from: self.others.rank(), to, wire };
            questions.extend(self.others.among(new).map(question));
        }
        questions
    }

    /// On the receiver: lends the larger ring, tells this rank's kernels, and returns what the sender needs to map it. The ring is not cleared
    /// (`growth` of the kernels crate says why), so nothing has to run on the device, which may be full of waiting kernels.
    pub(super) fn grant(
        &self,
        question: GrowthRequest,
        p2p: &P2p,
        heap: &Arc<Heap>,
        make_room: impl Fn(),
    ) -> Option<Answer> {
        self.lend(question, p2p, heap, make_room)
            .inspect_err(|words| log::warn!("no larger ring for messages of rank {}: {words}", question.from))
            .ok()
    }

    fn lend(
        &self,
        GrowthRequest { from, wire, .. }: GrowthRequest,
        p2p: &P2p,
        heap: &Arc<Heap>,
        make_room: impl Fn(),
    ) -> Result<Answer, String> {
        let sender = self.others.member(from)?;
        if p2p.has_grown(Direction::Receive, from, wire) {
            return Err("it has grown before".into());
        }
        let lend = || heap.lend_as_it_is(p2p.growth_bytes(wire), &self.holds);
        let make_room = |is_enough: &mut dyn FnMut() -> bool| {
            make_room();
            is_enough();
        };
        let region = recycling::lend(heap, make_room, lend).map_err(words)?;
        let member = Member { rank: from, process: sender.process.number() };
        let (place, descriptor) = if self.others.is_near(from) {
            (region.announce_here(&[member]).map_err(words)?, None)
        } else {
            let announcement = region.announce(&[member]).map_err(words)?;
            (announcement.place, Some(announcement.descriptor))
        };
        let told = p2p.grow_receive(from, wire, region.address(), p2p.growth_slots(wire));
        // It was announced, so it stays lent until the sender has closed, whether it is used or not.
        self.lock().regions.push(region);
        told.map_err(words)?;
        log::debug!("a larger ring for messages of rank {from}: {} bytes", p2p.growth_bytes(wire));
        Ok(Answer { words: place.to_wire().to_vec(), descriptor })
    }

    /// On the sender: maps the larger ring and tells this rank's kernels.
    pub(super) fn answered(
        &self,
        question: GrowthRequest,
        answer: Option<Answer>,
        p2p: &P2p,
        heap: &Arc<Heap>,
    ) {
        let taken = match answer {
            Some(answer) => self.map(question, &answer, p2p, heap),
            None => {
                log::debug!(
                    "no larger ring for messages to rank {} yet: its process gives none",
                    question.to
                );
                self.asked.denied(question.wire, question.to);
                Ok(())
            }
        };
        if let Err(words) = taken {
            log::warn!("no larger ring for messages to rank {}: {words}", question.to);
        }
    }

    fn map(
        &self,
        GrowthRequest { to, wire, .. }: GrowthRequest,
        answer: &Answer,
        p2p: &P2p,
        heap: &Arc<Heap>,
    ) -> Result<(), String> {
        let receiver = self.others.member(to)?;
        let place = Place::from_wire(answer.words[..].try_into().map_err(|_| "an answer that says nothing")?);
        let region = match &answer.descriptor {
            Some(memory) => {
                let process = receiver.process.number();
                let peer = Peer { process, device_uuid: receiver.device.uuid };
                let peers = PeerHeap::of(peer).map_err(words)?;
                peers.map(place, memory.as_fd(), heap, &self.holds).map_err(words)?
            }
            None => heap::reach(place, heap).map_err(words)?,
        };
        let (address, bytes) = (region.address(), region.bytes());
        self.lock().peers.push(region);
        let expected = p2p.growth_bytes(wire);
        if bytes < expected {
            return Err(format!("it lends {bytes} bytes, expected {expected}"));
        }
        p2p.grow_send(to, wire, address, p2p.growth_slots(wire)).map_err(words)
    }
}

fn words(error: impl std::fmt::Display) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A receiver that gave no ring is asked again a while later.
    #[test]
    fn asked_again() {
        let asked = AskedRings::default();
        asked.peers[1].store(0b110, Ordering::Relaxed);
        let (now, wire) = (Instant::now(), index(Wire::Bulk));
        asked.denied.lock().unwrap().extend([((wire, 1), now - AGAIN_AFTER), ((wire, 2), now)]);
        asked.ask_again(Wire::Ll128);
        assert_eq!(asked.peers[1].load(Ordering::Relaxed), 0b110);
        asked.ask_again(Wire::Bulk);
        assert_eq!(asked.peers[1].load(Ordering::Relaxed), 0b100);
        assert_eq!(asked.denied.lock().unwrap().keys().collect::<Vec<_>>(), [&(wire, 2)]);
    }

    /// Requests survive encoding and decoding, and other bytes are refused.
    #[test]
    fn questions() {
        for wire in [Wire::Ll128, Wire::Bulk] {
            let question = GrowthRequest { comm: Token([7; 16]), from: 3, to: 1, wire };
            let mut bytes = question.encode();
            assert_eq!(GrowthRequest::decode(&bytes), Some(question));
            assert_eq!(GrowthRequest::decode(&bytes[1..]), None);
            *bytes.last_mut().unwrap() = 2;
            assert_eq!(GrowthRequest::decode(&bytes), None);
        }
        assert_eq!(GrowthRequest::decode(&[]), None);
    }
}
