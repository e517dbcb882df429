//! Asks processes for whom their ranks wait on their GPUs.

use rustix::event::{Timespec, poll};
use std::time::{Duration, Instant};
use windlass_bootstrap::awaited::{Awaited, Question};
use windlass_bootstrap::negotiated::Token;
use windlass_bootstrap::request_socket::RequestSocket;

use super::compare::Member;
use super::on_gpus::Waiting;

/// A process that is stopped, or in another network namespace, does not answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// Which of these ranks wait now. Nothing is said of those that do not answer.
pub fn waiting(ranks: &[Member<'_>]) -> Vec<Waiting> {
    let Ok(mut socket) = RequestSocket::open() else { return Vec::new() };
    for (key, member) in (0..).zip(ranks) {
        let question = Question { token: member.of.token, rank: member.of.rank as u32 };
        socket.ask(Token(member.process.request_socket), question.encode(), key);
    }
    let (mut found, mut open, began) = (Vec::new(), ranks.len(), Instant::now());
    while open > 0 && began.elapsed() < ANSWERS_WITHIN {
        for (key, answer) in socket.turn(|_| None) {
            open -= 1;
            let member = &ranks[key as usize];
            let of = |awaited| Waiting::of(member, awaited);
            found.extend(answer.iter().flat_map(|answer| Awaited::decode(&answer.words)).map(of));
        }
        let _ = poll(&mut socket.polled(), Some(&TICK));
    }
    found
}
