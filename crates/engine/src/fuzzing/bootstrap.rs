//! What comes over sockets: at the port of an id, at the process listener, at rosters, descriptor sockets and request sockets.

use crate::peers;
use windlass_bootstrap::agreement::{Agreement, ConnectionId, Event};
use windlass_bootstrap::children::local_rendezvous::{self, Roster, RosterCourse};
use windlass_bootstrap::children::plan::Table;
use windlass_bootstrap::children::round::Round;
use windlass_bootstrap::id_tag::{self, Id, IdTag};
use windlass_bootstrap::message::{
    self, Caller, FROM_HOST_BYTES_MAX, FROM_RANK_BYTES_MAX, FromHost, FromRank, Front, GREETING_BYTES, front,
};
use windlass_bootstrap::negotiated::{GRID_MAX, NEGOTIATED_BYTES_MAX, RANKS_MAX};
use windlass_bootstrap::outcome::{Failure, FallbackReason, SessionOutcome};
use windlass_bootstrap::participation::{Participation, Stage, WithoutHost};
use windlass_bootstrap::{children, descriptors as sockets};
use windlass_transport::heap::Place;
use windlass_transport::tuning::agreed;

use super::seeds::{TOKEN, facts};
use super::{Choices, seeds};

/// What NCCL's connections begin with.
const NCCL: [u8; 8] = [3; 8];
/// Steps of one input at most.
const STEPS_MAX: usize = 64;

/// The first bytes of a connection, cut anywhere: what more bytes may not change is never changed by them.
pub(super) fn greetings(input: &[u8]) {
    let seen = message::identify(input, TOKEN, &NCCL);
    assert!(seen != Caller::Unclear || input.len() < GREETING_BYTES);
    let visitor = children::identify(input, TOKEN);
    assert!(visitor != children::Visitor::Unclear || input.len() < children::GREETING_BYTES);
    for cut in 0..input.len().min(children::GREETING_BYTES) {
        let first = message::identify(&input[..cut], TOKEN, &NCCL);
        assert!(first == Caller::Unclear || first == seen);
        let first = children::identify(&input[..cut], TOKEN);
        assert!(first == children::Visitor::Unclear || first == visitor);
    }
    if let Some((_, absent)) = children::withdrawal(input) {
        assert!(absent.len() <= 2 * FROM_RANK_BYTES_MAX);
    }
    local_rendezvous::who(input, TOKEN);
}

/// The 128 bytes of an id.
pub(super) fn tags(input: &[u8]) {
    let id: Id = Choices(input).array();
    // A checksum that nobody guesses is put right.
    let id = id_tag::test_support::with_right_sum(id);
    id_tag::address(&id);
    if let Some(tag) = IdTag::decode(&id) {
        // None if nobody can reach the id's address.
        let again = tag.encode(&id, 7).map(|id| IdTag::decode(&id));
        assert!(again.is_none_or(|again| again == Some(tag)));
    }
}

/// Whole messages at the front of what came, as a connection takes them; the rest is dropped.
fn messages<M>(mut input: &[u8], limit: usize, decode: fn(u16, &[u8]) -> Option<M>, mut each: impl FnMut(M)) {
    for _ in 0..STEPS_MAX {
        let Front::Whole(kind, body, end) = front(input, limit) else { return };
        let Some(message) = decode(kind, body) else { return };
        each(message);
        input = &input[end..];
    }
}

