//! Tests of sessions among threads, each rank with its own socket.

use std::collections::HashSet;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use windlass_bootstrap::facts::Facts;
use windlass_bootstrap::negotiated::{NegotiatedConfig, capability};
use windlass_bootstrap::outcome::{Failure, FallbackReason};
use windlass_bootstrap::{Bootstrap, Limits, Outcome, id_tag};

use crate::support::{BringAll, complete_all, facts, hosted, id_of, is_peer_group, join, ready, real_facts};

/// Two to eight ranks on threads, each with its own bootstrap, get one peer group and one negotiated config.
#[test]
fn threads() {
    for ranks in 2..=8 {
        let hosted = hosted();
        let outcomes: Vec<Outcome> = thread::scope(|scope| {
            let rank = |rank| {
                let id = &hosted.id;
                scope.spawn(move || {
                    let own = Bootstrap::start(Limits::default()).unwrap();
                    let outcome = join(&own, id, real_facts(rank, ranks));
                    // Other ranks' outcomes may be on their way, and this rank's bootstrap must live until then.
                    (outcome, own)
                })
            };
            let started: Vec<_> = (0..ranks).map(rank).collect();
            let joined: Vec<_> = started.into_iter().map(|thread| thread.join().unwrap()).collect();
            joined.into_iter().map(|(outcome, _)| outcome).collect()
        });
        let negotiated_configs: Vec<Vec<u8>> = outcomes
            .iter()
            .map(|outcome| match outcome {
                Outcome::PeerGroup(negotiated) => negotiated.encode(),
                other => panic!("{ranks} ranks: {other:?}"),
            })
            .collect();
        assert!(negotiated_configs.windows(2).all(|pair| pair[0] == pair[1]));
        let negotiated = NegotiatedConfig::decode(&negotiated_configs[0]).unwrap();
        assert_eq!(negotiated.members.len(), ranks as usize);
        let sockets = negotiated.members.iter().map(|member| member.descriptor_socket);
        assert_eq!(sockets.collect::<HashSet<_>>().len(), ranks as usize);
        assert_eq!(hosted.bootstrap.counts().peer_groups.load(Ordering::Relaxed), 1);
    }
}

/// Eight ranks of one process, brought by one thread. Each has seven peers.
#[test]
fn one_thread() {
    let hosted = hosted();
    let prepared = AtomicUsize::new(0);
    let participant =
        hosted.bootstrap.join_all(&hosted.id, (0..8).map(|rank| real_facts(rank, 8)).collect()).unwrap();
    let outcomes = complete_all(vec![participant], &|preparation| {
        prepared.fetch_or(1 << preparation.rank, Ordering::Relaxed);
        assert_eq!(preparation.peers().len(), 7);
        Ok(())
    });
    assert!(outcomes[0].len() == 8 && outcomes[0].iter().all(is_peer_group), "{outcomes:?}");
    assert_eq!(prepared.load(Ordering::Relaxed), 0xff);
}

/// Two processes join two sessions in opposite orders in a group each, and prepare only once the peer does: no session waits for
/// another.
#[test]
fn groups_in_opposite_order() {
    let hosted = hosted();
    let root = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let other_id = hosted.bootstrap.host(&id_of(&root.local_addr().unwrap())).unwrap();
    let both_prepare = [Barrier::new(2), Barrier::new(2)];
    let bring = |rank: u32, ids: [&id_tag::Id; 2]| {
        let participants = ids.map(|id| hosted.bootstrap.join_all(id, vec![facts(rank, 2)]).unwrap());
        complete_all(participants.into(), &|preparation| {
            let first = preparation.token == id_tag::IdTag::decode(&hosted.id).unwrap().token;
            both_prepare[usize::from(first)].wait();
            Ok(())
        })
    };
    thread::scope(|scope| {
        let there = scope.spawn(|| bring(0, [&hosted.id, &other_id]));
        let here = bring(1, [&other_id, &hosted.id]);
        for outcomes in [there.join().unwrap(), here] {
            assert!(outcomes.iter().flatten().all(is_peer_group), "{outcomes:?}");
        }
    });
}

