//! Tests of ids that NCCL made earlier and that are given out instead of new ones.

use std::net::TcpListener;

use nccl_sys::{ncclSuccess, ncclUniqueId};
use windlass_bootstrap::id_tag::{Id, IdTag};
use windlass_engine::api::communicators;
use windlass_engine::peers;

use crate::inits::id_of;

fn ask() -> Id {
    let mut place = ncclUniqueId { internal: [0; 128] };
    // There is no NCCL in this test, so a call of it would end the test.
    assert_eq!(communicators::unique_id(&mut place), ncclSuccess);
    place.internal.map(|byte| byte as u8)
}

/// A spare id is given out without NCCL, once, with a new session.
#[test]
fn spare_id_given_out() {
    // SAFETY: nextest gives this test a process of its own, and nothing else in it reads the environment now.
    unsafe { std::env::set_var("WINDLASS_PEER_GROUPS", "on") };
    assert_eq!(peers::spare_id(), None);
    let root = TcpListener::bind("127.0.0.1:0").unwrap();
    windlass_bootstrap::process().unwrap().return_id(id_of(&root));
    let tagged = ask();
    assert_eq!(IdTag::decode(&tagged).unwrap().root_port, root.local_addr().unwrap().port());
    assert_eq!(peers::spare_id(), None);
}
