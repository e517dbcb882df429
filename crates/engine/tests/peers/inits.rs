//! Tests of what ranks of one process share, and of what an init that failed leaves.

use std::net::{Ipv4Addr, TcpListener};

use windlass_base::descriptor;
use windlass_bootstrap::id_tag::Id;
use windlass_bootstrap::outcome::Failure;
use windlass_engine::forward::init::Ctas;
use windlass_engine::peers::{self, Asked, InitOutcome, InitRequest, Laziness, Waiting};
use windlass_transport::heap;

use crate::support::*;

/// Three devices of the process, each with its context, for inits with peer groups. `None` if there are fewer.
pub fn three_devices() -> Option<Vec<Primary>> {
    // SAFETY: nextest gives this test a process of its own, and nothing else in it reads the environment now.
    unsafe { std::env::set_var("WINDLASS_PEER_GROUPS", "on") };
    has_devices(3).then(|| (0..3).map(Primary::of).collect())
}

/// An id as NCCL makes it.
pub fn id_of(root: &TcpListener) -> Id {
    let mut id = [0xee; 128];
    id[..40].fill(0);
    id[..8].copy_from_slice(b"\xa7ncclid\x01");
    id[8..10].copy_from_slice(&2u16.to_ne_bytes());
    id[10..12].copy_from_slice(&root.local_addr().unwrap().port().to_be_bytes());
    id[12..16].copy_from_slice(&Ipv4Addr::LOCALHOST.octets());
    id
}

/// An id with a session, and its root, to which no rank connects.
fn id() -> (Id, TcpListener) {
    let root = TcpListener::bind("127.0.0.1:0").unwrap();
    let id = id_of(&root);
    let hosted = peers::host(&id);
    assert_ne!(hosted, id, "it has a session");
    (hosted, root)
}

fn ask(device: &Primary, id: Id, ranks: usize) -> Asked {
    device.make_current();
    let request = InitRequest {
        id,
        more_ids: Vec::new(),
        ranks: ranks as i32,
        rank: device.device,
        waiting: Waiting::Blocking,
        ctas: Ctas::UNSAID,
        device: Ok(device.device),
        laziness: Laziness::None,
        cached: Vec::new(),
    };
    peers::ask(&request).unwrap()
}

pub fn nothing_is_left() {
    eventually("all memory came back", || {
        peers::settle();
        let (heaps, peers) = heap::test_support::counters();
        heaps.is_empty() && peers.peers == 0
    });
}

/// Ranks of one process map each other's memory without imports, and their communicator keeps no descriptor, whether they met in a
/// session or were made by one call.
#[test]
fn ranks_of_one_process() {
    let Some(devices) = three_devices() else { return };
    let (id, _root) = id();
    let asked: Vec<Asked> = devices.iter().map(|device| ask(device, id, devices.len())).collect();
    let met = peers::complete(asked);
    let before = descriptor::open();
    let made = peers::all_here(&[0, 1, 2], Laziness::None);
    // The session before may still be closing some.
    assert!(descriptor::open() <= before, "one call takes no descriptor");
    for outcome in met.iter().chain(&made) {
        assert!(matches!(outcome, InitOutcome::PeerGroup(_)), "{outcome:?}");
    }
    let (heaps, peers) = heap::test_support::counters();
    assert_eq!((heaps.len(), peers.peers), (3, 0));
    assert!(heaps.iter().all(|heap| heap.regions == 2));
    drop((met, made));
    nothing_is_left();
}

/// A rank leaves while the others prepare, before it has sent them anything: their inits fail, and the regions that they had
/// announced are freed although this process, which is also the lost rank's, lives on.
#[test]
fn a_rank_that_leaves() {
    let Some(devices) = three_devices() else { return };
    let (id, _root) = id();
    let mut asked: Vec<Asked> = devices.iter().map(|device| ask(device, id, devices.len())).collect();
    let leaving = asked.pop().unwrap();
    std::thread::scope(|scope| {
        let joined = scope.spawn(|| peers::complete(asked));
        // Both have lent and zeroed their regions, so they wait for the third rank's message.
        eventually("they prepare", || {
            let (heaps, _) = heap::test_support::counters();
            heaps.iter().filter(|heap| heap.regions == 1).count() == 2
        });
        leaving.canceller().abort();
        let outcomes = joined.join().unwrap();
        for outcome in &outcomes {
            assert!(matches!(outcome, InitOutcome::Failed(Failure::Lost { rank: 2 })), "{outcome:?}");
        }
    });
    drop(leaving);
    nothing_is_left();
}
