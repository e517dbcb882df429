//! How the ranks of communicators that are made from another by a split or shrink find each other, where they have met before.
//!
//! There is no id with a port in it. But the parent's negotiated config says where each rank's process has its **process listener**, a Unix
//! socket that the background thread listens at for as long as the process lives.
//!
//! **Rounds.** Before a call whose communicators may be lazy all ranks that make it say at one process listener where they
//! go and what they want ([`super::colors`]), and hear what all said: at the process listener of rank 0 for a split, in which all take part, of the
//! lowest survivor for a shrink. A rank that cannot wait only says that it goes to NCCL. One whose process dies before its message, or
//! that withdraws it, ends the round for all; one that dies after it does not. Whoever hosts hears the answer last, so that it may
//! be gone then.
//!
//! **Lazy communicators.** All their ranks know each other from the round. They meet at the process listener of their own first rank: a rank of the
//! parent that is not in one has nothing to do with it, and may have ended. Each says one thing there: it
//! [reports](super::message::FromRank::Report), or [declines](super::message::FromRank::Decline). The host sees those die that have not come
//! yet by their pidfds. So a session whose missing ranks cannot come any more [ends](super::arrivals), and nothing is timed.
//!
//! **Those that NCCL makes** have a [roster](super::local_rendezvous).
//!
//! The rules of [`super`] hold but for two. There is no root of NCCL's behind a process listener, so that no rank goes to NCCL
//! without a message: it declines, which is tried as long as the host is there. And the host's death is a rank's: whoever
//! finds no process listener fails, as those do who lose it, unless they come from a roster, where NCCL's communicator is
//! there whatever becomes of the host.

use rustix::net::SocketAddrUnix;
use sha2::{Digest, Sha256};

use crate::negotiated::Token;
use crate::negotiated::bytes::{Reader, Writer};

use super::message::FromRank;
use super::outcome::{Failure, SessionOutcome};

/// The name of no communicator.
pub const NOBODY: Token = Token([0; 16]);
/// The first bytes of a connection to a process listener.
pub const GREETING_MAGIC: [u8; 8] = *b"\x01wndlss\x02";
/// Bytes of a greeting.
pub const GREETING_BYTES: usize = 8 + 3 * 16 + 4;

/// A call that makes communicators from another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Making {
    /// So many splits of this parent came before.
    Split {
        /// How many.
        count: u32,
    },
    /// A shrink that leaves out these ranks of this parent, which so many like it came before.
    Shrink {
        /// How many.
        count: u32,
        /// In order, each once.
        excluded: Vec<u32>,
    },
}

impl Making {
    /// The name of this call on the parent with this token.
    pub fn name(&self, parent: Token) -> Token {
        let mut words = Writer::default();
        words.token(parent);
        match self {
            Making::Split { count } => {
                words.u8(1).u32(*count);
            }
            Making::Shrink { count, excluded } => {
                words.u8(2).u32(*count);
                excluded.iter().for_each(|rank| {
                    words.u32(*rank);
                });
            }
        }
        digest(b"windlass call", &words.finish())
    }
}

/// The name of the communicator that a call makes of the ranks with this color.
pub fn child(call: Token, color: i32) -> Token {
    let mut words = Writer::default();
    words.token(call).u32(color as u32);
    digest(b"windlass child", &words.finish())
}

/// The name of the round in which the ranks that make this call tell each other what they want of it.
pub fn round(call: Token) -> Token {
    digest(b"windlass round", &call.0)
}

/// What the negotiated config of a communicator bears as its token.
pub fn comm_token(child: Token) -> Token {
    digest(b"windlass birth", &child.0)
}

/// Where a process listener listens, by what opens it: the name can be seen by everyone on the host, and opens nothing.
pub fn address(process_listener: Token) -> rustix::io::Result<SocketAddrUnix> {
    local_address("lobby", process_listener)
}

/// The abstract name of a socket of ours, of what kind and by its secret.
pub(super) fn local_address(kind: &str, secret: Token) -> rustix::io::Result<SocketAddrUnix> {
    let name = u128::from_be_bytes(digest(format!("windlass {kind}").as_bytes(), &secret.0).0);
    SocketAddrUnix::new_abstract_name(format!("windlass-{kind}-{name:032x}").as_bytes())
}

pub(super) fn digest(what: &[u8], words: &[u8]) -> Token {
    let whole = Sha256::new().chain_update(what).chain_update([0]).chain_update(words).finalize();
    let mut token = [0; 16];
    token.copy_from_slice(&whole[..16]);
    Token(token)
}

