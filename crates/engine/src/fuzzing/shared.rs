//! Memory that other processes write: the shared page of a peer group, and the counters of a process that `windlass stats` reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::features::registration::agreed;
use crate::features::windows;
use windlass_base::stats::segment::{self, Clock};
use windlass_base::stats::snapshot::Snapshot;
use windlass_base::stats::{calls, report};

use super::Choices;

type Words = Arc<[AtomicU64]>;

/// Steps of one input at most.
const STEPS_MAX: usize = 64;

fn words(count: usize) -> Words {
    vec![0; count].into_iter().map(AtomicU64::new).collect()
}

/// A peer writes a word anywhere: a wild one, or one near what is there.
fn scribble(words: &[AtomicU64], choices: &mut Choices<'_>) {
    let place = &words[usize::from(choices.short()) % words.len()];
    match choices.byte() {
        0 => place.store(choices.word(), Ordering::Relaxed),
        byte => drop(place.fetch_add((byte as i8 as i64) as u64, Ordering::Relaxed)),
    }
}

/// Rounds of windows beside a peer that writes anything.
pub(super) fn windows(input: &[u8]) {
    let mut choices = Choices(input);
    let shared = words(windows::WORDS);
    let ranks = u32::from(choices.byte() % 16) + 1;
    let Some(slot) =
        windows::slot::WindowSlot::new(shared.clone(), 0, u32::from(choices.byte()) % ranks, ranks)
    else {
        return assert!(ranks < 2);
    };
    let mut round = None;
    for _ in 0..STEPS_MAX {
        if choices.is_over() {
            return;
        }
        let said = |choices: &mut Choices<'_>| windows::said::Said {
            claim: choices.byte().into(),
            bytes: choices.byte().into(),
            allocation: choices.byte().into(),
            ..windows::said::Said::default()
        };
        match choices.byte() % 8 {
            0 => round = Some(slot.begin(&said(&mut choices))),
            1 => slot.is_unfit(&said(&mut choices), choices.byte().into()),
            2 => slot.go_off(),
            3 => round.into_iter().for_each(|round| slot.settle(round)),
            4 | 5 => {
                let Some(round) = round else { continue };
                match slot.look(round) {
                    windows::slot::Seen::All(all) => {
                        assert_eq!(all.len(), ranks as usize);
                        windows::decide::decide(&all, windows::Rules::of(choices.short().into()));
                    }
                    windows::slot::Seen::Refused(who) => {
                        assert!(who.iter().all(|(rank, _)| *rank < ranks as usize))
                    }
                    windows::slot::Seen::Missing(who) | windows::slot::Seen::Unfit(who) => {
                        assert!(who >> ranks == 0)
                    }
                    windows::slot::Seen::Off(rank) => assert!(rank < ranks as usize),
                }
            }
            _ => scribble(&shared, &mut choices),
        }
    }
}

/// A limit that ranks agree on, beside a peer that writes anything. An answer is a limit.
pub(super) fn agreed(input: &[u8]) {
    let mut choices = Choices(input);
    let ranks = u32::from(choices.byte() % 15) + 2;
    let shared = words(agreed::WORDS);
    let slot = agreed::RegistrationSlot::new(shared.clone(), u32::from(choices.byte()) % ranks, ranks);
    let Some(slot) = slot else { return };
    for _ in 0..STEPS_MAX {
        if choices.is_over() {
            return;
        }
        let number = |choices: &mut Choices<'_>| match choices.byte() {
            255 => choices.word(),
            byte => byte.into(),
        };
        match choices.byte() % 7 {
            0 => match slot.ask(number(&mut choices)) {
                Ok(limit) => assert!(limit <= agreed::LIMIT_MAX),
                Err(refusal) => assert!(!refusal.to_string().is_empty()),
            },
            1 => slot.passed(number(&mut choices)),
            2 => slot.offer(choices.byte()),
            3 => drop(slot.owes()),
            _ => scribble(&shared, &mut choices),
        }
    }
}

/// Counters of a process that wrote anything: words by place.
pub(super) fn segments(input: &[u8]) {
    let mut choices = Choices(input);
    let mut written = Vec::new();
    while !choices.is_over() && written.len() < STEPS_MAX {
        written.push((choices.short().into(), choices.word()));
    }
    segment::test_support::with_words(&written, |segment| {
        let snapshot = Snapshot::of(segment);
        snapshot.paths();
        assert!(!report::text(&snapshot).is_empty());
        assert!(report::json(&snapshot).starts_with('{'));
        calls::of(segment, &Clock::default());
    });
}
