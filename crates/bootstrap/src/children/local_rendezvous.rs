//! Host-local rendezvous: how ranks of one host find out, around NCCL's split or shrink, whether all ranks of it are
//! here.
//!
//! Before NCCL's call no rank knows the others' colors, and ranks of a parent without a peer group have never met. None
//! may wait for a rank that has no Windlass or is on another host. But NCCL's making of a communicator is a barrier: it
//! succeeds on no rank before all ranks of the communicator have called it. So each rank first **enters** the
//! host-local rendezvous, under a name that only ranks of the parent can know, and calls NCCL once that is
//! acknowledged. When NCCL has made the communicator, all ranks that will ever enter have entered. The first rank that
//! **asks** closes the [roster](Roster), and all hear the same answer. If the roster has all ranks of the communicator,
//! they meet as those of a [lazy communicator](super) do, each with its place in the roster. Otherwise the
//! communicator has no peer group, and no rank waits.
//!
//! The rendezvous is an abstract Unix socket in the host's network namespace. The first rank that comes listens, and
//! the background thread of its process keeps the roster. Connections stand until the session is over. A rank declines
//! or leaves over its connection, so that no message of it is lost. If a connection ends without a message, as its
//! process died, the session fails. A rank that declines, or that NCCL failed, leaves the others on NCCL. The process
//! that keeps the roster also hosts the session. It may end before the others in good order: if it has no rank of the
//! communicator, or if the session came to nothing. No rank has a peer group before all have confirmed. So a rank that
//! loses that process before its own confirmation goes without one
//! ([`WithoutHost`](crate::participation::WithoutHost)). A rank that loses it later cannot know the outcome, and fails.
//!
//! Ranks of other versions of Windlass have other rendezvous, since they would not understand each other's reports.

use rustix::net::SocketAddrUnix;

use crate::negotiated::bytes::{Reader, Writer};
use crate::negotiated::{RANKS_MAX, Token, Version};

use crate::children;
use crate::id_tag::Id;

/// The first bytes of a connection to a host-local rendezvous.
const GREETING_MAGIC: [u8; 8] = *b"\x01wndlss\x03";
/// Bytes of a greeting: its name, and the caller's rank in the parent.
pub const GREETING_BYTES: usize = 8 + 16 + 4;
/// Bytes of a rank's message after the greeting.
pub const MESSAGE_BYTES: usize = 5;
/// The most ranks of one communicator on one host, also of one too large for a peer group. More connections can only be
/// those of programs that are no ranks.
const MEMBERS_MAX: usize = 1024;
/// Bytes of an answer.
pub const ANSWER_BYTES: usize = 1 + 4 + 16;

/// The name of the host-local rendezvous of the child communicator with this [name](children::child).
pub fn name(child: Token) -> Token {
    let Version { major, minor, patch } = Version::THIS;
    let words = Writer::default().token(child).u16(major).u16(minor).u16(patch).finish();
    children::digest(b"windlass muster of", &words)
}

/// The name of a communicator that is made from these ids, where they have no token.
pub fn name_of_ids(ids: &[Id]) -> Token {
    children::digest(b"windlass ids", &ids.concat())
}

/// The address of the host-local rendezvous of this name. Only processes that know the name can know it.
pub fn address(name: Token) -> rustix::io::Result<SocketAddrUnix> {
    children::local_address("muster", name)
}

/// The first bytes of a connection to the host-local rendezvous of this name, by this rank of the parent.
pub fn greeting(name: Token, rank: u32) -> Vec<u8> {
    Writer::default().raw(&GREETING_MAGIC).token(name).u32(rank).finish()
}

/// The rank in the parent of a greeting. None if it is no greeting to the host-local rendezvous of this name.
pub fn who(greeting: &[u8], name: Token) -> Option<u32> {
    let words = greeting.get(..GREETING_BYTES).filter(|words| words.starts_with(&GREETING_MAGIC))?;
    let mut reader = Reader::new(&words[8..]);
    let is_here = reader.token()? == name;
    reader.u32().filter(|_| is_here)
}

