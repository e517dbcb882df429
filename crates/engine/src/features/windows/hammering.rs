//! Stress test of the rounds: threads register through the same words for a while.

#![cfg(test)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::features::windows::said::*;
use crate::features::windows::slot::*;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (self.0 >> 33) % bound
    }
}

/// Four threads register again and again. In some calls NCCL refuses one rank at once, while the others make the call, do not, or
/// are refused, too. All ranks end every round with the same result.
#[test]
fn threads() {
    const RANKS: u32 = 4;
    let words: Arc<[AtomicU64]> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
    let calls: u64 = 20_000;
    let (is_over, heard_off) = (AtomicBool::new(false), AtomicU32::new(0));
    let refused: Vec<AtomicBool> = (0..calls).map(|_| AtomicBool::new(false)).collect();
    let ends = Instant::now() + Duration::from_secs(200);
    let heard: Vec<Vec<(u64, Seen)>> = std::thread::scope(|scope| {
        let run = |rank: u32| {
            let (words, is_over, refused) = (words.clone(), &is_over, &refused);
            let heard_off = &heard_off;
            scope.spawn(move || {
                let slot = WindowSlot::new(words, 0, rank, RANKS).unwrap();
                // `alike` is equal on all ranks: the kind of each call, and whose it is. `own` decides delays.
                let (mut alike, mut own) = (Random(5), Random(77 + u64::from(rank)));
                let mut heard = Vec::new();
                for call in 0..calls {
                    let (kind, whose) = (alike.below(16), alike.below(RANKS.into()) as u32);
                    let said = Said { claim: call, bytes: 1 + u64::from(rank), ..Said::default() };
                    if own.below(50) == 0 {
                        std::thread::yield_now();
                    }
                    match kind {
                        // Refused on one rank. The others do not make the call.
                        0 if rank == whose => slot.is_unfit(&said, 4),
                        0 => {}
                        // Refused on all ranks.
                        1 => slot.is_unfit(&said, 4),
                        // Refused on one rank. The others wait until they give up.
                        2 if rank == whose => {
                            slot.is_unfit(&said, 5);
                            while !refused[call as usize].load(Ordering::Relaxed)
                                && !is_over.load(Ordering::Relaxed)
                                && Instant::now() < ends
                            {
                                std::thread::yield_now();
                            }
                        }
                        _ => {
                            let round = slot.begin(&said);
                            let seen = loop {
                                match slot.look(round) {
                                    Seen::Missing(_) | Seen::Unfit(_) if is_over.load(Ordering::Relaxed) => {
                                        return heard;
                                    }
                                    Seen::Missing(_) | Seen::Unfit(_) if Instant::now() > ends => {
                                        is_over.store(true, Ordering::Relaxed);
                                    }
                                    // Not an earlier call of that rank.
                                    Seen::Unfit(unfit)
                                        if (kind, unfit) == (2, 1 << whose)
                                            && slot.said(whose as usize, round).claim == 5 =>
                                    {
                                        slot.settle(round);
                                    }
                                    Seen::Missing(_) | Seen::Unfit(_) => std::thread::yield_now(),
                                    seen => break seen,
                                }
                            };
                            match &seen {
                                Seen::All(all) => {
                                    assert!(all.iter().all(|one| one.claim == call), "{call}: {all:?}");
                                    assert!((1..).zip(all).all(|(bytes, one)| one.bytes == bytes));
                                    assert_ne!(kind, 2);
                                }
                                Seen::Refused(unfit) => {
                                    assert_eq!((kind, &unfit[..]), (2, &[(whose as usize, 5)][..]));
                                    refused[call as usize].store(true, Ordering::Relaxed);
                                }
                                other => panic!("{other:?}"),
                            }
                            heard.push((call, seen));
                        }
                    }
                }
                // One rank goes off, with or without a refused call before. The others hear of it from that rank or from another.
                if rank == 2 || own.below(3) == 0 {
                    slot.is_unfit(&Said::default(), 4);
                }
                if rank != 2 {
                    let round = slot.begin(&Said::default());
                    while !matches!(slot.look(round), Seen::Off(_)) && Instant::now() < ends {
                        std::thread::yield_now();
                    }
                    heard_off
                        .fetch_add(u32::from(matches!(slot.look(round), Seen::Off(_))), Ordering::Relaxed);
                }
                slot.go_off();
                heard
            })
        };
        let threads: Vec<_> = (0..RANKS).map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(!is_over.load(Ordering::Relaxed), "a rank waited for ever");
    assert_eq!(heard_off.load(Ordering::Relaxed), RANKS - 1);
    // The others have heard of the calls that were refused on one rank alone.
    let all = |heard: &[(u64, Seen)]| -> Vec<(u64, Seen)> {
        heard.iter().filter(|(_, seen)| matches!(seen, Seen::All(_))).cloned().collect()
    };
    assert!(heard.iter().all(|one| all(one) == all(&heard[0])));
    assert!(heard.iter().any(|one| one.len() > all(one).len()));
}
