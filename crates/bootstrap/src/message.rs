//! The messages of a session: `length u32, kind u16, body`, little-endian, each kind with its limit.
//!
//! A connection of a rank begins with a [`greeting`], one of NCCL's with its id's magic; whatever else connects is nobody's.

use crate::negotiated::bytes::{Reader, Writer};
use crate::negotiated::{
    ATTACHMENT_BYTES_MAX, CELLS_BYTES_MAX, NEGOTIATED_BYTES_MAX, NegotiatedConfig, Token,
};

use super::colors::{SplitMessage, Table};
use super::facts::Facts;
use super::outcome::{SessionOutcome, WORDS_BYTES_MAX};

/// The first bytes of a rank's connection. NCCL's begin with the id's magic, 64 random bits.
pub const GREETING_MAGIC: [u8; 8] = *b"\x01wndlss\x01";
/// Bytes of a greeting.
pub const GREETING_BYTES: usize = 24;
/// Bytes before a message's body.
pub const HEADER_BYTES: usize = 6;
/// A body from a rank is at most this long.
pub const FROM_RANK_BYTES_MAX: usize = 256 + CELLS_BYTES_MAX + ATTACHMENT_BYTES_MAX;
/// A body from the host is at most this long.
pub const FROM_HOST_BYTES_MAX: usize = NEGOTIATED_BYTES_MAX + WORDS_BYTES_MAX;

/// What a rank says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromRank {
    /// I am here.
    Report(Box<Facts>),
    /// I am prepared, and wait for the outcome however long it takes.
    Confirm,
    /// I could not prepare.
    Refuse(String),
    /// Instead of a report: I shall not come, and this is how it ends.
    Decline(SessionOutcome),
    /// In a round before a split.
    Split {
        /// Its place among those who take part, in the order of the parent.
        place: u32,
        /// How many these are.
        ranks: u32,
        /// Of this rank.
        message: SplitMessage,
    },
}

/// What the host says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromHost {
    /// All are here and this is what they agree on: prepare.
    Prepare(NegotiatedConfig),
    /// A rank could not prepare: stop, and say how far you are.
    Stop,
    /// How it ends.
    Outcome(SessionOutcome),
    /// In a round before a split: all have spoken.
    Table(Table),
}

impl FromHost {
    /// Whether the host has no more to say.
    pub fn is_last(&self) -> bool {
        matches!(self, FromHost::Outcome(_) | FromHost::Table(_))
    }
}

/// What a rank's connection begins with.
pub fn greeting(token: Token) -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    bytes[..8].copy_from_slice(&GREETING_MAGIC);
    bytes[8..].copy_from_slice(&token.0);
    bytes
}

/// The token of a greeting, and whatever follows it.
pub fn token_of(words: &[u8]) -> Option<Token> {
    let greeting = words.get(..GREETING_BYTES).filter(|words| words.starts_with(&GREETING_MAGIC))?;
    Reader::new(&greeting[8..]).token()
}

/// Who connected, by the first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// More bytes are needed.
    Unclear,
    /// A rank that was given the id.
    Rank,
    /// A rank of NCCL's, which was given the id, too.
    Nccl,
    /// A rank of another session, whose host had this port before, or anybody: scanners, health checks.
    Unknown,
}

/// Tells who connected, where NCCL's connections begin with this magic. The first byte that neither has there decides.
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

/// A message that lies at the front of some bytes.
#[derive(Debug, PartialEq, Eq)]
pub enum Front<'a> {
    /// More bytes are needed.
    Partial,
    /// Its length is over the limit.
    Oversized(usize),
    /// The kind, the body, and how many bytes both take.
    Whole(u16, &'a [u8], usize),
}

/// Looks for a message.
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

fn framed(kind: u16, body: &[u8]) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.u32(body.len() as u32).u16(kind).raw(body);
    writer.finish()
}

impl FromRank {
    /// The bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Writer::default();
        let kind = match self {
            FromRank::Report(facts) => {
                facts.put(&mut body);
                1
            }
            FromRank::Confirm => 2,
            FromRank::Split { place, ranks, message } => {
                body.u32(*place).u32(*ranks);
                message.put(&mut body);
                6
            }
            FromRank::Decline(outcome) => {
                outcome.put(&mut body);
                5
            }
            FromRank::Refuse(words) => {
                body.counted(words.as_bytes(), WORDS_BYTES_MAX);
                3
            }
        };
        framed(kind, &body.finish())
    }

    /// Reads a body; nothing if it is not exactly one.
    pub fn decode(kind: u16, body: &[u8]) -> Option<FromRank> {
        let mut reader = Reader::new(body);
        let message = match kind {
            1 => FromRank::Report(Box::new(Facts::take(&mut reader)?)),
            2 => FromRank::Confirm,
            5 => match SessionOutcome::take(&mut reader)? {
                SessionOutcome::PeerGroup => return None,
                outcome => FromRank::Decline(outcome),
            },
            6 => FromRank::Split {
                place: reader.u32()?,
                ranks: reader.u32()?,
                message: SplitMessage::take(&mut reader)?,
            },
            3 => FromRank::Refuse(String::from_utf8_lossy(reader.counted(WORDS_BYTES_MAX)?).into_owned()),
            _ => return None,
        };
        reader.finish()?;
        Some(message)
    }
}

impl FromHost {
    /// The bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Writer::default();
        let kind = match self {
            FromHost::Prepare(negotiated) => {
                body.raw(&negotiated.encode());
                1
            }
            FromHost::Outcome(outcome) => {
                outcome.put(&mut body);
                2
            }
            FromHost::Stop => 4,
            FromHost::Table(table) => {
                table.put(&mut body);
                6
            }
        };
        framed(kind, &body.finish())
    }

    /// Reads a body; nothing if it is not exactly one.
    pub fn decode(kind: u16, body: &[u8]) -> Option<FromHost> {
        let mut reader = Reader::new(body);
        let message = match kind {
            1 => return NegotiatedConfig::decode(body).map(FromHost::Prepare),
            2 => FromHost::Outcome(SessionOutcome::take(&mut reader)?),
            4 => FromHost::Stop,
            6 => FromHost::Table(Table::take(&mut reader)?),
            _ => return None,
        };
        reader.finish()?;
        Some(message)
    }
}
