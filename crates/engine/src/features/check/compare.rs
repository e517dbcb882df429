//! Finds in what the entries of all ranks differ. Pure.
//!
//! # What matters of windows
//! NCCL runs a collective over windows on a rank if both of its buffers lie in symmetric windows. It then addresses its peers' memory by
//! its own offsets (2.28.9: `ncclSymkMakeDevWork` in src/sym_kernels.cc; over copy engines src/ce_coll.cc). So if any rank does,
//! a rank that does not takes another path, and one with another window or offset is written to at the wrong place.
//! Peers address both buffers of an all-reduce, an all-gather's receive buffer and a reduce-scatter's send buffer. If no rank runs over
//! windows, NCCL still looks buffers up, as a registration of the same bytes: they must be in a window on all ranks or on none.

use windlass_base::call::Function;

use crate::features::check::entry::{Called, Entry, Place};

/// What the real library accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rules {
    /// Whether allocations of ranks may differ in size.
    pub takes_unlike: bool,
    /// Whether copy engines may run a collective over windows, as under a CTA policy.
    pub copies: bool,
}

/// In what ranks may differ, the most important first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub(crate) enum Aspect {
    Call,
    Size,
    Reduction,
    Root,
    Send,
    Receive,
    Flags,
    Allocation,
    Offset,
}

impl Aspect {
    const ALL: [Aspect; 9] = [
        Aspect::Call,
        Aspect::Size,
        Aspect::Reduction,
        Aspect::Root,
        Aspect::Send,
        Aspect::Receive,
        Aspect::Flags,
        Aspect::Allocation,
        Aspect::Offset,
    ];
}

/// A difference between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Divergence {
    /// In what.
    pub aspect: Aspect,
    /// The ranks that differ from the majority, or from rank 0 if there is no majority. One bit each.
    pub odd: u64,
}

/// One rank's value of an aspect.
type Value = [u64; 3];

/// The first aspect in which the entries of all ranks differ. `all` is in the order of ranks.
pub(crate) fn compare(all: &[Entry], rules: Rules) -> Option<Divergence> {
    let any_symmetric = all.iter().any(|entry| is_over_windows(entry, rules));
    Aspect::ALL.into_iter().find_map(|aspect| {
        let values: Vec<Value> = all.iter().map(|entry| value(entry, aspect, any_symmetric, rules)).collect();
        let odd = odd(&values);
        (odd != 0).then_some(Divergence { aspect, odd })
    })
}

/// The ranks whose value differs from the majority's, or from rank 0's if there is no majority. One bit each.
fn odd(values: &[Value]) -> u64 {
    let is_of_most = |value: &&Value| 2 * values.iter().filter(|other| other == value).count() > values.len();
    let Some(usual) = values.iter().find(is_of_most).or(values.first()) else { return 0 };
    let bit = |(rank, value): (usize, &Value)| u64::from(value != usual) << rank;
    values.iter().enumerate().map(bit).fold(0, |odd, bit| odd | bit)
}

fn value(entry: &Entry, aspect: Aspect, any_symmetric: bool, rules: Rules) -> Value {
    match (entry, aspect) {
        (Entry::Window(_), Aspect::Call) => [1, 0, 0],
        (Entry::Window(window), Aspect::Size) => [window.bytes, 0, 0],
        (Entry::Window(window), Aspect::Flags) => [window.flags.into(), 0, 0],
        (Entry::Window(window), Aspect::Allocation) if !rules.takes_unlike => [window.allocation, 0, 0],
        (Entry::Window(window), Aspect::Offset) => [window.offset, 0, 0],
        (Entry::Window(_), _) => [0; 3],
        (Entry::Called(called), Aspect::Call) => [2, called.function as u64, 0],
        (Entry::Called(called), Aspect::Size) => match called.bytes().filter(|_| !called.reduces()) {
            Some(bytes) => [1, bytes, 0],
            None => [0, called.count, called.datatype as u64],
        },
        (Entry::Called(called), Aspect::Reduction) if called.reduces() => {
            [1, called.reduction.unwrap_or(0).into(), 0]
        }
        (Entry::Called(called), Aspect::Root) => {
            [called.root.is_some().into(), called.root.unwrap_or(0) as u64, 0]
        }
        (Entry::Called(called), Aspect::Send) => place(called.send, uses(called, rules).send, any_symmetric),
        (Entry::Called(called), Aspect::Receive) => {
            place(called.receive, uses(called, rules).receive, any_symmetric)
        }
        (Entry::Called(_), _) => [0; 3],
    }
}

/// What NCCL does with a buffer that lies in a window.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    /// Nothing.
    None,
    /// Looks it up.
    LooksUp,
    /// Peers write to it or read it, at their own offset.
    Reached,
}

