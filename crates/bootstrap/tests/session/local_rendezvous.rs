//! Tests of host-local rendezvous: ranks of one host meet before NCCL makes their communicator from one without a peer group.

use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use windlass_bootstrap::children::local_rendezvous::{self, ANSWER_BYTES, RosterAnswer, RosterMessage};
use windlass_bootstrap::children::{Invitation, child};
use windlass_bootstrap::negotiated::{RANKS_MAX, Token};
use windlass_bootstrap::outcome::{Failure, FallbackReason};
use windlass_bootstrap::{Bootstrap, Limits, LocalEntry, Outcome, Participant, place};

use crate::support::{facts, is_peer_group, ready};

fn never() -> bool {
    false
}

fn bootstrap() -> Bootstrap {
    Bootstrap::start(Limits::default()).unwrap()
}

/// A name that no other test has.
fn name() -> Token {
    place::random().unwrap()
}

/// The invitation to the session of a parent's rank, once NCCL has made its communicator of `ranks` ranks.
fn invited(name: Token, local_entry: &LocalEntry, ranks: u32) -> Invitation {
    match local_entry.ask(ranks, &never).unwrap() {
        RosterAnswer::Complete { place, process_listener } => {
            Invitation { process_listener, call: name, child: child(name, 0), rank: place }
        }
        other => panic!("{other:?}"),
    }
}

fn joined(participant: Participant) -> Outcome {
    participant.complete(ready)
}

fn connect(name: Token) -> UnixStream {
    let name = local_rendezvous::address(name).unwrap();
    UnixStream::connect_addr(&SocketAddr::from_abstract_name(name.abstract_name().unwrap()).unwrap()).unwrap()
}

/// Sends a message and reads the answer; `None` if the connection is closed instead.
fn asks(stream: &mut UnixStream, words: &[u8]) -> Option<RosterAnswer> {
    stream.write_all(words).unwrap();
    let mut answer = [0; ANSWER_BYTES];
    stream.read_exact(&mut answer).ok()?;
    RosterAnswer::decode(&answer)
}

/// Ranks of several processes, two of them in one, enter at once and in any order, twenty times. All get the same roster and meet.
#[test]
fn complete() {
    let (one, other) = (bootstrap(), bootstrap());
    let processes = [&one, &other, &one];
    // Stands for NCCL's own init, in which ranks wait for each other.
    let barrier = Barrier::new(3);
    for _ in 0..20 {
        let name = name();
        thread::scope(|scope| {
            for (rank, process) in (0..3).zip(processes) {
                let barrier = &barrier;
                scope.spawn(move || {
                    // The ranks' numbers in the parent are 20, 30 and 10.
                    let local_entry = process.enter_local(name, [20, 30, 10][rank], &never).unwrap();
                    barrier.wait();
                    let invitation = invited(name, &local_entry, 3);
                    assert_eq!(invitation.rank, [1, 2, 0][rank]);
                    let participant = process.join_local(&invitation, facts(rank as u32, 3)).unwrap();
                    assert!(is_peer_group(&joined(participant)));
                    local_entry.leave();
                });
            }
        });
    }
}

/// If ranks are on other hosts, or without Windlass, all ranks hear so at once.
#[test]
fn apart() {
    let (one, other, name) = (bootstrap(), bootstrap(), name());
    let (first, second) =
        (one.enter_local(name, 0, &never).unwrap(), other.enter_local(name, 1, &never).unwrap());
    assert_eq!(second.ask(4, &never).unwrap(), RosterAnswer::Apart);
    // The keeper of the roster may leave then.
    drop(second);
    assert_eq!(first.ask(4, &never).unwrap(), RosterAnswer::Apart);
    assert!(bootstrap().enter_local(name, 2, &never).is_err(), "it is closed");
    drop(first);
    // The next one to enter begins a new roster.
    while other.enter_local(name, 2, &never).is_err() {}
}

/// A process dies before its rank asks, or before its rank's message in the session: the others fail. If instead the rank's own
/// call failed, the others keep the communicator that NCCL gave them.
#[test]
fn goes_without_a_message() {
    for way in ["fails", "dies", "asks and dies"] {
        let (process, name) = (bootstrap(), name());
        let local_entry = process.enter_local(name, 0, &never).unwrap();
        let mut dying = connect(name);
        assert_eq!(asks(&mut dying, &local_rendezvous::greeting(name, 1)), Some(RosterAnswer::Entered));
        let participant = process.join_local(&invited(name, &local_entry, 2), facts(0, 2)).unwrap();
        match way {
            "fails" => dying.write_all(&RosterMessage::Leave.encode()).unwrap(),
            "dies" => {}
            _ => {
                let answer = asks(&mut dying, &RosterMessage::Ask { ranks: 2 }.encode());
                assert!(matches!(answer, Some(RosterAnswer::Complete { place: 1, .. })));
            }
        }
        drop(dying);
        let outcome = joined(participant);
        let is_right = match way {
            "fails" => matches!(outcome, Outcome::OnNccl(FallbackReason::Apart)),
            _ => matches!(outcome, Outcome::Failed(Failure::Absent { rank: 1 })),
        };
        assert!(is_right, "{way}: {outcome:?}");
    }
}

