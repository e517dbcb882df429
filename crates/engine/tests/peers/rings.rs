//! Tests of larger rings, which a sender's process asks the receiver's for.

use windlass_bootstrap::negotiated::Token;
use windlass_bootstrap::request_socket::{Answered, RequestSocket};
use windlass_engine::peers::{self, InitOutcome, Laziness};
use windlass_transport::heap;

use crate::inits::{nothing_is_left, three_devices};
use crate::support::*;

fn answer(to: Token, words: &[u8]) -> Answered {
    let mut socket = RequestSocket::open().unwrap();
    socket.ask(to, words.to_vec(), 1);
    let mut answers = Vec::new();
    eventually("an answer comes", || {
        answers.extend(socket.turn(|_| None));
        !answers.is_empty()
    });
    answers.remove(0).1
}

/// A sender that asks again, because an answer was lost, gets the same ring.
#[test]
fn the_same_ring_again() {
    let Some(_devices) = three_devices() else { return };
    let pair = peers::all_here(&[0, 1], Laziness::None);
    let InitOutcome::PeerGroup(receiver) = &pair[1] else { panic!("{pair:?}") };
    let negotiated = receiver.negotiated();
    let to = Token(*negotiated.members[1].attachment.first_chunk().unwrap());
    let lent = || heap::test_support::counters().0.iter().map(|heap| heap.regions).sum::<u64>();
    let before = lent();
    let ask = |wire: u8| {
        let ranks = [0_u32, 1].map(u32::to_le_bytes).concat();
        let words = [b"windlass", &negotiated.comm.0[..], &ranks, &[3 + wire], &[0; 8]].concat();
        answer(to, &words).map(|answer| answer.words)
    };
    let (of_ll128, of_chunks) = (ask(0), ask(1));
    assert!(of_ll128.is_ok() && of_chunks.is_ok() && of_ll128 != of_chunks);
    assert_eq!(lent(), before + 2);
    assert_eq!((ask(1), ask(0), lent()), (of_chunks, of_ll128, before + 2));
    assert!(ask(3).is_err(), "nobody asks for that");
    drop(pair);
    nothing_is_left();
}
