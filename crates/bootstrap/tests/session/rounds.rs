//! Tests of rounds before splits and shrinks: what the ranks of a call tell each other at a process listener of the parent.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::thread;

use windlass_base::descriptor as ours;
use windlass_bootstrap::children::plan::{ChildPlan, LazyVote, Parent, SplitMessage, Table};
use windlass_bootstrap::children::{self, Invitation, NOBODY, child};
use windlass_bootstrap::id_tag::Id;
use windlass_bootstrap::message::{FromHost, FromRank};
use windlass_bootstrap::negotiated::{RANKS_MAX, Token};
use windlass_bootstrap::outcome::{Failure, FallbackReason, SessionOutcome};
use windlass_bootstrap::{Bootstrap, Inquiry, Limits};

use crate::children::{address, kill, pidfd_of, process};
use crate::processes::{Played, await_message, play, say};
use crate::support::{facts, is_peer_group, ready};

const PARENT: Token = Token([9; 16]);
/// What a rank says that goes to NCCL without waiting.
const HURRIES: SplitMessage =
    SplitMessage { color: None, key: 0, vote: LazyVote::InNccl, parent: Parent::Built };
type Answer = Result<Table, Failure>;

fn bootstrap() -> Bootstrap {
    Bootstrap::start(Limits::default()).unwrap()
}

fn pair(color: i32, key: i32) -> SplitMessage {
    SplitMessage { color: Some(color), key, vote: LazyVote::InPair, parent: Parent::Built }
}

/// A round of a parent of `ranks` ranks, whose rank 0 is in the host's process.
struct Round<'a> {
    host: &'a Bootstrap,
    call: Token,
    ranks: u32,
}

impl Round<'_> {
    fn of(host: &Bootstrap, count: u32, ranks: u32) -> Round<'_> {
        Round { host, call: children::call(PARENT, &[], count), ranks }
    }

    fn invites(&self, rank: u32) -> Invitation {
        Invitation { process_listener: self.host.process_listener, call: self.call, child: NOBODY, rank }
    }

    /// The host's rank makes the call.
    fn begin(&self) {
        let name = self.invites(0).to_round().child;
        self.host.await_ranks(name, (1 << self.ranks) - 1, Vec::new());
    }

    fn say(&self, from: &Bootstrap, rank: u32, message: SplitMessage) -> Inquiry {
        from.ask_round(&self.invites(rank), rank, self.ranks, message)
    }

    fn connect(&self) -> UnixStream {
        UnixStream::connect_addr(&address(self.host.process_listener)).unwrap()
    }

    /// Waits until the host has read all that was written before, as it reads this connection after the earlier ones.
    fn hear_all(&self) {
        let mut behind = self.connect();
        behind.write_all(b"?").unwrap();
        assert_eq!(behind.read(&mut [0]).unwrap_or(0), 0);
    }

    /// The bytes that a rank sends.
    fn messages(&self, rank: u32, ranks: u32, message: SplitMessage) -> Vec<u8> {
        let message = FromRank::Split { place: rank, ranks, message }.encode();
        [self.invites(rank).to_round().greeting(), message].concat()
    }
}

