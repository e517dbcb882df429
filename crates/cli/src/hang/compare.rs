//! The comparison: pure. It names a rank only where ranks differ and the whole communicator stands still.
//!
//! What a call waits for is not known here, only which calls were made. So a rank is not named while it makes calls elsewhere, and calls that
//! ranks of a group made in another order are no difference.

use serde::Serialize;
use std::collections::BTreeMap;
use windlass_base::stats::calls::{CallMade, CallsOfRank, PEERS_MAX, ProcessCalls};

use super::sized::{self, describe};

/// What is wrong with ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Trouble {
    /// Its process has died.
    Dead,
    /// It has not come to a call.
    Absent,
    /// Its call differs from that of other ranks.
    Differs,
    /// It calls two communicators in another order.
    Crossed,
}

/// Ranks that are named, and why.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Late {
    /// The communicator's name.
    pub communicator: String,
    /// What is wrong.
    pub trouble: Trouble,
    /// The ranks that are named.
    pub ranks: Vec<i32>,
    /// Their processes.
    pub processes: Vec<u32>,
    /// The processes that wait for them.
    pub waiting: Vec<u32>,
    /// The same in words.
    pub text: String,
}

/// A rank of a communicator, in its process.
#[derive(Clone, Copy)]
pub struct Member<'a> {
    pub process: &'a ProcessCalls,
    pub of: &'a CallsOfRank,
}

impl Member<'_> {
    /// Whether its process ended without ending the communicator.
    pub fn has_died(&self) -> bool {
        !self.process.is_alive && self.of.is_live
    }

    fn last(&self) -> f64 {
        newest(&self.of.calls)
    }

    /// Since when its process has made no call at all.
    pub fn idle(&self) -> f64 {
        self.process.communicators.iter().map(|one| newest(&one.calls)).fold(f64::INFINITY, f64::min)
    }
}

fn newest(calls: &[CallMade]) -> f64 {
    calls.last().map_or(f64::INFINITY, |call| call.seconds_ago)
}

/// Names the ranks that others wait for, in communicators that stand still.
pub fn compare(seen: &[ProcessCalls], after: f64) -> Vec<Late> {
    let still = still(seen, after);
    let mut found: Vec<Late> = still.iter().flat_map(|members| of_communicator(members, after)).collect();
    if found.is_empty() {
        found = crossed(&still, after);
    }
    without_waiters(found)
}

/// The communicators that stand still, of whose processes nothing was found.
pub fn silent<'a>(seen: &'a [ProcessCalls], after: f64, found: &[Late]) -> Vec<Vec<Member<'a>>> {
    let has = |one: &Late, process| one.processes.contains(&process) || one.waiting.contains(&process);
    let is_found = |member: &Member<'_>| found.iter().any(|one| has(one, member.process.process));
    still(seen, after).into_iter().filter(|members| !members.iter().any(is_found)).collect()
}

/// The communicators of which no rank has made a call for `after` seconds.
fn still(seen: &[ProcessCalls], after: f64) -> Vec<Vec<Member<'_>>> {
    let mut communicators: BTreeMap<(&str, i32), Vec<Member<'_>>> = BTreeMap::new();
    for process in seen {
        for of in process.communicators.iter().filter(|of| !of.name.is_empty() && of.rank >= 0) {
            communicators.entry((&of.name, of.ranks)).or_default().push(Member { process, of });
        }
    }
    communicators.values_mut().for_each(|members| members.sort_by_key(|member| member.of.rank));
    communicators.into_values().filter(|members| stands_still(members, after)).collect()
}

