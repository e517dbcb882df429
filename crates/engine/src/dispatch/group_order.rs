//! In which order a group's communicators run: decided, not done. Pure.
//!
//! NCCL's own order is its release's (`ncclGroupCommJoin`). Before 2.26 communicators ran in the order of their first calls, so on
//! one stream a rank might group what another called one by one, and two ranks that grouped in opposite orders waited for each
//! other for ever. Since then they run in the order of hashes of their ids, which all ranks see alike, and it is the other way round.
//! What works on the one hangs on the other: ours keep the order of the release that is underneath.

use windlass_bootstrap::negotiated::Token;

/// Which order NCCL keeps in a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// Of the communicators' names, which all ranks see alike.
    Names,
    /// Of their first calls.
    Calls,
}

/// The first release with [`Order::Names`]; read in the sources of 2.13 to 2.30.
const NAMES_SINCE: i32 = 22602;

impl Order {
    /// Of a release, by its version code.
    pub fn of_release(version: i32) -> Order {
        if version >= NAMES_SINCE { Order::Names } else { Order::Calls }
    }
}

/// What NCCL had of a group when one of ours was called.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Nccls {
    /// No call yet.
    Nothing,
    /// Some call, or nobody knows.
    Some,
}

impl Nccls {
    /// When the call at `place` of what was held came: NCCL had calls of `given` communicators, and the first that was held and is
    /// NCCL's after all was at `turned_over`.
    pub fn at(place: usize, given: usize, turned_over: Option<usize>) -> Nccls {
        match given > 0 || turned_over.is_some_and(|first| first < place) {
            true => Nccls::Some,
            false => Nccls::Nothing,
        }
    }
}

/// A communicator of which a group runs something of ours.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Member {
    /// Its communicator's.
    pub name: Token,
    /// Several of one init may be one thread's.
    pub rank: u32,
    /// When it was first called.
    pub called_after: Nccls,
    /// What of the same group NCCL runs of this very communicator. It goes first: so it does on all ranks.
    pub beside: Nccls,
}

/// When ours run: by place in the list of members.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Schedule {
    /// Before NCCL ends the group.
    pub before: Vec<usize>,
    /// After it has.
    pub after: Vec<usize>,
}

/// Orders communicators, which come in the order of their first calls of ours. NCCL's calls all run at its end of the group, so
/// ours, which is called between two of them, is before or after both.
pub fn schedule(members: &[Member], order: Order) -> Schedule {
    let mut after: Vec<usize> = (0..members.len()).collect();
    match order {
        Order::Names => {
            // Whatever ranks group, NCCL's come first on all of them.
            after.sort_by_key(|index| (members[*index].name, members[*index].rank));
            Schedule { before: Vec::new(), after }
        }
        Order::Calls => {
            let is_before = |index: &usize| {
                let member = &members[*index];
                member.called_after == Nccls::Nothing && member.beside == Nccls::Nothing
            };
            let (before, after) = after.into_iter().partition(is_before);
            Schedule { before, after }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn member(name: u8, rank: u32, called_after: Nccls, beside: Nccls) -> Member {
        Member { name: Token([name; 16]), rank, called_after, beside }
    }

    /// The order changed with 2.26.
    #[test]
    fn releases() {
        for (version, order) in [
            (21803, Order::Calls),
            (22512, Order::Calls),
            (22602, Order::Names),
            (22809, Order::Names),
            (23203, Order::Names),
        ] {
            assert_eq!(Order::of_release(version), order, "{version}");
        }
    }

    /// What was held and is NCCL's after all was NCCL's when it was called.
    #[test]
    fn turned_over() {
        assert_eq!(Nccls::at(0, 0, None), Nccls::Nothing);
        assert_eq!(Nccls::at(5, 0, None), Nccls::Nothing);
        assert_eq!(Nccls::at(0, 1, None), Nccls::Some);
        assert_eq!(Nccls::at(2, 0, Some(1)), Nccls::Some);
        assert_eq!(Nccls::at(2, 0, Some(3)), Nccls::Nothing);
        assert_eq!(Nccls::at(2, 1, Some(3)), Nccls::Some);
    }

    /// In the order of calls, what was called before anything of NCCL's runs before that, but of a communicator of which NCCL has
    /// a part as well; in that of names, NCCL's come first.
    #[test]
    fn scheduled() {
        use Nccls::{Nothing, Some};
        let members = [
            member(9, 0, Nothing, Nothing),
            member(8, 0, Nothing, Some),
            member(7, 1, Nothing, Nothing),
            member(6, 0, Some, Nothing),
            member(7, 0, Some, Nothing),
        ];
        let of_calls = Schedule { before: vec![0, 2], after: vec![1, 3, 4] };
        assert_eq!(schedule(&members, Order::Calls), of_calls);
        let of_names = Schedule { before: vec![], after: vec![3, 4, 2, 1, 0] };
        assert_eq!(schedule(&members, Order::Names), of_names);
        assert_eq!(schedule(&[], Order::Names), Schedule::default());
    }

    proptest! {
        /// Every communicator runs once. Ranks that group in any order agree on that of names; one that makes the same calls one by
        /// one agrees with that of calls.
        #[test]
        fn agreed(names in proptest::collection::hash_set(any::<u8>(), 0..9), turned in any::<bool>()) {
            let mut members: Vec<Member> =
                names.into_iter().map(|name| member(name, 0, Nccls::Nothing, Nccls::Nothing)).collect();
            let named = |members: &[Member], order| {
                let Schedule { before, after } = schedule(members, order);
                before.into_iter().chain(after).map(|index| members[index].name).collect::<Vec<_>>()
            };
            let (names, calls) = (named(&members, Order::Names), named(&members, Order::Calls));
            let called: Vec<Token> = members.iter().map(|member| member.name).collect();
            prop_assert_eq!(&calls, &called);
            if turned {
                members.reverse();
            }
            prop_assert_eq!(named(&members, Order::Names), names);
        }
    }
}
