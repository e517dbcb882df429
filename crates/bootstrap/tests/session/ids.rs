//! Tests of ids that no rank will use after an init of lazy communicators: their ports close, and the ids are given out again.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::Ordering;
use std::thread;

use windlass_bootstrap::facts::Facts;
use windlass_bootstrap::id_tag::{self, Id, IdTag};
use windlass_bootstrap::message::{FromRank, greeting};
use windlass_bootstrap::negotiated::capability;
use windlass_bootstrap::outcome::{Failure, FallbackReason};
use windlass_bootstrap::{Bootstrap, Limits, Outcome};

use crate::support::{BringAll, Hosted, complete_all, facts, hosted, id_of, is_peer_group, join, ready};

fn lazy_facts(rank: u32, ranks: u32) -> Facts {
    let facts = facts(rank, ranks);
    Facts { capabilities: facts.capabilities | capability::LAZY, ..facts }
}

fn bring(hosted: &Hosted, all: [Facts; 2]) -> Vec<Outcome> {
    let participants = all.map(|facts| hosted.bootstrap.join_all(&hosted.id, vec![facts]).unwrap());
    complete_all(participants.into(), &ready).into_iter().flatten().collect()
}

/// The id as NCCL's simulator made it.
fn raw(hosted: &Hosted) -> Id {
    id_of(&hosted.root.local_addr().unwrap())
}

fn open(bootstrap: &Bootstrap) -> u64 {
    bootstrap.counts().sessions_open.load(Ordering::Relaxed)
}

