//! Explores every order of what two or three ranks do in a split or shrink: each says, hears and does what the [plan](super::plan) gives,
//! with the host's real [`Round`] and the real [`Roster`] between them. NCCL's calls are barriers, and so are sessions.
//!
//! Ranks may want different things, come late, be unable to come to a session, be refused by NCCL and try again, fail, or die.

#![cfg(test)]

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt::Write;
use std::hash::{DefaultHasher, Hasher};

use super::local_rendezvous::{Missing, Roster, RosterCourse, RosterMessage};
use super::plan::{CallFacts, ChildPlan, LazyVote, Parent, SplitMessage};
use super::round::Round;
use crate::agreement::{ConnectionId, ToRank};
use crate::message::FromHost;
use crate::outcome::Failure;

/// What one rank may suffer, once in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Nothing,
    /// Its process dies.
    Dies,
    /// It cannot come to its session.
    StaysAway,
    /// The same, and it gets no id, so it fails.
    LacksId,
    /// NCCL refuses the call of a rank in a group by arguments that only NCCL checks. The rank tries again, outside a group.
    Refused,
}

/// What is wrong with the protocol. Each must be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutation {
    Nothing,
    /// A rank that does not wait says nothing.
    MessageTooFew,
    /// A rank that says so a second time, after NCCL refused its call.
    MessageTooMany,
    /// A rank goes to NCCL without the answer that it waits for.
    GoesOnWithoutAnswer,
    /// The host sends an answer twice.
    AnswerTwice,
    /// The host answers before the last rank has spoken, with that rank's message as it were a rank without a color.
    AnswersEarly,
    /// Ranks of lazy children leave the others' split to the others.
    OthersAlone,
    /// A rank that cannot come to its session does not say so.
    StaysAwaySilently,
    /// A rank that fails before its message does not withdraw it.
    FailsSilently,
    /// The host does not notice that a rank's process is dead.
    DeathUnseen,
    /// A rank enters the roster only after NCCL's call.
    EntersLate,
    /// A rank makes NCCL's call on a parent where it should do without.
    CallsOnParent,
}

/// Where a rank is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum At {
    Start,
    /// Waits for the messages of all.
    InRound,
    /// Waits in the session at the child's first rank.
    Meeting {
        ranks: Vec<u32>,
        splits_too: bool,
    },
    /// In NCCL's call on the parent, with this color.
    OnParent(Option<i32>, After),
    /// In NCCL's init by an id.
    ById(Vec<u32>),
    /// NCCL has made its child: about to ask the roster.
    Roster,
    /// In the session of the roster's ranks.
    Rostered,
    Done(End),
}

/// What comes after NCCL's call on the parent.
#[derive(Clone, Debug, PartialEq, Eq)]
enum After {
    Roster,
    ById(Vec<u32>),
    Met(Vec<u32>),
}

/// How a rank's call ends.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    PeerGroup(Vec<u32>),
    OnNccl(Vec<u32>),
    Nothing,
    Failed,
    Dead,
}

/// A session: who is there, who says that it does not come, and whether one has failed or died.
#[derive(Clone, Debug, Default)]
struct Session {
    here: BTreeSet<u32>,
    is_declined: bool,
    is_failed: bool,
}

/// What a rank sends to the round's host.
#[derive(Clone, Debug)]
enum Said {
    Message(SplitMessage),
    Withdrawal,
}

#[derive(Clone, Debug)]
struct World {
    facts: Vec<CallFacts>,
    at: Vec<At>,
    round: Round,
    /// On their way to the host of the round, which is the first rank's process.
    said: Vec<Vec<Said>>,
    has_spoken: Vec<bool>,
    /// The answer that each rank has not read yet.
    answers: Vec<Option<FromHost>>,
    has_heard: Vec<bool>,
    /// Sessions by the ranks of the child, and those of rosters by color.
    sessions: BTreeMap<Vec<u32>, Session>,
    rosters: BTreeMap<i32, (Roster, Session)>,
    /// The ranks that have come to NCCL's call on the parent, with their colors.
    on_parent: BTreeMap<u32, Option<i32>>,
    by_id: BTreeMap<Vec<u32>, BTreeSet<u32>>,
    fault: Fault,
    is_faulty: bool,
    mutation: Mutation,
    /// What must never happen.
    wrong: Option<String>,
}

