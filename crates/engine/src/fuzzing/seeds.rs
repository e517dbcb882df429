//! Inputs that are well-formed, to begin with.

use windlass_base::config;
use windlass_bootstrap::awaited::Question;
use windlass_bootstrap::children::local_rendezvous;
use windlass_bootstrap::children::plan::{LazyVote, Parent, SplitMessage, Table};
use windlass_bootstrap::children::{Invitation, NOBODY};
use windlass_bootstrap::facts::{Facts, Place};
use windlass_bootstrap::id_tag::IdTag;
use windlass_bootstrap::message::{self, FromHost, FromRank};
use windlass_bootstrap::negotiated::{Device, Member, NegotiatedConfig, Token, Version, capability};
use windlass_bootstrap::outcome::{Failure, SessionOutcome};
use windlass_transport::tuning::Collective;
use windlass_transport::tuning::file::HEAD;

/// What opens everything here.
pub(super) const TOKEN: Token = Token([7; 16]);

fn member(rank: u32) -> Member {
    Member {
        rank,
        process: Token([rank as u8; 16]),
        process_id: 100 + rank,
        device: Device {
            uuid: [rank as u8; 16],
            pci: (0, rank as u8, 0),
            capability: 90,
            multiprocessors: 132,
        },
        descriptor_socket: Token([1 + rank as u8; 16]),
        process_listener: TOKEN,
        cells: Vec::new(),
        attachment: [TOKEN.0, [9; 16]].concat(),
    }
}

const CAPABILITIES: u64 = capability::NATIVE | capability::UNBOUND | capability::LAZY | capability::CACHES;

/// A rank that can all.
pub(super) fn facts(rank: u32, ranks: u32) -> Facts {
    Facts {
        ranks,
        version: Version::THIS,
        nccl: 22809,
        place: Place { host: TOKEN, network: 5 },
        capabilities: CAPABILITIES,
        options: 3,
        ctas_max: 0,
        member: member(rank),
    }
}

/// What it says first.
pub(super) fn report(rank: u32, ranks: u32) -> Vec<u8> {
    FromRank::Report(Box::new(facts(rank, ranks))).encode()
}

/// An input: a byte, a count, and so many bytes.
fn counted(what: u8, bytes: &[u8]) -> Vec<u8> {
    [&[what, bytes.len() as u8], bytes].concat()
}

pub(super) fn greetings() -> Vec<Vec<u8>> {
    let invitation = Invitation { process_listener: TOKEN, call: Token([4; 16]), child: NOBODY, rank: 15 };
    vec![
        message::greeting(TOKEN),
        invitation.greeting(),
        local_rendezvous::greeting(TOKEN, 3),
        b"GET / HTTP/1.1".to_vec(),
    ]
}

pub(super) fn tags() -> Vec<Vec<u8>> {
    let tag = IdTag { version: Version::THIS, token: TOKEN, root_port: 4 };
    let mut ids = [[0; 128]; 2];
    ids[0][8] = libc::AF_INET as u8;
    ids[1][8] = libc::AF_INET6 as u8;
    // An address that is none has no tag.
    ids.iter_mut().for_each(|id| id[12..32].fill(1));
    ids.iter().flat_map(|id| [Some(*id), tag.encode(id, 9)]).flatten().map(|id| id.to_vec()).collect()
}

pub(super) fn host() -> Vec<Vec<u8>> {
    let all_come = [16, 2, 0, 21, 2, 0, 12, 13];
    let confirm = FromRank::Confirm.encode();
    let more = [FromRank::Refuse("no".into()), FromRank::Decline(SessionOutcome::Failed(Failure::Aborted))];
    let mut seeds: Vec<Vec<u8>> = more
        .iter()
        .map(|said| [&all_come[..6], &counted(32, &said.encode()), &counted(33, &confirm)].concat())
        .collect();
    seeds.push([&all_come[..], &[0, 1]].concat());
    seeds.push(vec![4]);
    seeds.push(vec![8, 1]);
    seeds
}