/// A session's host: connections say anything, leave, or are no ranks. It decides once.
pub(super) fn host(input: &[u8]) {
    let mut choices = Choices(input);
    let mut agreement = Agreement::new(TOKEN, TOKEN);
    let mut decided: Option<SessionOutcome> = None;
    for _ in 0..STEPS_MAX {
        if choices.is_over() {
            return;
        }
        let what = choices.byte();
        let connection = ConnectionId(u64::from(what % 4));
        let mut step = |event| {
            for answer in agreement.step(event) {
                assert!(answer.message.encode().len() <= message::HEADER_BYTES + FROM_HOST_BYTES_MAX);
            }
            let now = agreement.outcome().cloned();
            assert!(decided.is_none() || decided == now);
            decided = now;
            assert!(
                agreement.missing().is_none_or(|missing| agreement.ranks.is_some_and(|all| missing <= all))
            );
            agreement.is_lazy();
        };
        match what / 4 {
            0 => step(Event::Left(connection)),
            1 => step(Event::NonWindlass),
            2 => step(Event::Absent(Failure::Absent { rank: choices.byte().into() })),
            3 => step(Event::Said(connection, FromRank::Confirm)),
            // A whole report of a rank, with some bytes changed.
            4..8 => {
                let (rank, ranks) = (u32::from(what / 4 - 4), u32::from(choices.byte() % 5));
                let mut bytes = seeds::report(rank, ranks);
                let changes = choices.byte() % 4;
                for _ in 0..changes {
                    let place = usize::from(choices.short()) % bytes.len();
                    bytes[place] = choices.byte();
                }
                messages(&bytes, FROM_RANK_BYTES_MAX, FromRank::decode, |said| {
                    step(Event::Said(connection, said))
                });
            }
            _ => {
                let said = choices.counted();
                messages(said, FROM_RANK_BYTES_MAX, FromRank::decode, |said| {
                    step(Event::Said(connection, said))
                });
            }
        }
    }
}

/// A rank in a session whose host says anything.
pub(super) fn participant(input: &[u8]) {
    let mut choices = Choices(input);
    let what = choices.byte();
    let without = if what & 1 == 0 { WithoutHost::Fails } else { WithoutHost::GoesToNccl };
    let mut rank = Participation::new(facts(u32::from(what >> 1 & 1), 2), without);
    let how = what >> 2;
    let mut count = 0;
    messages(choices.0, FROM_HOST_BYTES_MAX, FromHost::decode, |said| {
        if let FromHost::Prepare(negotiated) = &said {
            assert!(
                negotiated.encode().len() <= NEGOTIATED_BYTES_MAX && negotiated.members.len() <= RANKS_MAX
            );
            let _ = (negotiated.ctas_max(), negotiated.has_clusters());
            assert!((1..=GRID_MAX).contains(&negotiated.grid_max()));
            peers::common_offer(negotiated);
            agreed::decide(negotiated);
        }
        if let FromHost::Table(table) = &said {
            plans(table);
        }
        let was_over = rank.is_over();
        rank.heard(said);
        assert!(!was_over || rank.is_over());
        if matches!(rank.stage, Stage::Preparing(_)) && how >> (count % 6) & 1 != 0 {
            let _ = rank.confirm();
        }
        count += 1;
    });
    rank.lost(Failure::HostLost);
    assert!(rank.is_over());
}

/// Every rank of a table finds a plan, whose ranks are in the table.
fn plans(table: &Table) {
    use windlass_bootstrap::children::plan::ChildPlan;
    for rank in 0..table.ranks() as u32 + 1 {
        if let ChildPlan::Meet { rank: place, ranks, .. } = table.plan(rank) {
            assert!(ranks.len() <= RANKS_MAX && (place as usize) < ranks.len().max(1));
        }
    }
}

/// A round before a split: words in any order, from anyone.
pub(super) fn rounds(input: &[u8]) {
    let mut choices = Choices(input);
    let mut round = Round::default();
    for _ in 0..STEPS_MAX {
        if choices.is_over() {
            return;
        }
        let what = choices.byte();
        let connection = ConnectionId(u64::from(what % 8));
        let answers = match what / 8 {
            0 => {
                round.left(connection);
                Vec::new()
            }
            1 => round.fail(Failure::Absent { rank: choices.byte().into() }),
            2 => round.disorder(connection, choices.byte().into()),
            way => {
                // Claims that agree, or any.
                let (place, ranks) = match way {
                    3 => (choices.word() as u32, choices.word() as u32),
                    _ => ((what % 8).into(), u32::from(way % 8)),
                };
                let body = [&place.to_le_bytes()[..], &ranks.to_le_bytes(), choices.bytes(11)].concat();
                match FromRank::decode(6, &body) {
                    Some(FromRank::Split { place, ranks, message }) => {
                        round.said(connection, place, ranks, message)
                    }
                    _ => Vec::new(),
                }
            }
        };
        for answer in answers {
            let bytes = answer.message.encode();
            if let FromHost::Table(table) = &answer.message {
                plans(table);
                let mut again = Vec::new();
                messages(&bytes, FROM_HOST_BYTES_MAX, FromHost::decode, |said| again.push(said));
                assert_eq!(again, [answer.message]);
            }
        }
        assert!(!round.is_awaited() || round.answer.is_none());
    }
}

