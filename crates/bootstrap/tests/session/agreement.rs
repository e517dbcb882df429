//! Tests of the agreement over a model network: each connection keeps its order, and all else happens in a random order.

use std::collections::VecDeque;

use proptest::prelude::*;

use windlass_bootstrap::agreement::{Agreement, ConnectionId, Event, ToRank};
use windlass_bootstrap::decision;
use windlass_bootstrap::message::{FromHost, FromRank};
use windlass_bootstrap::negotiated::Token;
use windlass_bootstrap::outcome::{Failure, FallbackReason, SessionOutcome};
use windlass_bootstrap::participation::{Participation, Stage, WithoutHost};

use crate::support::facts;

/// The hosting process, which no rank is in unless a test says so.
const HOST: Token = Token([8; 16]);

/// What a rank of the model does.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Behavior {
    Well,
    OtherOptions,
    OtherHost,
    OtherVersion,
    SameDevice,
    Refuses,
    /// Runs without Windlass: goes to NCCL without a message.
    NonWindlass,
    Never,
    /// Declines instead of reporting, with a reason.
    Declines,
    /// Declines because its own call failed.
    Fails,
    /// Dies after this many of its own steps.
    Dies(u8),
}

struct Rank {
    behavior: Behavior,
    participation: Participation,
    steps: u8,
    reported: bool,
    confirmed: bool,
    alive: bool,
    to_host: VecDeque<FromRank>,
    from_host: VecDeque<FromHost>,
    /// Whether the host has seen the end of the connection, which comes after all that the rank sent.
    left_seen: bool,
}

struct World {
    host: Option<Agreement>,
    ranks: Vec<Rank>,
    non_windlass_pending: usize,
}

fn world(behaviors: &[Behavior], without_host: WithoutHost) -> World {
    let ranks = behaviors.iter().enumerate().map(|(rank, behavior)| {
        let mut facts = facts(rank as u32, behaviors.len() as u32);
        match behavior {
            Behavior::OtherOptions => facts.options = 77,
            Behavior::OtherHost => facts.place.host = Token([3; 16]),
            Behavior::OtherVersion => facts.version.major = 99,
            Behavior::SameDevice => facts.member.device.uuid = [0; 16],
            _ => {}
        }
        Rank {
            behavior: *behavior,
            participation: Participation::new(facts, without_host),
            steps: 0,
            reported: false,
            confirmed: false,
            alive: *behavior != Behavior::Never,
            to_host: VecDeque::new(),
            from_host: VecDeque::new(),
            left_seen: false,
        }
    });
    World {
        host: Some(Agreement::new(Token([5; 16]), HOST)),
        ranks: ranks.collect(),
        non_windlass_pending: 0,
    }
}

impl World {
    /// All possible next steps: (rank, kind). Rank `n` is the host.
    fn moves(&self) -> Vec<(usize, u8)> {
        let mut moves = Vec::new();
        for (index, rank) in self.ranks.iter().enumerate() {
            let preparing = matches!(rank.participation.stage, Stage::Preparing(_));
            if rank.alive && (!rank.reported || preparing && !rank.confirmed) {
                moves.push((index, 0));
            }
            if self.host.is_some() && !rank.to_host.is_empty() {
                moves.push((index, 1));
            }
            if rank.alive && !rank.from_host.is_empty() {
                moves.push((index, 2));
            }
            if self.host.is_some()
                && !rank.alive
                && rank.reported
                && rank.to_host.is_empty()
                && !rank.left_seen
            {
                moves.push((index, 3));
            }
            if self.host.is_none() && rank.alive && rank.reported && rank.from_host.is_empty() && !over(rank)
            {
                moves.push((index, 4));
            }
        }
        if self.non_windlass_pending > 0 && self.host.is_some() {
            moves.push((self.ranks.len(), 0));
        }
        moves
    }

    fn take(&mut self, (index, what): (usize, u8)) {
        if index == self.ranks.len() {
            self.non_windlass_pending -= 1;
            return self.host_sees(Event::NonWindlass);
        }
        let connection = ConnectionId(index as u64 + 1);
        let rank = &mut self.ranks[index];
        match what {
            0 => self.acts(index),
            1 => {
                let message = rank.to_host.pop_front().unwrap();
                self.host_sees(Event::Said(connection, message));
            }
            2 => {
                let message = rank.from_host.pop_front().unwrap();
                rank.participation.heard(message);
            }
            3 => {
                rank.left_seen = true;
                self.host_sees(Event::Left(connection));
            }
            _ => rank.participation.lost(Failure::HostLost),
        }
    }