/// A message of a rank after its greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RosterMessage {
    /// NCCL has made the communicator, of so many ranks.
    Ask {
        /// The ranks of the communicator.
        ranks: u32,
    },
    /// The rank has asked, and does not come to the session, if there is one.
    Decline,
    /// The rank leaves: before it asked, as NCCL failed it or the communicator gets no peer group; or after the answer
    /// that not all ranks are here; or after the outcome.
    Leave,
}

impl RosterMessage {
    /// The bytes.
    pub fn encode(&self) -> Vec<u8> {
        let (kind, ranks) = match self {
            RosterMessage::Ask { ranks } => (1, *ranks),
            RosterMessage::Leave => (2, 0),
            RosterMessage::Decline => (3, 0),
        };
        Writer::default().u8(kind).u32(ranks).finish()
    }

    /// Reads a message of exactly [`MESSAGE_BYTES`] bytes.
    pub fn decode(bytes: &[u8]) -> Option<RosterMessage> {
        match Reader::whole(bytes, |reader| Some((reader.u8()?, reader.u32()?)))? {
            (1, ranks) => Some(RosterMessage::Ask { ranks }),
            (2, 0) => Some(RosterMessage::Leave),
            (3, 0) => Some(RosterMessage::Decline),
            _ => None,
        }
    }
}

/// An answer to a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RosterAnswer {
    /// The rank is in the roster.
    Entered,
    /// All ranks of the communicator are in the roster. They meet at this process listener.
    Complete {
        /// The rank's place in the roster, by the ranks in the parent.
        place: u32,
        /// The secret of the process listener of the process that keeps the roster.
        process_listener: Token,
    },
    /// Not all ranks are in the roster, or this one cannot enter.
    Apart,
}

impl RosterAnswer {
    /// The bytes.
    pub fn encode(&self) -> Vec<u8> {
        let (kind, place, process_listener) = match self {
            RosterAnswer::Entered => (1, 0, children::NOBODY),
            RosterAnswer::Complete { place, process_listener } => (2, *place, *process_listener),
            RosterAnswer::Apart => (3, 0, children::NOBODY),
        };
        Writer::default().u8(kind).u32(place).token(process_listener).finish()
    }

    /// Reads an answer of exactly [`ANSWER_BYTES`] bytes.
    pub fn decode(bytes: &[u8]) -> Option<RosterAnswer> {
        match Reader::whole(bytes, |reader| Some((reader.u8()?, reader.u32()?, reader.token()?)))? {
            (1, ..) => Some(RosterAnswer::Entered),
            (2, place, process_listener) if (place as usize) < RANKS_MAX => {
                Some(RosterAnswer::Complete { place, process_listener })
            }
            (3, ..) => Some(RosterAnswer::Apart),
            _ => None,
        }
    }
}

/// The ranks that have entered, by their connections: pure data.
#[derive(Clone, Debug, Default)]
pub struct Roster {
    present: Vec<RosterMember>,
    closed: Option<Closed>,
}

#[derive(Clone, Copy, Debug)]
struct RosterMember {
    key: u64,
    rank: u32,
    has_asked: bool,
}

#[derive(Clone, Debug)]
struct Closed {
    /// Connections in the order of the ranks in the parent, also of ranks that have gone.
    places: Vec<u64>,
    /// Whether these are all ranks of the communicator, as the first rank that asked said.
    is_complete: bool,
}

/// What follows when a rank asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RosterCourse {
    /// All ranks are in the roster.
    Meet {
        /// The place of the rank that asked.
        place: u32,
        /// At the first question: the places that the session expects from now on, one bit each.
        expected: Option<u64>,
    },
    /// Not all ranks are in the roster.
    Apart,
}

