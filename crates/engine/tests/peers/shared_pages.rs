//! Tests of the shared page of a communicator's ranks.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Weak};
use std::thread;

use windlass_base::config::nccl;
use windlass_base::descriptor;
use windlass_base::shared_page::SharedPage;
use windlass_base::stats::count::Identity;
use windlass_bootstrap::id_tag::Id;
use windlass_bootstrap::negotiated::capability;
use windlass_bootstrap::outcome::FallbackReason;
use windlass_engine::features::registration::agreed::{RegistrationSlot, WORDS};
use windlass_engine::forward::init::Ctas;
use windlass_engine::peers::{
    self, Asked, ChildCall, ChildPlan, ChildRequest, InitOutcome, InitRequest, Laziness, PeerGroup, Waiting,
};

use crate::children::split;
use crate::inits::{id_of, nothing_is_left, three_devices};

/// Lets ranks of this process register, as with this version of NCCL.
pub fn register() {
    // SAFETY: nextest gives every test a process of its own, and nothing else in it reads the environment now.
    unsafe { std::env::set_var("WINDLASS_REGISTER", "on") };
    nccl::note_version(22809);
}

pub fn page(outcome: &InitOutcome) -> &Arc<SharedPage> {
    let InitOutcome::PeerGroup(peer_group) = outcome else { panic!("{outcome:?}") };
    assert!(peer_group.negotiated().registers());
    peer_group.shared_page().unwrap()
}

/// All ranks' slots are at the same words, which begin as zeros.
fn agree(outcomes: &[InitOutcome]) {
    let slot =
        |(rank, outcome)| RegistrationSlot::new(page(outcome).clone(), rank, outcomes.len() as u32).unwrap();
    let slots: Vec<_> = (0..).zip(outcomes).map(slot).collect();
    let words: &[AtomicU64] = page(&outcomes[0]).as_ref().as_ref();
    assert!(words[..WORDS].iter().all(|word| word.load(Ordering::Relaxed) == 0));
    for (slot, offer) in slots.iter().zip(23..) {
        slot.offer(offer);
    }
    assert!(slots.iter().all(|slot| slot.ask(1) == Ok(23)));
}

pub fn ask(id: Id, device: i32, ranks: i32, laziness: Laziness) -> Asked {
    let rank = device;
    let request = InitRequest {
        id,
        more_ids: Vec::new(),
        ranks,
        rank,
        waiting: Waiting::Blocking,
        ctas: Ctas::UNSAID,
        device: Ok(device),
        laziness,
        cached: Vec::new(),
    };
    peers::ask(&request).unwrap()
}

pub fn id() -> (Id, TcpListener) {
    let root = TcpListener::bind("127.0.0.1:0").unwrap();
    (peers::host(&id_of(&root)), root)
}

fn met(ranks: i32, laziness: Laziness) -> Vec<InitOutcome> {
    let (id, _root) = id();
    peers::complete((0..ranks).map(|rank| ask(id, rank, ranks, laziness)).collect())
}

/// Makes a child as where NCCL makes it; a barrier stands for NCCL's own init.
fn make_child((parent, device): (&PeerGroup, i32), made: &Barrier) -> InitOutcome {
    let request = ChildRequest { vote: Laziness::None.vote(), ..split(Some(0)) };
    let mut call = ChildCall::of(&parent.lineage, request).unwrap();
    assert_eq!(call.begin(), Ok(ChildPlan::Nccl));
    made.wait();
    let new = Identity { device, rank: device, ranks: 3 };
    peers::complete_one(call.ask(new, Laziness::None).unwrap())
}

/// Ranks that met in a session, that were made by one call and those of a split have a shared page each. It keeps no descriptor
/// open and ends with its communicator. A lazy communicator has one for its windows alone.
#[test]
fn ranks_of_one_process() {
    register();
    let Some(_devices) = three_devices() else { return };
    let met = met(3, Laziness::None);
    agree(&met);
    let before = descriptor::open();
    let made = peers::all_here(&[0, 1, 2], Laziness::None);
    // The session before may still be closing some.
    assert!(descriptor::open() <= before);
    agree(&made);
    let all_made = Barrier::new(met.len());
    let split: Vec<InitOutcome> = thread::scope(|scope| {
        let made = &all_made;
        let parents = met.iter().map(|outcome| match outcome {
            InitOutcome::PeerGroup(peer_group) => peer_group.as_ref(),
            _ => unreachable!("they agreed"),
        });
        let threads: Vec<_> =
            parents.zip(0..).map(|call| scope.spawn(move || make_child(call, made))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    agree(&split);
    let pages: Vec<Weak<SharedPage>> = [&met, &made, &split]
        .iter()
        .flat_map(|outcomes| outcomes.iter().map(page).map(Arc::downgrade))
        .collect();
    assert!(pages.iter().all(|page| page.upgrade().is_some()));

    let lazy = peers::complete({
        let (id, _root) = id();
        (0..2).map(|rank| ask(id, rank, 2, Laziness::AsConfigured)).collect()
    });
    for outcome in &lazy {
        let InitOutcome::PeerGroup(peer_group) = outcome else { panic!("{outcome:?}") };
        assert!(
            peer_group.negotiated().is_lazy()
                && peer_group.negotiated().capabilities & capability::REGISTERS != 0
        );
        assert!(!peer_group.negotiated().registers() && peer_group.negotiated().keeps_windows());
    }
    drop((split, met, made, lazy));
    nothing_is_left();
    assert!(pages.iter().all(|page| page.upgrade().is_none()));
}

/// With an NCCL that orders groups in another way there is no peer group.
#[test]
fn nccl_before_2_26() {
    register();
    nccl::note_version(22512);
    let Some(_devices) = three_devices() else { return };
    for outcome in peers::all_here(&[0, 1], Laziness::None) {
        assert!(matches!(outcome, InitOutcome::OnNccl(FallbackReason::OldNccl)), "{outcome:?}");
    }
    nothing_is_left();
}
