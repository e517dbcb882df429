//! Attempts to have NCCL build the communicator behind a lazy one, which all ranks number alike. A rank whose attempt failed says so: the
//! others would wait for it in NCCL. Theirs of the same number fail, too, and the next has the next number on all ranks; what the
//! peer group serves goes on. A rank whose attempt had come to its end by then has a communicator that not all ranks have.
// Divergence: with NCCL alone who waits in an init for a rank that has failed may wait for ever.

use std::sync::atomic::{AtomicU64, Ordering};

use once_cell::sync::OnceCell;

use windlass_bootstrap::negotiated::Token;
use windlass_bootstrap::negotiated::bytes::{Reader, Writer};

use super::requests::Others;

/// What is done when an attempt is heard to be lost; on the background worker, so it must not wait.
type Heard = Box<dyn Fn(u64) + Send + Sync>;

/// What is known of a lazy communicator's attempts.
pub(crate) struct Attempts {
    others: Others,
    /// Those with a lower number have failed on some rank, or had before this.
    lost: AtomicU64,
    heard: OnceCell<Heard>,
}

impl std::fmt::Debug for Attempts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attempts").field("lost", &self.lost).finish_non_exhaustive()
    }
}

impl Attempts {
    /// None yet.
    pub(super) fn new(others: Others) -> Attempts {
        Attempts { others, lost: AtomicU64::new(0), heard: OnceCell::new() }
    }

    /// Says what is to be done when another rank has failed at an attempt. Once; it must not wait.
    pub(crate) fn on_lost(&self, heard: impl Fn(u64) + Send + Sync + 'static) {
        let _ = self.heard.set(Box::new(heard));
    }

    /// Whether an attempt has failed on some rank, as far as is known here.
    pub(crate) fn has_lost(&self, attempt: u64) -> bool {
        attempt < self.lost.load(Ordering::Acquire)
    }

    /// This rank's attempt has failed: the others hear of it, also if this communicator ends at once.
    pub(crate) fn lose(&self, attempt: u64) {
        self.note(attempt);
        let (comm, from) = (self.others.comm(), self.others.rank());
        self.others.tell(|to| LostAttempt { comm, from, to, attempt }.encode());
    }

    /// Another rank's has.
    pub(super) fn hear_of_lost(&self, attempt: u64) {
        if self.note(attempt)
            && let Some(heard) = self.heard.get()
        {
            heard(attempt);
        }
    }

    /// Whether that is new.
    fn note(&self, attempt: u64) -> bool {
        let after = attempt.saturating_add(1);
        self.lost.fetch_max(after, Ordering::AcqRel) < after
    }
}

/// A message for a peer of a rank that has failed at an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LostAttempt {
    pub comm: Token,
    pub from: u32,
    pub to: u32,
    pub attempt: u64,
}

const MAGIC: &[u8; 8] = b"lost try";

impl LostAttempt {
    pub(super) fn encode(self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.raw(MAGIC).token(self.comm).u32(self.from).u32(self.to).u64(self.attempt);
        writer.finish()
    }

    pub(super) fn decode(words: &[u8]) -> Option<LostAttempt> {
        let mut reader = Reader::new(words);
        if reader.raw::<8>()? != *MAGIC {
            return None;
        }
        let (comm, from, to, attempt) = (reader.token()?, reader.u32()?, reader.u32()?, reader.u64()?);
        reader.finish()?;
        Some(LostAttempt { comm, from, to, attempt })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages read back.
    #[test]
    fn words() {
        let lost = LostAttempt { comm: Token([5; 16]), from: 2, to: 1, attempt: 7 };
        let bytes = lost.encode();
        assert_eq!(LostAttempt::decode(&bytes), Some(lost));
        assert_eq!(LostAttempt::decode(&bytes[1..]), None);
    }
}