fn wait_all(inquiries: Vec<Inquiry>) -> Vec<Answer> {
    thread::scope(|scope| {
        let threads: Vec<_> = inquiries.into_iter().map(|one| scope.spawn(|| one.wait())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// All ranks hear the same table, in any order, also before the host's own rank comes. The ranks of a lazy communicator then meet
/// at the same process listener.
#[test]
fn all_hear_the_same() {
    let (host, other) = (bootstrap(), bootstrap());
    let round = Round::of(&host, 0, 5);
    let none = SplitMessage { color: None, key: 0, vote: LazyVote::No, parent: Parent::Built };
    let mut inquiries = vec![
        round.say(&other, 4, pair(7, -1)),
        round.say(&other, 1, pair(7, 0)),
        round.say(&host, 3, none),
        round.say(&other, 2, pair(8, 0)),
    ];
    round.begin();
    inquiries.push(round.say(&host, 0, pair(8, 0)));
    let answers = wait_all(inquiries);
    let expected = Table::new(vec![pair(8, 0), pair(7, 0), pair(8, 0), none, pair(7, -1)]);
    assert!(answers.iter().all(|answer| *answer == Ok(expected.clone())), "{answers:?}");

    host.await_ranks(child(round.call, 8), 0b101, Vec::new());
    host.await_ranks(child(round.call, 7), 0b10010, Vec::new());
    let meet = |from: &Bootstrap, parent_rank: u32, color: i32| {
        let ChildPlan::Meet { rank, ranks, is_lazy: true, splits_too: false } = expected.plan(parent_rank)
        else {
            panic!("{:?}", expected.plan(parent_rank))
        };
        let child = child(round.call, color);
        let invitation = Invitation { call: child, child, ..round.invites(parent_rank) };
        from.join_invited(&invitation, facts(rank, ranks.len() as u32)).unwrap()
    };
    let participants = [meet(&host, 0, 8), meet(&other, 2, 8), meet(&other, 4, 7), meet(&other, 1, 7)];
    assert_eq!(expected.plan(3), ChildPlan::Nothing);
    thread::scope(|scope| {
        let _ = participants
            .map(|participant| scope.spawn(|| assert!(is_peer_group(&participant.complete(ready)))));
    });
}

/// Many rounds run at once, of several calls and parents, with their messages mixed.
#[test]
fn many_at_once() {
    let hosts = [bootstrap(), bootstrap()];
    let rounds: Vec<Round> = (0..40).map(|count| Round::of(&hosts[count % 2], count as u32, 3)).collect();
    rounds.iter().for_each(Round::begin);
    let mut inquiries: Vec<Vec<Inquiry>> = rounds.iter().map(|_| Vec::new()).collect();
    for rank in [2, 0, 1] {
        for (index, round) in rounds.iter().enumerate() {
            let from = &hosts[(index + rank as usize / 2) % 2];
            inquiries[index].push(round.say(from, rank, pair(index as i32, 0)));
        }
    }
    for (index, inquiries) in inquiries.into_iter().enumerate().rev() {
        for answer in wait_all(inquiries) {
            assert_eq!(answer, Ok(Table::new(vec![pair(index as i32, 0); 3])));
        }
    }
    assert!(hosts.iter().all(|host| host.counts().rounds.load(Ordering::Relaxed) == 20));
}

/// A rank that cannot wait only says so, and all others hear that NCCL makes every communicator. Its bootstrap may end then.
#[test]
fn one_cannot_wait() {
    let (host, own) = (bootstrap(), bootstrap());
    let round = Round::of(&host, 0, 3);
    round.begin();
    own.say_in_round(&round.invites(2), 2, 3, HURRIES);
    drop(own);
    let waiting = vec![round.say(&host, 0, pair(0, 0)), round.say(&host, 1, pair(0, 0))];
    for answer in wait_all(waiting) {
        assert_eq!(answer.unwrap().plan(0), ChildPlan::Nccl);
    }
    // The host's own rank need not wait either.
    let round = Round::of(&host, 1, 2);
    let waiting = round.say(&host, 1, pair(0, 0));
    round.begin();
    host.say_in_round(&round.invites(0), 0, 2, HURRIES);
    assert_eq!(waiting.wait().unwrap().plan(1), ChildPlan::Nccl);
}

/// A process dies before its rank's message: all waiting and later ranks fail, even if others have not come. A death after the
/// message does not matter to the round.
#[test]
fn dies_before_its_message() {
    let host = bootstrap();
    let round = Round::of(&host, 0, 4);
    let ((dying, pidfd), (spoken, of_spoken)) = (process(), process());
    let name = round.invites(0).to_round().child;
    host.await_ranks(name, 0b1111, vec![(3, pidfd), (1, of_spoken)]);
    let waiting = round.say(&host, 0, pair(0, 0));
    let speaks = round.say(&host, 1, pair(0, 0));
    kill(dying);
    for answer in wait_all(vec![waiting, speaks]) {
        assert_eq!(answer, Err(Failure::Absent { rank: 3 }));
    }
    assert_eq!(round.say(&host, 2, pair(0, 0)).wait(), Err(Failure::Absent { rank: 3 }));
    kill(spoken);
    assert_eq!(host.counts().rounds_failed.load(Ordering::Relaxed), 1);

    let round = Round::of(&host, 1, 3);
    let (dying, pidfd) = process();
    let mut messages = round.connect();
    messages.write_all(&round.messages(1, 3, pair(0, 0))).unwrap();
    round.hear_all();
    host.await_ranks(round.invites(0).to_round().child, 0b111, vec![(1, pidfd)]);
    drop(messages);
    kill(dying);
    let waiting = vec![round.say(&host, 0, pair(0, 0)), round.say(&host, 2, pair(0, 0))];
    assert!(wait_all(waiting).iter().all(Result::is_ok));
}

/// A rank that leaves between its greeting and its message makes the round fail, whether the host's rank has come or not.
#[test]
fn leaves_before_its_message() {
    let host = bootstrap();
    for count in 0..2 {
        let round = Round::of(&host, count, 2);
        if count == 0 {
            round.begin();
        }
        let waiting = round.say(&host, 0, pair(0, 0));
        round.connect().write_all(&round.invites(1).to_round().greeting()).unwrap();
        assert_eq!(waiting.wait(), Err(Failure::Absent { rank: 1 }));
    }
}

/// Another thread aborts a wait, which returns at once. If the rank's message was sent it counts, else no rank waits for it.
#[test]
fn aborted() {
    let (host, own) = (bootstrap(), bootstrap());
    for count in 0..50 {
        let round = Round::of(&host, count, 2);
        round.begin();
        let waiting = round.say(&host, 0, pair(0, 0));
        let inquiry = round.say(&own, 1, pair(0, 0));
        let canceller = inquiry.canceller();
        thread::scope(|scope| {
            let aborted = scope.spawn(|| inquiry.wait());
            canceller.abort();
            let aborted = aborted.join().unwrap();
            assert!(matches!(aborted, Err(Failure::Aborted) | Ok(_)), "{aborted:?}");
        });
        let answer = waiting.wait();
        assert!(matches!(answer, Ok(_) | Err(Failure::Absent { rank: 1 })), "{answer:?}");
    }
    let round = Round::of(&host, 100, 2);
    let alone = round.say(&host, 1, pair(0, 0));
    alone.canceller().abort();
    assert_eq!(alone.wait(), Err(Failure::Aborted));
}

/// The host ends while ranks wait, or before they come: they fail.
#[test]
fn host_is_gone() {
    let (host, own) = (bootstrap(), bootstrap());
    let round = Round::of(&host, 0, 2);
    let waiting = round.say(&own, 1, pair(0, 0));
    let invitation = round.invites(1);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| waiting.wait());
        drop(host);
        assert_eq!(waiting.join().unwrap(), Err(Failure::HostLost));
    });
    own.say_in_round(&invitation, 1, 2, HURRIES);
    assert_eq!(own.ask_round(&invitation, 1, 2, pair(0, 0)).wait(), Err(Failure::HostLost));
}

/// An invalid message ends the round for all ranks at once, and an unknown connection harms no rank.
#[test]
fn nonsense() {
    let host = bootstrap();
    let answer = |count: u32, messages: &dyn Fn(&Round) -> Vec<u8>| {
        let round = Round::of(&host, count, 3);
        round.begin();
        let waiting = round.say(&host, 0, pair(0, 0));
        let mut unknown_connection = round.connect();
        unknown_connection.write_all(&messages(&round)).unwrap();
        let answer = waiting.wait();
        (answer, unknown_connection)
    };
    let greeted = |round: &Round, message: FromRank| {
        [round.invites(1).to_round().greeting(), message.encode()].concat()
    };
    let (twice, _one) = answer(0, &|round| round.messages(0, 3, pair(0, 0)));
    assert_eq!(twice, Err(Failure::Duplicate { rank: 0 }));
    // Either of the two may have come first.
    let (other_number, _two) = answer(1, &|round| round.messages(1, 4, pair(0, 0)));
    assert!(matches!(other_number, Err(Failure::Mismatch { .. })), "{other_number:?}");
    let (report, _three) = answer(2, &|round| greeted(round, FromRank::Report(Box::new(facts(1, 3)))));
    assert_eq!(report, Err(Failure::Disorder { rank: 1 }));
    let declines = FromRank::Decline(SessionOutcome::OnNccl(FallbackReason::NonBlocking));
    let (declined, _four) = answer(3, &|round| greeted(round, declines.clone()));
    assert_eq!(declined, Err(Failure::Disorder { rank: 1 }));
    let (oversized, mut five) = answer(4, &|round| {
        [&round.invites(1).to_round().greeting()[..], &u32::MAX.to_le_bytes(), &[0; 64]].concat()
    });
    assert_eq!(oversized, Err(Failure::Absent { rank: 1 }));
    assert_eq!(five.read(&mut [0]).unwrap_or(0), 0);
    assert_eq!(host.counts().unreadable.load(Ordering::Relaxed), 1);

    // A message of a round is invalid in a session.
    let call = children::call(PARENT, &[], 9);
    let invites =
        |rank| Invitation { process_listener: host.process_listener, call, child: child(call, 0), rank };
    let participant = host.join_invited(&invites(0), facts(0, 2)).unwrap();
    let mut unknown_connection = UnixStream::connect_addr(&address(host.process_listener)).unwrap();
    let report = FromRank::Report(Box::new(facts(1, 2))).encode();
    let message = FromRank::Split { place: 1, ranks: 2, message: pair(0, 0) }.encode();
    unknown_connection.write_all(&[invites(1).greeting(), report, message].concat()).unwrap();
    let outcome = participant.complete(ready);
    let failed = windlass_bootstrap::Outcome::Failed(Failure::Disorder { rank: 1 });
    assert_eq!(format!("{outcome:?}"), format!("{failed:?}"));
}

/// An invalid answer of the host makes the rank's round fail without further waiting.
#[test]
fn unreadable_host() {
    use std::os::linux::net::SocketAddrExt;
    let process_listener = Token([0x52; 16]);
    let name = windlass_bootstrap::children::address(process_listener).unwrap();
    let name = std::os::unix::net::SocketAddr::from_abstract_name(name.abstract_name().unwrap()).unwrap();
    let listener = std::os::unix::net::UnixListener::bind_addr(&name).unwrap();
    let own = bootstrap();
    let call = children::call(PARENT, &[], 0);
    let too_many = Table::new(vec![pair(0, 0); RANKS_MAX + 1]);
    for answer in [FromHost::Stop.encode(), FromHost::Table(too_many).encode(), vec![0xff; 64]] {
        let invitation = Invitation { process_listener, call, child: NOBODY, rank: 1 };
        let inquiry = own.ask_round(&invitation, 1, 2, pair(0, 0));
        let (mut host, _) = listener.accept().unwrap();
        host.write_all(&answer).unwrap();
        assert_eq!(inquiry.wait(), Err(Failure::Unreadable));
    }
}

/// Rounds that are over are forgotten, and leave no descriptor.
#[test]
fn nothing_is_left() {
    let (host, other) =
        (Bootstrap::start(Limits { calls_max: 2, ..Limits::default() }).unwrap(), bootstrap());
    let before = ours::open();
    for count in 0..20 {
        let round = Round::of(&host, count, 3);
        let (process, pidfd) = process();
        host.await_ranks(round.invites(0).to_round().child, 0b111, vec![(2, pidfd)]);
        let inquiries = vec![round.say(&other, 1, pair(0, 0)), round.say(&host, 0, pair(0, 0))];
        match count % 3 {
            0 => assert!(round.say(&other, 2, pair(0, 0)).wait().is_ok()),
            1 => other.say_in_round(&round.invites(2), 2, 3, HURRIES),
            _ => drop(round.connect().write_all(&round.invites(2).to_round().greeting())),
        }
        assert!(wait_all(inquiries).iter().all(|answer| answer.is_ok() == (count % 3 != 2)));
        kill(process);
    }
    while ours::open() != before {
        thread::yield_now();
    }
    assert_eq!(host.counts().calls_forgotten.load(Ordering::Relaxed), 0);
}

/// The number of incomplete rounds is bounded: the oldest are forgotten, but never one in which a rank waits.
#[test]
fn too_many_rounds() {
    let host = Bootstrap::start(Limits { calls_max: 4, ..Limits::default() }).unwrap();
    let round = Round::of(&host, 0, 2);
    let mut waiting = round.connect();
    waiting.write_all(&round.messages(0, 2, pair(0, 0))).unwrap();
    round.hear_all();
    round.begin();
    for count in 1..=8 {
        let name = Round::of(&host, count, 2).invites(0).to_round().child;
        host.await_ranks(name, 0b11, vec![(1, pidfd_of(std::process::id()))]);
    }
    assert!(round.say(&host, 1, pair(0, 0)).wait().is_ok());
    waiting.read_exact(&mut [0; 6]).unwrap();
    // There is room for four rounds, in one of which a rank waits.
    assert_eq!(host.counts().calls_forgotten.load(Ordering::Relaxed), 5);
    // A connection without a message in a forgotten round is closed.
    let mut silent = round.connect();
    silent.write_all(&Round::of(&host, 100, 2).invites(1).to_round().greeting()).unwrap();
    round.hear_all();
    for count in 101..=105 {
        let name = Round::of(&host, count, 2).invites(0).to_round().child;
        host.await_ranks(name, 0b11, vec![(1, pidfd_of(std::process::id()))]);
    }
    assert_eq!(silent.read(&mut [0]).unwrap_or(0), 0);
    // The number of connections without a message in one round is bounded, too.
    let host = Bootstrap::start(Limits { present_max: 4, ..Limits::default() }).unwrap();
    let round = Round::of(&host, 0, 2);
    let silent: Vec<UnixStream> = (0..5)
        .map(|_| {
            let mut silent = round.connect();
            silent.write_all(&round.invites(1).to_round().greeting()).unwrap();
            silent
        })
        .collect();
    // One too many is turned away, and the round fails.
    (&silent[4]).read_to_end(&mut Vec::new()).unwrap();
    assert_eq!(host.counts().turned_away.load(Ordering::Relaxed), 1);
    drop(silent);
    let late = round.say(&host, 0, pair(0, 0)).wait();
    assert_eq!(late, Err(Failure::Absent { rank: 1 }));
}

/// The parts of processes in these tests. If another process hosts, `id` has its process listener.
pub fn plays(part: &str, own: &Bootstrap, rank: u32, ranks: u32, id: &Id) -> bool {
    let process_listener = Token(*id.first_chunk().unwrap());
    let call = children::call(PARENT, &[], 0);
    let invitation = Invitation { process_listener, call, child: NOBODY, rank };
    match part {
        "hosts-rounds" => {
            let hex: Vec<String> = own.process_listener.0.iter().map(|byte| format!("{byte:02x}")).collect();
            say(&hex.concat());
            await_message();
        }
        "speaks" => {
            let inquiry = own.ask_round(&invitation, rank, ranks, pair(0, 0));
            say("spoken");
            say(&format!("{:?}", inquiry.wait().map(|table| table.plan(rank))));
        }
        "hurries" => {
            own.say_in_round(&invitation, rank, ranks, HURRIES);
            say("spoken");
            await_message();
        }
        "is-silent" => {
            say("here");
            await_message();
        }
        _ => return false,
    }
    true
}

fn plays_in(round: &Round, part: &str, rank: u32) -> Played {
    let mut id = [0; 128];
    id[..16].copy_from_slice(&round.host.process_listener.0);
    play(&[], part, rank, round.ranks, &id)
}

/// Ranks in processes of their own hear the same table. One that is killed before its message ends the round for all, whatever the
/// others wait for.
#[test]
fn processes() {
    let host = bootstrap();
    let round = Round::of(&host, 0, 4);
    let begin = |players: &[(u32, &Played)]| {
        let lives = players.iter().map(|(rank, player)| (*rank, pidfd_of(player.id()))).collect();
        host.await_ranks(round.invites(0).to_round().child, 0b1111, lives);
    };
    let (mut one, mut two) = (plays_in(&round, "speaks", 1), plays_in(&round, "speaks", 2));
    let mut hurries = plays_in(&round, "hurries", 3);
    begin(&[(1, &one), (2, &two), (3, &hurries)]);
    let own = round.say(&host, 0, pair(0, 0));
    assert_eq!([one.says(), two.says(), hurries.says()], ["spoken"; 3]);
    assert_eq!([one.says(), two.says()], ["Ok(Nccl)"; 2]);
    assert_eq!(own.wait().map(|table| table.plan(0)), Ok(ChildPlan::Nccl));
    drop((one, two, hurries));

    // The last round's session is over, so the same name serves again.
    let (mut one, mut silent) = (plays_in(&round, "speaks", 1), plays_in(&round, "is-silent", 3));
    begin(&[(1, &one), (3, &silent)]);
    let own = round.say(&host, 0, pair(0, 0));
    assert_eq!([one.says(), silent.says()], ["spoken", "here"]);
    silent.kill();
    assert_eq!(own.wait(), Err(Failure::Absent { rank: 3 }));
    assert_eq!(one.says(), "Err(Absent { rank: 3 })");
    let mut two = plays_in(&round, "speaks", 2);
    assert_eq!([two.says(), two.says()], ["spoken", "Err(Absent { rank: 3 })"]);
}

/// The process that hosts is killed while ranks wait.
#[test]
fn host_process_is_killed() {
    let own = bootstrap();
    let mut host = play(&[], "hosts-rounds", 0, 3, &[0; 128]);
    let hex = host.says();
    let mut process_listener = [0; 16];
    for (index, byte) in process_listener.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * index..2 * index + 2], 16).unwrap();
    }
    let call = children::call(PARENT, &[], 0);
    let invites = |rank| Invitation { process_listener: Token(process_listener), call, child: NOBODY, rank };
    let waiting = own.ask_round(&invites(1), 1, 3, pair(0, 0));
    thread::scope(|scope| {
        let waiting = scope.spawn(|| waiting.wait());
        host.kill();
        assert_eq!(waiting.join().unwrap(), Err(Failure::HostLost));
    });
    assert_eq!(own.ask_round(&invites(2), 2, 3, pair(0, 0)).wait(), Err(Failure::HostLost));
}
