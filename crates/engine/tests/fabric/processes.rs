//! Ranks in processes of their own. Tests named `child_…` are ignored; their parents run them in a process of its own.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use windlass_engine::agreed::Seat;
use windlass_engine::fabric::{self, Patience};
use windlass_engine::rendezvous::card::Id;

use crate::births::{nothing_is_left, three_devices};
use crate::pages::{ask, id, page, register};
use crate::support::*;

/// One of two ranks in processes of their own, until both have asked.
fn live(id: Id, rank: i32, mut socket: &UnixStream) {
    let fates = fabric::join(vec![ask(id, rank, 2, Patience::None)]);
    let seat = Seat::new(page(&fates[0]).clone(), rank as u32, 2).unwrap();
    seat.offer([25, 23][rank as usize]);
    meet(socket);
    assert_eq!(seat.offers(), [25, 23]);
    assert_eq!(seat.ask(1), Ok(23));
    seat.passed(1);
    meet(socket);
    // The rank that comes second sees what the first has decided.
    seat.offer([25, 0][rank as usize]);
    if rank == 0 {
        socket.read_exact(&mut [0]).unwrap();
    }
    assert_eq!((seat.ask(2), seat.owes()), (Ok(0), [25, 0][rank as usize]));
    if rank == 1 {
        socket.write_all(&[1]).unwrap();
    }
    meet(socket);
    drop((seat, fates));
}

/// Ranks of two processes agree over the page, which comes with the slices' memory.
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

#[test]
#[ignore = "a child process of the test above"]
fn child_rank() {
    register();
    let _devices = three_devices().unwrap();
    let socket = inherited();
    let mut id: Id = [0; 128];
    (&socket).read_exact(&mut id).unwrap();
    live(id, 1, &socket);
}
