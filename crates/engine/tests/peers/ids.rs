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

/// A spare id is given out without NCCL, once, with a new session; if no more sessions can be opened, without one.
#[test]
fn spare_id_given_out() {
    // SAFETY: nextest gives this test a process of its own, and nothing else in it reads the environment now.
    unsafe {
        std::env::set_var("WINDLASS_PEER_GROUPS", "on");
        std::env::set_var("WINDLASS_SESSIONS_MAX", "2");
    }
    assert_eq!(peers::spare_id(), None);
    let roots = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
    let ids = roots.each_ref().map(id_of);
    let rendezvous = windlass_bootstrap::process().unwrap();
    rendezvous.return_id(ids[0]);
    let tagged = ask();
    assert_eq!(IdTag::decode(&tagged).unwrap().root_port, roots[0].local_addr().unwrap().port());
    assert_eq!(peers::spare_id(), None);
    rendezvous.return_id(ids[1]);
    assert_ne!(peers::host(&ids[0]), ids[0]);
    assert_eq!(ask(), ids[1], "two sessions are open");
    assert_eq!(peers::spare_id(), None);
}
