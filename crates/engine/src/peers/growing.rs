//! Larger rings for a pair: the sender's process asks the receiver's, which lends memory for the ring, tells its own kernels
//! and answers with it; the sender maps it and tells its kernels. On the background worker of both; calls and kernels go on. Each
//! ring grows once. A receiver that gives none may not be through its init yet, or have no memory now: it is asked again.
//! What cannot be mapped leaves the ring as it is.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use windlass_bootstrap::negotiated::bytes::{Reader, Writer};
use windlass_bootstrap::negotiated::{self, Token};
use windlass_bootstrap::request_socket::Answer;
use windlass_transport::heap::{self, LeaseId, Member, Peer, PeerHeap, PeerRegion, Place, Region};
use windlass_transport::p2p::{Direction, P2p, Wire};

use super::PeerGroup;
use super::preparing::process_number;
use super::transports::Transports;
use super::{recycling, room};

/// How soon a receiver that gave none is asked again.
const AGAIN_AFTER: Duration = Duration::from_millis(500);

/// What rings grew into.
#[derive(Debug, Default)]
pub(super) struct Growing {
    /// Connections whose ring was asked for, a bit for each peer: LL128, then chunks.
    asked: [AtomicU64; 2],
    /// When a receiver gave none, by wire and peer. The background worker's alone.
    denied: Mutex<BTreeMap<(usize, u32), Instant>>,
    /// Held for a push, and taken when the peer group ends.
    grown: Mutex<Grown>,
}

#[derive(Debug, Default)]
struct Grown {
    regions: Vec<Region>,
    peers: Vec<PeerRegion>,
}

/// A ring that should be larger: this rank sends to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Question {
    pub comm: Token,
    pub from: u32,
    pub to: u32,
    pub wire: Wire,
}

impl Question {
    pub(super) fn encode(self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.token(self.comm).u32(self.from).u32(self.to).u8(index(self.wire) as u8);
        writer.finish()
    }

    pub(super) fn decode(words: &[u8]) -> Option<Question> {
        let mut reader = Reader::new(words);
        let (comm, from, to) = (reader.token()?, reader.u32()?, reader.u32()?);
        let wire = match reader.u8()? {
            0 => Wire::Ll128,
            1 => Wire::Bulk,
            _ => return None,
        };
        reader.finish()?;
        Some(Question { comm, from, to, wire })
    }
}

fn index(wire: Wire) -> usize {
    match wire {
        Wire::Ll128 => 0,
        Wire::Bulk => 1,
    }
}

impl Growing {
    /// Those who gave none a while ago may be asked.
    fn ask_again(&self, wire: Wire) {
        let mut denied = self.denied.lock().unwrap_or_else(PoisonError::into_inner);
        denied.retain(|(of, peer), at| {
            let again = *of == index(wire) && at.elapsed() >= AGAIN_AFTER;
            if again {
                self.asked[*of].fetch_and(!(1 << peer), Ordering::Relaxed);
            }
            !again
        });
    }

