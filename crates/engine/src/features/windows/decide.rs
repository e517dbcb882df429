//! Decides the result of a round of registration. Pure, and the same on every rank, since all ranks have the same input.

use crate::features::windows::said::{Number, Said};

/// What the real library accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rules {
    /// Whether allocations of ranks may differ in size.
    pub takes_unlike: bool,
    /// Whether NCCL maps an allocation anew if it has a window already. Before, a rank with such a window waited for no rank, while others waited.
    pub maps_anew: bool,
}

impl Rules {
    /// The rules of a release, read in the sources of 2.28.3 to 2.30.7.
    pub(crate) fn of(version: i32) -> Rules {
        Rules { takes_unlike: version >= 23_007, maps_anew: version >= 23_003 }
    }
}

/// The result of a round, equal on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Decided {
    /// What becomes of the registration, after each rank has dropped its windows of the numbers in `drop`.
    pub decision: Decision,
    /// In ascending order: the numbers that any rank has lost and, if NCCL makes a new window, those that were claimed.
    pub drop: Vec<Number>,
}

/// What becomes of a registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Each rank uses its window of this number.
    Hit(Number),
    /// NCCL makes a new window.
    Make,
    /// NCCL would fail on some ranks and hang on the others.
    Refused {
        /// The rank that differs from most.
        rank: usize,
        /// In what it differs.
        why: Unlike,
    },
}

/// A difference between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unlike {
    /// The size of their allocations.
    Allocations,
    /// Whether the allocation already has a window.
    Over,
}

impl std::fmt::Display for Unlike {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Unlike::Allocations => "in the size of its allocation",
            Unlike::Over => "in whether its allocation has a window already",
        })
    }
}

/// Decides from what all ranks have said, in the order of ranks.
pub(crate) fn decide(all: &[Said], rules: Rules) -> Decided {
    let decision = decision(all, rules);
    let named = match decision {
        Decision::Make => all,
        Decision::Hit(_) | Decision::Refused { .. } => &[],
    };
    let mut drop: Vec<Number> =
        named.iter().map(|said| said.claim).chain(all.iter().map(|said| said.lost)).collect();
    drop.sort_unstable();
    drop.dedup();
    drop.retain(|number| *number != 0);
    Decided { decision, drop }
}

fn decision(all: &[Said], rules: Rules) -> Decision {
    let claims = || all.iter().map(|said| said.claim);
    if let Some(number) = claims().next().filter(|number| *number != 0)
        && claims().all(|claim| claim == number)
    {
        return Decision::Hit(number);
    }
    // Of memory outside the pool the allocation is unknown.
    let are_known = all.iter().all(|said| said.allocation != 0);
    if are_known
        && !rules.takes_unlike
        && let Some(rank) = odd(all, |said| said.allocation)
    {
        return Decision::Refused { rank, why: Unlike::Allocations };
    }
    if are_known
        && !rules.maps_anew
        && let Some(rank) = odd(all, |said| u64::from(said.is_over))
    {
        return Decision::Refused { rank, why: Unlike::Over };
    }
    Decision::Make
}

/// The first rank that differs from the majority, or from rank 0 if there is no majority.
pub(crate) fn odd(all: &[Said], of: impl Fn(&Said) -> u64) -> Option<usize> {
    let first = of(all.first()?);
    if all.iter().all(|said| of(said) == first) {
        return None;
    }
    let is_of_most = |value: u64| 2 * all.iter().filter(|said| of(said) == value).count() > all.len();
    let usual = all.iter().map(&of).find(|value| is_of_most(*value)).unwrap_or(first);
    all.iter().position(|said| of(said) != usual)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OLD: Rules = Rules { takes_unlike: false, maps_anew: false };
    const NEW: Rules = Rules { takes_unlike: true, maps_anew: true };

    fn said(claim: Number) -> Said {
        Said { claim, allocation: 64, ..Said::default() }
    }

    fn made(drop: &[Number]) -> Decided {
        Decided { decision: Decision::Make, drop: drop.into() }
    }

    #[test]
    fn decisions() {
        let hit = |number, drop: &[Number]| Decided { decision: Decision::Hit(number), drop: drop.into() };
        assert_eq!(decide(&[said(7), said(7)], OLD), hit(7, &[]));
        assert_eq!(decide(&[said(0), said(0)], OLD), made(&[]));
        let lost = Said { lost: 3, ..said(7) };
        assert_eq!(decide(&[said(9), lost, said(0)], OLD), made(&[3, 7, 9]));
        assert_eq!(decide(&[said(7), lost], OLD), hit(7, &[3]));
        let large = Said { allocation: 128, ..said(0) };
        let refused = |rank, why| Decided { decision: Decision::Refused { rank, why }, drop: vec![] };
        assert_eq!(decide(&[said(0), said(0), large], OLD), refused(2, Unlike::Allocations));
        assert_eq!(decide(&[large, said(0), said(0)], OLD), refused(0, Unlike::Allocations));
        assert_eq!(decide(&[said(0), large], OLD), refused(1, Unlike::Allocations));
        assert_eq!(decide(&[lost, large], OLD).drop, [3]);
        let over = Said { is_over: true, ..said(0) };
        assert_eq!(decide(&[over, over, said(0)], OLD), refused(2, Unlike::Over));
        assert_eq!(decide(&[over, over], OLD), made(&[]));
        let unknown = Said { allocation: 0, ..said(0) };
        assert_eq!(decide(&[unknown, large, over], OLD), made(&[]));
        assert_eq!(decide(&[said(0), large, over], NEW), made(&[]));
    }

    #[test]
    fn releases() {
        assert_eq!((Rules::of(22_809), Rules::of(23_007)), (OLD, NEW));
        assert_eq!(Rules::of(23_003), Rules { takes_unlike: false, maps_anew: true });
    }

    fn anything() -> impl Strategy<Value = Said> {
        (0..4u64, 0..3u64, any::<bool>(), 0..4u64).prop_map(|(claim, allocation, is_over, lost)| Said {
            claim,
            allocation,
            is_over,
            lost,
            ..Said::default()
        })
    }

    proptest! {
        /// A window is used again only if every rank claims it. A new window drops all claimed ones. Lost ones are always dropped.
        #[test]
        fn hits_are_everybodys(all in proptest::collection::vec(anything(), 2..=16), old in any::<bool>()) {
            let Decided { decision, drop } = decide(&all, if old { OLD } else { NEW });
            prop_assert!(!drop.contains(&0));
            prop_assert!(all.iter().all(|said| said.lost == 0 || drop.contains(&said.lost)));
            match decision {
                Decision::Hit(number) => {
                    prop_assert!(number != 0 && all.iter().all(|said| said.claim == number));
                }
                Decision::Make => {
                    prop_assert!(all.iter().all(|said| said.claim == 0 || drop.contains(&said.claim)));
                }
                Decision::Refused { rank, .. } => prop_assert!(old && rank < all.len()),
            }
        }
    }
}
