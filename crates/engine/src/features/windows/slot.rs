//! A rank's slot in the words by which ranks register windows together, in rounds.
//!
//! A rank that registers writes the line of its next round, and waits until all ranks have written theirs. It writes the same line
//! again two rounds later. All have read it by then, since a rank that writes in the round between has read this one.
//!
//! A rank whose call NCCL refuses at once does not wait, as with NCCL, and the others may never come: then there was
//! no round. So it says that it is *unfit*. Its next call takes that back, and has the same round. If all
//! others have come, a rank that waits may [*settle*](WindowSlot::settle) the round. It is then refused on all ranks, and cannot be taken back.
//! Both change one word. The caller decides how long to wait before that: NCCL would wait for the unfit rank's next call.
//!
//! A rank that must not wait goes *off*: it says so in its next round, and writes nothing after. A rank that sees it, in that round or a
//! later one, goes off, too, and says so.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use windlass_bootstrap::negotiated::RANKS_MAX;

use crate::features::windows::said::{Head, Kind, SLOT_WORDS, Said, TAKEN, WORDS};

/// A rank's slot in the shared words. One thread at a time, as NCCL demands of a communicator. The fields are atomic only because
/// it is not always the same thread.
#[derive(Debug)]
pub(crate) struct WindowSlot<W> {
    words: W,
    from: usize,
    rank: usize,
    ranks: usize,
    /// The round of this rank's next call.
    next: AtomicU64,
    /// Whether this rank has said in that round that it is unfit.
    is_unfit: AtomicBool,
}

/// A round that this rank waits in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Round(u64);

impl Round {
    /// The number of the window that the round makes.
    pub(crate) fn number(self) -> u64 {
        self.0
    }
}

/// What a rank sees of a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// These ranks have not written yet, one bit each.
    Missing(u64),
    /// All ranks have written, but these are unfit, one bit each. They may still register, or [never](WindowSlot::settle).
    Unfit(u64),
    /// The rank with this number has gone off.
    Off(usize),
    /// The round is refused on all ranks. These were unfit, each with NCCL's code.
    Refused(Vec<(usize, u32)>),
    /// What all ranks register, by rank.
    All(Vec<Said>),
}