    fn acts(&mut self, index: usize) {
        let rank = &mut self.ranks[index];
        rank.steps += 1;
        if rank.behavior == Behavior::Dies(rank.steps) {
            rank.alive = false;
            return;
        }
        if !rank.reported {
            rank.reported = true;
            if rank.behavior == Behavior::NonWindlass {
                self.non_windlass_pending += 1;
                rank.participation.end(SessionOutcome::OnNccl(FallbackReason::NonBlocking));
            } else if let Some(outcome) = declining(rank.behavior) {
                rank.to_host.push_back(FromRank::Decline(outcome));
            } else {
                rank.to_host.push_back(FromRank::Report(Box::new(rank.participation.facts.clone())));
            }
            return;
        }
        rank.confirmed = true;
        if rank.behavior == Behavior::Refuses {
            rank.to_host.push_back(FromRank::Refuse("it does not map".into()));
        } else if rank.participation.confirm() {
            rank.to_host.push_back(FromRank::Confirm);
        }
        if rank.behavior == Behavior::Dies(rank.steps + 1) {
            rank.alive = false;
        }
    }

    fn host_sees(&mut self, event: Event) {
        let Some(host) = &mut self.host else { return };
        for answer in host.step(event) {
            // Encoded and decoded, as over the wire.
            let bytes = answer.message.encode();
            let kind = u16::from_le_bytes([bytes[4], bytes[5]]);
            let message = FromHost::decode(kind, &bytes[6..]).expect("readable");
            assert_eq!(message, answer.message);
            let rank = &mut self.ranks[answer.to.0 as usize - 1];
            if rank.alive {
                rank.from_host.push_back(message);
            }
        }
    }

    fn run(&mut self, choices: &[u16], host_dies_at: Option<usize>) {
        for step in 0.. {
            let moves = self.moves();
            if moves.is_empty() {
                return;
            }
            assert!(step < 1000, "this does not end");
            if host_dies_at == Some(step) {
                self.host = None;
                // Messages that were not sent yet are lost.
                for rank in &mut self.ranks {
                    let keep = choices.first().map_or(0, |choice| *choice as usize % 3);
                    rank.from_host.truncate(keep);
                }
                continue;
            }
            let choice = choices.get(step).copied().unwrap_or(step as u16);
            let chosen = moves[choice as usize % moves.len()];
            self.take(chosen);
        }
    }

    fn check(&self, host_died: bool) {
        let living = || self.ranks.iter().filter(|rank| rank.alive && rank.reported);
        let peer_group: Vec<_> = living()
            .filter_map(|rank| match &rank.participation.stage {
                Stage::PeerGroup(negotiated) => Some(negotiated.encode()),
                _ => None,
            })
            .collect();
        let on_nccl = living()
            .filter(|rank| matches!(rank.participation.stage, Stage::Over(SessionOutcome::OnNccl(_))))
            .count();
        assert!(peer_group.is_empty() || on_nccl == 0, "a peer group beside ranks on NCCL");
        assert!(peer_group.windows(2).all(|pair| pair[0] == pair[1]), "negotiated configs differ");
        if !peer_group.is_empty() {
            assert!(self.ranks.iter().all(|rank| rank.confirmed), "a peer group that not all confirmed");
            if !host_died {
                assert_eq!(peer_group.len(), living().count(), "some living ranks are not in the peer group");
            }
        }
        let all_came = self.ranks.iter().all(|rank| rank.reported);
        if all_came || host_died {
            for rank in living() {
                assert!(over(rank), "a rank waits for ever: {:?}", rank.participation.stage);
            }
        }
    }
}

fn declining(behavior: Behavior) -> Option<SessionOutcome> {
    match behavior {
        Behavior::Declines => Some(SessionOutcome::OnNccl(FallbackReason::NonBlocking)),
        Behavior::Fails => Some(SessionOutcome::Failed(Failure::Absent { rank: 7 })),
        _ => None,
    }
}

fn over(rank: &Rank) -> bool {
    rank.participation.is_over()
}

