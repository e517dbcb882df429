//! Host-local rendezvous: what ranks of a host do before NCCL makes their communicator from another.
//!
//! They do not know who else will be in it: before NCCL's call nobody knows the others' colors, and where the parent has no peer
//! group its ranks have never met. None may wait for one that has no Windlass or is on another host. But NCCL's own making is a barrier: it ends well on no rank before all ranks of the new communicator have called it.
//! So each of them first **enters** the host-local rendezvous, under a name that only ranks of the parent can know, and goes to NCCL once that
//! is acknowledged. When NCCL has made the communicator here, all who will ever come have entered; whoever **asks** first closes
//! the [roster](Roster), and all hear the same: how many there are. If these are all ranks of the communicator, they meet as those of a
//! [lazy communicator](super::children) do, each with its place in the roster; otherwise it has no peer group, and nobody waits.
//!
//! The host-local rendezvous is an abstract Unix socket of the host's network namespace: the first who comes listens, and its thread keeps the roster. Connections
//! stand until the session is over, and what a rank has to say to the others but its report it says there, so that nothing of it can be lost: who goes without a
//! word, as its process died, fails the others; who declines, or whom NCCL failed, leaves them with what NCCL gave them. The process that keeps
//! the roster, and hosts the session, may end before the others in good order, where it is no rank of the communicator or the session came to nothing. None has a peer group before all have confirmed;
//! so whoever loses that process before its own confirmation goes without one ([`WithoutHost`](super::participation::WithoutHost)). Whoever loses it later cannot know, and fails.
//!
//! Ranks of other versions of Windlass have other host-local rendezvous: they would not understand each other's reports.

use rustix::net::SocketAddrUnix;

use crate::negotiated::bytes::{Reader, Writer};
use crate::negotiated::{RANKS_MAX, Token, Version};

use super::children;

/// The first bytes of a connection to a host-local rendezvous.
const GREETING_MAGIC: [u8; 8] = *b"\x01wndlss\x03";
/// Bytes of a greeting: its name, and the caller's rank in the parent.
pub const GREETING_BYTES: usize = 8 + 16 + 4;
/// Bytes of what a rank says after it.
pub const MESSAGE_BYTES: usize = 5;
/// Ranks of one communicator on one host, also of one that is too large for a peer group; more can only be connections of programs that are no ranks.
const MEMBERS_MAX: usize = 1024;
/// Bytes of an answer.
pub const ANSWER_BYTES: usize = 1 + 4 + 16;

/// The name of the host-local rendezvous of a communicator that is made from another, by the [name](children::child) that its ranks share.
pub fn name(child: Token) -> Token {
    let Version { major, minor, patch } = Version::THIS;
    let mut words = Writer::default();
    words.token(child).u16(major).u16(minor).u16(patch);
    children::digest(b"windlass muster of", &words.finish())
}

/// Where the host-local rendezvous of this name listens, which only those can know who know the name.
pub fn address(name: Token) -> rustix::io::Result<SocketAddrUnix> {
    children::local_address("muster", name)
}

/// What a connection begins with.
pub fn greeting(name: Token, rank: u32) -> Vec<u8> {
    let mut bytes = Writer::default();
    bytes.raw(&GREETING_MAGIC).token(name).u32(rank);
    bytes.finish()
}

/// Whose greeting this is, by the rank in the parent; none if it is no greeting to this host-local rendezvous.
pub fn who(greeting: &[u8], name: Token) -> Option<u32> {
    let words = greeting.get(..GREETING_BYTES).filter(|words| words.starts_with(&GREETING_MAGIC))?;
    let mut reader = Reader::new(&words[8..]);
    let is_here = reader.token()? == name;
    reader.u32().filter(|_| is_here)
}

/// What a rank says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RosterMessage {
    /// NCCL has made the communicator, of so many ranks.
    Ask {
        /// How many.
        ranks: u32,
    },
    /// I have asked, and shall not come to the session, if there is one.
    Decline,
    /// I go: before I asked, because NCCL failed me or the communicator is none for a peer group; or because the answer was that not all are
    /// here; or after the outcome.
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
        let mut bytes = Writer::default();
        bytes.u8(kind).u32(ranks);
        bytes.finish()
    }

    /// Reads one.
    pub fn decode(bytes: &[u8]) -> Option<RosterMessage> {
        let mut reader = Reader::new(bytes);
        let message = match (reader.u8()?, reader.u32()?) {
            (1, ranks) => RosterMessage::Ask { ranks },
            (2, 0) => RosterMessage::Leave,
            (3, 0) => RosterMessage::Decline,
            _ => return None,
        };
        reader.finish()?;
        Some(message)
    }
}