pub(super) fn participant() -> Vec<Vec<u8>> {
    let negotiated = NegotiatedConfig {
        comm: TOKEN,
        version: Version::THIS,
        host: TOKEN,
        capabilities: CAPABILITIES,
        options: 3,
        ctas_max: 0,
        members: vec![member(0), member(1)],
    };
    let prepare = FromHost::Prepare(negotiated);
    let message = |color| SplitMessage { color, key: 1, vote: LazyVote::InPair, parent: Parent::Built };
    let talks: [&[FromHost]; 4] = [
        &[prepare.clone(), FromHost::Outcome(SessionOutcome::PeerGroup)],
        &[prepare, FromHost::Stop],
        &[FromHost::Outcome(SessionOutcome::Failed(Failure::Mismatch { rank: 1, ranks: 2, expected: 3 }))],
        &[FromHost::Table(Table::new(vec![message(Some(1)), message(Some(1)), message(None)]))],
    ];
    let of_talk = |talk: &[FromHost]| [vec![0xfc], talk.iter().flat_map(FromHost::encode).collect()].concat();
    talks.into_iter().map(of_talk).collect()
}

pub(super) fn rounds() -> Vec<Vec<u8>> {
    // Of two ranks each: has a color, the color, the key, what it wants, how its parent stands.
    let said =
        |what: u8, color: u8, wants: u8| [vec![what, 1, color, 0, 0, 0, 3, 0, 0, 0, wants, 0]].concat();
    vec![
        [said(80, 1, 2), said(81, 1, 2)].concat(),
        [said(80, 1, 2), said(81, 2, 0)].concat(),
        [said(80, 1, 2), vec![0, 8, 1, 16, 1]].concat(),
    ]
}

pub(super) fn rosters() -> Vec<Vec<u8>> {
    let enter = |key: u8| vec![key, key, 0, 0, 0];
    let say = |what: u8, message: local_rendezvous::RosterMessage| [vec![what], message.encode()].concat();
    let ask = local_rendezvous::RosterMessage::Ask { ranks: 2 };
    let answer = local_rendezvous::RosterAnswer::Complete { place: 1, process_listener: TOKEN }.encode();
    vec![
        [enter(1), enter(2), say(65, ask), say(66, ask), say(113, local_rendezvous::RosterMessage::Leave)]
            .concat(),
        [enter(1), enter(2), say(65, ask), say(114, local_rendezvous::RosterMessage::Decline)].concat(),
        [vec![128], answer].concat(),
    ]
}

pub(super) fn descriptors() -> Vec<Vec<u8>> {
    let opening = |payload: u8, count: u8| vec![4, payload, 0, 0, 0, count, 0, 0, 0];
    vec![[opening(7, 0), vec![5, 1, 2, 3, 4, 5, 6, 7, 8]].concat(), opening(0, 0), opening(0, 1)]
}

pub(super) fn requests() -> Vec<Vec<u8>> {
    let of = |kind: u8, value: u64| {
        [&b"windlass"[..], &TOKEN.0, &[1, 0, 0, 0, 2, 0, 0, 0, kind], &value.to_le_bytes()].concat()
    };
    let place = [64 << 20, 7, 8 << 20, 4 << 20, 10 << 20, 2 << 20].map(u64::to_le_bytes).concat();
    let refusal = FromRank::Refuse("no".into()).encode();
    let question = Question { token: 7, rank: 1 }.encode();
    vec![place, of(0, 0), of(1, 7), of(2, 7), of(3, 0), of(4, 0), refusal, question]
}

/// Nothing is told of what stands in memory.
pub(super) fn words() -> Vec<Vec<u8>> {
    vec![(0..=255).collect(), vec![1, 0, 0, 1, 2, 3, 4, 1, 4, 3, 4, 5], [2, 0, 1].repeat(40)]
}

pub(super) fn tuning() -> Vec<Vec<u8>> {
    let row = |collective: &Collective| {
        format!("{} ranks 2 gpu 9.0/132 multicast no native_bytes_max 32M\n", collective.name())
    };
    let rows: String = Collective::ALL.iter().map(row).collect();
    vec![
        format!("{HEAD}\n# words\n{rows}").into_bytes(),
        format!("{HEAD}\n").into_bytes(),
        b"nothing".to_vec(),
    ]
}

pub(super) fn options() -> Vec<Vec<u8>> {
    let of_option = |(index, option): (usize, &config::Description)| {
        let values = option.values.split(", ").chain([option.default, "1G"]);
        let lines: Vec<u8> =
            values.flat_map(|value| [&[index as u8], &b"="[..], value.as_bytes(), b"\n"].concat()).collect();
        [vec![0, 0, 0], lines].concat()
    };
    let of_file =
        b"\x01\x00\x59NCCL_P2P_LEVEL=NVL\nNCCL_MAX_CTAS=4\n#NCCL_ALGO=x\n=0\n=^Ring,Tree\n=GROUP\n".to_vec();
    config::options().enumerate().map(of_option).chain([of_file]).collect()
}