/// Why a rank that the session waits for does not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// Its rank said that it does not come.
    Declines,
    /// Its process has died, as far as can be seen.
    Dies,
}

impl Roster {
    /// How many ranks are connected.
    pub fn present(&self) -> usize {
        self.present.len()
    }

    /// Enters a rank of the parent. False if the roster is closed or full. A rank that is in it comes again after NCCL
    /// refused its call, and its old connection is about to close.
    #[must_use]
    pub fn enter(&mut self, key: u64, rank: u32) -> bool {
        if self.closed.is_some() {
            return false;
        }
        if let Some(member) = self.present.iter_mut().find(|member| member.rank == rank) {
            member.key = key;
            return true;
        }
        let enters = self.present.len() < MEMBERS_MAX;
        if enters {
            self.present.push(RosterMember { key, rank, has_asked: false });
        }
        enters
    }

    /// A rank asks about a communicator of `ranks` ranks. None if it has not entered.
    pub fn ask(&mut self, key: u64, ranks: u32) -> Option<RosterCourse> {
        let asker = self.present.iter().position(|member| member.key == key)?;
        let first = self.closed.is_none();
        let present = &self.present;
        let closed = self.closed.get_or_insert_with(|| {
            let mut members = present.clone();
            members.sort_by_key(|member| member.rank);
            let places: Vec<u64> = members.iter().map(|member| member.key).collect();
            let is_complete = places.len() == ranks as usize && places.len() <= RANKS_MAX;
            Closed { places, is_complete }
        });
        let place = closed.places.iter().position(|place| *place == key)?;
        if !closed.is_complete || closed.places.len() != ranks as usize {
            return Some(RosterCourse::Apart);
        }
        self.present[asker].has_asked = true;
        let expected = first.then(|| (1 << closed.places.len()) - 1);
        Some(RosterCourse::Meet { place: place as u32, expected })
    }

