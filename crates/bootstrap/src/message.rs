//! The messages of sessions and rounds between a rank and its host: `length u32, kind u16, body`, little-endian, each
//! side's bodies with a limit in bytes.
//!
//! A rank's connection begins with a [`greeting`], NCCL's with its id's magic. Any other connection is unknown.

use crate::negotiated::bytes::{Reader, Writer};
use crate::negotiated::{
    ATTACHMENT_BYTES_MAX, CELLS_BYTES_MAX, NEGOTIATED_BYTES_MAX, NegotiatedConfig, Token,
};

use super::children::plan::{SplitMessage, Table};
use super::facts::Facts;
use super::outcome::{SessionOutcome, WORDS_BYTES_MAX};

/// The first bytes of a rank's connection to a port. NCCL's connections begin with the id's magic, 64 random bits.
pub const GREETING_MAGIC: [u8; 8] = *b"\x01wndlss\x01";
/// Bytes of a greeting.
pub const GREETING_BYTES: usize = 24;
/// Bytes before a message's body.
pub const HEADER_BYTES: usize = 6;
/// Bytes of the longest body that a rank sends.
pub const FROM_RANK_BYTES_MAX: usize = 256 + CELLS_BYTES_MAX + ATTACHMENT_BYTES_MAX;
/// Bytes of the longest body that a host sends.
pub const FROM_HOST_BYTES_MAX: usize = NEGOTIATED_BYTES_MAX + WORDS_BYTES_MAX;

/// A message of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromRank {
    /// The rank has come, with these facts.
    Report(Box<Facts>),
    /// The rank is prepared, and waits for the outcome without a time limit.
    Confirm,
    /// The rank could not prepare, for this reason.
    Refuse(String),
    /// Instead of a report: the rank does not come, and names this outcome.
    Decline(SessionOutcome),
    /// The rank's message in a round before a split or shrink.
    Split {
        /// The rank's place among the ranks that take part, in the order of the parent.
        place: u32,
        /// How many ranks take part.
        ranks: u32,
        /// The rank's color, key, vote and parent.
        message: SplitMessage,
    },
}

/// A message of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromHost {
    /// All ranks have reported, and this is their negotiated config: prepare.
    Prepare(NegotiatedConfig),
    /// A rank could not prepare: stop preparing, then confirm or refuse.
    Stop,
    /// The outcome.
    Outcome(SessionOutcome),
    /// All ranks have spoken in a round before a split or shrink.
    Table(Table),
}

impl FromHost {
    /// Whether this is the host's last message.
    pub fn is_last(&self) -> bool {
        matches!(self, FromHost::Outcome(_) | FromHost::Table(_))
    }

    /// The bytes.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            FromHost::Prepare(negotiated) => framed(1, |body| {
                body.raw(&negotiated.encode());
            }),
            FromHost::Outcome(outcome) => framed(2, |body| outcome.put(body)),
            FromHost::Stop => framed(4, |_| ()),
            FromHost::Table(table) => framed(6, |body| table.put(body)),
        }
    }

    /// Reads a body. None unless the bytes are exactly one message.
    pub fn decode(kind: u16, body: &[u8]) -> Option<FromHost> {
        match kind {
            1 => NegotiatedConfig::decode(body).map(FromHost::Prepare),
            2 => Reader::whole(body, SessionOutcome::take).map(FromHost::Outcome),
            4 => body.is_empty().then_some(FromHost::Stop),
            6 => Reader::whole(body, Table::take).map(FromHost::Table),
            _ => None,
        }
    }
}

/// The first bytes of a rank's connection to the session with this token.
pub fn greeting(token: Token) -> Vec<u8> {
    Writer::default().raw(&GREETING_MAGIC).token(token).finish()
}

/// The token in a rank's words, which begin with a greeting. None if they do not.
pub fn token_of(words: &[u8]) -> Option<Token> {
    let greeting = words.get(..GREETING_BYTES).filter(|words| words.starts_with(&GREETING_MAGIC))?;
    Reader::new(&greeting[8..]).token()
}

/// Who connected to a port, by the first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// More bytes are needed.
    Unclear,
    /// A rank that was given the id.
    Rank,
    /// A rank of NCCL's, which was also given the id.
    Nccl,
    /// Anyone else: a scanner, a health check, or a rank of an earlier session at this port.
    Unknown,
}

/// Tells who connected to the port of an id with this magic. The first byte that fits neither a greeting nor the magic
/// decides.
pub fn identify(bytes: &[u8], token: Token, nccl_magic: &[u8; 8]) -> Caller {
    let said = &bytes[..bytes.len().min(8)];
    if bytes.starts_with(nccl_magic) {
        Caller::Nccl
    } else if bytes.len() < 8 && nccl_magic.starts_with(said) {
        Caller::Unclear
    } else if !GREETING_MAGIC.starts_with(said) {
        Caller::Unknown
    } else if bytes.len() < GREETING_BYTES {
        Caller::Unclear
    } else if bytes[8..GREETING_BYTES] == token.0 {
        Caller::Rank
    } else {
        Caller::Unknown
    }
}

/// The message at the front of received bytes.
#[derive(Debug, PartialEq, Eq)]
pub enum Front<'a> {
    /// More bytes are needed.
    Partial,
    /// The body's length is over the limit.
    Oversized(usize),
    /// The kind, the body, and the bytes of header and body.
    Whole(u16, &'a [u8], usize),
}

/// Finds the message at the front of `bytes`. `limit`: bytes of the longest body.
pub fn front(bytes: &[u8], limit: usize) -> Front<'_> {
    let mut reader = Reader::new(bytes);
    let Some(length) = reader.u32() else { return Front::Partial };
    let length = length as usize;
    if length > limit {
        return Front::Oversized(length);
    }
    let end = HEADER_BYTES + length;
    match (reader.u16(), bytes.get(HEADER_BYTES..end)) {
        (Some(kind), Some(body)) => Front::Whole(kind, body, end),
        _ => Front::Partial,
    }
}

/// A message of this kind, with the body that `put` writes.
fn framed(kind: u16, put: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let mut body = Writer::default();
    put(&mut body);
    let body = body.finish();
    Writer::default().u32(body.len() as u32).u16(kind).raw(&body).finish()
}

impl FromRank {
    /// The bytes.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            FromRank::Report(facts) => framed(1, |body| facts.put(body)),
            FromRank::Confirm => framed(2, |_| ()),
            FromRank::Refuse(words) => framed(3, |body| {
                body.counted(words.as_bytes(), WORDS_BYTES_MAX);
            }),
            FromRank::Decline(outcome) => framed(5, |body| outcome.put(body)),
            FromRank::Split { place, ranks, message } => {
                framed(6, |body| message.put(body.u32(*place).u32(*ranks)))
            }
        }
    }

    /// Reads a body. None unless the bytes are exactly one message.
    pub fn decode(kind: u16, body: &[u8]) -> Option<FromRank> {
        Reader::whole(body, |reader| {
            Some(match kind {
                1 => FromRank::Report(Box::new(Facts::take(reader)?)),
                2 => FromRank::Confirm,
                5 => match SessionOutcome::take(reader)? {
                    SessionOutcome::PeerGroup => return None,
                    outcome => FromRank::Decline(outcome),
                },
                6 => FromRank::Split {
                    place: reader.u32()?,
                    ranks: reader.u32()?,
                    message: SplitMessage::take(reader)?,
                },
                3 => FromRank::Refuse(String::from_utf8_lossy(reader.counted(WORDS_BYTES_MAX)?).into_owned()),
                _ => return None,
            })
        })
    }
}