    /// Nobody of this rank uses the rings any more. Gives the leases.
    pub(super) fn end(&self) -> Vec<LeaseId> {
        let grown = std::mem::take(&mut *self.lock());
        grown.regions.iter().map(Region::lease).collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Grown> {
        self.grown.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PeerGroup {
    /// The rings that should be larger and were not asked for yet; now they are. Calls no driver.
    pub(super) fn ask_for_growth(&self) -> Vec<Question> {
        let Some(Transports { p2p, .. }) = &self.transports else { return Vec::new() };
        let (stalled, early) = (p2p.wants_growth(), p2p.asks_early());
        let mut questions = Vec::new();
        for (wire, stalled, early) in
            [(Wire::Ll128, stalled.ll128, early.ll128), (Wire::Bulk, stalled.bulk, early.bulk)]
        {
            let asked = &self.growing.asked[index(wire)];
            self.growing.ask_again(wire);
            let new = (early | stalled) & !asked.load(Ordering::Relaxed);
            if new == 0 {
                continue;
            }
            asked.fetch_or(new, Ordering::Relaxed);
            let peers = (0..self.negotiated.members.len() as u32).filter(|peer| new & (1 << peer) != 0);
            let question = |to| Question { comm: self.negotiated.comm, from: self.rank, to, wire };
            questions.extend(peers.map(question));
        }
        questions
    }

    /// As the receiver: lends the ring, tells this rank's kernels and gives what the sender needs. What the ring holds does not
    /// matter (`growth` of the kernels crate says why), so nothing has to run on the device, which may be full of waiting kernels.
    pub(super) fn grant_growth(&self, question: Question) -> Option<Answer> {
        self.grant(question)
            .inspect_err(|words| log::warn!("no larger ring for messages of rank {}: {words}", question.from))
            .ok()
    }

    fn grant(&self, Question { from, wire, .. }: Question) -> Result<Answer, String> {
        let (p2p, own) = self.parts()?;
        let sender = self.member(from)?;
        if p2p.has_grown(Direction::Receive, from, wire) {
            return Err("it has grown before".into());
        }
        let lend = || own.heap().lend_as_it_is(p2p.growth_bytes(wire), &self.holds);
        let make_room = |is_enough: &mut dyn FnMut() -> bool| {
            room::make();
            is_enough();
        };
        let region = recycling::lend(own.heap(), make_room, lend).map_err(words)?;
        let member = Member { rank: from, process: process_number(sender.process) };
        let (place, descriptor) = if self.is_near(from) {
            (region.announce_here(&[member]).map_err(words)?, None)
        } else {
            let announcement = region.announce(&[member]).map_err(words)?;
            (announcement.place, Some(announcement.descriptor))
        };
        let told = p2p.grow_receive(from, wire, region.address(), p2p.growth_slots(wire));
        // Announced: it stays until the sender has closed, whether it is used or not.
        self.growing.lock().regions.push(region);
        told.map_err(words)?;
        log::debug!("a larger ring for messages of rank {from}: {} bytes", p2p.growth_bytes(wire));
        Ok(Answer { words: place.to_wire().to_vec(), descriptor })
    }

    /// As the sender: maps the ring and tells this rank's kernels.
    pub(super) fn take_growth(&self, question: Question, answer: Option<Answer>) {
        let taken = match answer {
            Some(answer) => self.take(question, answer),
            None => {
                log::debug!(
                    "no larger ring for messages to rank {} yet: its process gives none",
                    question.to
                );
                let mut denied = self.growing.denied.lock().unwrap_or_else(PoisonError::into_inner);
                denied.insert((index(question.wire), question.to), Instant::now());
                Ok(())
            }
        };
        if let Err(words) = taken {
            log::warn!("no larger ring for messages to rank {}: {words}", question.to);
        }
    }

    fn take(&self, Question { to, wire, .. }: Question, answer: Answer) -> Result<(), String> {
        let (p2p, own) = self.parts()?;
        let receiver = self.member(to)?;
        let place = Place::from_wire(answer.words[..].try_into().map_err(|_| "an answer that says nothing")?);
        let region = match answer.descriptor {
            Some(memory) => {
                let process = process_number(receiver.process);
                let peer = Peer { process, device_uuid: receiver.device.uuid };
                let peers = PeerHeap::of(peer).map_err(words)?;
                peers.map(place, memory.as_fd(), own.heap(), &self.holds).map_err(words)?
            }
            None => heap::reach(place, own.heap()).map_err(words)?,
        };
        let (address, bytes) = (region.address(), region.bytes());
        self.growing.lock().peers.push(region);
        let expected = p2p.growth_bytes(wire);
        if bytes < expected {
            return Err(format!("it lends {bytes} bytes, expected {expected}"));
        }
        p2p.grow_send(to, wire, address, p2p.growth_slots(wire)).map_err(words)
    }

    fn parts(&self) -> Result<(&P2p, &Region), String> {
        let own = self.own.as_ref().map(|(region, _)| region);
        self.transports
            .as_ref()
            .map(|transports| &transports.p2p)
            .zip(own)
            .ok_or_else(|| "it is ending".into())
    }

    fn member(&self, rank: u32) -> Result<&negotiated::Member, String> {
        let member = self.negotiated.members.get(rank as usize);
        member.filter(|_| rank != self.rank).ok_or_else(|| format!("there is no other rank {rank}"))
    }

    fn is_near(&self, rank: u32) -> bool {
        let process = |rank: u32| self.negotiated.members.get(rank as usize).map(|member| member.process);
        process(rank) == process(self.rank)
    }
}

fn words(error: impl std::fmt::Display) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who gave none is asked again, a while later.
    #[test]
    fn asked_again() {
        let growing = Growing::default();
        growing.asked[1].store(0b110, Ordering::Relaxed);
        let (now, wire) = (Instant::now(), index(Wire::Bulk));
        growing.denied.lock().unwrap().extend([((wire, 1), now - AGAIN_AFTER), ((wire, 2), now)]);
        growing.ask_again(Wire::Ll128);
        assert_eq!(growing.asked[1].load(Ordering::Relaxed), 0b110);
        growing.ask_again(Wire::Bulk);
        assert_eq!(growing.asked[1].load(Ordering::Relaxed), 0b100);
        assert_eq!(growing.denied.lock().unwrap().keys().collect::<Vec<_>>(), [&(wire, 2)]);
    }

    /// Questions read back; anything else is none.
    #[test]
    fn questions() {
        for wire in [Wire::Ll128, Wire::Bulk] {
            let question = Question { comm: Token([7; 16]), from: 3, to: 1, wire };
            let mut bytes = question.encode();
            assert_eq!(Question::decode(&bytes), Some(question));
            assert_eq!(Question::decode(&bytes[1..]), None);
            *bytes.last_mut().unwrap() = 2;
            assert_eq!(Question::decode(&bytes), None);
        }
        assert_eq!(Question::decode(&[]), None);
    }
}