    /// A connection has closed, after this message if it sent one. Returns the place for which the session waits in
    /// vain, if any.
    pub fn left(&mut self, key: u64, message: Option<RosterMessage>) -> Option<(u32, Missing)> {
        let index = self.present.iter().position(|member| member.key == key)?;
        let member = self.present.swap_remove(index);
        let closed = self.closed.as_ref().filter(|closed| closed.is_complete)?;
        let place = closed.places.iter().position(|place| *place == key)? as u32;
        match message {
            Some(RosterMessage::Leave) if member.has_asked => None,
            Some(RosterMessage::Leave | RosterMessage::Decline) => Some((place, Missing::Declines)),
            _ => Some((place, Missing::Dies)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: Token = Token([5; 16]);

    /// Messages are read back; other bytes are none.
    #[test]
    fn words() {
        let bytes = greeting(NAME, 700);
        assert_eq!(bytes.len(), GREETING_BYTES);
        assert_eq!(who(&bytes, NAME), Some(700));
        assert_eq!(who(&bytes, children::NOBODY), None);
        assert_eq!(who(&bytes[..GREETING_BYTES - 1], NAME), None);
        for wrong in 0..24 {
            let mut bytes = bytes.clone();
            bytes[wrong] ^= 1;
            assert_eq!(who(&bytes, NAME), None);
        }
        for message in [RosterMessage::Ask { ranks: 8 }, RosterMessage::Leave, RosterMessage::Decline] {
            assert_eq!(message.encode().len(), MESSAGE_BYTES);
            assert_eq!(RosterMessage::decode(&message.encode()), Some(message));
        }
        assert_eq!(RosterMessage::decode(&[3, 0, 0, 0, 1]), None);
        assert_eq!(RosterMessage::decode(&[4, 0, 0, 0, 0]), None);
        let place = |place| RosterAnswer::Complete { place, process_listener: NAME };
        for answer in [RosterAnswer::Entered, place(15), RosterAnswer::Apart] {
            assert_eq!(answer.encode().len(), ANSWER_BYTES);
            assert_eq!(RosterAnswer::decode(&answer.encode()), Some(answer));
        }
        assert_eq!(RosterAnswer::decode(&place(16).encode()), None);
        assert_ne!(address(NAME).unwrap(), children::address(NAME).unwrap());
    }

    /// All ranks hear the same, whoever asks first, in the order of the parent. The session expects them once.
    #[test]
    fn complete() {
        let mut roster = Roster::default();
        assert!(roster.enter(10, 70) && roster.enter(11, 3) && roster.enter(12, 9));
        assert_eq!(roster.ask(13, 3), None);
        assert_eq!(roster.ask(12, 3), Some(RosterCourse::Meet { place: 1, expected: Some(0b111) }));
        assert!(!roster.enter(13, 4), "closed");
        assert_eq!(roster.ask(10, 3), Some(RosterCourse::Meet { place: 2, expected: None }));
        assert_eq!(roster.left(12, Some(RosterMessage::Leave)), None);
        assert_eq!(roster.left(10, None), Some((2, Missing::Dies)));
        assert_eq!(roster.ask(11, 3), Some(RosterCourse::Meet { place: 0, expected: None }));
        assert_eq!(roster.left(11, Some(RosterMessage::Decline)), Some((0, Missing::Declines)));
        assert_eq!(roster.left(11, None), None);
    }

    /// A rank comes again before its old connection is seen to close.
    #[test]
    fn comes_again() {
        let mut roster = Roster::default();
        assert!(roster.enter(1, 0) && roster.enter(2, 1) && roster.enter(3, 0));
        assert_eq!(roster.left(1, Some(RosterMessage::Leave)), None);
        assert_eq!(roster.ask(3, 2), Some(RosterCourse::Meet { place: 0, expected: Some(0b11) }));
    }

    /// A rank that leaves before the first question does not count. One that leaves later without having asked is
    /// missed.
    #[test]
    fn gone() {
        for (message, missing) in [(None, Missing::Dies), (Some(RosterMessage::Leave), Missing::Declines)] {
            let mut roster = Roster::default();
            assert!(roster.enter(1, 0) && roster.enter(2, 1) && roster.enter(3, 2));
            assert_eq!(roster.left(1, None), None);
            assert_eq!(roster.ask(2, 2), Some(RosterCourse::Meet { place: 0, expected: Some(0b11) }));
            assert_eq!(roster.left(3, message), Some((1, missing)));
        }
    }

    /// If some ranks are elsewhere, none is missed.
    #[test]
    fn apart() {
        let mut roster = Roster::default();
        assert!(roster.enter(1, 0) && roster.enter(2, 1));
        assert_eq!(roster.ask(1, 4), Some(RosterCourse::Apart));
        assert_eq!(roster.ask(2, 4), Some(RosterCourse::Apart));
        assert_eq!(roster.left(1, None), None);
        // A rank that asks with another number than the first does not come.
        let mut other = Roster::default();
        assert!(other.enter(1, 0) && other.enter(2, 1));
        assert_eq!(other.ask(1, 2), Some(RosterCourse::Meet { place: 0, expected: Some(0b11) }));
        assert_eq!(other.ask(2, 3), Some(RosterCourse::Apart));
        assert_eq!(other.left(2, Some(RosterMessage::Leave)), Some((1, Missing::Declines)));
        // Too many ranks for a peer group, and too many for a roster.
        let (mut large, many) = (Roster::default(), RANKS_MAX as u32 + 1);
        assert!((0..many).all(|rank| large.enter(rank.into(), rank)));
        assert_eq!(large.ask(3, many), Some(RosterCourse::Apart));
        let mut full = Roster::default();
        assert!((0..MEMBERS_MAX as u32).all(|rank| full.enter(rank.into(), rank)));
        assert!(!full.enter(9999, 9999));
    }
}
