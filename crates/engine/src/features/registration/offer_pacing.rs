//! Whether this rank would have its buffers registered: told by those that it has passed lately. Pure.
//!
//! It learns only what it looks at, and looks seldom where it was in vain: a look costs some 0.2 us a call.

/// Candidates in a row whose buffers can all be registered, before the first offer.
const FIRST: u32 = 3;
/// Before any later one at most.
const MOST: u32 = 1 << 16;
/// Candidates at most that are let pass between two looks.
const SKIP_MOST: u32 = 64;

/// What this rank has seen of its buffers.
#[derive(Debug)]
pub(crate) struct OfferPacing {
    /// How many in a row it takes.
    needed: u32,
    /// How many in a row there were.
    row: u32,
    /// Looks in vain, in a row.
    vain: u32,
    /// Candidates to let pass.
    skip: u32,
    offers: bool,
}

impl OfferPacing {
    pub(crate) fn new() -> OfferPacing {
        OfferPacing { needed: FIRST, row: 0, vain: 0, skip: 0, offers: false }
    }

    /// Whether to look at the buffers of this candidate, which runs as ever.
    pub(crate) fn looks(&mut self) -> bool {
        if self.offers {
            return false;
        }
        let skips = self.skip > 0;
        self.skip = self.skip.saturating_sub(1);
        !skips
    }

    /// The buffers of a candidate that was looked at can be registered, or not. Whether it would offer now.
    pub(crate) fn saw(&mut self, registrable: bool) -> bool {
        if registrable {
            (self.row, self.vain) = (self.row + 1, 0);
            return self.row >= self.needed;
        }
        self.row = 0;
        self.vain += 1;
        self.skip = 1_u32.checked_shl(self.vain).unwrap_or(SKIP_MOST).min(SKIP_MOST);
        false
    }

    /// It has offered.
    pub(crate) fn offers(&mut self) {
        self.offers = true;
    }

    /// Whether it has.
    pub(crate) fn has_offered(&self) -> bool {
        self.offers
    }

    /// What it offered for could not be had, or a buffer could not be registered after all: the next offer takes longer.
    pub(crate) fn takes_back(&mut self) {
        (self.offers, self.row) = (false, 0);
        self.needed = self.needed.saturating_mul(2).min(MOST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many candidates until it would offer, and at how many of them it looked.
    fn until_offer(pacing: &mut OfferPacing, registrable: bool) -> (u32, u32) {
        let mut looks = 0;
        for candidate in 1..=100_000 {
            if pacing.looks() {
                looks += 1;
                if pacing.saw(registrable) {
                    pacing.offers();
                    return (candidate, looks);
                }
            }
        }
        (0, looks)
    }

    #[test]
    fn offers_after_a_few() {
        let mut pacing = OfferPacing::new();
        assert_eq!(until_offer(&mut pacing, true), (FIRST, FIRST));
        assert!(!pacing.looks(), "what is offered stands till it is taken back");
        pacing.takes_back();
        assert_eq!(until_offer(&mut pacing, true), (2 * FIRST, 2 * FIRST));
    }

    /// Memory that cannot be registered is looked at less and less.
    #[test]
    fn seldom_in_vain() {
        let (candidates, looks) = until_offer(&mut OfferPacing::new(), false);
        assert_eq!(candidates, 0);
        assert!(looks < 100_000 / 60, "{looks}");
    }

    /// One that changes its mind for ever offers ever more seldom.
    #[test]
    fn changes_seldom() {
        let mut pacing = OfferPacing::new();
        let mut last = 0;
        for _ in 0..40 {
            let (candidates, _) = until_offer(&mut pacing, true);
            assert!(candidates >= last && candidates <= MOST);
            last = candidates;
            pacing.takes_back();
        }
        assert_eq!(last, MOST);
        // One that cannot now and then begins its row anew.
        let mut pacing = OfferPacing::new();
        for _ in 0..1000 {
            while !pacing.looks() {}
            assert!(!pacing.saw(true));
            while !pacing.looks() {}
            assert!(!pacing.saw(false));
        }
    }
}