fn behaviors() -> impl Strategy<Value = Vec<Behavior>> {
    let behavior = prop_oneof![
        40 => Just(Behavior::Well),
        1 => Just(Behavior::OtherOptions),
        1 => Just(Behavior::OtherHost),
        1 => Just(Behavior::OtherVersion),
        1 => Just(Behavior::SameDevice),
        2 => Just(Behavior::Refuses),
        2 => Just(Behavior::NonWindlass),
        1 => Just(Behavior::Never),
        1 => Just(Behavior::Declines),
        1 => Just(Behavior::Fails),
        4 => (1u8..5).prop_map(Behavior::Dies),
    ];
    proptest::collection::vec(behavior, 2..=8)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    /// In any order, with deaths at any step of any rank and of the host: no two ranks have different outcomes, a peer group has
    /// all confirmations and one negotiated config, and only ranks that must wait wait for ever.
    #[test]
    fn one_outcome(
        behaviors in behaviors(),
        choices in proptest::collection::vec(any::<u16>(), 0..120),
        host_dies_at in proptest::option::weighted(0.3, 0usize..80),
        without_host in prop_oneof![Just(WithoutHost::Fails), Just(WithoutHost::GoesToNccl)],
    ) {
        let mut world = world(&behaviors, without_host);
        world.run(&choices, host_dies_at);
        world.check(world.host.is_none());
    }
}

fn run_in_order(behaviors: &[Behavior]) -> Vec<Stage> {
    let mut world = world(behaviors, WithoutHost::Fails);
    world.run(&[0; 200], None);
    world.check(false);
    world.ranks.iter().map(|rank| rank.participation.stage.clone()).collect()
}

/// Each behavior gives its own outcome.
#[test]
fn outcomes() {
    let well = run_in_order(&[Behavior::Well; 4]);
    assert!(well.iter().all(|stage| matches!(stage, Stage::PeerGroup(_))));
    let cases = [
        (Behavior::OtherOptions, SessionOutcome::OnNccl(FallbackReason::OtherOptions { rank: 1, other: 0 })),
        (Behavior::OtherHost, SessionOutcome::OnNccl(FallbackReason::OtherHost { rank: 1, other: 0 })),
        (Behavior::OtherVersion, SessionOutcome::OnNccl(FallbackReason::OtherVersion)),
        (Behavior::SameDevice, SessionOutcome::OnNccl(FallbackReason::SameDevice { rank: 1, other: 0 })),
        (
            Behavior::Refuses,
            SessionOutcome::OnNccl(FallbackReason::Refused { rank: 1, words: "it does not map".into() }),
        ),
        (Behavior::NonWindlass, SessionOutcome::OnNccl(FallbackReason::NonWindlass)),
        (Behavior::Declines, SessionOutcome::OnNccl(FallbackReason::NonBlocking)),
        (Behavior::Fails, SessionOutcome::Failed(Failure::Absent { rank: 7 })),
        (Behavior::Dies(2), SessionOutcome::Failed(Failure::Lost { rank: 1 })),
    ];
    for (behavior, expected) in cases {
        assert_eq!(run_in_order(&[Behavior::Well, behavior])[0], Stage::Over(expected), "{behavior:?}");
    }
    // A rank that never comes, or dies before its report, counts as late: the others wait for it.
    for behavior in [Behavior::Never, Behavior::Dies(1)] {
        assert_eq!(run_in_order(&[Behavior::Well, behavior])[0], Stage::Asked, "{behavior:?}");
    }
}

/// A rank that already has NCCL's communicator goes without a peer group if the host is lost before the rank has confirmed. If the
/// host is lost later, or the failure is another, its init fails. A rank without that communicator fails in every case.
#[test]
fn without_host() {
    let lost = |without_host, confirms: bool, failure| {
        let mut host = Agreement::new(Token([5; 16]), HOST);
        let mut rank = Participation::new(facts(0, 2), without_host);
        host.step(Event::Said(ConnectionId(1), report(0, 2)));
        let answers = host.step(Event::Said(ConnectionId(2), report(1, 2)));
        let own = answers.into_iter().find(|answer| answer.to == ConnectionId(1)).unwrap();
        if confirms {
            rank.heard(own.message);
            assert!(rank.confirm());
        }
        rank.lost(failure);
        matches!(rank.stage, Stage::Over(SessionOutcome::OnNccl(FallbackReason::Unreachable { .. })))
    };
    assert!(lost(WithoutHost::GoesToNccl, false, Failure::HostLost));
    assert!(!lost(WithoutHost::GoesToNccl, true, Failure::HostLost));
    assert!(!lost(WithoutHost::GoesToNccl, false, Failure::Unreadable));
    assert!(!lost(WithoutHost::Fails, false, Failure::HostLost));
}