/// Sessions work over IPv6, where the id holds another kind of address.
#[test]
fn internet_protocol_6() {
    let Ok(root) = std::net::TcpListener::bind("[::1]:0") else {
        println!("skipped: no IPv6 here");
        return;
    };
    let mut id = id_of(&root.local_addr().unwrap());
    id[8..36].fill(0);
    id[8..10].copy_from_slice(&10u16.to_ne_bytes());
    id[10..12].copy_from_slice(&root.local_addr().unwrap().port().to_be_bytes());
    id[31] = 1;
    let bootstrap = Bootstrap::start(Limits::default()).unwrap();
    let id = bootstrap.host(&id).unwrap();
    let participant = bootstrap.join_all(&id, vec![facts(0, 2), facts(1, 2)]).unwrap();
    assert!(participant.complete(ready).iter().all(is_peer_group));
    let hosted = crate::support::Hosted { bootstrap, root, id };
    hosted.nccl_rank();
}

/// The others wait for a rank that comes long after them.
#[test]
fn late_rank() {
    let hosted = hosted();
    let participant = hosted.bootstrap.join_all(&hosted.id, vec![facts(0, 3), facts(1, 3)]).unwrap();
    let settled = Barrier::new(2);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            settled.wait();
            participant.complete(ready)
        });
        settled.wait();
        // Meanwhile the same thread runs a whole other session.
        let root = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let id = hosted.bootstrap.host(&id_of(&root.local_addr().unwrap())).unwrap();
        let two = hosted.bootstrap.join_all(&id, vec![facts(0, 2), facts(1, 2)]).unwrap();
        assert!(two.complete(ready).iter().all(is_peer_group));
        assert!(!waiting.is_finished());
        assert!(is_peer_group(&join(&hosted.bootstrap, &hosted.id, facts(2, 3))));
        assert!(waiting.join().unwrap().iter().all(is_peer_group));
    });
}

/// A rank without Windlass sends the waiting and the later ranks to NCCL.
#[test]
fn rank_without_windlass() {
    let hosted = hosted();
    let participant = hosted.bootstrap.join_all(&hosted.id, vec![facts(0, 3)]).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| participant.complete(ready));
        hosted.nccl_rank();
        let outcomes = waiting.join().unwrap();
        assert!(matches!(outcomes[0], Outcome::OnNccl(FallbackReason::NonWindlass)), "{outcomes:?}");
    });
    let late = join(&hosted.bootstrap, &hosted.id, facts(1, 3));
    assert!(matches!(late, Outcome::OnNccl(FallbackReason::NonWindlass)), "{late:?}");
}

/// After a peer group's outcome NCCL's connections are still relayed, and the port closes once the root's has.
#[test]
fn real_communicator_after_the_outcome() {
    let hosted = hosted();
    let participant = hosted.bootstrap.join_all(&hosted.id, vec![facts(0, 2), facts(1, 2)]).unwrap();
    let outcomes = participant.complete(ready);
    assert!(outcomes.iter().all(is_peer_group));
    hosted.nccl_rank();
    hosted.nccl_rank();
    let counts = hosted.bootstrap.counts();
    assert_eq!(counts.sessions_open.load(Ordering::Relaxed), 1);
    drop(hosted.root);
    while counts.sessions_open.load(Ordering::Relaxed) != 0 {
        thread::yield_now();
    }
    assert_eq!(counts.on_nccl.load(Ordering::Relaxed), 0);
    assert!(is_peer_group(&outcomes[0]));
}

/// A rank that cannot prepare gives its reason, and all ranks go to NCCL for it.
#[test]
fn refusal() {
    let hosted = hosted();
    let participants =
        [0, 1].map(|rank| hosted.bootstrap.join_all(&hosted.id, vec![facts(rank, 2)]).unwrap());
    let outcomes = complete_all(participants.into(), &|preparation| match preparation.rank {
        1 => Err("a chunk of 2 MiB did not map ".repeat(20)),
        _ => Ok(()),
    });
    for outcome in outcomes.iter().flatten() {
        let Outcome::OnNccl(FallbackReason::Refused { rank: 1, words }) = outcome else {
            panic!("{outcome:?}")
        };
        assert!(words.starts_with("a chunk") && words.len() <= 200);
    }
}

