//! Whom ranks wait for on their GPUs, in replays of graphs for example, where calls name nobody: pure.

use std::collections::BTreeSet;
use windlass_bootstrap::awaited::Awaited;

use super::compare::{Late, Member, Trouble, died, has, late, ranks_text};

/// A rank that waits on its GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Waiting {
    process: u32,
    communicator: String,
    rank: i32,
    awaited: Awaited,
}

impl Waiting {
    /// What this rank waits for.
    pub fn of(member: &Member<'_>, awaited: Awaited) -> Waiting {
        let (process, communicator, rank) = (member.process.process, member.of.name.clone(), member.of.rank);
        Waiting { process, communicator, rank, awaited }
    }

    /// Whether that member waits here for that other one.
    fn is(&self, member: &Member<'_>, late: &Member<'_>) -> bool {
        let is_of = self.process == member.process.process && self.rank == member.of.rank;
        let is_late =
            || self.awaited.ranks.checked_shr(late.of.rank as u32).is_some_and(|bits| bits & 1 == 1);
        is_of && self.communicator == member.of.name && is_late()
    }
}

/// Names the ranks for which others have waited in one launch all the while. A rank whose process waits itself is named only if all wait
/// for each other.
pub fn compare(communicators: &[Vec<Member<'_>>], waiting: &[Waiting], after: f64) -> Vec<Late> {
    let processes: BTreeSet<u32> = waiting.iter().map(|one| one.process).collect();
    let awaited = |may: &dyn Fn(&Member<'_>) -> bool| -> Vec<_> {
        communicators.iter().filter_map(|members| awaited(members, waiting, may)).collect()
    };
    let mut found = awaited(&|member| !processes.contains(&member.process.process));
    if found.is_empty() {
        found = awaited(&|_| true);
    }
    found.retain(|(late, _)| late.iter().all(|member| member.idle() >= after));
    found.iter().map(|(late, waiting)| name(late, waiting)).collect()
}

/// The ranks that others wait for, and those others.
fn awaited<'a>(
    members: &[Member<'a>],
    waiting: &[Waiting],
    may: &dyn Fn(&Member<'_>) -> bool,
) -> Option<(Vec<Member<'a>>, Vec<Member<'a>>)> {
    let waits = |member: &Member<'_>, late: &Member<'_>| waiting.iter().any(|one| one.is(member, late));
    let is_late = |late: &Member<'_>| may(late) && members.iter().any(|member| waits(member, late));
    let late: Vec<Member<'a>> = members.iter().filter(|one| is_late(one)).copied().collect();
    let waits_for_one = |member: &Member<'_>| late.iter().any(|late| waits(member, late));
    let others = members.iter().filter(|one| waits_for_one(one)).copied().collect();
    (!late.is_empty()).then_some((late, others))
}

fn name(ranks: &[Member<'_>], waiting: &[Member<'_>]) -> Late {
    let dead: Vec<Member<'_>> = ranks.iter().filter(|member| member.has_died()).copied().collect();
    if !dead.is_empty() {
        return died(waiting, &dead);
    }
    let text = format!(
        "{} not come on the GPU to a call or a graph's replay, for which {} {}",
        has(ranks),
        ranks_text(waiting),
        if waiting.len() == 1 { "waits" } else { "wait" }
    );
    late(Trouble::Absent, ranks, waiting.iter(), text)
}