impl World {
    fn ranks(&self) -> u32 {
        self.at.len() as u32
    }

    fn is_dead(&self, rank: u32) -> bool {
        self.at[rank as usize] == At::Done(End::Dead)
    }

    fn some_dead(&self) -> bool {
        (0..self.ranks()).any(|rank| self.is_dead(rank))
    }

    fn of_color(&self, color: i32) -> Vec<u32> {
        let members = self.on_parent.iter().filter(|(_, of)| **of == Some(color));
        members.map(|(rank, _)| *rank).collect()
    }

    /// All worlds after one step.
    fn next(&self) -> Vec<World> {
        let mut worlds = Vec::new();
        for rank in 0..self.ranks() {
            let mut add = |step: fn(&mut World, u32) -> bool| {
                let mut world = self.clone();
                if step(&mut world, rank) {
                    worlds.push(world);
                }
            };
            add(World::go);
            add(World::deliver);
            add(World::notice);
            if !self.is_faulty {
                match self.fault {
                    Fault::Dies => {
                        add(|world, rank| world.die(rank, false));
                        add(|world, rank| world.die(rank, true));
                    }
                    Fault::StaysAway | Fault::LacksId => add(World::stay_away),
                    Fault::Nothing | Fault::Refused => {}
                }
            }
        }
        worlds
    }

    /// The host hears what a rank has said.
    fn deliver(&mut self, rank: u32) -> bool {
        let own = rank as usize;
        if self.said[own].is_empty() || self.is_dead(0) {
            return false;
        }
        let answers = match self.said[own].remove(0) {
            Said::Message(message) => {
                self.has_spoken[own] = true;
                self.round.said(ConnectionId(rank.into()), rank, self.ranks(), message)
            }
            Said::Withdrawal => self.round.fail(Failure::Absent { rank }),
        };
        if self.mutation == Mutation::AnswerTwice {
            self.answer(answers.clone());
        }
        self.answer(answers);
        let spoken = self.has_spoken.iter().filter(|spoken| **spoken).count();
        if self.mutation == Mutation::AnswersEarly && spoken + 1 == self.at.len() {
            let late = self.has_spoken.iter().position(|spoken| !spoken).unwrap();
            self.has_spoken[late] = true;
            let none = SplitMessage { color: None, key: 0, vote: LazyVote::No, parent: Parent::Built };
            let answers = self.round.said(ConnectionId(late as u64), late as u32, self.ranks(), none);
            self.answer(answers);
        }
        true
    }

    fn answer(&mut self, answers: Vec<ToRank>) {
        for ToRank { to, message } in answers {
            let own = to.0 as usize;
            // A rank that has not waited reads nothing.
            if self.at[own] != At::InRound {
                continue;
            }
            if self.has_heard[own] {
                self.wrong = Some(format!("rank {own} hears twice"));
            }
            self.has_heard[own] = true;
            self.answers[own] = Some(message);
        }
    }

    /// The host of a wait notices that a process is dead, or a rank that it has lost its host.
    fn notice(&mut self, rank: u32) -> bool {
        let own = rank as usize;
        if self.mutation == Mutation::DeathUnseen {
            return false;
        }
        if self.is_dead(rank) {
            let is_unheard = !self.has_spoken[own] && self.said[own].is_empty() && !self.is_dead(0);
            if is_unheard && self.round.answer.is_none() {
                let answers = self.round.fail(Failure::Absent { rank });
                self.answer(answers);
                return true;
            }
            return false;
        }
        let waits_for_dead = match &self.at[own] {
            At::InRound => self.answers[own].is_none() && self.is_dead(0),
            At::Meeting { ranks, .. } | At::ById(ranks) => ranks.iter().any(|other| self.is_dead(*other)),
            At::OnParent(..) => self.some_dead(),
            At::Rostered | At::Roster => self.some_dead(),
            At::Start | At::Done(_) => false,
        };
        if waits_for_dead {
            self.at[own] = At::Done(End::Failed);
        }
        waits_for_dead
    }

