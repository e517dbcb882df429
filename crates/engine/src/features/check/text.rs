//! The log lines of divergences and of missing ranks.

use crate::features::check::compare::{Aspect, Divergence};
use crate::features::check::entry::OWN;
use crate::features::check::entry::{Called, Entry, Place, Window};

/// Names by NCCL's numbers.
const REDUCTIONS: [&str; 5] = ["sum", "prod", "max", "min", "avg"];
const TYPES: [&str; 12] = [
    "int8",
    "uint8",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
    "float8e4m3",
    "float8e5m2",
];

/// The text of a divergence, after the communicator's name: the call, which ranks differ in what, and each rank's value.
pub(crate) fn divergence(number: u64, all: &[Entry], found: Divergence) -> String {
    let Divergence { aspect, odd } = found;
    let is_odd = |rank: usize| odd >> rank & 1 != 0;
    let usual = (0..all.len()).find(|rank| !is_odd(*rank)).and_then(|rank| all.get(rank));
    let name = usual.map_or("", name);
    let mut groups: Vec<(String, Vec<usize>)> = Vec::new();
    // The ranks that differ come first.
    let order =
        (0..all.len()).filter(|rank| is_odd(*rank)).chain((0..all.len()).filter(|rank| !is_odd(*rank)));
    for (rank, entry) in order.filter_map(|rank| Some((rank, all.get(rank)?))) {
        let has = has(entry, aspect);
        match groups.iter_mut().find(|(words, _)| *words == has) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((has, vec![rank])),
        }
    }
    let odd: Vec<usize> = (0..all.len()).filter(|rank| is_odd(*rank)).collect();
    let differs = if odd.len() == 1 { "differs" } else { "differ" };
    let table: Vec<String> = groups.iter().map(|(has, who)| format!("{} {has}", ranks(who))).collect();
    format!("call {number}, {name}: {} {differs} in {}: {}", ranks(&odd), words(aspect), table.join("; "))
}

/// The text for ranks that have not made a call.
pub(crate) fn absent(number: u64, missing: &[usize], there: &[(usize, Entry)], seconds: u64) -> String {
    let calls: Vec<String> =
        there.iter().map(|(rank, entry)| format!("rank {rank} {}", has(entry, Aspect::Call))).collect();
    let have = if missing.len() == 1 { "has" } else { "have" };
    format!("call {number}: {} {have} not come for {seconds} s: {}", ranks(missing), calls.join("; "))
}

fn ranks(all: &[usize]) -> String {
    let list: Vec<String> = all.iter().map(usize::to_string).collect();
    format!("rank{} {}", if all.len() == 1 { "" } else { "s" }, list.join(", "))
}

fn name(entry: &Entry) -> &'static str {
    match entry {
        Entry::Called(called) => called.function.entry().description().name,
        Entry::Window(_) => "ncclCommWindowRegister",
    }
}

fn words(aspect: Aspect) -> &'static str {
    match aspect {
        Aspect::Call => "what is called",
        Aspect::Size => "size",
        Aspect::Reduction => "reduction",
        Aspect::Root => "root",
        Aspect::Send => "where the send buffer lies",
        Aspect::Receive => "where the receive buffer lies",
        Aspect::Flags => "flags",
        Aspect::Allocation => "the size of the allocation",
        Aspect::Offset => "the place in the allocation",
    }
}

/// A rank's value of an aspect.
fn has(entry: &Entry, aspect: Aspect) -> String {
    match (entry, aspect) {
        (Entry::Called(called), Aspect::Call) => format!("{} of {}", name(entry), size(called)),
        (Entry::Called(called), Aspect::Reduction) => reduction(called.reduction),
        (Entry::Called(called), Aspect::Root) => called.root.map_or("none".into(), |root| root.to_string()),
        (Entry::Called(called), Aspect::Send) => place(called.send),
        (Entry::Called(called), Aspect::Receive) => place(called.receive),
        (Entry::Called(called), _) => size(called),
        (Entry::Window(Window { bytes, .. }), Aspect::Call) => format!("{} of {bytes} bytes", name(entry)),
        (Entry::Window(window), Aspect::Flags) => window.flags.to_string(),
        (Entry::Window(window), Aspect::Allocation) => format!("{} bytes", window.allocation),
        (Entry::Window(window), Aspect::Offset) => format!("{} bytes from its beginning", window.offset),
        (Entry::Window(window), _) => format!("{} bytes", window.bytes),
    }
}

