//! Decides when this rank offers to register its buffers, from the candidates that it has lately looked at. Pure.
//!
//! A look costs some 0.2 us a call, so the rank looks seldom after looks in vain.

/// How many candidates in a row must be registrable before the first offer.
const FIRST: u32 = 3;
/// The most that a later offer requires.
const MOST: u32 = 1 << 16;
/// The most candidates that are skipped between two looks.
const SKIP_MOST: u32 = 64;

/// What this rank has seen of its candidates' buffers.
#[derive(Debug)]
pub(crate) struct OfferPacing {
    /// How many registrable candidates in a row an offer requires.
    needed: u32,
    /// How many there were in a row.
    row: u32,
    /// How many looks in a row were in vain.
    vain: u32,
    /// How many candidates to skip.
    skip: u32,
    offers: bool,
}

impl OfferPacing {
    pub(crate) fn new() -> OfferPacing {
        OfferPacing { needed: FIRST, row: 0, vain: 0, skip: 0, offers: false }
    }

    /// Whether to look at the buffers of this candidate, which runs unregistered.
    pub(crate) fn looks(&mut self) -> bool {
        if self.offers {
            return false;
        }
        let skips = self.skip > 0;
        self.skip = self.skip.saturating_sub(1);
        !skips
    }

    /// Notes whether the buffers of a candidate can be registered. Returns whether the rank should offer now.
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

    /// Notes that the rank has offered.
    pub(crate) fn offers(&mut self) {
        self.offers = true;
    }

    /// Whether the rank's offer stands.
    pub(crate) fn has_offered(&self) -> bool {
        self.offers
    }

    /// Takes the offer back, since there was no memory for it or a buffer could not be registered. The next offer requires a longer row.
    pub(crate) fn takes_back(&mut self) {
        (self.offers, self.row) = (false, 0);
        self.needed = self.needed.saturating_mul(2).min(MOST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many candidates come before an offer, and how many of them were looked at.
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

    /// Buffers that cannot be registered are looked at less and less.
    #[test]
    fn seldom_in_vain() {
        let (candidates, looks) = until_offer(&mut OfferPacing::new(), false);
        assert_eq!(candidates, 0);
        assert!(looks < 100_000 / 60, "{looks}");
    }

    /// A rank whose buffers change again and again offers more and more seldom.
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
        // A buffer that cannot be registered starts the row anew.
        let mut pacing = OfferPacing::new();
        for _ in 0..1000 {
            while !pacing.looks() {}
            assert!(!pacing.saw(true));
            while !pacing.looks() {}
            assert!(!pacing.saw(false));
        }
    }
}
