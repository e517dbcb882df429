//! Tests of sessions at a process listener, for communicators made from another.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::process::{Child, Command};
use std::sync::atomic::Ordering;
use std::thread;

use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use windlass_base::descriptor::Ours;
use windlass_bootstrap::children::{self, Invitation, NOBODY, child};
use windlass_bootstrap::message::FromRank;
use windlass_bootstrap::negotiated::Token;
use windlass_bootstrap::outcome::{Failure, FallbackReason, SessionOutcome};
use windlass_bootstrap::{Bootstrap, Limits, Outcome, Participant};

use crate::support::{facts, hosted, is_peer_group, join, ready};

const PARENT: Token = Token([9; 16]);

fn bootstrap() -> Bootstrap {
    Bootstrap::start(Limits::default()).unwrap()
}

/// A split of a parent whose rank 0 is in the host's process.
struct Split {
    host: Bootstrap,
    call: Token,
}

fn split() -> Split {
    Split { host: bootstrap(), call: children::call(PARENT, &[], 0) }
}

impl Split {
    /// The name of the communicator of a color. The host waits for its ranks under that name.
    fn of(&self, color: i32) -> Token {
        child(self.call, color)
    }

    /// The invitation of a rank of the parent to its child.
    fn invites(&self, rank: u32, color: i32) -> Invitation {
        let child = self.of(color);
        Invitation { process_listener: self.host.process_listener, call: child, child, rank }
    }

    fn join(&self, from: &Bootstrap, parent_rank: u32, color: i32, rank: u32, ranks: u32) -> Participant {
        from.join_invited(&self.invites(parent_rank, color), facts(rank, ranks)).unwrap()
    }

    fn connect(&self) -> UnixStream {
        UnixStream::connect_addr(&address(self.host.process_listener)).unwrap()
    }
}

pub fn address(process_listener: Token) -> SocketAddr {
    let name = children::address(process_listener).unwrap();
    SocketAddr::from_abstract_name(name.abstract_name().unwrap()).unwrap()
}

fn joined(participant: Participant) -> Outcome {
    participant.complete(ready)
}

/// A process that stands for a rank's, and its pidfd.
pub fn process() -> (Child, Ours) {
    let process = Command::new("sleep").arg("600").spawn().unwrap();
    let pidfd = pidfd_of(process.id());
    (process, pidfd)
}

pub fn pidfd_of(process: u32) -> Ours {
    let process = Pid::from_raw(process as i32).unwrap();
    Ours::new(pidfd_open(process, PidfdFlags::empty()).unwrap()).unwrap()
}

pub fn kill(mut process: Child) {
    process.kill().unwrap();
    process.wait().unwrap();
}