    /// A rank's process dies, after its words have gone out or before.
    fn die(&mut self, rank: u32, loses_words: bool) -> bool {
        let own = rank as usize;
        if matches!(self.at[own], At::Done(_)) || loses_words && self.said[own].is_empty() {
            return false;
        }
        self.is_faulty = true;
        if loses_words {
            self.said[own].clear();
        }
        self.at[own] = At::Done(End::Dead);
        for (roster, session) in self.rosters.values_mut() {
            if let Some((_, Missing::Dies)) = roster.left(rank.into(), None) {
                session.is_failed = true;
            }
        }
        true
    }

    /// A rank that would come to a session cannot.
    fn stay_away(&mut self, rank: u32) -> bool {
        let own = rank as usize;
        let lacks_id = self.fault == Fault::LacksId;
        let is_silent = self.mutation == Mutation::StaysAwaySilently;
        match self.at[own].clone() {
            At::Meeting { ranks, splits_too } if !self.session(&ranks).here.contains(&rank) => {
                self.is_faulty = true;
                let session = self.session(&ranks);
                session.is_declined |= !lacks_id && !is_silent;
                session.is_failed |= lacks_id && !is_silent;
                match lacks_id {
                    true => self.at[own] = At::Done(End::Failed),
                    false => self.leave_meeting(rank, splits_too, After::ById(ranks)),
                }
                true
            }
            At::Roster if !lacks_id => {
                self.is_faulty = true;
                let color = self.facts[own].message.color.unwrap();
                let ranks = self.of_color(color);
                let (roster, session) = self.rosters.entry(color).or_default();
                // It asks, and then declines.
                let asked = roster.ask(rank.into(), ranks.len() as u32);
                let missing = roster.left(rank.into(), Some(RosterMessage::Decline));
                let is_expected = matches!(asked, Some(RosterCourse::Meet { .. })) && missing.is_some();
                session.is_declined |= is_expected && !is_silent;
                self.at[own] = At::Done(End::OnNccl(ranks));
                true
            }
            _ => false,
        }
    }

    fn session(&mut self, ranks: &[u32]) -> &mut Session {
        self.sessions.entry(ranks.to_vec()).or_default()
    }

    /// A rank does its next step, if it waits for nothing.
    fn go(&mut self, rank: u32) -> bool {
        let own = rank as usize;
        match self.at[own].clone() {
            At::Start => self.begin(rank),
            At::InRound => {
                if self.mutation == Mutation::GoesOnWithoutAnswer {
                    self.answers[own] = None;
                    self.follow(rank, ChildPlan::Nccl);
                    return true;
                }
                match self.answers[own].take() {
                    None => return false,
                    Some(FromHost::Table(table)) => self.follow(rank, table.plan(rank)),
                    Some(_) => self.at[own] = At::Done(End::Failed),
                }
            }
            At::Meeting { ranks, splits_too } => return self.meet(rank, ranks, splits_too),
            At::OnParent(_, after) => {
                if self.on_parent.len() < self.at.len() {
                    return false;
                }
                self.after_parent(rank, after);
            }
            At::ById(ranks) => {
                if self.by_id.entry(ranks.clone()).or_default().len() < ranks.len() {
                    return false;
                }
                self.at[own] = At::Done(End::OnNccl(ranks));
            }
            At::Roster => self.ask_roster(rank),
            At::Rostered => return self.meet_rostered(rank),
            At::Done(_) => return false,
        }
        true
    }