/// A rank that prepares hears of another's refusal and stops.
#[test]
fn stop_ends_preparing() {
    let hosted = hosted();
    let participants =
        [0, 1].map(|rank| hosted.bootstrap.join_all(&hosted.id, vec![facts(rank, 2)]).unwrap());
    let outcomes = complete_all(participants.into(), &|preparation| match preparation.rank {
        0 => Err("no room".into()),
        _ => {
            use rustix::event::{PollFd, PollFlags, poll};
            poll(&mut [PollFd::new(preparation.stop, PollFlags::IN)], None).unwrap();
            Err("stopped".into())
        }
    });
    for outcome in outcomes.iter().flatten() {
        assert!(matches!(outcome, Outcome::OnNccl(FallbackReason::Refused { rank: 0, .. })), "{outcome:?}");
    }
}

/// Different options, hosts or equal devices send all ranks to NCCL as soon as a report shows it, without waiting for other ranks.
#[test]
fn conflicts() {
    type Change = fn(&mut Facts);
    let changes: [(Change, FallbackReason); 6] = [
        (|facts| facts.nccl = 22510, FallbackReason::OtherNccl { rank: 1, other: 0 }),
        (|facts| facts.options = 6, FallbackReason::OtherOptions { rank: 1, other: 0 }),
        (|facts| facts.place.host.0[0] = 9, FallbackReason::OtherHost { rank: 1, other: 0 }),
        (|facts| facts.place.network = 9, FallbackReason::OtherNetwork { rank: 1, other: 0 }),
        (|facts| facts.member.device.uuid = [0; 16], FallbackReason::SameDevice { rank: 1, other: 0 }),
        (|facts| facts.capabilities = 0, FallbackReason::Incapable { rank: 1 }),
    ];
    for (change, expected) in changes {
        let hosted = hosted();
        let mut second = facts(1, 4);
        change(&mut second);
        let first = hosted.bootstrap.join_all(&hosted.id, vec![facts(0, 4)]).unwrap();
        let second = hosted.bootstrap.join_all(&hosted.id, vec![second]).unwrap();
        for outcome in [first.complete(ready), second.complete(ready)].iter().flatten() {
            let Outcome::OnNccl(reason) = outcome else { panic!("{outcome:?}") };
            // Either of two reports may come first.
            let swapped = format!("{reason}").replace("rank 0, other 1", "rank 1, other 0");
            assert_eq!(swapped, format!("{expected}"));
        }
    }
}

/// The negotiated config has the least limit, and the capabilities that all ranks have.
#[test]
fn negotiated_of_unlike_ranks() {
    let hosted = hosted();
    let (mut first, mut second) = (facts(0, 3), facts(1, 3));
    (first.ctas_max, second.ctas_max) = (16, 8);
    second.capabilities |= 12;
    second.member.attachment = b"a region at 4096".to_vec();
    let participant = hosted.bootstrap.join_all(&hosted.id, vec![first, second, facts(2, 3)]).unwrap();
    for outcome in participant.complete(ready) {
        let Outcome::PeerGroup(negotiated) = outcome else { panic!("{outcome:?}") };
        assert_eq!(
            (negotiated.ctas_max, negotiated.capabilities),
            (8, capability::REQUIRED | capability::LAUNCHES_ALONE)
        );
        assert_eq!(negotiated.members[1].attachment, b"a region at 4096");
    }
}

/// A rank that cannot reach its host goes to NCCL.
#[test]
fn unreachable_host() {
    let hosted = hosted();
    hosted.bootstrap.retire(&hosted.id);
    while hosted.bootstrap.counts().sessions_open.load(Ordering::Relaxed) != 0 {
        thread::yield_now();
    }
    let outcome = join(&hosted.bootstrap, &hosted.id, facts(0, 2));
    assert!(matches!(outcome, Outcome::OnNccl(FallbackReason::Unreachable { .. })), "{outcome:?}");
}

