//! Tests of ids that NCCL made earlier and that are given out instead of new ones.

use std::net::TcpListener;

use nccl_sys::{ncclSuccess, ncclUniqueId};
use windlass_bootstrap::id_tag::{Id, IdTag};
use windlass_engine::api::communicators;
use windlass_engine::peers::{self, InitOutcome, Laziness};

use crate::inits::{id_of, three_devices};
use crate::shared_pages::ask;

fn unique_id() -> Id {
    let mut place = ncclUniqueId { internal: [0; 128] };
    // There is no NCCL in this test, so a call of it would end the test.
    assert_eq!(communicators::unique_id(&mut place), ncclSuccess);
    place.internal.map(|byte| byte as u8)
}

/// A spare id is given out without NCCL, once, with a new session.
#[test]
fn spare_id_given_out() {
    let Some(_devices) = three_devices() else { return };
    assert_eq!(peers::spare_id(), None);
    let root = TcpListener::bind("127.0.0.1:0").unwrap();
    // NCCL made this id, and its ranks become lazy communicators, so none goes to its root.
    let id = peers::host(&id_of(&root));
    let outcomes = peers::complete([0, 1].map(|rank| ask(id, rank, 2, Laziness::AsConfigured)).into());
    assert!(outcomes.iter().all(|outcome| matches!(outcome, InitOutcome::PeerGroup(_))), "{outcomes:?}");
    drop(outcomes);
    let tagged = unique_id();
    assert_eq!(IdTag::decode(&tagged).unwrap().root_port, root.local_addr().unwrap().port());
    assert_eq!(peers::spare_id(), None);
}