struct Uses {
    send: Use,
    receive: Use,
    /// Whether NCCL can run the function over windows.
    has_way: bool,
}

fn uses(called: &Called, rules: Rules) -> Uses {
    let (send, receive, has_way) = match called.function {
        Function::AllReduce => (Use::Reached, Use::Reached, true),
        Function::AllGather => (Use::LooksUp, Use::Reached, true),
        Function::ReduceScatter => (Use::Reached, Use::LooksUp, true),
        Function::AlltoAll | Function::Gather | Function::Scatter if rules.copies => {
            (Use::LooksUp, Use::Reached, true)
        }
        // On ranks other than the root, the send buffer means nothing.
        Function::Broadcast => (Use::None, Use::LooksUp, false),
        _ => (Use::None, Use::None, false),
    };
    Uses { send, receive, has_way }
}

fn is_over_windows(entry: &Entry, rules: Rules) -> bool {
    let Entry::Called(called) = entry else { return false };
    let is_symmetric = |place: Option<Place>| place.is_some_and(|place| place.is_symmetric);
    uses(called, rules).has_way && is_symmetric(called.send) && is_symmetric(called.receive)
}

/// The value of one buffer. If only the rank's other buffer is in no window, the other buffer's value shows it.
fn place(place: Option<Place>, used: Use, any_symmetric: bool) -> Value {
    let Some(Place { window, is_symmetric, offset }) = place.filter(|_| used != Use::None) else {
        return [0; 3];
    };
    match any_symmetric {
        false => [1, 0, 0],
        true if used == Use::Reached && is_symmetric => [2, window.into(), offset],
        true => [1 + u64::from(is_symmetric), 0, 0],
    }
}

#[cfg(test)]
mod tests {
    use nccl_sys::{ncclFloat16, ncclFloat32, ncclInt8};
    use proptest::prelude::*;

    use super::*;
    use crate::features::check::entry::tests::entry;
    use crate::features::check::entry::{Place, Window};

    const RULES: Rules = Rules { takes_unlike: false, copies: false };
    const COPIES: Rules = Rules { copies: true, ..RULES };

    fn at(window: u32, offset: u64) -> Option<Place> {
        Some(Place { window, is_symmetric: true, offset })
    }

    fn reduce(send: Option<Place>, receive: Option<Place>) -> Called {
        let (function, datatype) = (Function::AllReduce, ncclFloat32.0);
        Called { function, count: 8, datatype, reduction: Some(0), root: None, send, receive }
    }

    fn of(function: Function, called: Called) -> Called {
        Called { function, ..called }
    }

    fn compared(all: &[Called], rules: Rules) -> Option<(Aspect, u64)> {
        let all: Vec<Entry> = all.iter().map(|called| Entry::Called(*called)).collect();
        compare(&all, rules).map(|Divergence { aspect, odd }| (aspect, odd))
    }

    /// Operation, size, reduction and root always matter, in this order.
    #[test]
    fn what_is_called() {
        let usual = reduce(None, None);
        let larger = Called { count: 9, ..usual };
        let product = Called { reduction: Some(1), ..usual };
        let half = Called { datatype: ncclFloat16.0, count: 8, ..usual };
        let gather = of(Function::AllGather, larger);
        assert_eq!(compared(&[usual; 4], RULES), None);
        assert_eq!(compared(&[usual, larger, usual], RULES), Some((Aspect::Size, 0b10)));
        assert_eq!(compared(&[usual, usual, half], RULES), Some((Aspect::Size, 0b100)));
        assert_eq!(compared(&[product, usual, usual], RULES), Some((Aspect::Reduction, 1)));
        assert_eq!(compared(&[gather, usual, product], RULES), Some((Aspect::Call, 1)));
        let rooted = |root| of(Function::Broadcast, Called { root: Some(root), ..usual });
        assert_eq!(compared(&[rooted(0), rooted(1), rooted(1)], RULES), Some((Aspect::Root, 1)));
        // Of two ranks there is no majority: the second differs.
        assert_eq!(compared(&[larger, usual], RULES), Some((Aspect::Size, 0b10)));
        assert_eq!(compared(&[usual, larger, usual, larger, gather], RULES), Some((Aspect::Call, 0b10000)));
        let window = Entry::Window(Window { bytes: 8, flags: 1, allocation: 0, offset: 0 });
        let mixed = [Entry::Called(usual), window, window];
        assert_eq!(compare(&mixed, RULES), Some(Divergence { aspect: Aspect::Call, odd: 1 }));
    }

    /// Functions that only move bytes may be called with any type.
    #[test]
    fn types_of_bytes() {
        let floats = of(Function::AllGather, reduce(None, None));
        let bytes = Called { datatype: ncclInt8.0, count: 32, ..floats };
        assert_eq!(compared(&[floats, bytes], RULES), None);
        let reduces = [of(Function::AllReduce, floats), of(Function::AllReduce, bytes)];
        assert_eq!(compared(&reduces, RULES), Some((Aspect::Size, 0b10)));
    }