/// A session fails if a missing rank turns out never to come. A session that has all its ranks goes on.
#[test]
fn absent() {
    let lost = Failure::Absent { rank: 5 };
    let mut host = Agreement::new(Token([0; 16]), HOST);
    assert_eq!(host.missing(), None);
    host.step(Event::Said(ConnectionId(1), report(0, 2)));
    assert_eq!(host.missing(), Some(1));
    assert_eq!(host.step(Event::Absent(lost.clone())).len(), 1);
    assert_eq!((host.missing(), host.outcome()), (None, Some(&SessionOutcome::Failed(lost.clone()))));
    // A session with all its ranks does not wait for it.
    let mut host = Agreement::new(Token([0; 16]), HOST);
    host.step(Event::Said(ConnectionId(1), report(0, 2)));
    assert_eq!(host.step(Event::Said(ConnectionId(2), report(1, 2))).len(), 2);
    assert_eq!(host.missing(), None);
    assert!(host.step(Event::Absent(lost.clone())).is_empty());
    let declined = SessionOutcome::Failed(lost);
    let answers = host.step(Event::Said(ConnectionId(3), FromRank::Decline(declined.clone())));
    assert_eq!(answers, [ToRank { to: ConnectionId(3), message: FromHost::Outcome(declined) }]);
    assert_eq!(host.outcome(), None);
    // A rank cannot decline with the outcome of a peer group.
    let bytes = FromRank::Decline(SessionOutcome::PeerGroup).encode();
    assert_eq!(FromRank::decode(5, &bytes[6..]), None);
}

/// Ranks of one caller are decided without a session, with the result of a session.
#[test]
fn without_a_session() {
    let mut all: Vec<_> = (0..4).map(|rank| facts(rank, 4)).collect();
    let negotiated = decision::decide(Token([6; 16]), &all).unwrap();
    assert_eq!((negotiated.members.len(), negotiated.comm), (4, Token([6; 16])));
    all[3].member.device.uuid = [1; 16];
    assert_eq!(decision::decide(Token([6; 16]), &all), Err(FallbackReason::SameDevice { rank: 3, other: 1 }));
}

fn report(rank: u32, ranks: u32) -> FromRank {
    FromRank::Report(Box::new(facts(rank, ranks)))
}

/// Reports that contradict each other give all ranks the same failure. After the outcome only the new connection gets it.
#[test]
fn impossible_claims() {
    let told = |answers: &[ToRank]| -> Vec<(u64, SessionOutcome)> {
        answers
            .iter()
            .filter_map(|answer| match &answer.message {
                FromHost::Outcome(outcome) => Some((answer.to.0, outcome.clone())),
                _ => None,
            })
            .collect()
    };
    let cases = [
        (report(0, 2), Failure::Duplicate { rank: 0 }),
        (report(1, 3), Failure::Mismatch { rank: 1, ranks: 3, expected: 2 }),
        (report(2, 2), Failure::Mismatch { rank: 2, ranks: 2, expected: 2 }),
    ];
    for (claim, failure) in cases {
        let mut host = Agreement::new(Token([0; 16]), HOST);
        assert!(host.step(Event::Said(ConnectionId(1), report(0, 2))).is_empty());
        let failed = SessionOutcome::Failed(failure);
        assert_eq!(
            told(&host.step(Event::Said(ConnectionId(2), claim))),
            [(1, failed.clone()), (2, failed.clone())]
        );
        // A later rank gets it, too.
        assert_eq!(told(&host.step(Event::Said(ConnectionId(3), report(1, 2)))), [(3, failed)]);
    }
    let mut host = Agreement::new(Token([0; 16]), HOST);
    assert!(host.step(Event::Said(ConnectionId(1), FromRank::Confirm)).is_empty());
    host.step(Event::Said(ConnectionId(1), report(0, 2)));
    let disorder = SessionOutcome::Failed(Failure::Disorder { rank: 0 });
    assert_eq!(told(&host.step(Event::Said(ConnectionId(1), FromRank::Confirm))), [(1, disorder)]);

    let mut host = Agreement::new(Token([0; 16]), HOST);
    host.step(Event::Said(ConnectionId(1), report(0, 2)));
    host.step(Event::Said(ConnectionId(2), report(1, 2)));
    host.step(Event::Said(ConnectionId(1), FromRank::Confirm));
    let peer_group = told(&host.step(Event::Said(ConnectionId(2), FromRank::Confirm)));
    assert_eq!(peer_group, [(1, SessionOutcome::PeerGroup), (2, SessionOutcome::PeerGroup)]);
    let again = SessionOutcome::Failed(Failure::Duplicate { rank: 1 });
    assert_eq!(told(&host.step(Event::Said(ConnectionId(3), report(1, 2)))), [(3, again)]);
    assert!(host.step(Event::NonWindlass).is_empty());
    assert!(host.step(Event::Left(ConnectionId(1))).is_empty(), "the others do not need the host for it");
}