/// Retiring a session makes its waiting ranks fail.
#[test]
fn retired_while_waiting() {
    let hosted = hosted();
    let participant = hosted.bootstrap.join_all(&hosted.id, vec![facts(0, 2)]).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| participant.complete(ready));
        while !waiting.is_finished() {
            hosted.bootstrap.retire(&hosted.id);
            thread::yield_now();
        }
        let outcomes = waiting.join().unwrap();
        // The rank finds the port closed if the session was retired before the rank came.
        let expected = matches!(
            outcomes[0],
            Outcome::Failed(Failure::HostLost) | Outcome::OnNccl(FallbackReason::Unreachable { .. })
        );
        assert!(expected, "{outcomes:?}");
    });
}

/// An id that NCCL never used serves again, with the same root and another token.
#[test]
fn recycled_id() {
    let hosted = hosted();
    let meet = |id: &id_tag::Id| {
        let participant = hosted.bootstrap.join_all(id, vec![facts(0, 2), facts(1, 2)]).unwrap();
        participant.complete(ready).into_iter().map(|outcome| match outcome {
            Outcome::PeerGroup(negotiated) => negotiated.comm,
            other => panic!("{other:?}"),
        })
    };
    let first: Vec<_> = meet(&hosted.id).collect();
    let again = hosted.bootstrap.host(&id_of(&hosted.root.local_addr().unwrap())).unwrap();
    hosted.bootstrap.retire(&hosted.id);
    let (old, new) = (id_tag::IdTag::decode(&hosted.id).unwrap(), id_tag::IdTag::decode(&again).unwrap());
    assert_ne!(old.token, new.token);
    assert_eq!(old.root_port, new.root_port);
    let second: Vec<_> = meet(&again).collect();
    assert!(first[0] == first[1] && second[0] == second[1] && first[0] != second[0]);
}

/// 200 sessions leave no descriptor and no thread.
#[test]
fn two_hundred_sessions() {
    let bootstrap = Bootstrap::start(Limits::default()).unwrap();
    let alive = || {
        let count = |folder: &str| std::fs::read_dir(folder).unwrap().count();
        (count("/proc/self/fd"), count("/proc/self/task"))
    };
    let meet = |number: usize| {
        let root = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let id = bootstrap.host(&id_of(&root.local_addr().unwrap())).unwrap();
        let participant = bootstrap.join_all(&id, (0..4).map(|rank| facts(rank, 4)).collect()).unwrap();
        assert!(participant.complete(ready).iter().all(is_peer_group), "session {number}");
        bootstrap.retire(&id);
    };
    let settle = || {
        while bootstrap.counts().sessions_open.load(Ordering::Relaxed) != 0 {
            thread::yield_now();
        }
        // All earlier commands have been carried out, also those of the last participants.
        let root = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let id = bootstrap.host(&id_of(&root.local_addr().unwrap())).unwrap();
        bootstrap.retire(&id);
        while bootstrap.counts().sessions_open.load(Ordering::Relaxed) != 0 {
            thread::yield_now();
        }
    };
    // Counted before the sessions, whose resources may be freed one turn after the end.
    let before = alive();
    (0..=200).for_each(meet);
    settle();
    // The host closes its end of the last connections one turn after the ranks do, and a joined thread is listed a moment longer.
    let more = |now: (usize, usize)| now.0 > before.0 || now.1 > before.1;
    while more(alive()) {
        thread::yield_now();
    }
    assert_eq!(alive(), before);
}

/// With too many sessions open an id stays NCCL's own and is counted. Ids whose root is gone make room again.
#[test]
fn limit_of_sessions() {
    let bootstrap = Bootstrap::start(Limits { sessions_max: 3, ..Limits::default() }).unwrap();
    let mut roots: Vec<_> = (0..4).map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let addresses: Vec<_> = roots.iter().map(|root| root.local_addr().unwrap()).collect();
    let counts = bootstrap.counts();
    for address in &addresses[..3] {
        bootstrap.host(&id_of(address)).unwrap();
    }
    assert!(bootstrap.host(&id_of(&addresses[3])).is_err());
    assert_eq!(counts.sessions_refused.load(Ordering::Relaxed), 1);
    roots.drain(..2);
    while bootstrap.host(&id_of(&addresses[3])).is_err() {
        thread::yield_now();
    }
}
