//! Decides in which order a group's communicators run their kernels. Pure.
//!
//! NCCL's own order depends on its release (`ncclGroupCommJoin`). Before 2.26 communicators ran in the order of their first calls. So on
//! one stream a rank could group calls that another rank made one by one, but two ranks that grouped in opposite orders hung.
//! Since 2.26 communicators run in the order of hashes of their ids, which all ranks see alike, and it is the other way round.
//! A program that works with one order may hang with the other, so Windlass keeps the order of the NCCL underneath.

use windlass_bootstrap::negotiated::Token;

/// Which order NCCL keeps in a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// By the communicators' names, which all ranks see alike.
    Names,
    /// By their first calls.
    Calls,
}

/// The version code of the first release with [`Order::Names`]; read in the sources of 2.13 to 2.30.
const NAMES_SINCE: i32 = 22602;

impl Order {
    /// The order of a release, by its version code.
    pub fn of_release(version: i32) -> Order {
        if version >= NAMES_SINCE { Order::Names } else { Order::Calls }
    }
}

/// What NCCL had got of a group when a call that Windlass runs was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Nccls {
    /// No call yet.
    Nothing,
    /// Some call, or it is unknown.
    Some,
}

impl Nccls {
    /// What NCCL had when the held call at index `place` was made. NCCL had got calls of `given` communicators by then;
    /// `turned_over` is the index of the first held call that NCCL is to run after all.
    pub fn at(place: usize, given: usize, turned_over: Option<usize>) -> Nccls {
        match given > 0 || turned_over.is_some_and(|first| first < place) {
            true => Nccls::Some,
            false => Nccls::Nothing,
        }
    }
}

/// A communicator of which a group runs kernels of Windlass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Member {
    /// The communicator's token.
    pub name: Token,
    /// Its rank: one thread may use several ranks of one communicator.
    pub rank: u32,
    /// What NCCL had at this communicator's first call that Windlass runs.
    pub called_after: Nccls,
    /// What NCCL runs of this communicator in the same group. NCCL's part goes first, on all ranks.
    pub beside: Nccls,
}

/// When kernels of Windlass run, by index in the list of members.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Schedule {
    /// Before NCCL ends the group.
    pub before: Vec<usize>,
    /// After it has.
    pub after: Vec<usize>,
}

/// Orders communicators, which come in the order of their first calls that Windlass runs. NCCL's calls all run when NCCL ends the
/// group, so a call made between two of them runs before or after both.
pub fn schedule(members: &[Member], order: Order) -> Schedule {
    let mut after: Vec<usize> = (0..members.len()).collect();
    match order {
        Order::Names => {
            // Whatever ranks group, NCCL's calls come first on all of them.
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

    /// A held call that NCCL runs after all counts as NCCL's from when it was made.
    #[test]
    fn turned_over() {
        assert_eq!(Nccls::at(0, 0, None), Nccls::Nothing);
        assert_eq!(Nccls::at(5, 0, None), Nccls::Nothing);
        assert_eq!(Nccls::at(0, 1, None), Nccls::Some);
        assert_eq!(Nccls::at(2, 0, Some(1)), Nccls::Some);
        assert_eq!(Nccls::at(2, 0, Some(3)), Nccls::Nothing);
        assert_eq!(Nccls::at(2, 1, Some(3)), Nccls::Some);
    }

    /// In the order of calls, a communicator that was called before NCCL got anything runs before NCCL, unless NCCL has
    /// a part of it as well. In the order of names, NCCL's part comes first.
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
        /// Every communicator runs once. Ranks that group in any order agree in the order of names; a rank that makes the same calls
        /// one by one agrees in the order of calls.
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
