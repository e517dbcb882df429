//! How the ranks of child communicators (by split or shrink) find each other, and the names and greetings that they
//! use.
//!
//! There is no id with a port in it. But the parent's negotiated config names the **process listener** of each rank's
//! process: a Unix socket at which the background thread listens for as long as the process lives.
//!
//! **Rounds.** Before a call whose communicators may be lazy, all ranks that make it say at one process listener where
//! they go and what they want ([`plan`]), and hear the messages of all. For a split, in which all ranks take
//! part, that is rank 0's process listener; for a shrink, the lowest survivor's. A rank that cannot wait only says that
//! it goes to NCCL. A rank whose process dies before its message, or that withdraws it, ends the round for all; after
//! its message it does not. The host hears the answer last, so its process may end then.
//!
//! **Lazy communicators.** Their ranks know each other from the round, and meet at the process listener of their own
//! first rank. Other ranks of the parent are not needed, and may have ended. Each rank sends one message: it
//! [reports](super::message::FromRank::Report) or [declines](super::message::FromRank::Decline). The host sees by
//! pidfds whether a process dies before its rank has come. So a session whose missing ranks cannot come
//! [ends](arrivals), and nothing is timed.
//!
//! **Communicators that NCCL makes** have a [roster](local_rendezvous).
//!
//! The rules of [`super`] hold but for two. First, no root of NCCL's is behind a process listener, so no rank goes to
//! NCCL without a message: it declines, and tries to for as long as the host's process lives. Second, the host's
//! process has a rank of the communicator: a rank that finds no process listener, or loses it, fails. A rank that comes
//! from a roster does not fail so, since NCCL's communicator exists whatever happens to the host.

pub mod arrivals;
mod exploring;
pub(crate) mod local_entry;
pub mod local_rendezvous;
pub mod plan;
pub mod round;

use rustix::net::SocketAddrUnix;
use sha2::{Digest, Sha256};

use crate::negotiated::Token;
use crate::negotiated::bytes::{Reader, Writer};

use super::message::FromRank;
use super::outcome::{Failure, SessionOutcome};

/// A token that names nothing.
pub const NOBODY: Token = Token([0; 16]);
/// The first bytes of a connection to a process listener.
pub const GREETING_MAGIC: [u8; 8] = *b"\x01wndlss\x02";
/// Bytes of a greeting.
pub const GREETING_BYTES: usize = 8 + 3 * 16 + 4;

/// The name of a call on the parent with this token, the same on every rank: of a split, which excludes nobody, or of a
/// shrink that leaves out these ranks. `count` calls that exclude the same came before.
pub fn call(parent: Token, excluded: &[u32], count: u32) -> Token {
    let excluded: Vec<u8> = excluded.iter().flat_map(|rank| rank.to_le_bytes()).collect();
    digest(b"windlass call", &Writer::default().token(parent).u32(count).raw(&excluded).finish())
}

/// The name of the communicator that a call makes of the ranks with this color.
pub fn child(call: Token, color: i32) -> Token {
    digest(b"windlass child", &Writer::default().token(call).u32(color as u32).finish())
}

/// The name of the round before this call.
pub fn round(call: Token) -> Token {
    digest(b"windlass round", &call.0)
}

/// The token in the negotiated config of the communicator with this name.
pub fn comm_token(child: Token) -> Token {
    digest(b"windlass birth", &child.0)
}

/// The abstract address of the process listener with this secret. Everyone on the host can see the address, but only
/// the secret opens the listener.
pub fn address(process_listener: Token) -> rustix::io::Result<SocketAddrUnix> {
    local_address("lobby", process_listener)
}

/// The abstract address of a socket of this kind, from its secret.
pub(super) fn local_address(kind: &str, secret: Token) -> rustix::io::Result<SocketAddrUnix> {
    let name = u128::from_be_bytes(digest(format!("windlass {kind}").as_bytes(), &secret.0).0);
    SocketAddrUnix::new_abstract_name(format!("windlass-{kind}-{name:032x}").as_bytes())
}

pub(super) fn digest(what: &[u8], words: &[u8]) -> Token {
    let whole = Sha256::new().chain_update(what).chain_update([0]).chain_update(words).finalize();
    Token(std::array::from_fn(|index| whole[index]))
}

/// Where a rank is invited to: the contents of its greeting at a process listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invitation {
    /// The secret of the host's process listener.
    pub process_listener: Token,
    /// The name under which the host waits for its ranks: the [`child`]'s own, its roster's, or before a round
    /// [`call`]'s.
    pub call: Token,
    /// The [`child`]'s name, or the [`round()`]'s for a message in a round.
    pub child: Token,
    /// The rank of the sender in the parent.
    pub rank: u32,
}

impl Invitation {
    /// The invitation to the round before the same call.
    pub fn to_round(self) -> Invitation {
        Invitation { child: round(self.call), ..self }
    }

    /// The bytes.
    pub fn greeting(&self) -> Vec<u8> {
        Writer::default()
            .raw(&GREETING_MAGIC)
            .token(self.process_listener)
            .token(self.call)
            .token(self.child)
            .u32(self.rank)
            .finish()
    }
}

/// From words that begin with a greeting at a process listener: which listener, and the words by which that rank
/// declines. The host would wait for a rank that stays silent. None if the words begin otherwise.
pub fn withdrawal(words: &[u8]) -> Option<(Token, Vec<u8>)> {
    let greeting = words.get(..GREETING_BYTES).filter(|greeting| greeting.starts_with(&GREETING_MAGIC))?;
    let process_listener = Reader::new(&greeting[8..]).token()?;
    let Some(Visitor::Invited(Invitation { rank, .. })) = read(greeting, process_listener) else {
        return None;
    };
    let absent = FromRank::Decline(SessionOutcome::Failed(Failure::Absent { rank })).encode();
    Some((process_listener, [greeting, &absent].concat()))
}

/// Who connected to a process listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visitor {
    /// More bytes are needed.
    Unclear,
    /// A rank that knows the secret of this process listener.
    Invited(Invitation),
    /// Anyone else.
    Unknown,
}

/// Tells who connected. The first byte that no greeting has there decides.
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

    /// Calls, rounds, their communicators and tokens all have different names, the same on every rank.
    #[test]
    fn names_differ() {
        let of = |parent| {
            let calls = [(0, &[][..]), (1, &[]), (0, &[1]), (1, &[1]), (0, &[2]), (0, &[1, 2])];
            calls.map(|(count, excluded)| call(parent, excluded, count))
        };
        let mut names = vec![PARENT, NOBODY];
        for call in of(PARENT) {
            names.extend([call, round(call)]);
            for child in [0, 1, -5, i32::MAX].map(|color| child(call, color)) {
                names.extend([child, comm_token(child)]);
            }
        }
        names.extend(of(Token([8; 16])));
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        assert_eq!(of(PARENT), of(PARENT));
    }

    /// A whole greeting is read, a cut one is unclear. One with a wrong byte before the call's name, or with an
    /// impossible rank, is an unknown connection's.
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
