//! What the application has registered itself: known, never touched.

use crate::range::Range;
use crate::registration::entry::Key;

/// What the application gives a registration back by. One may be given for several registrations, as NCCL does where one
/// lies within another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub usize);

/// As many as there are: NCCL keeps each of them, too, and walks through all.
#[derive(Debug, Default)]
pub(super) struct Applications {
    registrations: Vec<(Token, Key, Range)>,
}

/// What there is for a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Nothing, or a part of the same allocation: to register the whole beside it is right.
    Nothing,
    /// All of the buffer.
    Covers,
    /// Of another allocation that was there: NCCL takes the buffer for that.
    Stale,
}

impl Applications {
    pub fn enter(&mut self, token: Token, key: Key, range: Range) {
        self.registrations.push((token, key, range));
    }

    pub fn remove(&mut self, token: Token) {
        if let Some(at) = self.registrations.iter().position(|(known, ..)| *known == token) {
            self.registrations.swap_remove(at);
        }
    }

    /// What is stale outweighs what covers: NCCL takes whichever comes first.
    pub fn look(&self, key: Key, part: Range) -> Found {
        let mut found = Found::Nothing;
        for (_, registered, range) in &self.registrations {
            if *registered != key && range.overlaps(key.range) {
                return Found::Stale;
            }
            if range.contains(part) {
                found = Found::Covers;
            }
        }
        found
    }

    pub fn len(&self) -> usize {
        self.registrations.len()
    }
}