    fn begin(&mut self, rank: u32) {
        let own = rank as usize;
        let facts = self.facts[own];
        let (said, plan) = facts.first();
        if let Some(message) = said
            && self.mutation != Mutation::MessageTooFew
        {
            self.say(rank, Said::Message(message));
        }
        if facts.is_in_group && self.fault == Fault::Refused && !self.is_faulty && plan == ChildPlan::Nccl {
            self.is_faulty = true;
            let has_said = said.is_some() && self.mutation != Mutation::MessageTooMany;
            self.facts[own] = CallFacts { is_in_group: false, has_said, ..facts };
            return;
        }
        self.follow(rank, plan);
    }

    fn say(&mut self, rank: u32, what: Said) {
        self.said[rank as usize].push(what);
    }

    /// What `ChildCall::begin` and the call around it do with a plan.
    fn follow(&mut self, rank: u32, plan: ChildPlan) {
        let own = rank as usize;
        let color = self.facts[own].message.color;
        match plan {
            // The program tries again with arguments that NCCL takes.
            ChildPlan::Refused => self.facts[own].is_refused = false,
            ChildPlan::Round => {
                self.say(rank, Said::Message(self.facts[own].message));
                self.at[own] = At::InRound;
            }
            ChildPlan::Nccl => {
                if let Some(color) = color
                    && self.mutation != Mutation::EntersLate
                {
                    let (roster, _) = self.rosters.entry(color).or_default();
                    assert!(roster.enter(rank.into(), rank));
                }
                self.enters_parent(rank, color, After::Roster);
            }
            ChildPlan::Meet { ranks, .. } if self.mutation == Mutation::CallsOnParent => {
                drop(ranks);
                self.enters_parent(rank, color, After::Roster);
            }
            ChildPlan::Meet { rank: place, ranks, splits_too, .. } => {
                assert_eq!(ranks[place as usize], rank);
                let splits_too = splits_too && self.mutation != Mutation::OthersAlone;
                match ranks.len() {
                    1 => self.leave_meeting(rank, splits_too, After::ById(ranks)),
                    _ => self.at[own] = At::Meeting { ranks, splits_too },
                }
            }
            ChildPlan::StayAway { rank: place, ranks } => {
                assert_eq!(ranks[place as usize], rank);
                self.session(&ranks).is_declined |= self.mutation != Mutation::StaysAwaySilently;
                self.leave_meeting(rank, false, After::ById(ranks));
            }
            ChildPlan::Nothing => self.at[own] = At::Done(End::Nothing),
            ChildPlan::Torn => {
                let is_due = self.facts[own].has_round && !self.has_spoken[own] && self.said[own].is_empty();
                if is_due && self.mutation != Mutation::FailsSilently {
                    self.say(rank, Said::Withdrawal);
                }
                self.at[own] = At::Done(End::Failed);
            }
        }
    }

    fn enters_parent(&mut self, rank: u32, color: Option<i32>, after: After) {
        self.on_parent.insert(rank, color);
        self.at[rank as usize] = At::OnParent(color, after);
    }

    fn leave_meeting(&mut self, rank: u32, splits_too: bool, after: After) {
        match splits_too {
            true => self.enters_parent(rank, None, after),
            false => self.after_parent(rank, after),
        }
    }

    fn after_parent(&mut self, rank: u32, after: After) {
        self.at[rank as usize] = match after {
            After::Roster if self.facts[rank as usize].message.color.is_none() => At::Done(End::Nothing),
            After::Roster => At::Roster,
            After::ById(ranks) => {
                self.by_id.entry(ranks.clone()).or_default().insert(rank);
                At::ById(ranks)
            }
            After::Met(ranks) => At::Done(End::PeerGroup(ranks)),
        };
    }

    fn meet(&mut self, rank: u32, ranks: Vec<u32>, splits_too: bool) -> bool {
        let session = self.session(&ranks);
        if session.here.insert(rank) {
            return true;
        }
        if session.is_failed {
            self.at[rank as usize] = At::Done(End::Failed);
        } else if session.is_declined {
            self.leave_meeting(rank, splits_too, After::ById(ranks));
        } else if session.here.len() == ranks.len() {
            self.leave_meeting(rank, splits_too, After::Met(ranks));
        } else {
            return false;
        }
        true
    }

