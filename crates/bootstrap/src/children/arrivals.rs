//! Which ranks have come to the process listener for a child communicator, or for the round before it: pure data.
//!
//! If no rank can come any more, those that are still waited for never will.

use crate::negotiated::Token;

/// A call, as its host sees it. Ranks are those of the parent, or the places in the roster of a [host-local
/// rendezvous](super::local_rendezvous).
#[derive(Debug, Default)]
pub struct Arrivals {
    /// The ranks of the parent that make the call, one bit each, once the host's own rank has said so.
    expected: Option<u64>,
    spoken: u64,
    dead: u64,
    /// The communicator for which a rank has come; none in a round.
    pub child: Option<Token>,
}

impl Arrivals {
    /// These ranks of the parent make the call, one bit each.
    pub fn await_ranks(&mut self, ranks: u64) {
        self.expected = Some(ranks);
    }

    /// A rank comes for the communicator of this name. False if others have come for another one, which no rank of
    /// Windlass does.
    pub fn comes_for(&mut self, child: Token) -> bool {
        *self.child.get_or_insert(child) == child
    }

    /// A rank has sent its message.
    pub fn spoke(&mut self, rank: u32) {
        self.spoken |= bit(rank);
    }

    /// A rank's process has died, or it left without a message.
    pub fn died(&mut self, rank: u32) {
        self.dead |= bit(rank);
    }

    /// How many ranks can still come. None before the host's own rank has made the call.
    pub fn coming(&self) -> Option<u32> {
        Some((self.expected? & !self.spoken & !self.dead).count_ones())
    }

    /// The first rank that died before its message.
    pub fn lost(&self) -> Option<u32> {
        let absent = self.dead & !self.spoken;
        (absent != 0).then(|| absent.trailing_zeros())
    }

    /// The first rank that died before its message, or else rank 0.
    pub fn absent(&self) -> u32 {
        self.lost().unwrap_or(0)
    }

    /// Whether no rank can come any more.
    pub fn is_over(&self) -> bool {
        self.coming() == Some(0)
    }
}

fn bit(rank: u32) -> u64 {
    1u64.checked_shl(rank).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHILD: Token = Token([1; 16]);

    /// Before the host's rank comes the number is not known. A rank that came and died counts once.
    #[test]
    fn counts_down() {
        let mut arrivals = Arrivals::default();
        assert!(arrivals.comes_for(CHILD));
        arrivals.spoke(2);
        arrivals.spoke(1);
        assert_eq!((arrivals.coming(), arrivals.is_over()), (None, false));
        arrivals.await_ranks(0b1111);
        assert_eq!(arrivals.coming(), Some(2));
        arrivals.died(2);
        assert_eq!((arrivals.coming(), arrivals.absent()), (Some(2), 0));
        assert_eq!(arrivals.lost(), None);
        arrivals.died(3);
        assert_eq!((arrivals.coming(), arrivals.absent()), (Some(1), 3));
        assert!(arrivals.comes_for(CHILD) && !arrivals.comes_for(Token([2; 16])));
        arrivals.spoke(0);
        assert!(arrivals.is_over());
        assert_eq!(arrivals.child, Some(CHILD));
    }

    /// The excluded ranks of a shrink are never waited for, even if they die.
    #[test]
    fn excluded() {
        let mut arrivals = Arrivals::default();
        arrivals.await_ranks(0b101);
        arrivals.died(1);
        arrivals.spoke(0);
        assert_eq!(arrivals.coming(), Some(1));
        arrivals.spoke(2);
        assert!(arrivals.is_over());
    }
}