/// The ranks of the hosting process get the outcome last, as the process may end once they have it.
#[test]
fn hosts_own_hear_last() {
    let mut host = Agreement::new(Token([0; 16]), HOST);
    let said = |rank: u32| {
        let mut facts = facts(rank, 4);
        if rank < 2 {
            facts.member.process = HOST;
        }
        Event::Said(ConnectionId(rank.into()), FromRank::Report(Box::new(facts)))
    };
    let answers: Vec<_> = (0..4).map(|rank| host.step(said(rank))).collect();
    let heard: Vec<u64> = answers[3].iter().map(|answer| answer.to.0).collect();
    assert_eq!(heard, [2, 3, 0, 1]);
}

/// After a refusal the outcome waits for a message of every rank. A rank that leaves meanwhile makes the session fail.
#[test]
fn refusal_waits_for_all() {
    let begin = || {
        let mut host = Agreement::new(Token([0; 16]), HOST);
        for rank in 0..3 {
            host.step(Event::Said(ConnectionId(u64::from(rank) + 1), report(rank, 3)));
        }
        assert!(host.step(Event::Said(ConnectionId(1), FromRank::Confirm)).is_empty());
        let stops = host.step(Event::Said(ConnectionId(2), FromRank::Refuse("full".into())));
        // A rank that has answered is not asked to stop.
        assert_eq!(stops.len(), 1);
        assert_eq!((stops[0].to, &stops[0].message), (ConnectionId(3), &FromHost::Stop));
        host
    };
    for message in [FromRank::Confirm, FromRank::Refuse("stopped".into())] {
        let mut host = begin();
        assert_eq!(host.step(Event::Said(ConnectionId(3), message)).len(), 3);
        assert_eq!(
            host.outcome(),
            Some(&SessionOutcome::OnNccl(FallbackReason::Refused { rank: 1, words: "full".into() }))
        );
    }
    for (gone, rank) in [(1, 0), (2, 1), (3, 2)] {
        let mut host = begin();
        assert_eq!(host.step(Event::Left(ConnectionId(gone))).len(), 2);
        assert_eq!(host.outcome(), Some(&SessionOutcome::Failed(Failure::Lost { rank })));
    }
}

proptest! {
    /// Random bytes are read as no message, without a panic.
    #[test]
    fn garbage_is_no_message(kind in 0u16..6, body in proptest::collection::vec(any::<u8>(), 0..400)) {
        if let Some(message) = FromRank::decode(kind, &body) {
            prop_assert!(message.encode().len() <= body.len() + 6 + 400);
        }
        let _ = FromHost::decode(kind, &body);
        let _ = windlass_bootstrap::negotiated::NegotiatedConfig::decode(&body);
    }

    /// Reports and negotiated configs are read as they were written. With a byte removed or added they are not read at all.
    #[test]
    fn round_trips(rank in 0u32..8, attachment in proptest::collection::vec(any::<u8>(), 0..4096)) {
        let mut facts = facts(rank, 8);
        facts.member.attachment = attachment;
        let message = FromRank::Report(Box::new(facts.clone()));
        let bytes = message.encode();
        prop_assert_eq!(FromRank::decode(1, &bytes[6..]), Some(message));
        prop_assert_eq!(FromRank::decode(1, &bytes[6..bytes.len() - 1]), None);
        facts.member.rank = 0;
        let negotiated = decision::negotiated(Token([1; 16]), std::iter::once(&facts));
        let bytes = negotiated.encode();
        let read = windlass_bootstrap::negotiated::NegotiatedConfig::decode(&bytes).unwrap();
        prop_assert_eq!(read.hash(), negotiated.hash());
        prop_assert_eq!(read, negotiated);
        let longer: Vec<u8> = bytes.iter().copied().chain([0]).collect();
        prop_assert_eq!(windlass_bootstrap::negotiated::NegotiatedConfig::decode(&longer), None);
    }
}