    fn ask_roster(&mut self, rank: u32) {
        let own = rank as usize;
        let color = self.facts[own].message.color.unwrap();
        let ranks = self.of_color(color);
        let (roster, _) = self.rosters.entry(color).or_default();
        if self.mutation == Mutation::EntersLate && !roster.enter(rank.into(), rank) {
            self.at[own] = At::Done(End::OnNccl(ranks));
            return;
        }
        self.at[own] = match roster.ask(rank.into(), ranks.len() as u32) {
            Some(RosterCourse::Meet { place, .. }) if ranks.len() > 1 => {
                assert_eq!(ranks[place as usize], rank);
                At::Rostered
            }
            _ => At::Done(End::OnNccl(ranks)),
        };
    }

    fn meet_rostered(&mut self, rank: u32) -> bool {
        let own = rank as usize;
        let color = self.facts[own].message.color.unwrap();
        let ranks = self.of_color(color);
        let (_, session) = self.rosters.get_mut(&color).unwrap();
        if session.here.insert(rank) {
            return true;
        }
        let end = match (session.is_failed, session.is_declined, session.here.len() == ranks.len()) {
            (true, ..) => End::Failed,
            (_, true, _) => End::OnNccl(ranks),
            (.., true) => End::PeerGroup(ranks),
            _ => return false,
        };
        self.at[own] = At::Done(end);
        true
    }

    /// Whether what a rank of another one was told can make all that follows go wrong, as with NCCL alone: some ranks lack the parent.
    fn is_mixed(&self) -> bool {
        self.facts.iter().any(|facts| facts.message.parent != self.facts[0].message.parent)
            || self.facts.iter().any(|facts| facts.message.parent == Parent::Lost)
    }

    /// What is wrong when no rank can do anything more, or at any time.
    fn outcome(&self, is_over: bool) -> Result<(), String> {
        if let Some(wrong) = &self.wrong {
            return Err(wrong.clone());
        }
        if !is_over {
            return Ok(());
        }
        let fails = self.at.iter().any(|at| matches!(at, At::Done(End::Failed | End::Dead)));
        let may_fail =
            self.is_mixed() || self.is_faulty && matches!(self.fault, Fault::Dies | Fault::LacksId);
        if fails && !may_fail {
            return Err("a rank fails without a cause".into());
        }
        let comes = |facts: &CallFacts| facts.is_known || facts.message.parent != Parent::Unbuildable;
        let all_come = !self.is_faulty && self.facts.iter().all(comes);
        for (rank, at) in self.at.iter().enumerate() {
            match at {
                At::Done(End::OnNccl(ranks)) if all_come && ranks.len() > 1 => {
                    return Err(format!("{ranks:?} get no peer group"));
                }
                At::Done(End::PeerGroup(ranks)) => self.agree(ranks, at)?,
                At::Done(End::OnNccl(ranks)) => self.agree(ranks, at)?,
                At::Done(_) => {}
                // As with NCCL alone, when ranks have failed before NCCL's call.
                At::OnParent(..) | At::ById(_) if fails => {}
                _ => return Err(format!("rank {rank} waits for ever at {at:?}")),
            }
        }
        Ok(())
    }

    fn agree(&self, ranks: &[u32], end: &At) -> Result<(), String> {
        let fits = |other: &u32| {
            let other = &self.at[*other as usize];
            // A rank may die or fail after the others have ended.
            other == end || matches!(other, At::Done(End::Failed | End::Dead))
        };
        // A rank of a session that came to nothing has NCCL's communicator.
        ranks.iter().all(fits).then_some(()).ok_or_else(|| format!("{end:?} of {ranks:?}: {:?}", self.at))
    }

    fn key(&self) -> u64 {
        struct Hashing(DefaultHasher);
        impl Write for Hashing {
            fn write_str(&mut self, text: &str) -> std::fmt::Result {
                self.0.write(text.as_bytes());
                Ok(())
            }
        }
        let mut hashing = Hashing(DefaultHasher::new());
        write!(
            hashing,
            "{:?}{:?}{:?}{:?}{:?}{:?}{:?}{:?}",
            self.facts,
            self.at,
            self.round,
            self.said,
            self.answers,
            self.sessions,
            self.rosters,
            self.is_faulty
        )
        .unwrap();
        hashing.0.finish()
    }
}

