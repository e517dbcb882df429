//! Tests with ranks in processes of their own. Tests named `child_…` are ignored; their parents run them in a new process.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use windlass_bootstrap::id_tag::Id;
use windlass_engine::features::registration::agreed::{RegistrationSlot, WORDS};
use windlass_engine::peers::{self, InitOutcome, Laziness};
use windlass_transport::heap;

use crate::inits::{nothing_is_left, three_devices};
use crate::shared_pages::{ask, id, page, register};
use crate::support::*;

/// One of two ranks in processes of their own, until both have asked.
fn live(id: Id, rank: i32, mut socket: &UnixStream) {
    let outcomes = peers::complete(vec![ask(id, rank, 2, Laziness::None)]);
    let slot = RegistrationSlot::new(page(&outcomes[0]).clone(), rank as u32, 2).unwrap();
    slot.offer([25, 23][rank as usize]);
    meet(socket);
    // Both offers and nothing else.
    let words: &[AtomicU64] = page(&outcomes[0]).as_ref().as_ref();
    let said = words[..WORDS].iter().map(|word| word.load(Ordering::Relaxed)).filter(|word| *word != 0);
    assert_eq!(said.collect::<Vec<_>>(), [25, 23]);
    meet(socket);
    assert_eq!(slot.ask(1), Ok(23));
    slot.passed(1);
    meet(socket);
    // The second rank sees what the first has decided.
    slot.offer([25, 0][rank as usize]);
    if rank == 0 {
        socket.read_exact(&mut [0]).unwrap();
    }
    assert_eq!((slot.ask(2), slot.owes()), (Ok(0), [25, 0][rank as usize]));
    if rank == 1 {
        socket.write_all(&[1]).unwrap();
    }
    meet(socket);
    drop((slot, outcomes));
}

/// Ranks of two processes agree over the shared page, which is passed with the memory of the regions.
#[test]
fn two_processes() {
    register();
    let Some(_devices) = three_devices() else { return };
    let (here, there) = UnixStream::pair().unwrap();
    let mut process = child("child_rank", &there);
    drop(there);
    let (id, _root) = id();
    (&here).write_all(&id).unwrap();
    live(id, 0, &here);
    assert!(process.wait().unwrap().success());
    nothing_is_left();
}

/// An init fails while a peer may still touch this rank's memory. The memory is freed once the peer has closed it, although this
/// process makes no call meanwhile and has no communicator.
#[test]
fn let_go_of_late() {
    let Some(_devices) = three_devices() else { return };
    let (here, there) = UnixStream::pair().unwrap();
    let mut process = child("child_that_stops", &there);
    drop(there);
    let (id, _root) = id();
    (&here).write_all(&id).unwrap();
    let (waits, leaves) = (ask(id, 0, 3, Laziness::None), ask(id, 2, 3, Laziness::None));
    let joined = std::thread::spawn(|| peers::complete(vec![waits]));
    let regions = || heap::test_support::counters().0.iter().map(|heap| heap.regions).sum::<u64>();
    eventually("it prepares", || regions() == 1);
    std::thread::sleep(Duration::from_millis(300));
    let signal = |signal| {
        // SAFETY: the process is ours and not waited for yet.
        assert_eq!(unsafe { libc::kill(process.id() as i32, signal) }, 0);
    };
    signal(libc::SIGSTOP);
    leaves.canceller().abort();
    assert!(matches!(joined.join().unwrap()[..], [InitOutcome::Failed(_)]));
    drop(leaves);
    assert_eq!(regions(), 1, "the other may touch it");
    signal(libc::SIGCONT);
    eventually("it came back", || regions() == 0);
    assert!(process.wait().unwrap().success());
}

#[test]
#[ignore = "a child process of the test above"]
fn child_that_stops() {
    let _devices = three_devices().unwrap();
    let mut id: Id = [0; 128];
    (&inherited()).read_exact(&mut id).unwrap();
    assert!(matches!(peers::complete(vec![ask(id, 1, 3, Laziness::None)])[..], [InitOutcome::Failed(_)]));
}

#[test]
#[ignore = "a child process of the first test"]
fn child_rank() {
    register();
    let _devices = three_devices().unwrap();
    let socket = inherited();
    let mut id: Id = [0; 128];
    (&socket).read_exact(&mut id).unwrap();
    live(id, 1, &socket);
}