/// What it hears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RosterAnswer {
    /// You are in the roster.
    Entered,
    /// All ranks of the communicator are, you in this place; they meet at the process listener that this opens.
    Complete {
        /// By the ranks in the parent.
        place: u32,
        /// Of the process that keeps the roster.
        process_listener: Token,
    },
    /// Not all are; or you cannot enter.
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
        let mut bytes = Writer::default();
        bytes.u8(kind).u32(place).token(process_listener);
        bytes.finish()
    }

    /// Reads one.
    pub fn decode(bytes: &[u8]) -> Option<RosterAnswer> {
        let mut reader = Reader::new(bytes);
        let (kind, place, process_listener) = (reader.u8()?, reader.u32()?, reader.token()?);
        reader.finish()?;
        match kind {
            1 => Some(RosterAnswer::Entered),
            2 if (place as usize) < RANKS_MAX => Some(RosterAnswer::Complete { place, process_listener }),
            3 => Some(RosterAnswer::Apart),
            _ => None,
        }
    }
}

/// Who has entered, by connections, as pure data.
#[derive(Debug, Default)]
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

#[derive(Debug)]
struct Closed {
    /// Connections in order of the ranks in the parent, also of those that have gone.
    places: Vec<u64>,
    /// Whether these are all ranks of the communicator, as who asked first said.
    is_complete: bool,
}

/// What follows from a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RosterCourse {
    /// All ranks are in the roster. If it was not known, those with a bit are expected in the session from now on.
    Meet {
        /// The asker's.
        place: u32,
        /// Of places, one bit each, at the first question.
        expected: Option<u64>,
    },
    /// Not all are.
    Apart,
}

/// Why a rank that is waited for does not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// It said so.
    Declines,
    /// Its process has died, as far as can be seen.
    Dies,
}

impl Roster {
    /// How many are there.
    pub fn present(&self) -> usize {
        self.present.len()
    }

    /// A rank of the parent enters. False if it cannot: the roster is closed or full. One that is there has come again, after NCCL
    /// refused its call, and its old line is about to close.
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

    /// A rank asks, of a communicator of so many ranks. None if it has not entered.
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

    /// A connection is gone, after this message if it sent one. Gives the place that is waited for in the session in vain.
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

    /// What is said is read back; anything else is nothing.
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

    /// All hear the same, whoever asks first, in the order of the parent; the session is told of once.
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

    /// A rank comes again before its old line is seen to close.
    #[test]
    fn comes_again() {
        let mut roster = Roster::default();
        assert!(roster.enter(1, 0) && roster.enter(2, 1) && roster.enter(3, 0));
        assert_eq!(roster.left(1, Some(RosterMessage::Leave)), None);
        assert_eq!(roster.ask(3, 2), Some(RosterCourse::Meet { place: 0, expected: Some(0b11) }));
    }

    /// Who has gone before the first question does not count; who goes then without having asked is missed, however it went.
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

    /// Where some are elsewhere nobody is missed.
    #[test]
    fn apart() {
        let mut roster = Roster::default();
        assert!(roster.enter(1, 0) && roster.enter(2, 1));
        assert_eq!(roster.ask(1, 4), Some(RosterCourse::Apart));
        assert_eq!(roster.ask(2, 4), Some(RosterCourse::Apart));
        assert_eq!(roster.left(1, None), None);
        // Who asks for other ranks than the first does not come.
        let mut other = Roster::default();
        assert!(other.enter(1, 0) && other.enter(2, 1));
        assert_eq!(other.ask(1, 2), Some(RosterCourse::Meet { place: 0, expected: Some(0b11) }));
        assert_eq!(other.ask(2, 3), Some(RosterCourse::Apart));
        assert_eq!(other.left(2, Some(RosterMessage::Leave)), Some((1, Missing::Declines)));
        // Too many for a peer group, and too many at all.
        let (mut large, many) = (Roster::default(), RANKS_MAX as u32 + 1);
        assert!((0..many).all(|rank| large.enter(rank.into(), rank)));
        assert_eq!(large.ask(3, many), Some(RosterCourse::Apart));
        let mut full = Roster::default();
        assert!((0..MEMBERS_MAX as u32).all(|rank| full.enter(rank.into(), rank)));
        assert!(!full.enter(9999, 9999));
    }
}
