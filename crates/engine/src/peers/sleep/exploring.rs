//! Explores every order of what two or three ranks do in suspends and resumes: each acts, votes and sees as the real [`SleepStep`] and [`Ballot`]
//! say. One fault happens at any moment: a rank refuses a step, dies, or comes so late that others stop waiting. Wrong protocols are found.

#![cfg(test)]

use std::collections::HashSet;

use super::ballot::{Ballot, Objection, Outcome};
use super::plan::{SleepPlan, SleepStep};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Nothing,
    /// The rank refuses this step once.
    Refuses(u32, SleepStep),
    Dies(u32),
    /// A rank that waits stops waiting, once.
    Late,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutation {
    Nothing,
    /// A step passes before the last rank has voted.
    PassesEarly,
    /// A rank ends a resume without waiting for the others.
    NoBarrier,
    /// A rank gives its memory back without waiting for the others.
    LetsGoEarly,
    /// A rank opens the next step before all have seen the outcome.
    OpensEarly,
    /// A rank that has waited too long tells nobody.
    GivesUpAlone,
    /// A resume that was refused keeps its memory.
    KeepsMemory,
    /// Memory is announced before it holds zeros.
    NoZeros,
    DeathUnseen,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Doing {
    Act,
    /// Memory is there and is being filled with zeros.
    Zeroes,
    Vote(Result<(), Objection>),
    Wait,
    /// No call; the next is this one.
    Between,
    /// All calls are made.
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct OneRank {
    doing: Doing,
    step: SleepStep,
    call: u32,
    sleeps: bool,
    is_quiet: bool,
    /// None, any content, zeros.
    memory: Option<bool>,
    mapped: u8,
    lives: bool,
    /// Of each call whether it succeeded: none while it was not made.
    results: [Option<bool>; CALLS],
}

const CALLS: usize = 4;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    ballot: Ballot,
    ranks: Vec<OneRank>,
    has_fault: bool,
}

struct Search {
    fault: Fault,
    mutation: Mutation,
    seen: HashSet<World>,
    found: Option<String>,
}

impl Search {
    fn run(ranks: u32, fault: Fault, mutation: Mutation) -> (usize, Option<String>) {
        let one = OneRank {
            doing: Doing::Between,
            step: SleepStep::Quiet,
            call: 0,
            sleeps: false,
            is_quiet: false,
            memory: Some(true),
            mapped: ((1 << ranks) - 1) as u8,
            lives: true,
            results: [None; CALLS],
        };
        let world = World {
            ballot: Ballot::of(0),
            ranks: vec![one; ranks as usize],
            has_fault: fault != Fault::Nothing,
        };
        let mut search = Search { fault, mutation, seen: HashSet::new(), found: None };
        let mut open = vec![world];
        while let Some(world) = open.pop() {
            if search.found.is_some() || !search.seen.insert(world.clone()) {
                continue;
            }
            let next = search.all_next(&world);
            let all_over = world.ranks.iter().all(|rank| rank.doing == Doing::Over || !rank.lives);
            if next.is_empty() && !all_over {
                search.found = Some(format!("nobody goes on: {world:?}"));
            }
            if all_over {
                search.check_end(&world);
            }
            open.extend(next);
        }
        (search.seen.len(), search.found)
    }

    fn finds(&mut self, what: &str, world: &World) {
        self.found = Some(format!("{what}: {world:?}"));
    }

    fn all_next(&mut self, world: &World) -> Vec<World> {
        let mut all = Vec::new();
        for rank in 0..world.ranks.len() {
            let one = &world.ranks[rank];
            if !one.lives || one.doing == Doing::Over {
                continue;
            }
            if self.fault == Fault::Dies(rank as u32) && world.has_fault {
                let mut next = world.clone();
                (next.ranks[rank].lives, next.has_fault) = (false, false);
                all.push(next);
            }
            all.extend(self.next(world, rank));
        }
        all
    }

    fn next(&mut self, world: &World, rank: usize) -> Vec<World> {
        let mut next = world.clone();
        let ranks = world.ranks.len() as u32;
        let one = world.ranks[rank];
        let number = one.step.number(one.call);
        let dead = (0..world.ranks.len()).find(|rank| !world.ranks[*rank].lives);
        let dead = dead.filter(|_| self.mutation != Mutation::DeathUnseen);
        match one.doing {
            Doing::Between => {
                let mine = &mut next.ranks[rank];
                if mine.call as usize == CALLS {
                    mine.doing = Doing::Over;
                } else {
                    mine.call += 1;
                    (mine.step, mine.doing) = (SleepStep::first(mine.sleeps), Doing::Act);
                }
            }
            Doing::Act => self.act(&mut next, rank),
            Doing::Zeroes => {
                next.ranks[rank].memory = Some(true);
                next.ranks[rank].doing = Doing::Vote(Ok(()));
            }
            Doing::Vote(vote) => {
                let of = if self.mutation == Mutation::PassesEarly { ranks - 1 } else { ranks };
                let mut ballot = world.ballot;
                if self.mutation == Mutation::OpensEarly
                    && ballot.vote(number, (rank as u32, of), vote).is_none()
                {
                    ballot = Ballot::of(ballot.word() & !0xffff);
                }
                match ballot.vote(number, (rank as u32, of), vote) {
                    Some(ballot) => {
                        next.ballot = ballot;
                        next.ranks[rank].doing = Doing::Wait;
                        let goes_on = match self.mutation {
                            Mutation::NoBarrier => one.step == SleepStep::Map,
                            Mutation::LetsGoEarly => one.step == SleepStep::Quiet,
                            _ => false,
                        };
                        if goes_on && vote.is_ok() {
                            self.goes_on(&mut next, rank, Ok(()));
                        }
                    }
                    None => match dead {
                        Some(dead) => self.goes_on(&mut next, rank, Err((dead as u32, Objection::Gone))),
                        None => return Vec::new(),
                    },
                }
            }
            Doing::Wait => {
                let (ballot, outcome) = world.ballot.see(number, rank as u32);
                next.ballot = ballot;
                match outcome {
                    Outcome::Passed => self.goes_on(&mut next, rank, Ok(())),
                    Outcome::Refused(by, why) => self.goes_on(&mut next, rank, Err((by, why))),
                    Outcome::Open => return self.stops_waiting(world, rank, number, dead),
                }
            }
            Doing::Over => {}
        }
        vec![next]
    }

    /// What a rank does that waits for others: it sees that one is dead, or that it has waited too long.
    fn stops_waiting(&mut self, world: &World, rank: usize, number: u32, dead: Option<usize>) -> Vec<World> {
        let mut next = world.clone();
        if let Some(dead) = dead {
            next.ballot = world.ballot.refuse(number, dead as u32, Objection::Gone);
            return vec![next];
        }
        if self.fault != Fault::Late || !world.has_fault || !world.ranks[rank].step.has_deadline() {
            return Vec::new();
        }
        next.has_fault = false;
        let late = world.ballot.missing(world.ranks.len() as u32).trailing_zeros();
        if self.mutation == Mutation::GivesUpAlone {
            self.goes_on(&mut next, rank, Err((late, Objection::Late)));
        } else {
            next.ballot = world.ballot.refuse(number, late, Objection::Late);
        }
        vec![next]
    }

    fn act(&mut self, world: &mut World, rank: usize) {
        let step = world.ranks[rank].step;
        if world.has_fault && self.fault == Fault::Refuses(rank as u32, step) && step != SleepStep::LetGo {
            world.has_fault = false;
            world.ranks[rank].doing = Doing::Vote(Err(Objection::Failed));
            return;
        }
        let all_quiet = world.ranks.iter().all(|one| one.is_quiet);
        let others = world.ranks.clone();
        let one = &mut world.ranks[rank];
        one.doing = Doing::Vote(Ok(()));
        match step {
            SleepStep::Quiet => one.is_quiet = true,
            SleepStep::LetGo => {
                (one.memory, one.mapped) = (None, 0);
                if !all_quiet {
                    self.finds("memory goes while a rank's work may touch it", world);
                }
            }
            SleepStep::Make if self.mutation == Mutation::NoZeros => one.memory = Some(false),
            SleepStep::Make => (one.memory, one.doing) = (Some(false), Doing::Zeroes),
            SleepStep::Map => {
                let is_there = |other: &OneRank| match self.mutation {
                    Mutation::NoZeros => other.memory.is_some(),
                    _ => other.memory == Some(true),
                };
                if others.iter().all(is_there) {
                    one.mapped = ((1 << others.len()) - 1) as u8;
                } else {
                    one.doing = Doing::Vote(Err(Objection::Failed));
                }
            }
        }
    }

    fn goes_on(&mut self, world: &mut World, rank: usize, agreed: Result<(), (u32, Objection)>) {
        let is_dead = agreed.is_err_and(|(_, why)| why == Objection::Gone);
        let one = &mut world.ranks[rank];
        match one.step.then(agreed) {
            SleepPlan::Go(step) => (one.step, one.doing) = (step, Doing::Act),
            SleepPlan::End { sleeps, result } => {
                one.sleeps = sleeps;
                one.results[one.call as usize - 1] = Some(result.is_ok());
                one.doing = if is_dead { Doing::Over } else { Doing::Between };
                if sleeps && self.mutation != Mutation::KeepsMemory {
                    (one.memory, one.mapped) = (None, 0);
                }
                one.is_quiet = sleeps;
                let is_whole = |one: &OneRank| {
                    one.memory == Some(true)
                        && u32::from(one.mapped).count_ones() as usize == world.ranks.len()
                };
                if !sleeps && !world.ranks.iter().all(is_whole) {
                    self.finds("a rank may launch while memory is missing", world);
                } else if sleeps && world.ranks[rank].memory.is_some() {
                    self.finds("a sleeping rank has memory", world);
                }
            }
        }
    }

    fn check_end(&mut self, world: &World) {
        let of_living: Vec<&OneRank> = world.ranks.iter().filter(|one| one.lives).collect();
        let unlike =
            |one: &&&OneRank| one.sleeps != of_living[0].sleeps || one.results != of_living[0].results;
        // A death may come between two ranks' calls: the one hears of it in this call, the other in the next.
        if !matches!(self.fault, Fault::Dies(_)) && of_living.iter().any(|one| unlike(&one)) {
            self.finds("the ranks end unlike", world);
        }
        let failed = |one: &&OneRank| one.results.iter().filter(|one| **one != Some(true)).count();
        let most = usize::from(self.fault != Fault::Nothing);
        if !matches!(self.fault, Fault::Dies(_)) && of_living.iter().any(|one| failed(one) > most) {
            self.finds("one fault made several calls fail", world);
        }
    }
}

fn faults(ranks: u32) -> Vec<Fault> {
    let steps = [SleepStep::Quiet, SleepStep::LetGo, SleepStep::Make, SleepStep::Map];
    let refuses = (0..ranks).flat_map(|rank| steps.map(|step| Fault::Refuses(rank, step)));
    [Fault::Nothing, Fault::Late].into_iter().chain(refuses).chain((0..ranks).map(Fault::Dies)).collect()
}

/// Four calls in a row: whatever fails, all ranks end alike, a refused call changes nothing, and nobody waits for ever.
#[test]
fn every_order() {
    for ranks in [2, 3] {
        let mut orders = 0;
        for fault in faults(ranks) {
            let (states, found) = Search::run(ranks, fault, Mutation::Nothing);
            assert_eq!(found, None, "{ranks} ranks, {fault:?}");
            orders += states;
        }
        assert!(orders > 1000, "{orders} states");
    }
}

/// Each wrong protocol is found.
#[test]
fn mutations() {
    let all = [
        Mutation::PassesEarly,
        Mutation::NoBarrier,
        Mutation::LetsGoEarly,
        Mutation::OpensEarly,
        Mutation::GivesUpAlone,
        Mutation::KeepsMemory,
        Mutation::NoZeros,
        Mutation::DeathUnseen,
    ];
    for mutation in all {
        let finds = |fault: &Fault| Search::run(2, *fault, mutation).1.is_some();
        let in_three = |fault: &Fault| Search::run(3, *fault, mutation).1.is_some();
        assert!(faults(2).iter().any(finds) || faults(3).iter().any(in_three), "{mutation:?}");
    }
}