/// Explores all orders from here. How many states there are, or the first wrong one.
fn explore(facts: &[CallFacts], fault: Fault, mutation: Mutation) -> Result<usize, String> {
    let count = facts.len();
    let world = World {
        facts: facts.to_vec(),
        at: vec![At::Start; count],
        round: Round::default(),
        said: vec![Vec::new(); count],
        has_spoken: vec![false; count],
        answers: vec![None; count],
        has_heard: vec![false; count],
        sessions: BTreeMap::new(),
        rosters: BTreeMap::new(),
        on_parent: BTreeMap::new(),
        by_id: BTreeMap::new(),
        fault,
        is_faulty: false,
        mutation,
        wrong: None,
    };
    let (mut seen, mut ahead) = (HashSet::from([world.key()]), vec![world]);
    while let Some(world) = ahead.pop() {
        let next = world.next();
        world.outcome(next.is_empty()).map_err(|wrong| format!("{wrong}, with {fault:?} of {facts:#?}"))?;
        ahead.extend(next.into_iter().filter(|next| seen.insert(next.key())));
    }
    Ok(seen.len())
}

fn facts(place: u32, ranks: u32, color: Option<i32>, vote: LazyVote) -> CallFacts {
    CallFacts {
        message: SplitMessage { color, key: 0, vote, parent: Parent::Built },
        place,
        ranks,
        is_refused: false,
        has_round: true,
        has_said: false,
        is_in_group: false,
        is_known: true,
    }
}

/// All calls of so many ranks, where each rank has one of these facts.
fn calls(ranks: u32, of_rank: &[CallFacts]) -> Vec<Vec<CallFacts>> {
    (0..ranks).fold(vec![Vec::new()], |calls, place| {
        let with = |call: &Vec<CallFacts>| {
            let one = |facts: &CallFacts| [&call[..], &[CallFacts { place, ranks, ..*facts }]].concat();
            of_rank.iter().map(one).collect::<Vec<_>>()
        };
        calls.iter().flat_map(with).collect()
    })
}

/// What a rank of a split may know: its color, whether it wants a lazy child, and what keeps it from waiting.
fn splits(parents: &[Parent]) -> Vec<CallFacts> {
    let mut all = Vec::new();
    for parent in parents {
        for color in [None, Some(0), Some(1)] {
            let of = |vote| {
                let facts = facts(0, 0, color, vote);
                CallFacts { message: SplitMessage { parent: *parent, ..facts.message }, ..facts }
            };
            all.push(of(LazyVote::Always));
            // Without a color a rank has no vote.
            all.extend(color.map(|_| of(LazyVote::No)));
            all.push(CallFacts { is_in_group: true, ..of(LazyVote::Always) });
        }
    }
    all
}

/// What a rank of a shrink may know.
fn shrinks() -> Vec<CallFacts> {
    let of = |parent, vote| {
        let facts = facts(0, 0, Some(0), vote);
        CallFacts { message: SplitMessage { parent, ..facts.message }, ..facts }
    };
    let without = of(Parent::Unbuildable, LazyVote::Always);
    vec![
        without,
        of(Parent::Unbuildable, LazyVote::No),
        CallFacts { is_in_group: true, ..without },
        CallFacts { is_known: false, ..without },
        CallFacts { is_refused: true, ..without },
        of(Parent::Built, LazyVote::Always),
        of(Parent::Built, LazyVote::No),
    ]
}

const FAULTS: [Fault; 5] = [Fault::Nothing, Fault::Dies, Fault::StaysAway, Fault::LacksId, Fault::Refused];