fn size(called: &Called) -> String {
    let Called { count, datatype, .. } = called;
    let name = usize::try_from(*datatype).ok().and_then(|datatype| TYPES.get(datatype));
    name.map_or_else(|| format!("{count} of type {datatype}"), |name| format!("{count} {name}"))
}

fn reduction(number: Option<u16>) -> String {
    let name = number.and_then(|number| REDUCTIONS.get(usize::from(number)));
    match (number, name) {
        (_, Some(name)) => (*name).into(),
        (Some(OWN), None) => "one of its own".into(),
        _ => "none".into(),
    }
}

fn place(place: Option<Place>) -> String {
    match place {
        None => "in no window".into(),
        Some(Place { window, is_symmetric, offset }) => {
            let kind = if is_symmetric { "" } else { ", which is not symmetric" };
            format!("at {offset} bytes in window {window}{kind}")
        }
    }
}

#[cfg(test)]
mod tests {
    use nccl_sys::ncclBfloat16;
    use proptest::prelude::*;

    use super::*;
    use crate::features::check::compare::{Rules, compare};
    use crate::features::check::entry::tests::entry;
    use windlass_base::call::Function;

    fn called(offset: Option<u64>) -> Entry {
        let place = |offset| Place { window: 3, is_symmetric: true, offset };
        Entry::Called(Called {
            function: Function::AllReduce,
            count: 1024,
            datatype: ncclBfloat16.0,
            reduction: Some(0),
            root: None,
            send: Some(place(0)),
            receive: offset.map(place),
        })
    }

    /// The rank that differs is named first, with its value and the others'.
    #[test]
    fn lines() {
        let found = |aspect, odd| Divergence { aspect, odd };
        let (usual, other, outside) = (called(Some(0)), called(Some(512)), called(None));
        assert_eq!(
            divergence(17, &[usual, usual, other, usual], found(Aspect::Receive, 0b100)),
            "call 17, ncclAllReduce: rank 2 differs in where the receive buffer lies: rank 2 at 512 bytes in window 3; ranks 0, 1, 3 at 0 bytes in window 3"
        );
        assert_eq!(
            divergence(17, &[other, outside, usual, usual, usual], found(Aspect::Receive, 0b11)),
            "call 17, ncclAllReduce: ranks 0, 1 differ in where the receive buffer lies: rank 0 at 512 bytes in window 3; rank 1 in no window; ranks 2, 3, 4 at 0 bytes in window 3"
        );
        let window = Entry::Window(Window { bytes: 4096, flags: 1, allocation: 0, offset: 0 });
        assert_eq!(
            divergence(1, &[usual, window], found(Aspect::Call, 0b10)),
            "call 1, ncclAllReduce: rank 1 differs in what is called: rank 1 ncclCommWindowRegister of 4096 bytes; rank 0 ncclAllReduce of 1024 bfloat16"
        );
        assert_eq!(
            absent(9, &[1], &[(0, usual), (2, usual)], 10),
            "call 9: rank 1 has not come for 10 s: rank 0 ncclAllReduce of 1024 bfloat16; rank 2 ncclAllReduce of 1024 bfloat16"
        );
    }

    proptest! {
        /// Every divergence has a text, with every rank in it.
        #[test]
        fn any(all in proptest::collection::vec(entry(), 2..16)) {
            if let Some(found) = compare(&all, Rules { takes_unlike: false, copies: true }) {
                let line = divergence(1, &all, found);
                prop_assert!((0..all.len()).all(|rank| line.contains(&rank.to_string())), "{line}");
            }
        }
    }
}