impl<W: Deref> WindowSlot<W>
where
    W::Target: AsRef<[AtomicU64]>,
{
    /// The slot of one of 2 to [`RANKS_MAX`] ranks, over [`WORDS`] words from `from` on. None if they do not fit. A rank has one slot.
    pub(crate) fn new(words: W, from: usize, rank: u32, ranks: u32) -> Option<WindowSlot<W>> {
        let (rank, ranks) = (rank as usize, ranks as usize);
        let has_room = words.as_ref().len() >= from + WORDS;
        let fits = (2..=RANKS_MAX).contains(&ranks) && rank < ranks && has_room;
        let (next, is_unfit) = (AtomicU64::new(1), AtomicBool::new(false));
        fits.then(|| WindowSlot { words, from, rank, ranks, next, is_unfit })
    }

    /// Writes this rank's registration, and returns the round to wait in.
    pub(crate) fn begin(&self, said: &Said) -> Round {
        let round = self.open();
        said.write(self.line(self.rank, round));
        self.say(Head::new(round, Kind::Registers));
        Round(round)
    }

    /// Says that NCCL has refused this rank's call at once, with this code.
    pub(crate) fn is_unfit(&self, said: &Said, code: u32) {
        let round = self.open();
        Said { claim: code.into(), ..*said }.write(self.line(self.rank, round));
        self.say(Head::new(round, Kind::Unfit));
        self.is_unfit.store(true, Ordering::Relaxed);
    }

    /// Says that this rank takes part in no further round.
    pub(crate) fn go_off(&self) {
        let round = self.open();
        self.say(Head::new(round, Kind::Off));
    }

    /// Looks at a round of this rank. To be repeated until the result is neither `Missing` nor `Unfit`.
    pub(crate) fn look(&self, Round(round): Round) -> Seen {
        let (mut missing, mut unfit, mut is_settled) = (0, 0, false);
        if let Some(rank) = (0..self.ranks).find(|rank| self.is_off(*rank, round)) {
            return Seen::Off(rank);
        }
        for rank in 0..self.ranks {
            match self.head(rank, round) {
                // It has gone off since the check above.
                Some(Head { kind: Kind::Off, .. }) => return Seen::Off(rank),
                Some(Head { kind: Kind::Registers, .. }) => {}
                Some(Head { kind: Kind::Unfit, is_taken, .. }) => {
                    unfit |= 1 << rank;
                    is_settled |= is_taken;
                }
                None => missing |= 1 << rank,
            }
        }
        if missing != 0 {
            return Seen::Missing(missing);
        }
        if unfit != 0 && !is_settled {
            return Seen::Unfit(unfit);
        }
        self.next.store(round + 1, Ordering::Relaxed);
        if unfit == 0 {
            return Seen::All((0..self.ranks).map(|rank| Said::read(self.line(rank, round))).collect());
        }
        // A rank may have taken its message back since it was read, and the rank that settles may not have reached another's line. Settling here
        // makes each message taken or taken back, for all who look.
        self.settle(Round(round));
        let taken = (0..self.ranks).filter(|rank| self.head(*rank, round).is_some_and(|head| head.is_taken));
        let code = |rank| (rank, Said::read(self.line(rank, round)).claim as u32);
        Seen::Refused(taken.map(code).collect())
    }

    /// Refuses a round with [unfit](Seen::Unfit) ranks for all. A rank that has just taken its message back joins the refused round.
    pub(crate) fn settle(&self, Round(round): Round) {
        let said = Head::new(round, Kind::Unfit).pack();
        for rank in 0..self.ranks {
            // Fails if that rank registers, or if another rank has settled its line.
            let word = &self.line(rank, round)[0];
            let _ = word.compare_exchange(said, said | TAKEN, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// What a rank wrote in a round that was looked at, for the log.
    pub(crate) fn said(&self, rank: usize, Round(round): Round) -> Said {
        Said::read(self.line(rank, round))
    }

    /// This rank's next round, in which it has written nothing.
    fn open(&self) -> u64 {
        let round = self.next.load(Ordering::Relaxed);
        if !self.is_unfit.swap(false, Ordering::Relaxed) {
            return round;
        }
        let said = Head::new(round, Kind::Unfit).pack();
        let word = &self.line(self.rank, round)[0];
        // Acquire if the message was taken: all others had come to that round, and so had read the one before.
        let taken_back = word.compare_exchange(said, 0, Ordering::AcqRel, Ordering::Acquire);
        let open = if taken_back.is_ok() { round } else { round + 1 };
        self.next.store(open, Ordering::Relaxed);
        open
    }

    fn say(&self, head: Head) {
        // Release: the line's other words were written before, and earlier rounds were read before.
        self.line(self.rank, head.round)[0].store(head.pack(), Ordering::Release);
    }

    /// The head that a rank has written in this round.
    fn head(&self, rank: usize, round: u64) -> Option<Head> {
        let head = Head::of(self.line(rank, round)[0].load(Ordering::Acquire))?;
        (head.round == round).then_some(head)
    }

    /// Whether a rank has gone off in this round or before. It writes nothing after that.
    fn is_off(&self, rank: usize, round: u64) -> bool {
        let said = |round| Head::of(self.line(rank, round)[0].load(Ordering::Acquire));
        let is_off = |head: Head| head.kind == Kind::Off && head.round <= round;
        [said(round), said(round + 1)].into_iter().flatten().any(is_off)
    }

    fn line(&self, rank: usize, round: u64) -> &[AtomicU64] {
        let first = self.from + (2 * rank + (round % 2) as usize) * SLOT_WORDS;
        &self.words.as_ref()[first..first + SLOT_WORDS]
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    type Slots = Vec<WindowSlot<Arc<[AtomicU64]>>>;

    fn slots(ranks: u32) -> Slots {
        let words: Arc<[AtomicU64]> = (0..8 + WORDS).map(|_| AtomicU64::new(0)).collect();
        (0..ranks).map(|rank| WindowSlot::new(words.clone(), 8, rank, ranks).unwrap()).collect()
    }

    fn said(claim: u64) -> Said {
        Said { claim, bytes: 64, ..Said::default() }
    }

    /// All ranks hear what all say, round after round.
    #[test]
    fn all_hear_all() {
        let slots = slots(3);
        for number in 1..=9 {
            let mut rounds = Vec::new();
            for slot in &slots {
                rounds.push(slot.begin(&said(10 * number + slot.rank as u64)));
                let missing = match slot.rank {
                    0 => Seen::Missing(0b110),
                    1 => Seen::Missing(0b100),
                    _ => continue,
                };
                assert_eq!(slot.look(rounds[slot.rank]), missing);
            }
            let all = Seen::All((0..3).map(|rank| said(10 * number + rank)).collect());
            for (slot, round) in slots.iter().zip(rounds) {
                assert_eq!((slot.look(round), round.number()), (all.clone(), number));
            }
        }
    }

    /// A call that is refused at once takes no round if no other rank comes, and refuses all ranks' calls if all come.
    #[test]
    fn unfit() {
        let slots = slots(3);
        slots.iter().for_each(|slot| slot.is_unfit(&said(0), 4));
        slots[0].is_unfit(&said(0), 4);
        let first: Vec<Round> = slots.iter().map(|slot| slot.begin(&said(1))).collect();
        assert!(first.iter().all(|round| round.number() == 1));
        assert!(slots.iter().all(|slot| matches!(slot.look(Round(1)), Seen::All(_))));

        slots[2].is_unfit(&said(0), 5);
        let rounds = [slots[0].begin(&said(1)), slots[1].begin(&said(1))];
        assert_eq!(slots[0].look(rounds[0]), Seen::Unfit(0b100));
        slots[0].settle(rounds[0]);
        let refused = Seen::Refused(vec![(2, 5)]);
        assert_eq!((slots[0].look(rounds[0]), slots[1].look(rounds[1])), (refused.clone(), refused));
        let third: Vec<Round> = slots.iter().map(|slot| slot.begin(&said(1))).collect();
        assert!(third.iter().all(|round| round.number() == 3), "{third:?}");
    }

    /// Of two unfit ranks one takes its message back before the third has come. It joins the round, which is refused.
    #[test]
    fn taken_back() {
        let slots = slots(3);
        slots[0].is_unfit(&said(0), 4);
        let waits = slots[1].begin(&said(1));
        assert_eq!(slots[1].look(waits), Seen::Missing(0b100));
        let now = slots[0].begin(&said(1));
        assert_eq!(now.number(), 1);
        slots[2].is_unfit(&said(0), 5);
        assert_eq!(slots[1].look(waits), Seen::Unfit(0b100));
        slots[1].settle(waits);
        let refused = Seen::Refused(vec![(2, 5)]);
        assert_eq!((slots[1].look(waits), slots[0].look(now)), (refused.clone(), refused));
    }

    /// Both unfit ranks have gone on when the third refuses the round.
    #[test]
    fn two_unfit() {
        let slots = slots(3);
        (1..3).for_each(|rank| slots[rank].is_unfit(&said(0), rank as u32));
        let waits = slots[0].begin(&said(1));
        assert_eq!(slots[0].look(waits), Seen::Unfit(0b110));
        slots[0].settle(waits);
        assert_eq!(slots[0].look(waits), Seen::Refused(vec![(1, 1), (2, 2)]));
        let next: Vec<Round> = slots.iter().map(|slot| slot.begin(&said(1))).collect();
        assert!(next.iter().all(|round| round.number() == 2), "{next:?}");
    }

    /// A rank that sees a round refused, while another is still settling it, sees what all will see: the unfit ranks that it counts cannot
    /// take their messages back.
    #[test]
    fn settled_by_halves() {
        let slots = slots(3);
        (1..3).for_each(|rank| slots[rank].is_unfit(&said(0), rank as u32));
        let waits = slots[0].begin(&said(1));
        // As a settler's first step does.
        slots[0].line(1, 1)[0].fetch_or(TAKEN, Ordering::AcqRel);
        assert_eq!(slots[0].look(waits), Seen::Refused(vec![(1, 1), (2, 2)]));
        assert_eq!(slots[2].begin(&said(1)).number(), 2);
    }

    /// A rank that goes off takes all others with it, even those that come later.
    #[test]
    fn off() {
        let slots = slots(3);
        let waits = slots[1].begin(&said(1));
        slots[0].go_off();
        assert_eq!(slots[1].look(waits), Seen::Off(0));
        assert_eq!(slots[2].look(slots[2].begin(&said(1))), Seen::Off(0));
    }

    /// A rank that goes off in a round is seen by ranks that have left that round.
    #[test]
    fn off_late() {
        let slots = slots(3);
        let rounds: Vec<Round> = slots.iter().map(|slot| slot.begin(&said(1))).collect();
        assert!(
            rounds[..2].iter().zip(&slots).all(|(round, slot)| matches!(slot.look(*round), Seen::All(_)))
        );
        slots[2].go_off();
        let next = [slots[0].begin(&said(2)), slots[1].begin(&said(2))];
        assert_eq!([slots[0].look(next[0]), slots[1].look(next[1])], [Seen::Off(2), Seen::Off(2)]);
    }

    /// There are slots for the allowed ranks and words only.
    #[test]
    fn slots_there_are() {
        let words: Arc<[AtomicU64]> = (0..8 + WORDS).map(|_| AtomicU64::new(0)).collect();
        let is = |from, rank, ranks| WindowSlot::new(words.clone(), from, rank, ranks).is_some();
        assert!(is(8, 15, 16) && is(0, 0, 2));
        assert!(!is(9, 0, 2) && !is(8, 2, 2) && !is(8, 0, 1) && !is(8, 0, 17));
    }
}