/// Two colors meet at one host at the same time, in any order of ranks, also before the host's own rank. Their negotiated configs
/// have different tokens.
#[test]
fn two_colors_at_once() {
    let (split, other) = (split(), bootstrap());
    let participants = vec![
        split.join(&other, 4, 7, 1, 2),
        split.join(&other, 3, 8, 0, 2),
        split.join(&split.host, 1, 7, 0, 2),
        split.join(&split.host, 2, 8, 1, 2),
    ];
    split.host.await_ranks(split.of(7), 0b10010, Vec::new());
    split.host.await_ranks(split.of(8), 0b1100, Vec::new());
    let outcomes: Vec<Outcome> = thread::scope(|scope| {
        let threads: Vec<_> =
            participants.into_iter().map(|participant| scope.spawn(|| joined(participant))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut negotiated_configs = outcomes.into_iter().map(|outcome| match outcome {
        Outcome::PeerGroup(negotiated) => negotiated,
        other => panic!("{other:?}"),
    });
    let (one, two) = (negotiated_configs.next().unwrap(), negotiated_configs.next().unwrap());
    assert_eq!((&negotiated_configs.next().unwrap(), &negotiated_configs.next().unwrap()), (&one, &two));
    assert_eq!(one.comm, children::comm_token(split.of(7)));
    assert_ne!(one.comm, two.comm);
    assert_eq!(split.host.counts().peer_groups.load(Ordering::Relaxed), 2);
}

/// A rank that declines sends all ranks of its session to NCCL, the waiting and the late ones, and no other session.
#[test]
fn declined() {
    let split = split();
    split.host.await_ranks(split.of(1), 0b11001, Vec::new());
    split.host.await_ranks(split.of(2), 0b110, Vec::new());
    let early = split.join(&split.host, 0, 1, 0, 3);
    let others = [split.join(&split.host, 1, 2, 0, 2), split.join(&split.host, 2, 2, 1, 2)];
    declines_as(&split, 3, SessionOutcome::OnNccl(FallbackReason::NonBlocking));
    assert!(matches!(joined(early), Outcome::OnNccl(FallbackReason::NonBlocking)));
    let late = split.join(&split.host, 4, 1, 2, 3);
    assert!(matches!(joined(late), Outcome::OnNccl(FallbackReason::NonBlocking)));
    thread::scope(|scope| {
        for participant in others {
            scope.spawn(|| assert!(is_peer_group(&joined(participant))));
        }
    });
}

fn declines_as(split: &Split, rank: u32, outcome: SessionOutcome) {
    // Another process than the host's: the message must arrive although the sender ends at once.
    let other = bootstrap();
    let invitation = split.invites(rank, 1);
    other.decline(&invitation, outcome);
    // Ends after the message was sent.
    drop(other);
}

/// A rank whose own call failed makes its peers fail at once, even if a third rank has not come.
#[test]
fn a_call_failed() {
    let split = split();
    split.host.await_ranks(split.of(1), 0b111, Vec::new());
    let waiting = split.join(&split.host, 0, 1, 0, 3);
    declines_as(&split, 2, SessionOutcome::Failed(Failure::Absent { rank: 2 }));
    let outcome = joined(waiting);
    assert!(matches!(outcome, Outcome::Failed(Failure::Absent { rank: 2 })), "{outcome:?}");
    let late = joined(split.join(&split.host, 1, 1, 1, 3));
    assert!(matches!(late, Outcome::Failed(Failure::Absent { rank: 2 })), "{late:?}");
}

/// A process dies before its rank has come. The session with this rank fails once no other rank is missing. A session beside it
/// with late ranks only does not fail.
#[test]
fn dies_before_it_comes() {
    let split = split();
    let ((dying, pidfd), (living, alive)) = (process(), process());
    split.host.await_ranks(split.of(1), 0b1001, vec![(3, pidfd)]);
    split.host.await_ranks(split.of(2), 0b110, vec![(2, alive)]);
    let misses_the_dead = split.join(&split.host, 0, 1, 0, 2);
    let misses_the_late = split.join(&split.host, 1, 2, 0, 2);
    kill(dying);
    let late = split.join(&split.host, 2, 2, 1, 2);
    thread::scope(|scope| {
        let peer_group = [misses_the_late, late].map(|participant| scope.spawn(|| joined(participant)));
        let outcome = joined(misses_the_dead);
        assert!(matches!(outcome, Outcome::Failed(Failure::Absent { rank: 3 })), "{outcome:?}");
        for outcome in peer_group {
            assert!(is_peer_group(&outcome.join().unwrap()));
        }
    });
    kill(living);
}

/// A rank that a shrink excludes may be dead before the shrink begins; nobody waits for it.
#[test]
fn excluded_and_dead() {
    let host = bootstrap();
    let call = children::call(PARENT, &[0, 2], 0);
    let invites =
        |rank| Invitation { process_listener: host.process_listener, call, child: child(call, 0), rank };
    let (third, pidfd) = process();
    host.await_ranks(call, 0b1010, vec![(3, pidfd)]);
    let one = host.join_invited(&invites(1), facts(0, 2)).unwrap();
    let other = host.join_invited(&invites(3), facts(1, 2)).unwrap();
    thread::scope(|scope| {
        for participant in [one, other] {
            scope.spawn(|| assert!(is_peer_group(&joined(participant))));
        }
    });
    kill(third);
}

/// A rank that leaves after its report or its confirmation makes the others fail, as at other inits.
#[test]
fn leaves_after_its_report() {
    for words in [vec![], FromRank::Confirm.encode()] {
        let split = split();
        split.host.await_ranks(split.of(1), 0b111, Vec::new());
        let mut leaving = split.connect();
        let report = FromRank::Report(Box::new(facts(1, 3))).encode();
        leaving.write_all(&[split.invites(1, 1).greeting(), report].concat()).unwrap();
        let participants = [split.join(&split.host, 0, 1, 0, 3), split.join(&split.host, 2, 1, 2, 3)];
        // All ranks have reported.
        let mut header = [0; 6];
        leaving.read_exact(&mut header).unwrap();
        leaving.write_all(&words).unwrap();
        drop(leaving);
        thread::scope(|scope| {
            for outcome in participants.map(|participant| scope.spawn(|| joined(participant))) {
                let outcome = outcome.join().unwrap();
                assert!(matches!(outcome, Outcome::Failed(Failure::Lost { rank: 1 })), "{outcome:?}");
            }
        });
    }
}

/// A rank that leaves between its greeting and its report counts as never coming.
#[test]
fn leaves_before_its_report() {
    let split = split();
    split.host.await_ranks(split.of(1), 0b11, Vec::new());
    let waiting = split.join(&split.host, 0, 1, 0, 2);
    split.connect().write_all(&split.invites(1, 1).greeting()).unwrap();
    let outcome = joined(waiting);
    assert!(matches!(outcome, Outcome::Failed(Failure::Absent { rank: 1 })), "{outcome:?}");
}

/// Another thread aborts a waiting rank: its wait returns, and its peers fail, also later ones.
#[test]
fn aborted() {
    let split = split();
    split.host.await_ranks(split.of(1), 0b111, Vec::new());
    let (one, two) = (split.join(&split.host, 0, 1, 0, 3), split.join(&split.host, 1, 1, 1, 3));
    let canceller = one.canceller();
    thread::scope(|scope| {
        let aborted = scope.spawn(|| joined(one));
        let peer = scope.spawn(|| joined(two));
        canceller.abort();
        assert!(matches!(aborted.join().unwrap(), Outcome::Failed(Failure::Aborted)));
        let peer = peer.join().unwrap();
        assert!(matches!(peer, Outcome::Failed(Failure::Lost { .. } | Failure::Absent { .. })), "{peer:?}");
    });
    let late = joined(split.join(&split.host, 2, 1, 2, 3));
    assert!(matches!(late, Outcome::Failed(Failure::Lost { .. } | Failure::Absent { .. })), "{late:?}");
}

/// The host ends while ranks wait, or before they come: they fail. Declining to a listener that is gone does nothing.
#[test]
fn host_is_gone() {
    let (split, own) = (split(), bootstrap());
    let waiting = split.join(&own, 1, 1, 1, 2);
    let invitation = split.invites(2, 1);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| joined(waiting));
        drop(split.host);
        assert!(matches!(waiting.join().unwrap(), Outcome::Failed(Failure::HostLost)));
    });
    own.decline(&invitation, SessionOutcome::OnNccl(FallbackReason::NonBlocking));
    let late = own.join_invited(&invitation, facts(1, 2)).unwrap();
    assert!(matches!(joined(late), Outcome::Failed(Failure::HostLost)));
}