/// A roster: whoever comes enters, asks and leaves; and what it answers.
pub(super) fn rosters(input: &[u8]) {
    let mut choices = Choices(input);
    let mut roster = Roster::default();
    for _ in 0..STEPS_MAX {
        if choices.is_over() {
            return;
        }
        let what = choices.byte();
        let key = u64::from(what % 16);
        match what / 16 {
            0..4 => {
                let greeting = [&local_rendezvous::greeting(TOKEN, 0)[..24], choices.bytes(4)].concat();
                if let Some(rank) = local_rendezvous::who(&greeting, TOKEN) {
                    let _ = roster.enter(key, rank);
                }
            }
            way @ 4..8 => {
                let message =
                    local_rendezvous::RosterMessage::decode(choices.bytes(local_rendezvous::MESSAGE_BYTES));
                match message {
                    Some(local_rendezvous::RosterMessage::Ask { ranks }) if way < 7 => match roster
                        .ask(key, ranks)
                    {
                        Some(RosterCourse::Meet { place, expected }) => {
                            assert!((place as usize) < RANKS_MAX);
                            assert!(expected.is_none_or(|places| places >> RANKS_MAX == 0 && places >> place & 1 == 1));
                        }
                        Some(RosterCourse::Apart) | None => {}
                    },
                    message => {
                        let missing = roster.left(key, message);
                        assert!(missing.is_none_or(|(place, _)| (place as usize) < RANKS_MAX));
                    }
                }
            }
            _ => {
                let answer =
                    local_rendezvous::RosterAnswer::decode(choices.bytes(local_rendezvous::ANSWER_BYTES));
                answer.into_iter().for_each(|answer| {
                    assert_eq!(local_rendezvous::RosterAnswer::decode(&answer.encode()), Some(answer))
                });
            }
        }
        assert!(roster.present() <= STEPS_MAX);
    }
}

/// Packets at a descriptor socket.
pub(super) fn descriptors(input: &[u8]) {
    let mut choices = Choices(input);
    let mut packets = Vec::new();
    while !choices.is_over() && packets.len() < 8 {
        let what = choices.byte();
        let words = choices.bytes(usize::from(what) / 2 * 4);
        // An opening that only the numbers of which are the input's, or any words.
        packets.push(if what & 1 == 0 {
            sockets::test_support::opening_with(TOKEN, words)
        } else {
            words.to_vec()
        });
    }
    let payload = sockets::test_support::receive(&packets, TOKEN);
    assert!(payload.is_none_or(|payload| payload.len() <= sockets::PAYLOAD_BYTES_MAX));
}

/// Packets at a request socket; and reasons, which come from peers too.
pub(super) fn requests(input: &[u8]) {
    peers::fuzz_request(input);
    let place = Place::from_wire(Choices(input).array());
    if place.is_sound(1 << 21) {
        assert!(place.offset + place.bytes <= place.span_bytes);
    }
    let words = String::from_utf8_lossy(input);
    let refusal = FromRank::Refuse(words.clone().into_owned()).encode();
    let reason = FromHost::Outcome(SessionOutcome::OnNccl(FallbackReason::Refused {
        rank: 1,
        words: words.into_owned(),
    }))
    .encode();
    messages(&refusal, FROM_RANK_BYTES_MAX, FromRank::decode, drop);
    messages(&reason, FROM_HOST_BYTES_MAX, FromHost::decode, drop);
    messages(input, FROM_RANK_BYTES_MAX, FromRank::decode, |said| drop(said.encode()));
    messages(input, FROM_HOST_BYTES_MAX, FromHost::decode, |said| drop(said.encode()));
}