/// When a rank hears the outcome, the port is closed and the id is spare, once, as NCCL made it. NCCL's root has had no connection,
/// and one rank too many does not disturb the others.
#[test]
fn peer_group_of_lazy_communicators() {
    let hosted = hosted();
    let outcomes = bring(&hosted, [lazy_facts(0, 2), lazy_facts(1, 2)]);
    assert!(TcpStream::connect(hosted.address()).is_err());
    assert_eq!(open(&hosted.bootstrap), 0);
    assert_eq!(hosted.bootstrap.spare_id(), Some(raw(&hosted)));
    assert_eq!(hosted.bootstrap.spare_id(), None);
    assert_eq!(hosted.bootstrap.counts().ids_recycled.load(Ordering::Relaxed), 1);
    let late = join(&hosted.bootstrap, &hosted.id, lazy_facts(1, 2));
    assert!(matches!(late, Outcome::OnNccl(FallbackReason::Unreachable { .. })), "{late:?}");
    assert!(outcomes.iter().all(is_peer_group));
    hosted.root.set_nonblocking(true).unwrap();
    assert_eq!(hosted.root.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

/// A connection that was silent so far is closed with the port, and does not count as a rank without Windlass.
#[test]
fn silent_connection_beside_lazy_communicators() {
    let hosted = hosted();
    let mut silent = hosted.connect();
    assert!(bring(&hosted, [lazy_facts(0, 2), lazy_facts(1, 2)]).iter().all(is_peer_group));
    assert_eq!(silent.read(&mut [0; 8]).unwrap_or(0), 0);
    assert_eq!(hosted.bootstrap.spare_id(), Some(raw(&hosted)));
}

/// If even one rank goes to NCCL at once, the port stays open and the id is not spare, also after NCCL's ranks have connected.
#[test]
fn not_all_lazy() {
    for all in [[facts(0, 2), facts(1, 2)], [lazy_facts(0, 2), facts(1, 2)]] {
        let hosted = hosted();
        assert!(bring(&hosted, all).iter().all(is_peer_group));
        assert_eq!((open(&hosted.bootstrap), hosted.bootstrap.spare_id()), (1, None));
        hosted.nccl_rank();
        hosted.nccl_rank();
        assert_eq!((open(&hosted.bootstrap), hosted.bootstrap.spare_id()), (1, None));
    }
}

/// Ranks that would be lazy but get no peer group go to NCCL, and the id is not spare: after a refusal, or after a relayed
/// connection.
#[test]
fn on_nccl_after_all() {
    let refused = hosted();
    let participants = [0, 1].map(|rank| {
        let facts = lazy_facts(rank, 2);
        refused.bootstrap.join_all(&refused.id, vec![facts]).unwrap()
    });
    let outcomes = complete_all(participants.into(), &|preparation| match preparation.rank {
        1 => Err("no room".into()),
        _ => Ok(()),
    });
    for outcome in outcomes.iter().flatten() {
        assert!(matches!(outcome, Outcome::OnNccl(FallbackReason::Refused { rank: 1, .. })), "{outcome:?}");
    }
    assert_eq!((open(&refused.bootstrap), refused.bootstrap.spare_id()), (1, None));
    refused.nccl_rank();

    let relayed = hosted();
    relayed.nccl_rank();
    for outcome in bring(&relayed, [lazy_facts(0, 2), lazy_facts(1, 2)]) {
        assert!(matches!(outcome, Outcome::OnNccl(FallbackReason::NonWindlass)), "{outcome:?}");
    }
    assert_eq!((open(&relayed.bootstrap), relayed.bootstrap.spare_id()), (1, None));
}

/// After a session that failed it is unknown where its ranks go, so the id is not spare.
#[test]
fn failed_after_all() {
    let hosted = hosted();
    let participants =
        [0, 1].map(|rank| hosted.bootstrap.join_all(&hosted.id, vec![lazy_facts(rank, 2)]).unwrap());
    let aborted = participants[1].cancellers().remove(0);
    let outcomes = complete_all(participants.into(), &|preparation| {
        if preparation.rank == 1 {
            aborted.abort();
        }
        Ok(())
    });
    assert!(matches!(outcomes[0][0], Outcome::Failed(Failure::Lost { rank: 1 })), "{outcomes:?}");
    assert_eq!(hosted.bootstrap.spare_id(), None);
}

/// A rank that confirmed and dies before it reads the outcome connects to no root: the id is spare.
#[test]
fn outcome_unheard() {
    let hosted = hosted();
    let token = IdTag::decode(&hosted.id).unwrap().token;
    let mut dying = hosted.connect();
    let report = FromRank::Report(Box::new(lazy_facts(1, 2))).encode();
    dying.write_all(&[&greeting(token)[..], &report].concat()).unwrap();
    let participant = hosted.bootstrap.join_all(&hosted.id, vec![lazy_facts(0, 2)]).unwrap();
    // The negotiated config has arrived, so the rank may confirm.
    dying.read_exact(&mut [0]).unwrap();
    dying.write_all(&FromRank::Confirm.encode()).unwrap();
    let outcomes = participant.complete(ready);
    drop(dying);
    assert!(is_peer_group(&outcomes[0]));
    assert_eq!(hosted.bootstrap.spare_id(), Some(raw(&hosted)));
}

/// An id whose root is gone is not given out, and no more than `spare_ids_max` are kept.
#[test]
fn bounded_and_alive() {
    let bootstrap = Bootstrap::start(Limits { spare_ids_max: 2, ..Limits::default() }).unwrap();
    let roots: Vec<_> = (0..3).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let ids: Vec<Id> = roots.iter().map(|root| id_of(&root.local_addr().unwrap())).collect();
    for id in &ids {
        let id = bootstrap.host(id).unwrap();
        let participant = bootstrap.join_all(&id, vec![lazy_facts(0, 2), lazy_facts(1, 2)]).unwrap();
        assert!(participant.complete(ready).iter().all(is_peer_group));
    }
    assert_eq!(bootstrap.counts().ids_dropped.load(Ordering::Relaxed), 1);
    let mut roots = roots.into_iter();
    let first = roots.next();
    // The root of the second id ends.
    drop(roots.next());
    assert_eq!(bootstrap.spare_id(), Some(ids[0]));
    assert_eq!(bootstrap.spare_id(), None);
    assert_eq!(bootstrap.counts().ids_recycled.load(Ordering::Relaxed), 1);
    drop((first, roots));
}

/// After 1,000 inits in sequence, each with an id, there is as much as after one: one id of NCCL's, and no more descriptors,
/// threads or sessions. Each init has its own id tag and name.
#[test]
fn a_thousand_inits() {
    let bootstrap = Bootstrap::start(Limits::default()).unwrap();
    let alive = || {
        let count = |folder: &str| std::fs::read_dir(folder).unwrap().count();
        (count("/proc/self/fd"), count("/proc/self/task"))
    };
    let before = alive();
    let (mut roots, mut tokens, mut comms) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
    let mut made = |number: usize| {
        let made = bootstrap.spare_id().unwrap_or_else(|| {
            roots.push(TcpListener::bind("127.0.0.1:0").unwrap());
            id_of(&roots[roots.len() - 1].local_addr().unwrap())
        });
        let id = bootstrap.host(&made).unwrap();
        assert_eq!(id_tag::address(&made).unwrap().port(), IdTag::decode(&id).unwrap().root_port);
        assert!(tokens.insert(IdTag::decode(&id).unwrap().token));
        let participant = bootstrap.join_all(&id, vec![lazy_facts(0, 2), lazy_facts(1, 2)]).unwrap();
        let outcomes = participant.complete(ready);
        let Outcome::PeerGroup(negotiated) = &outcomes[0] else { panic!("{number}: {outcomes:?}") };
        assert!(comms.insert(negotiated.comm));
        assert_eq!(open(&bootstrap), 0);
    };
    (0..1000).for_each(&mut made);
    // The last connections close only after their ranks have left.
    while alive() != (before.0 + 1, before.1) {
        thread::yield_now();
    }
    assert_eq!(roots.len(), 1);
    assert_eq!(bootstrap.counts().ids_recycled.load(Ordering::Relaxed), 999);
}