/// The descriptor numbers of this process's epoll instances.
fn pollers() -> Vec<i32> {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap().map(Result::unwrap);
    let is_one = |entry: &std::fs::DirEntry| {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        target.to_string_lossy().contains("[eventpoll]")
    };
    entries.filter(is_one).map(|entry| entry.file_name().to_str().unwrap().parse().unwrap()).collect()
}

/// A process lives although its bootstrap thread has ended, as when the program has closed the thread's descriptors. The others do
/// not wait for its ranks, which were connecting, come, decline or do nothing.
#[test]
fn thread_has_ended() {
    let hosted = hosted();
    let (process, _) = process();
    let lives = || vec![(1, pidfd_of(process.id())), (2, pidfd_of(process.id()))];
    let before = pollers();
    let own = bootstrap();
    let taken: Vec<i32> = pollers().into_iter().filter(|poller| !before.contains(poller)).collect();
    let null = std::fs::File::open("/dev/null").unwrap();
    for number in taken {
        // SAFETY: the number stays a valid descriptor of its owner, of another file.
        assert_eq!(unsafe { libc::dup2(null.as_raw_fd(), number) }, number);
    }
    let has_ended = || match join(&own, &hosted.id, facts(1, 3)) {
        Outcome::OnNccl(FallbackReason::Unreachable { words }) => words.contains("has ended"),
        _ => false,
    };
    let at_host = Bootstrap::start(Limits::default()).unwrap();
    for (count, way) in (0..).zip(["declines", "comes"]) {
        let split = Split { call: children::call(PARENT, &[], count), host: bootstrap() };
        let waits = split.join(&at_host, 0, 1, 0, 2);
        split.host.await_ranks(split.of(1), 0b101, lives());
        while !has_ended() {}
        match way {
            "declines" => {
                own.decline(&split.invites(2, 1), SessionOutcome::Failed(Failure::Absent { rank: 2 }))
            }
            _ => {
                let outcome = joined(split.join(&own, 2, 1, 1, 2));
                assert!(matches!(outcome, Outcome::Failed(Failure::HostLost)), "{outcome:?}");
            }
        }
        let outcome = joined(waits);
        assert!(matches!(outcome, Outcome::Failed(Failure::Absent { .. })), "{way}: {outcome:?}");
    }
    kill(process);
}