/// Explores these calls with these faults, and says how many states there were.
fn explore_all(
    what: &str,
    calls: &[Vec<CallFacts>],
    faults: &[Fault],
    mutation: Mutation,
) -> Result<(), String> {
    let mut states = 0;
    for call in calls {
        for fault in faults {
            states += explore(call, *fault, mutation)?;
        }
    }
    println!("{what}: {} calls, {states} states", calls.len());
    Ok(())
}

/// Every order of every call of two ranks, and of three without faults, ends with all ranks in agreement and none waiting.
#[test]
fn every_order() {
    use Parent::{Built, Lazy, Lost};
    let refused = CallFacts { is_refused: true, ..facts(0, 0, Some(0), LazyVote::Always) };
    let unreadable = CallFacts { is_known: false, ..facts(0, 0, Some(0), LazyVote::Always) };
    let of_rank = [&splits(&[Built])[..], &[refused, unreadable]].concat();
    explore_all("splits of 2", &calls(2, &of_rank), &FAULTS, Mutation::Nothing).unwrap();
    let (of_rank, none) = (splits(&[Built]), [Fault::Nothing]);
    explore_all("splits of 3", &calls(3, &of_rank), &none, Mutation::Nothing).unwrap();
    let torn = splits(&[Built, Lost, Lazy]);
    explore_all("splits of 2, parents apart", &calls(2, &torn), &FAULTS, Mutation::Nothing).unwrap();
    explore_all("shrinks to 2", &calls(2, &shrinks()), &FAULTS, Mutation::Nothing).unwrap();
    explore_all("shrinks to 3", &calls(3, &shrinks()), &[Fault::Nothing], Mutation::Nothing).unwrap();
}

/// The same for some calls of three ranks that fail, refuse or die, also where no rank can have a round.
#[test]
fn faults_of_three() {
    let pair = [Some(0), Some(0), Some(1)];
    let call = |votes: [LazyVote; 3], in_group: [bool; 3]| -> Vec<CallFacts> {
        let of = |rank: usize| CallFacts {
            is_in_group: in_group[rank],
            ..facts(rank as u32, 3, pair[rank], votes[rank])
        };
        (0..3).map(of).collect()
    };
    let (no, always) = (LazyVote::No, LazyVote::Always);
    let mut all = vec![
        call([always; 3], [false; 3]),
        call([always, always, no], [false; 3]),
        call([no; 3], [false; 3]),
        call([always; 3], [false, true, false]),
        call([always; 3], [true; 3]),
    ];
    all.push(all[0].iter().map(|facts| CallFacts { has_round: false, ..*facts }).collect());
    let without = shrinks();
    all.extend([[0, 0, 0], [0, 1, 5], [0, 3, 2], [4, 0, 0]].map(|of: [usize; 3]| {
        (0..).zip(of).map(|(place, of)| CallFacts { place, ranks: 3, ..without[of] }).collect()
    }));
    explore_all("faults of 3", &all, &FAULTS, Mutation::Nothing).unwrap();
}

/// What is wrong with the protocol is found.
#[test]
fn mutations_are_found() {
    use Mutation::*;
    let pair_and_one = [(0, LazyVote::Always), (0, LazyVote::Always), (1, LazyVote::No)];
    let of_three = (0..).zip(pair_and_one).map(|(place, (color, vote))| facts(place, 3, Some(color), vote));
    let calls = [
        vec![of_three.collect()],
        calls(2, &splits(&[Parent::Built])),
        calls(2, &shrinks()),
        calls(2, &splits(&[Parent::Built, Parent::Lost])),
    ]
    .concat();
    let mutations = [
        MessageTooFew,
        MessageTooMany,
        GoesOnWithoutAnswer,
        AnswerTwice,
        AnswersEarly,
        OthersAlone,
        StaysAwaySilently,
        FailsSilently,
        DeathUnseen,
        EntersLate,
        CallsOnParent,
    ];
    for mutation in mutations {
        let found = explore_all("", &calls, &FAULTS, mutation);
        println!(
            "{mutation:?}: {}",
            found.clone().err().unwrap_or_default().lines().next().unwrap_or_default()
        );
        assert!(found.is_err(), "{mutation:?} is not found");
    }
}