/// What a connection to a process listener begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invitation {
    /// Opens the process listener of the host.
    pub process_listener: Token,
    /// The name by which its ranks are waited for: the [`child`]'s own, its roster's, or before a round [`Making::name`].
    pub call: Token,
    /// [`child`]; of a message in the round before the call, [`round`].
    pub child: Token,
    /// Who speaks, by its rank in the parent.
    pub rank: u32,
}

impl Invitation {
    /// To the round before the same call.
    pub fn to_round(self) -> Invitation {
        Invitation { child: round(self.call), ..self }
    }

    /// The bytes.
    pub fn greeting(&self) -> Vec<u8> {
        let mut bytes = Writer::default();
        bytes
            .raw(&GREETING_MAGIC)
            .token(self.process_listener)
            .token(self.call)
            .token(self.child)
            .u32(self.rank);
        bytes.finish()
    }
}

/// Of a greeting at a process listener, and whatever follows it: which process listener, and the words of a rank that does not come after all.
/// It would be waited for.
pub fn withdrawal(words: &[u8]) -> Option<(Token, Vec<u8>)> {
    let greeting = words.get(..GREETING_BYTES).filter(|greeting| greeting.starts_with(&GREETING_MAGIC))?;
    let process_listener = Reader::new(&greeting[8..]).token()?;
    let Some(Visitor::Invited(Invitation { rank, .. })) = read(greeting, process_listener) else {
        return None;
    };
    let absent = FromRank::Decline(SessionOutcome::Failed(Failure::Absent { rank })).encode();
    Some((process_listener, [greeting, &absent].concat()))
}

/// Who came to a process listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visitor {
    /// More bytes are needed.
    Unclear,
    /// A rank of a communicator in which this process has one, too.
    Invited(Invitation),
    /// Anyone else.
    Unknown,
}

/// Tells who came; the first byte that no greeting has there decides.
pub fn identify(bytes: &[u8], process_listener: Token) -> Visitor {
    let mut known = GREETING_MAGIC.to_vec();
    known.extend(process_listener.0);
    let seen = bytes.len().min(known.len());
    if bytes[..seen] != known[..seen] {
        return Visitor::Unknown;
    }
    read(bytes, process_listener).unwrap_or(Visitor::Unclear)
}

fn read(bytes: &[u8], process_listener: Token) -> Option<Visitor> {
    let mut reader = Reader::new(bytes.get(24..GREETING_BYTES)?);
    let (call, child, rank) = (reader.token()?, reader.token()?, reader.u32()?);
    let possible = (rank as usize) < crate::negotiated::RANKS_MAX;
    Some(if possible {
        Visitor::Invited(Invitation { process_listener, call, child, rank })
    } else {
        Visitor::Unknown
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: Token = Token([7; 16]);

    /// Calls, their communicators and tokens all have names of their own, the same on every rank.
    #[test]
    fn names_differ() {
        let shrink = |count, excluded: &[u32]| Making::Shrink { count, excluded: excluded.to_vec() };
        let calls = [
            Making::Split { count: 0 },
            Making::Split { count: 1 },
            shrink(0, &[1]),
            shrink(1, &[1]),
            shrink(0, &[2]),
            shrink(0, &[1, 2]),
        ];
        let mut names = vec![PARENT, NOBODY];
        for call in &calls {
            let call = call.name(PARENT);
            names.extend([call, round(call)]);
            for child in [0, 1, -5, i32::MAX].map(|color| child(call, color)) {
                names.extend([child, comm_token(child)]);
            }
        }
        names.push(calls[0].name(Token([8; 16])));
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        assert_eq!(calls[3].name(PARENT), shrink(1, &[1]).name(PARENT));
    }

    /// A greeting is read back; cut, it is unclear; with a wrong byte before the call's name, or an impossible rank, it is
    /// an unknown connection's.
    #[test]
    fn greetings() {
        let process_listener = Token([3; 16]);
        let invitation = Invitation { process_listener, call: Token([4; 16]), child: NOBODY, rank: 15 };
        let bytes = invitation.greeting();
        assert_eq!(bytes.len(), GREETING_BYTES);
        assert_eq!(identify(&bytes, process_listener), Visitor::Invited(invitation));
        for cut in 0..bytes.len() {
            assert_eq!(identify(&bytes[..cut], process_listener), Visitor::Unclear);
        }
        for wrong in 0..24 {
            let mut bytes = bytes.clone();
            bytes[wrong] ^= 1;
            assert_eq!(identify(&bytes, process_listener), Visitor::Unknown);
        }
        let impossible = Invitation { rank: 16, ..invitation }.greeting();
        assert_eq!(identify(&impossible, process_listener), Visitor::Unknown);
        assert_ne!(address(process_listener).unwrap(), address(NOBODY).unwrap());
    }
}
