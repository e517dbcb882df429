//! Tests of ranks and hosts that end early, and of aborts.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use windlass_bootstrap::id_tag::IdTag;
use windlass_bootstrap::message::{FromRank, greeting};
use windlass_bootstrap::outcome::Failure;
use windlass_bootstrap::{Bootstrap, Canceller, Limits, Outcome};

use crate::support::{BringAll, facts, hosted, is_peer_group, join, ready};

/// A rank waits for peers that never come. Another thread aborts it, and its wait returns.
#[test]
fn abort_from_another_thread() {
    let hosted = hosted();
    let participant = hosted.bootstrap.join_all(&hosted.id, vec![facts(0, 2)]).unwrap();
    let canceller = participant.cancellers().remove(0);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| participant.complete(ready));
        canceller.abort();
        let outcomes = waiting.join().unwrap();
        assert!(matches!(outcomes[0], Outcome::Failed(Failure::Aborted)), "{outcomes:?}");
    });
    canceller.abort();
}

/// A rank is aborted while it prepares: its peers' init fails and names the lost rank, also if the peers have confirmed.
#[test]
fn peers_of_an_aborted_rank() {
    let hosted = hosted();
    let one = hosted.bootstrap.join_all(&hosted.id, vec![facts(0, 2)]).unwrap();
    let other = hosted.bootstrap.join_all(&hosted.id, vec![facts(1, 2)]).unwrap();
    let canceller = other.cancellers().remove(0);
    let preparing = Barrier::new(2);
    let aborted = Barrier::new(2);
    thread::scope(|scope| {
        let confirmed = scope.spawn(|| one.complete(ready));
        let lost = scope.spawn(|| {
            other.complete(|_| {
                preparing.wait();
                aborted.wait();
                Ok(())
            })
        });
        preparing.wait();
        canceller.abort();
        aborted.wait();
        assert!(matches!(lost.join().unwrap()[0], Outcome::Failed(Failure::Aborted)));
        let outcomes = confirmed.join().unwrap();
        assert!(matches!(outcomes[0], Outcome::Failed(Failure::Lost { rank: 1 })), "{outcomes:?}");
    });
}

/// Two ranks of a process wait for a third. An abort ends the wait of its own rank, and the other waits on until its own abort.
#[test]
fn aborts_of_ranks_of_a_process() {
    let hosted = hosted();
    let participants = hosted.bootstrap.join_all(&hosted.id, vec![facts(0, 3), facts(1, 3)]).unwrap();
    let cancellers = participants.cancellers();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| participants.complete(ready));
        cancellers.iter().for_each(Canceller::abort);
        let outcomes = waiting.join().unwrap();
        assert!(!outcomes.iter().any(is_peer_group), "{outcomes:?}");
    });
}

/// A rank that leaves before its whole report was sent counts as late and may come again. One that leaves after its report makes
/// the session fail even if a third has not come, and the third hears so.
#[test]
fn gone_before_all_are_there() {
    let hosted = hosted();
    let token = IdTag::decode(&hosted.id).unwrap().token;
    let report = [&greeting(token)[..], &FromRank::Report(Box::new(facts(1, 3))).encode()].concat();
    let participant = hosted.bootstrap.join_all(&hosted.id, vec![facts(0, 3)]).unwrap();
    for cut in [0, 5, 24, 30, report.len() - 1] {
        hosted.connect().write_all(&report[..cut]).unwrap();
    }
    thread::scope(|scope| {
        let waiting = scope.spawn(|| participant.complete(ready));
        let mut rank = hosted.connect();
        rank.write_all(&report).unwrap();
        drop(rank);
        let outcomes = waiting.join().unwrap();
        assert!(matches!(outcomes[0], Outcome::Failed(Failure::Lost { rank: 1 })), "{outcomes:?}");
    });
    let late = join(&hosted.bootstrap, &hosted.id, facts(2, 3));
    assert!(matches!(late, Outcome::Failed(Failure::Lost { .. })), "{late:?}");
}

/// The host ends before all ranks have come: their inits fail and do not go to NCCL.
#[test]
fn host_is_lost() {
    let hosted = hosted();
    let own = Bootstrap::start(Limits::default()).unwrap();
    let reached = AtomicBool::new(false);
    let one = own.join_all(&hosted.id, vec![facts(0, 2)]).unwrap();
    let other = own.join_all(&hosted.id, vec![facts(1, 2)]).unwrap();
    let prepared = Barrier::new(2);
    thread::scope(|scope| {
        let confirmed = scope.spawn(|| one.complete(ready));
        let waiting = scope.spawn(|| {
            other.complete(|preparation| {
                reached.store(true, Ordering::Relaxed);
                prepared.wait();
                use rustix::event::{PollFd, PollFlags, poll};
                poll(&mut [PollFd::new(preparation.stop, PollFlags::IN)], None).unwrap();
                Ok(())
            })
        });
        prepared.wait();
        drop(hosted.bootstrap);
        for outcomes in [confirmed.join().unwrap(), waiting.join().unwrap()] {
            assert!(matches!(outcomes[0], Outcome::Failed(Failure::HostLost)), "{outcomes:?}");
        }
    });
    assert!(reached.into_inner());
}

/// After the outcome no rank needs the host, which keeps no connection and may end.
#[test]
fn host_ends_after_the_outcome() {
    let hosted = hosted();
    let own = Bootstrap::start(Limits::default()).unwrap();
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open();
    let participant = own.join_all(&hosted.id, (0..3).map(|rank| facts(rank, 3)).collect()).unwrap();
    let outcomes = participant.complete(ready);
    while open() > before {
        thread::yield_now();
    }
    drop(hosted.bootstrap);
    assert!(outcomes.iter().all(is_peer_group));
}

/// When a bootstrap ends, the waits of its ranks end.
#[test]
fn thread_ends() {
    let hosted = hosted();
    let own = Bootstrap::start(Limits::default()).unwrap();
    let participant = own.join_all(&hosted.id, vec![facts(0, 2)]).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| participant.complete(ready));
        drop(own);
        assert!(!is_peer_group(&waiting.join().unwrap()[0]));
    });
}

/// The program replaces all descriptors of the bootstrap, as programs do that close whatever they find. Waiting ranks get an error,
/// later ones go to NCCL, and the thread ends without spinning.
#[test]
fn descriptors_taken_away() {
    let hosted = hosted();
    let own = Bootstrap::start(Limits::default()).unwrap();
    let participant = own.join_all(&hosted.id, vec![facts(0, 3)]).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| participant.complete(ready));
        let null = std::fs::File::open("/dev/null").unwrap();
        for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
            let entry = entry.unwrap();
            let target = std::fs::read_link(entry.path()).unwrap_or_default();
            if target.to_string_lossy().contains("[eventpoll]") {
                let number: i32 = entry.file_name().to_str().unwrap().parse().unwrap();
                // SAFETY: the number stays a valid descriptor of its owner, of another file.
                assert_eq!(unsafe { libc::dup2(null.as_raw_fd(), number) }, number);
            }
        }
        while !waiting.is_finished() {
            // Wakes both threads, whose descriptors to wait for are gone.
            let _ = own.join_all(&hosted.id, vec![facts(1, 3)]);
            hosted.bootstrap.retire(&hosted.id);
        }
        assert!(!is_peer_group(&waiting.join().unwrap()[0]));
    });
    assert!(!is_peer_group(&own.join_all(&hosted.id, vec![facts(1, 3)]).unwrap().complete(ready)[0]));
}