/// The bootstrap thread ends while a rank of its process connects to a process listener. The others do not wait for a report that
/// was not sent.
#[test]
fn thread_ends_while_it_knocks() {
    let (process, _) = process();
    let other = bootstrap();
    // Each time the connection gets to another point.
    for _ in 0..20 {
        let (split, own) = (split(), bootstrap());
        let (waits, comes) = (split.join(&other, 0, 1, 0, 2), split.join(&own, 1, 1, 1, 2));
        split.host.await_ranks(split.of(1), 0b11, vec![(1, pidfd_of(process.id()))]);
        drop(own);
        let outcomes = [joined(comes), joined(waits)];
        assert!(
            matches!(outcomes[0], Outcome::Failed(Failure::HostLost | Failure::Lost { .. })),
            "{outcomes:?}"
        );
        assert!(
            matches!(outcomes[1], Outcome::Failed(Failure::Absent { .. } | Failure::Lost { .. })),
            "{outcomes:?}"
        );
    }
    kill(process);
}

/// A rank tries again while the queue of a process listener is full, until there is room, also a rank that is aborted meanwhile.
#[test]
fn full_queue() {
    let process_listener = Token([0x51; 16]);
    let listener = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let listener = listener.unwrap();
    net::bind(&listener, &children::address(process_listener).unwrap()).unwrap();
    net::listen(&listener, 0).unwrap();
    // The kernel decides how many connections a queue of length 0 holds.
    let mut queued = Vec::new();
    loop {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        match net::connect(&socket, &children::address(process_listener).unwrap()) {
            Ok(()) => queued.push(socket),
            Err(error) => break assert_eq!(error, rustix::io::Errno::AGAIN),
        }
    }
    let own = bootstrap();
    let call = children::call(PARENT, &[], 3);
    let invites = |rank| Invitation { process_listener, call, child: child(call, 0), rank };
    let aborted = own.join_invited(&invites(1), facts(1, 2)).unwrap();
    aborted.canceller().abort();
    assert!(matches!(joined(aborted), Outcome::Failed(Failure::Aborted)));
    own.decline(&invites(2), SessionOutcome::OnNccl(FallbackReason::NonBlocking));
    queued.iter().for_each(|_| drop(net::accept(&listener).unwrap()));
    // The aborted rank's message comes, too, as its host waits for it.
    let mut missing = vec![invites(1).greeting(), invites(2).greeting()];
    while !missing.is_empty() {
        let mut words = Vec::new();
        UnixStream::from(net::accept(&listener).unwrap()).read_to_end(&mut words).unwrap();
        missing.retain(|greeting| !words.starts_with(greeting));
    }
}

/// A rank aborted before its report was sent: its peers hear that it does not come.
#[test]
fn aborted_at_once() {
    for _ in 0..50 {
        let (split, own) = (split(), bootstrap());
        split.host.await_ranks(split.of(1), 0b11, Vec::new());
        let waiting = split.join(&split.host, 0, 1, 0, 2);
        let aborted = split.join(&own, 1, 1, 1, 2);
        aborted.canceller().abort();
        assert!(matches!(joined(aborted), Outcome::Failed(Failure::Aborted)));
        let outcome = joined(waiting);
        let lost = matches!(outcome, Outcome::Failed(Failure::Lost { .. } | Failure::Absent { rank: 1 }));
        assert!(lost, "{outcome:?}");
    }
}