/// A rank that declines and leaves takes the peer group from the others, also from later ones, but not NCCL's communicator. The
/// keeper of the roster may leave then.
#[test]
fn declines() {
    let (keeper, other, late) = (bootstrap(), bootstrap(), bootstrap());
    let name = name();
    let local_entry = [(&keeper, 0), (&other, 1), (&late, 2)]
        .map(|(one, rank)| one.enter_local(name, rank, &never).unwrap());
    let [one, _, three] = [0, 1, 2].map(|rank| invited(name, &local_entry[rank], 3));
    let [first, second, third] = local_entry;
    let participant = keeper.join_local(&one, facts(0, 3)).unwrap();
    second.decline();
    drop(second);
    assert!(matches!(joined(participant), Outcome::OnNccl(FallbackReason::Apart)));
    first.leave();
    drop((first, keeper));
    let outcome = joined(late.join_local(&three, facts(2, 3)).unwrap());
    assert!(matches!(outcome, Outcome::OnNccl(FallbackReason::Unreachable { .. })), "{outcome:?}");
    drop(third);
}

/// The message of a rank that declines is read although the rank has left before the answer.
#[test]
fn declines_unheard() {
    for _ in 0..50 {
        let (process, name) = (bootstrap(), name());
        let local_entry = process.enter_local(name, 0, &never).unwrap();
        let mut gone = connect(name);
        assert_eq!(asks(&mut gone, &local_rendezvous::greeting(name, 1)), Some(RosterAnswer::Entered));
        let participant = process.join_local(&invited(name, &local_entry, 2), facts(0, 2)).unwrap();
        gone.write_all(&[RosterMessage::Ask { ranks: 2 }.encode(), RosterMessage::Decline.encode()].concat())
            .unwrap();
        drop(gone);
        let outcome = joined(participant);
        assert!(matches!(outcome, Outcome::OnNccl(FallbackReason::Apart)), "{outcome:?}");
    }
}

/// The keeper of the roster was refused by NCCL and ends while the others meet: they keep NCCL's communicator.
#[test]
fn keeper_is_none_of_them() {
    let (keeper, other, late, name) = (bootstrap(), bootstrap(), bootstrap(), name());
    let refused = keeper.enter_local(name, 0, &never).unwrap();
    let (second, third) =
        (other.enter_local(name, 1, &never).unwrap(), late.enter_local(name, 2, &never).unwrap());
    drop(refused);
    // The host has seen the refused rank leave once it has closed a later connection.
    assert_eq!(asks(&mut connect(name), &local_rendezvous::greeting(place::random().unwrap(), 9)), None);
    let participant = other.join_local(&invited(name, &second, 2), facts(0, 2)).unwrap();
    thread::scope(|scope| {
        let waits = scope.spawn(|| joined(participant));
        thread::sleep(Duration::from_millis(100));
        drop(keeper);
        let outcome = waits.join().unwrap();
        assert!(matches!(outcome, Outcome::OnNccl(FallbackReason::Unreachable { .. })), "{outcome:?}");
    });
    assert!(third.ask(2, &never).is_err());
}

/// A rank waits for a keeper that does not answer only while the parent lives.
#[test]
fn parent_ends() {
    let name = name();
    let address = local_rendezvous::address(name).unwrap();
    let address = SocketAddr::from_abstract_name(address.abstract_name().unwrap()).unwrap();
    let silent = UnixListener::bind_addr(&address).unwrap();
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let enters =
            scope.spawn(|| bootstrap().enter_local(name, 0, &|| ended.load(Ordering::Relaxed)).is_err());
        let connected = silent.accept().unwrap();
        ended.store(true, Ordering::Relaxed);
        assert!(enters.join().unwrap());
        drop(connected);
    });
}

/// The process that keeps the roster ends: ranks without an answer get an error.
#[test]
fn keeper_ends() {
    let (keeper, other, name) = (bootstrap(), bootstrap(), name());
    let first = keeper.enter_local(name, 0, &never).unwrap();
    let second = other.enter_local(name, 1, &never).unwrap();
    drop(keeper);
    assert!(second.ask(2, &never).is_err());
    assert!(first.ask(2, &never).is_err());
}

/// Unknown connections are closed, and so is one with an invalid message. Other ranks are not disturbed.
#[test]
fn unknown_connections() {
    let (process, name) = (bootstrap(), name());
    let first = process.enter_local(name, 0, &never).unwrap();
    assert_eq!(asks(&mut connect(name), &local_rendezvous::greeting(place::random().unwrap(), 1)), None);
    let silent = connect(name);
    let mut garbled = connect(name);
    assert_eq!(asks(&mut garbled, &local_rendezvous::greeting(name, 1)), Some(RosterAnswer::Entered));
    assert_eq!(asks(&mut garbled, &[9; 5]), None);
    let mut all: Vec<UnixStream> = (1..RANKS_MAX as u32)
        .map(|rank| {
            let mut one = connect(name);
            assert_eq!(asks(&mut one, &local_rendezvous::greeting(name, rank)), Some(RosterAnswer::Entered));
            one
        })
        .collect();
    // A message in pieces, and two messages at once.
    let ask = RosterMessage::Ask { ranks: RANKS_MAX as u32 }.encode();
    let one = all.first_mut().unwrap();
    one.write_all(&ask[..2]).unwrap();
    assert!(matches!(
        asks(one, &[&ask[2..], &RosterMessage::Leave.encode()].concat()),
        Some(RosterAnswer::Complete { place: 1, .. })
    ));
    assert!(matches!(first.ask(RANKS_MAX as u32, &never), Ok(RosterAnswer::Complete { place: 0, .. })));
    drop(silent);
}

/// The last rank leaves while others come: these enter the same roster or a new one.
#[test]
fn last_goes_while_others_come() {
    let processes = [bootstrap(), bootstrap()];
    let name = name();
    let entered = AtomicU32::new(0);
    thread::scope(|scope| {
        for (rank, process) in (0..2).zip(&processes) {
            let entered = &entered;
            scope.spawn(move || {
                for _ in 0..400 {
                    drop(process.enter_local(name, rank, &never).unwrap());
                    entered.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(entered.load(Ordering::Relaxed), 800);
}