    /// Offsets matter in buffers that peers address, and windows matter if any rank runs over them.
    #[test]
    fn where_buffers_lie() {
        let (usual, other) = (reduce(at(1, 0), at(1, 64)), reduce(at(1, 0), at(1, 128)));
        let moved = reduce(at(2, 0), at(1, 64));
        assert_eq!(compared(&[usual, other, usual], RULES), Some((Aspect::Receive, 0b10)));
        assert_eq!(compared(&[usual, usual, moved], RULES), Some((Aspect::Send, 0b100)));
        let all = |function, called: [Called; 3]| called.map(|called| of(function, called));
        let sends = [usual, reduce(at(1, 8), at(1, 64)), usual];
        assert_eq!(compared(&all(Function::AllGather, sends), RULES), None);
        assert_eq!(compared(&all(Function::ReduceScatter, sends), RULES), Some((Aspect::Send, 0b10)));
        let receives = [usual, usual, other];
        assert_eq!(compared(&all(Function::AllGather, receives), RULES), Some((Aspect::Receive, 0b100)));
        assert_eq!(compared(&all(Function::ReduceScatter, receives), RULES), None);
        assert_eq!(compared(&all(Function::AlltoAll, receives), RULES), None);
        assert_eq!(compared(&all(Function::AlltoAll, receives), COPIES), Some((Aspect::Receive, 0b100)));
        assert_eq!(compared(&all(Function::Broadcast, sends), RULES), None);
        assert_eq!(compared(&all(Function::Broadcast, receives), RULES), None);
    }

    /// A buffer outside windows takes another path. If no rank runs over windows, offsets do not matter.
    #[test]
    fn outside() {
        let (inside, outside) = (reduce(at(1, 0), at(1, 64)), reduce(at(1, 0), None));
        assert_eq!(compared(&[inside, outside, inside], RULES), Some((Aspect::Receive, 0b10)));
        assert_eq!(compared(&[outside, reduce(at(3, 8), None)], RULES), None);
        assert_eq!(compared(&[outside, reduce(None, None), outside], RULES), Some((Aspect::Send, 0b10)));
        let plain = |offset| Some(Place { window: 1, is_symmetric: false, offset });
        assert_eq!(compared(&[reduce(plain(0), plain(8)), reduce(plain(16), plain(24))], RULES), None);
        let mixed = [inside, reduce(at(1, 0), plain(64)), inside];
        assert_eq!(compared(&mixed, RULES), Some((Aspect::Receive, 0b10)));
    }

    /// What must be equal in a registration.
    #[test]
    fn registrations() {
        let usual = Window { bytes: 4096, flags: 1, allocation: 1 << 21, offset: 0 };
        let compared = |one: Window, rules| {
            let all = [usual, one, usual].map(Entry::Window);
            compare(&all, rules).map(|found| (found.aspect, found.odd))
        };
        assert_eq!(compared(usual, RULES), None);
        assert_eq!(compared(Window { bytes: 8192, offset: 8, ..usual }, RULES), Some((Aspect::Size, 2)));
        assert_eq!(compared(Window { flags: 0, ..usual }, RULES), Some((Aspect::Flags, 2)));
        assert_eq!(compared(Window { offset: 4096, ..usual }, RULES), Some((Aspect::Offset, 2)));
        let larger = Window { allocation: 1 << 22, ..usual };
        assert_eq!(compared(larger, RULES), Some((Aspect::Allocation, 2)));
        assert_eq!(compared(larger, Rules { takes_unlike: true, ..RULES }), None);
    }

    proptest! {
        /// Equal entries never differ.
        #[test]
        fn alike(entry in entry(), ranks in 2..16_usize, takes_unlike: bool, copies: bool) {
            prop_assert_eq!(compare(&vec![entry; ranks], Rules { takes_unlike, copies }), None);
        }

        /// If one rank among three or more differs, that rank is named.
        #[test]
        fn one_differs(usual in entry(), one in entry(), ranks in 3..16_usize, place in 0..16_usize, copies: bool) {
            let place = place % ranks;
            let mut all = vec![usual; ranks];
            all[place] = one;
            let named = compare(&all, Rules { takes_unlike: false, copies });
            prop_assert!(named.is_none_or(|found| found.odd == 1 << place), "{named:?}");
        }

        /// Some rank always differs, but never all of them.
        #[test]
        fn never_all(all in proptest::collection::vec(entry(), 2..16)) {
            if let Some(found) = compare(&all, RULES) {
                prop_assert!(found.odd != 0 && found.odd.count_ones() < all.len() as u32);
            }
        }
    }
}