fn stands_still(members: &[Member<'_>], after: f64) -> bool {
    let lives = |member: &Member<'_>| member.process.is_alive && member.of.is_live;
    members.len() > 1
        && members.iter().any(lives)
        && members.iter().any(|member| member.of.made > 0)
        && members.iter().all(|member| member.last() >= after)
}

/// What is wrong in one communicator that stands still: differing calls before absent ones. A dead rank for which nobody waits is no hang.
fn of_communicator(members: &[Member<'_>], after: f64) -> Vec<Late> {
    let found = sized::collectives(members).or_else(|| absent(members, after));
    found.map_or_else(|| messages(members, after), |one| vec![one])
}

/// A finding on ranks whose processes have died.
pub fn died(members: &[Member<'_>], dead: &[Member<'_>]) -> Late {
    let others = |member: &&Member<'_>| !member.has_died();
    let last = dead[0]
        .of
        .calls
        .last()
        .map_or("it made no call".into(), |call| format!("its last call is {}", describe(call)));
    let numbers: Vec<String> = dead.iter().map(|member| member.process.process.to_string()).collect();
    let text = format!("{} died, process {}; {last}", ranks_text(dead), numbers.join(", "));
    late(Trouble::Dead, dead, members.iter().filter(others), text)
}

/// The ranks with the fewest collectives.
fn absent(members: &[Member<'_>], after: f64) -> Option<Late> {
    let fewest = members.iter().map(|member| member.of.collectives).min()?;
    let (behind, ahead): (Vec<Member<'_>>, Vec<Member<'_>>) =
        members.iter().partition(|member| member.of.collectives == fewest);
    let number = fewest + 1;
    let first = ahead.first()?;
    if behind.iter().any(|member| member.idle() < after) {
        return None;
    }
    let dead: Vec<Member<'_>> = behind.iter().filter(|member| member.has_died()).copied().collect();
    if !dead.is_empty() {
        return Some(died(members, &dead));
    }
    let call = first.of.calls.iter().find(|call| call.collective == Some(number));
    let what = call.map_or_else(
        || format!("collective {number}"),
        |call| format!("{}, collective {number}", describe(call)),
    );
    let gone =
        if behind.iter().all(|member| member.of.is_live) { "" } else { ", and has ended the communicator" };
    let text = format!(
        "{} not come to {what}{gone}; {} made that call{}",
        has(&behind),
        ranks_text(&ahead),
        call.map_or_else(String::new, |call| since(call.seconds_ago))
    );
    Some(late(Trouble::Absent, &behind, ahead.iter(), text))
}

/// `rank 1 has`, or `ranks 0, 2 have`.
pub fn has(members: &[Member<'_>]) -> String {
    format!("{} {}", ranks_text(members), if members.len() == 1 { "has" } else { "have" })
}

/// Sends without their receives, receives without their sends, and those whose sizes differ.
fn messages(members: &[Member<'_>], after: f64) -> Vec<Late> {
    let mut found = Vec::new();
    if members.iter().any(|member| member.of.ranks as usize > PEERS_MAX) {
        return found;
    }
    for from in members {
        for to in members {
            let sent = from.of.sends.get(to.of.rank as usize).copied().unwrap_or_default();
            let received = to.of.receives.get(from.of.rank as usize).copied().unwrap_or_default();
            let (behind, ahead, function, verb) = match sent.cmp(&received) {
                std::cmp::Ordering::Equal => {
                    found.extend(sized::messages(*from, *to, sent));
                    continue;
                }
                std::cmp::Ordering::Less => (from, to, "ncclSend", "receives"),
                std::cmp::Ordering::Greater => (to, from, "ncclRecv", "sends"),
            };
            if behind.idle() < after {
                continue;
            }
            if behind.has_died() {
                found.push(died(members, &[*behind]));
                continue;
            }
            let (other, number) = (ahead.of.rank, sent.min(received) + 1);
            let text = format!(
                "rank {} has not come to {function} {number} with rank {other}, which {verb}{}",
                behind.of.rank,
                since(ahead.last())
            );
            found.push(late(Trouble::Absent, &[*behind], [*ahead].iter(), text));
        }
    }
    found
}

/// Two ranks whose last calls in two communicators are on one stream, in opposite order. Either call needs all ranks, so none can run.
fn crossed(still: &[Vec<Member<'_>>], after: f64) -> Vec<Late> {
    let mut found = Vec::new();
    for (place, one) in still.iter().enumerate() {
        for other in &still[place + 1..] {
            // Whether a process's last call of the first communicator is before that of the second, and which calls they are.
            let order = |member: &Member<'_>| {
                let twin = other.iter().find(|twin| twin.process.process == member.process.process)?;
                let last = |of: &CallsOfRank| of.calls.last().filter(|call| is_synchronizing(call)).cloned();
                let (first, second) = (last(member.of)?, last(twin.of)?);
                let is_first = first.seconds_ago > second.seconds_ago;
                let is_stuck = first.stream == second.stream && member.idle() >= after;
                is_stuck.then_some((is_first, first.collective, second.collective))
            };
            let orders: Vec<_> = one.iter().filter_map(|member| Some((*member, order(member)?))).collect();
            let opposite =
                |(_, (is_first, first, second)): &&(Member<'_>, (bool, Option<u64>, Option<u64>))| {
                    (!is_first, *first, *second) == orders[0].1
                };
            let Some((opposite, _)) = orders.iter().find(opposite) else { continue };
            let both = [orders[0].0, *opposite];
            let text = format!(
                "ranks {} and {} made their last calls here and in communicator {} in opposite order on one stream",
                both[0].of.rank, both[1].of.rank, other[0].of.name
            );
            found.push(late(Trouble::Crossed, &both, both.iter(), text));
        }
    }
    found
}

/// A finding on these ranks.
pub fn late<'a>(
    trouble: Trouble,
    named: &[Member<'a>],
    waiting: impl Iterator<Item = &'a Member<'a>>,
    text: String,
) -> Late {
    Late {
        communicator: named.first().map_or_else(String::new, |member| member.of.name.clone()),
        trouble,
        ranks: named.iter().map(|member| member.of.rank).collect(),
        processes: named.iter().map(|member| member.process.process).collect(),
        waiting: waiting.map(|member| member.process.process).collect(),
        text,
    }
}

/// Functions that end on no rank before all have come.
const SYNCHRONIZING: [&str; 4] = ["ncclAllReduce", "ncclAllGather", "ncclReduceScatter", "ncclAlltoAll"];

/// Whether a call ends on no rank before all ranks have come.
fn is_synchronizing(call: &CallMade) -> bool {
    SYNCHRONIZING.contains(&call.function.trim_end_matches("Config")) && call.bytes > 0
}

/// `rank 1`, or `ranks 0, 2`.
pub fn ranks_text(members: &[Member<'_>]) -> String {
    let ranks: Vec<String> = members.iter().map(|member| member.of.rank.to_string()).collect();
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, ranks.join(", "))
}

/// ` 31 s ago`.
fn since(seconds: f64) -> String {
    if seconds.is_finite() { format!(" {seconds:.0} s ago") } else { String::new() }
}

/// Leaves out ranks that do not come because they wait themselves: those that they wait for are named. Where all wait for each other, all
/// are named.
fn without_waiters(found: Vec<Late>) -> Vec<Late> {
    let is_waiting = |one: &Late| {
        let waits = |process| {
            found
                .iter()
                .any(|other| other.communicator != one.communicator && other.waiting.contains(process))
        };
        one.trouble == Trouble::Absent && one.processes.iter().all(waits)
    };
    let first: Vec<Late> = found.iter().filter(|one| !is_waiting(one)).cloned().collect();
    if first.is_empty() { found } else { first }
}

#[cfg(test)]
mod tests;