/// The number of incomplete calls is bounded: the oldest are forgotten, but never one in which a rank waits.
#[test]
fn too_many_calls() {
    let host = Bootstrap::start(Limits { calls_max: 4, ..Limits::default() }).unwrap();
    let split = Split { host, call: children::call(PARENT, &[], 0) };
    let mut waiting = split.connect();
    let report = FromRank::Report(Box::new(facts(0, 2))).encode();
    waiting.write_all(&[split.invites(0, 1).greeting(), report].concat()).unwrap();
    // The host reads this connection after the one before, so its end shows that the host has read that one.
    let mut behind = split.connect();
    behind.write_all(b"?").unwrap();
    assert_eq!(behind.read(&mut [0]).unwrap_or(0), 0);
    split.host.await_ranks(split.of(1), 0b11, Vec::new());
    for count in 1..=8 {
        let call = children::call(PARENT, &[], count);
        split.host.await_ranks(call, 0b11, vec![(1, pidfd_of(std::process::id()))]);
    }
    let late = split.join(&split.host, 1, 1, 1, 2);
    waiting.read_exact(&mut [0; 6]).unwrap();
    drop(late);
    // There is room for four calls, in one of which a rank waits.
    assert_eq!(split.host.counts().calls_forgotten.load(Ordering::Relaxed), 5);
}

/// A rank that comes for another communicator of the same name is turned away, and does not disturb waiting ranks.
#[test]
fn another_communicator() {
    let split = split();
    split.host.await_ranks(split.of(1), 0b11, Vec::new());
    let report = |rank| FromRank::Report(Box::new(facts(rank, 2))).encode();
    let mut waiting = split.connect();
    waiting.write_all(&[split.invites(0, 1).greeting(), report(0)].concat()).unwrap();
    // The host reads this connection after the one before.
    let mut behind = split.connect();
    let elsewhere = Invitation { child: split.of(2), ..split.invites(1, 1) };
    behind.write_all(&[elsewhere.greeting(), report(1)].concat()).unwrap();
    assert_eq!(behind.read(&mut [0]).unwrap_or(0), 0);
    assert_eq!(split.host.counts().turned_away.load(Ordering::Relaxed), 1);
    let late = split.join(&split.host, 1, 1, 1, 2);
    waiting.read_exact(&mut [0; 6]).unwrap();
    drop(late);
}

/// A connection without the secret, or with invalid messages, is turned away and harms no rank. So are hundreds of silent
/// connections.
#[test]
fn unknown_connections() {
    let split = split();
    split.host.await_ranks(split.of(1), 0b11, Vec::new());
    let waiting = split.join(&split.host, 0, 1, 0, 2);
    let good = split.invites(1, 1);
    let wrong_secret = Invitation { process_listener: Token([1; 16]), ..good }.greeting();
    let no_rank = Invitation { rank: 4711, ..good }.greeting();
    let report = FromRank::Report(Box::new(facts(1, 2))).encode();
    for bytes in
        [&[][..], b"GET / HTTP/1.1\r\n\r\n", &wrong_secret, &no_rank, &good.greeting()[..59], &[0; 5000]]
    {
        let mut unknown_connection = split.connect();
        // The host may have closed it already.
        let _ = unknown_connection.write_all(bytes);
        let _ = unknown_connection.write_all(&report);
    }
    let silent: Vec<UnixStream> = (0..300).map(|_| split.connect()).collect();
    // With the name of another call, so in a session of its own in which no rank waits.
    let elsewhere = Invitation { call: Token([2; 16]), child: Token([3; 16]), ..good };
    let mut oversized = split.connect();
    oversized.write_all(&[&elsewhere.greeting()[..], &u32::MAX.to_le_bytes(), &[0; 64]].concat()).unwrap();
    assert_eq!(oversized.read(&mut [0]).unwrap_or(0), 0);
    let other = split.join(&split.host, 1, 1, 1, 2);
    thread::scope(|scope| {
        for participant in [waiting, other] {
            scope.spawn(|| assert!(is_peer_group(&joined(participant))));
        }
    });
    drop(silent);
    assert!(split.host.counts().turned_away.load(Ordering::Relaxed) >= 4);
    assert_eq!(split.host.counts().unreadable.load(Ordering::Relaxed), 1);
    assert_ne!(NOBODY, split.host.process_listener);
}
