//! Calls that ranks made alike in number, but not in what they asked for.

use super::compare::{Late, Member, Trouble, late, ranks_text};
use std::collections::BTreeMap;
use windlass_base::stats::calls::CallMade;
use windlass_base::stats::report;

/// What must be the same on all ranks. Types of as many bytes differ only where values are combined.
type Wanted = (String, u64, Option<u32>, Option<String>);

fn wanted(call: &CallMade) -> Wanted {
    let function = call.function.trim_end_matches("Config").replace("Bcast", "Broadcast");
    let datatype = function.contains("Reduce").then(|| call.datatype.clone());
    (function, call.bytes, call.other, datatype)
}

/// `ncclBroadcast of 1.0 KiB ncclFloat32 from rank 0`.
pub fn describe(call: &CallMade) -> String {
    let other = match (call.function.as_str(), call.other) {
        (_, None) => String::new(),
        ("ncclSend" | "ncclRecv", Some(peer)) => format!(" with rank {peer}"),
        (_, Some(root)) => format!(" with root {root}"),
    };
    format!("{} of {} {}{other}", call.function, report::size(call.bytes), call.datatype)
}

/// The first collective that differs, among those that all ranks still have. Where ranks have made the same ones in another order, a group may have
/// had them, in which NCCL allows that.
pub fn collectives<'a>(members: &'a [Member<'a>]) -> Option<Late> {
    let of = |member: &'a Member<'a>| -> BTreeMap<u64, &'a CallMade> {
        member.of.calls.iter().filter_map(|call| Some((call.collective?, call))).collect()
    };
    let all: Vec<BTreeMap<u64, &CallMade>> = members.iter().map(of).collect();
    let common: Vec<u64> =
        all[0].keys().filter(|number| all.iter().all(|own| own.contains_key(number))).copied().collect();
    let sorted = |own: &BTreeMap<u64, &CallMade>| {
        let mut wants: Vec<Wanted> = common.iter().map(|number| wanted(own[number])).collect();
        wants.sort();
        wants
    };
    let usual = sorted(&all[0]);
    if all.iter().all(|own| sorted(own) == usual) {
        return None;
    }
    let number =
        *common.iter().find(|number| all.iter().any(|own| wanted(own[number]) != wanted(all[0][number])))?;
    let mut kinds: BTreeMap<Wanted, Vec<Member<'a>>> = BTreeMap::new();
    members
        .iter()
        .zip(&all)
        .for_each(|(member, own)| kinds.entry(wanted(own[&number])).or_default().push(*member));
    let mut kinds: Vec<Vec<Member<'a>>> = kinds.into_values().collect();
    // The usual call is that of most ranks; of two, nobody can say which one is wrong.
    kinds.sort_by_key(Vec::len);
    let is_split = kinds.len() == 2 && kinds[0].len() == kinds[1].len();
    let odd: Vec<Member<'a>> = kinds[..kinds.len() - usize::from(!is_split)].concat();
    let texts: Vec<String> = kinds
        .iter()
        .map(|kind| {
            let call = all[members.iter().position(|member| member.of.rank == kind[0].of.rank).unwrap_or(0)]
                [&number];
            format!("{}: {}", ranks_text(kind), describe(call))
        })
        .collect();
    let text = format!("ranks differ in collective {number}; {}", texts.join("; "));
    let others = members.iter().filter(|member| odd.iter().all(|odd| odd.of.rank != member.of.rank));
    Some(late(Trouble::Differs, &odd, others, text))
}

/// The first message of a pair whose send and receive are of different sizes. `count`: how many messages either side has called.
pub fn messages(from: Member<'_>, to: Member<'_>, count: u32) -> Option<Late> {
    let last_first = |member: Member<'_>, function: &str, peer: i32| -> Vec<CallMade> {
        let is_own = |call: &&CallMade| call.function == function && call.other == u32::try_from(peer).ok();
        member.of.calls.iter().filter(is_own).rev().cloned().collect()
    };
    let (sends, receives) =
        (last_first(from, "ncclSend", to.of.rank), last_first(to, "ncclRecv", from.of.rank));
    let pairs: Vec<_> = sends.iter().zip(&receives).enumerate().collect();
    let (before, (send, receive)) =
        pairs.into_iter().rfind(|(_, (send, receive))| send.bytes != receive.bytes)?;
    let (sent, received) = (report::size(send.bytes), report::size(receive.bytes));
    let text = format!(
        "ranks differ in message {} from rank {} to rank {}: the send has {sent}, the receive {received}",
        u64::from(count) - before as u64,
        from.of.rank,
        to.of.rank
    );
    Some(late(Trouble::Differs, &[from, to], [from, to].iter(), text))
}
