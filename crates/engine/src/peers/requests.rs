//! Sends requests and messages to the processes of the other ranks of a peer group, through the background [worker].

use std::sync::Arc;
use std::time::{Duration, Instant};

use windlass_bootstrap::negotiated::bytes::{Reader, Writer};
use windlass_bootstrap::negotiated::{Member, NegotiatedConfig, RANKS_MAX, Token};
use windlass_bootstrap::request_socket::{Answer, Answered};
use windlass_transport::heap::{self, Region};
use windlass_transport::p2p::Wire;

use crate::background::worker;

/// How long a message is repeated to a peer that does not answer: it may still be in its init, or have ended.
const TOLD_WITHIN: Duration = Duration::from_secs(60);
const TELL_EVERY: Duration = Duration::from_millis(100);

/// What one rank's process asks or tells another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub comm: Token,
    /// The rank that asks or tells.
    pub from: u32,
    /// The rank whose process hears it.
    pub to: u32,
    pub matter: Matter,
}

/// What a request is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Matter {
    /// The rank has failed.
    Failed,
    /// The rank's attempt of this number to materialize has failed.
    LostAttempt(u64),
    /// The rank wants the id of the communicator with this number.
    Id(u64),
    /// The rank wants a larger ring for its messages.
    Ring(Wire),
    /// The rank wants to map the other's region again.
    Region,
}

const MAGIC: &[u8; 8] = b"windlass";

impl Request {
    pub(super) fn encode(self) -> Vec<u8> {
        let (kind, value) = match self.matter {
            Matter::Failed => (0, 0),
            Matter::LostAttempt(attempt) => (1, attempt),
            Matter::Id(number) => (2, number),
            Matter::Ring(Wire::Ll128) => (3, 0),
            Matter::Ring(Wire::Bulk) => (4, 0),
            Matter::Region => (5, 0),
        };
        let Request { comm, from, to, .. } = self;
        Writer::default().raw(MAGIC).token(comm).u32(from).u32(to).u8(kind).u64(value).finish()
    }

    pub(super) fn decode(words: &[u8]) -> Option<Request> {
        let (magic, comm, from, to, kind, value) = Reader::whole(words, |reader| {
            Some((reader.raw()?, reader.token()?, reader.u32()?, reader.u32()?, reader.u8()?, reader.u64()?))
        })?;
        let matter = match (kind, value) {
            _ if magic != *MAGIC || from >= RANKS_MAX as u32 => return None,
            (0, 0) => Matter::Failed,
            (1, attempt) => Matter::LostAttempt(attempt),
            (2, number) => Matter::Id(number),
            (3, 0) => Matter::Ring(Wire::Ll128),
            (4, 0) => Matter::Ring(Wire::Bulk),
            (5, 0) => Matter::Region,
            _ => return None,
        };
        Some(Request { comm, from, to, matter })
    }
}

/// One rank's way to the other ranks of its peer group.
#[derive(Clone, Debug)]
pub(super) struct Others {
    /// What all ranks agreed on.
    pub(super) negotiated: Arc<NegotiatedConfig>,
    /// This rank.
    pub(super) rank: u32,
}

impl Others {
    /// The other ranks of this rank.
    pub(super) fn new(negotiated: Arc<NegotiatedConfig>, rank: u32) -> Others {
        Others { negotiated, rank }
    }

    /// Another rank.
    pub(super) fn member(&self, rank: u32) -> Result<&Member, String> {
        let member = self.negotiated.members.get(rank as usize);
        member.filter(|_| rank != self.rank).ok_or_else(|| format!("there is no other rank {rank}"))
    }

    /// Announces a region of this rank to another, as the answer to its request.
    pub(super) fn announced(&self, region: &Region, to: u32) -> Result<Answer, String> {
        let there = [heap::Member { rank: to, process: self.member(to)?.process.number() }];
        let (place, descriptor) = match self.negotiated.are_in_one_process(self.rank, to) {
            true => (region.announce_here(&there).map_err(|error| error.to_string())?, None),
            false => {
                let announcement = region.announce(&there).map_err(|error| error.to_string())?;
                (announcement.place, Some(announcement.descriptor))
            }
        };
        Ok(Answer { words: place.to_wire().to_vec(), descriptor })
    }

    /// The ranks whose bit is set.
    pub(super) fn among(&self, ranks: u64) -> impl Iterator<Item = u32> + use<> {
        (0..self.negotiated.members.len() as u32).filter(move |rank| ranks & (1 << rank) != 0)
    }

    /// Sends a request to a rank's process. Returns whether `heard` will be called, with an answer or with the reason why none came.
    pub(super) fn ask(&self, to: u32, matter: Matter, heard: impl FnOnce(Answered) + Send + 'static) -> bool {
        let request_socket = self.negotiated.members.get(to as usize).and_then(request_socket_of);
        request_socket.is_some_and(|there| worker::ask(there, self.words(to, matter), Instant::now(), heard))
    }

    /// Sends a message to every other rank, made by `words` for each. It is repeated until heard, also if this communicator ends at once.
    pub(super) fn tell(&self, matter: Matter) {
        let until = Instant::now() + TOLD_WITHIN;
        let others = self.negotiated.members.iter().filter(|member| member.rank != self.rank);
        others.for_each(|member| {
            request_socket_of(member).into_iter().for_each(|to| {
                tell(to, self.words(member.rank, matter), Instant::now(), until);
            });
        });
    }

    fn words(&self, to: u32, matter: Matter) -> Vec<u8> {
        Request { comm: self.negotiated.comm, from: self.rank, to, matter }.encode()
    }
}

/// Sends a message until it is answered, or until `until`.
fn tell(to: Token, words: Vec<u8>, due: Instant, until: Instant) {
    let again = words.clone();
    worker::ask(to, words, due, move |answer| {
        let due = Instant::now() + TELL_EVERY;
        if answer.is_err() && due < until {
            tell(to, again, due, until);
        }
    });
}

/// The request socket of a rank's process.
fn request_socket_of(member: &Member) -> Option<Token> {
    Some(Token(*member.attachment.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests survive encoding and decoding; other bytes are none.
    #[test]
    fn words() {
        let matters = [
            Matter::Failed,
            Matter::LostAttempt(7),
            Matter::Id(u64::MAX),
            Matter::Ring(Wire::Ll128),
            Matter::Ring(Wire::Bulk),
            Matter::Region,
        ];
        for matter in matters {
            let request = Request { comm: Token([7; 16]), from: 3, to: 1, matter };
            let bytes = request.encode();
            assert_eq!(Request::decode(&bytes), Some(request));
            assert_eq!(Request::decode(&bytes[1..]), None);
            assert_eq!(Request::decode(&Request { from: 16, ..request }.encode()), None);
        }
        let mut bytes = Request { comm: Token([7; 16]), from: 3, to: 1, matter: Matter::Failed }.encode();
        bytes[32] = 6;
        assert_eq!(Request::decode(&bytes), None);
        assert_eq!(Request::decode(&[]), None);
    }
}
