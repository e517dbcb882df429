//! [`WindowLedger`]: a rank's windows of one communicator, whether the program has them, and which numbers the ranks must forget.

use std::collections::{BTreeMap, VecDeque};

use windlass_base::range::Range;

use crate::features::windows::said::Number;

/// How many dropped windows are remembered that the program has still to end.
const GONE_MAX: usize = 1024;

/// A window that NCCL has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// The window's number. 0 if no rank may claim it.
    pub number: Number,
    /// NCCL's handle, which the program has.
    pub handle: usize,
    /// The registered range.
    pub range: Range,
    /// The flags that the program gave.
    pub flags: u32,
    /// The serial of the pool's block that holds it. None in other memory.
    pub block: Option<u64>,
    /// The life of that block in which the window was last registered.
    pub life: u64,
    /// How many registrations the program has not ended.
    pub users: u64,
    /// How often NCCL must be told of the end.
    pub times: u32,
}

/// The state of a window's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// The program holds it.
    Held {
        /// The block's life.
        life: u64,
    },
    /// The pool keeps it, to be handed out again.
    Kept,
    /// It is leaving the pool, or the pool does not know it.
    Leaving,
}

impl Record {
    /// Whether the program has the window. If not, no call may let NCCL meet it. A window that the program has still to end stays in NCCL when
    /// its memory goes, as without Windlass. Otherwise NCCL could reuse the handle, and a later end would be ambiguous.
    fn is_owned(&self, standing: impl Fn(&Record) -> Standing) -> bool {
        let is_live = || match standing(self) {
            Standing::Held { life } => life == self.life,
            Standing::Kept => false,
            Standing::Leaving => true,
        };
        self.users > 0 && (self.block.is_none() || is_live())
    }
}

/// The result of a deregistration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// NCCL ends the window.
    Real,
    /// It stays in NCCL, and the program does not have it any more.
    Cached,
    /// Other registrations of it have not ended, or it is dropped already.
    Counted,
    /// The program had ended it before.
    Twice,
    /// The handle is of no kept window.
    Unknown,
}

/// The ledger.
#[derive(Debug, Default)]
pub(crate) struct WindowLedger {
    /// In the order in which they were made.
    records: Vec<Record>,
    /// Handles of dropped windows, and how often the program has still to end each.
    gone: VecDeque<(usize, u64)>,
    /// Numbers of windows that this rank has dropped, which the other ranks do not know yet.
    lost: VecDeque<Number>,
}

impl WindowLedger {
    /// How many windows there are.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether there are no windows, and no dropped ones to remember.
    pub(crate) fn is_empty(&self) -> bool {
        self.records.is_empty() && self.gone.is_empty()
    }

    /// The number of the window that fits a registration in a pool block. 0 if there is none.
    pub(crate) fn claim(&self, range: Range, flags: u32, block: u64) -> Number {
        let fits = |one: &&Record| {
            one.range == range && one.flags == flags && one.block == Some(block) && one.times == 1
        };
        let found = self.records.iter().find(fits).filter(|one| self.is_alone(one));
        found.map_or(0, |one| one.number)
    }

    /// Whether no other window begins at the same address. When one of such windows ends, NCCL forgets the one made last (2.28.9,
    /// symWindowDestroy). So the program has all of them or none, and the others are dropped at once, the last one first.
    fn is_alone(&self, record: &Record) -> bool {
        self.records.iter().filter(|one| one.range.base == record.range.base).count() == 1
    }

    /// Gives the window to the program once more, and returns its handle.
    pub(crate) fn hit(&mut self, number: Number, life: u64) -> Option<usize> {
        let record = self.records.iter_mut().find(|one| one.number == number)?;
        record.users += 1;
        record.life = life;
        Some(record.handle)
    }

    /// The window with this handle.
    pub(crate) fn find(&self, handle: usize) -> Option<Record> {
        self.records.iter().find(|one| one.handle == handle).copied()
    }

    /// Whether the program has ended all its registrations of this window.
    pub(crate) fn is_cached(&self, handle: usize) -> bool {
        self.records.iter().any(|one| one.handle == handle && one.users == 0)
    }

    /// Enters a window that NCCL has made.
    pub(crate) fn made(&mut self, record: Record) {
        match self.records.iter_mut().find(|one| one.handle == record.handle) {
            // NCCL counts registrations of this window, so it must be told of as many ends.
            Some(known) => {
                known.users += 1;
                known.times += 1;
                known.number = 0;
            }
            None => self.records.push(record),
        }
    }

    /// Whether the program has a window over this block.
    pub(crate) fn is_over(&self, block: u64, standing: impl Fn(&Record) -> Standing) -> bool {
        self.records.iter().any(|one| one.block == Some(block) && one.is_owned(&standing))
    }

    /// The number of a dropped window that all ranks must forget. 0 if there is none.
    pub(crate) fn lost(&self) -> Number {
        self.lost.front().copied().unwrap_or(0)
    }

    /// Forgets these numbers, as all ranks do. Returns the windows that the program does not have; the others stay until it ends them.
    pub(crate) fn forget_names(
        &mut self,
        names: &[Number],
        standing: impl Fn(&Record) -> Standing,
    ) -> Vec<Record> {
        let is_named = |one: &Record| one.number != 0 && names.contains(&one.number);
        let taken = self.lose(|one| is_named(one) && !one.is_owned(&standing));
        let named = self.records.iter_mut().filter(|one| is_named(one));
        named.for_each(|one| one.number = 0);
        self.lost.retain(|one| !names.contains(one));
        taken
    }

    /// Whether the range overlaps a window that the program does not have.
    pub(crate) fn meets(&self, range: Range, standing: impl Fn(&Record) -> Standing) -> bool {
        self.records.iter().any(|one| one.range.overlaps(range) && !one.is_owned(&standing))
    }

    /// Removes the windows that overlap the range and that the program does not have, as NCCL is about to meet them.
    pub(crate) fn meet(&mut self, range: Range, standing: impl Fn(&Record) -> Standing) -> Vec<Record> {
        self.lose(|one| one.range.overlaps(range) && !one.is_owned(&standing))
    }

    /// Removes the windows that the program does not have over a block that gets a new window.
    pub(crate) fn make_way(&mut self, block: u64, standing: impl Fn(&Record) -> Standing) -> Vec<Record> {
        self.lose(|one| one.block == Some(block) && !one.is_owned(&standing))
    }

    /// Removes the windows that the program has ended over a leaving block.
    pub(crate) fn leave(&mut self, block: u64) -> Vec<Record> {
        self.lose(|one| one.block == Some(block) && one.users == 0)
    }

    /// Removes the windows that the program has ended over all leaving blocks.
    pub(crate) fn leave_all(&mut self, standing: impl Fn(&Record) -> Standing) -> Vec<Record> {
        self.lose(|one| one.block.is_some() && one.users == 0 && standing(one) == Standing::Leaving)
    }

    /// Removes all windows that the program does not have.
    pub(crate) fn end_cached(&mut self, standing: impl Fn(&Record) -> Standing) -> Vec<Record> {
        self.lose(|one| !one.is_owned(&standing))
    }

    /// Removes the oldest windows that the program has ended, until `cached_max` are left.
    pub(crate) fn limit(&mut self, cached_max: usize) -> Vec<Record> {
        let cached = self.records.iter().filter(|one| one.users == 0).count();
        let mut surplus = cached.saturating_sub(cached_max);
        self.lose(|one| {
            let is_one = one.users == 0 && surplus > 0;
            surplus -= usize::from(is_one);
            is_one
        })
    }

    /// Forgets all windows, which stay in NCCL. Returns their blocks.
    pub(crate) fn forget(&mut self) -> Vec<u64> {
        self.lost.clear();
        self.gone.clear();
        std::mem::take(&mut self.records).iter().filter_map(|one| one.block).collect()
    }

    /// Sets all windows' numbers to 0, so that no rank finds them again.
    pub(crate) fn forget_all_names(&mut self) {
        self.records.iter_mut().for_each(|one| one.number = 0);
        self.lost.clear();
    }

    /// The block of each window, and whether the program has still to end the window.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (u64, bool)> {
        self.records.iter().filter_map(|one| Some((one.block?, one.users > 0)))
    }

    /// The blocks of windows that the program has ended, each once with one window's range.
    pub(crate) fn cached(&self) -> impl Iterator<Item = (u64, Range)> {
        let cached = self.records.iter().filter(|one| one.users == 0);
        let each: BTreeMap<u64, Range> = cached.filter_map(|one| Some((one.block?, one.range))).collect();
        each.into_iter()
    }

    /// Ends a registration by the program. A window in other memory than the pool's, or in a leaving block, is not kept.
    pub(crate) fn end(&mut self, handle: usize, standing: impl Fn(&Record) -> Standing) -> Ended {
        // NCCL reuses handles. An end that the program still owes to the earlier window comes first.
        if self.end_gone(handle) {
            return Ended::Counted;
        }
        let Some(index) = self.records.iter().position(|one| one.handle == handle) else {
            return Ended::Unknown;
        };
        let is_alone = self.is_alone(&self.records[index]);
        let record = &mut self.records[index];
        if record.users == 0 {
            return Ended::Twice;
        }
        record.users -= 1;
        let stays =
            |record: &Record| record.block.is_some() && standing(record) != Standing::Leaving && is_alone;
        match (record.users, record.number) {
            (0, number) if number != 0 && stays(record) => Ended::Cached,
            (0, _) => {
                let record = self.records.remove(index);
                self.note_lost(&record);
                Ended::Real
            }
            (_, 0) if record.times > 1 => {
                record.times -= 1;
                Ended::Real
            }
            _ => Ended::Counted,
        }
    }

    /// Counts an end that the program owed to a dropped window. Returns whether there was one.
    fn end_gone(&mut self, handle: usize) -> bool {
        let Some(index) = self.gone.iter().position(|(gone, _)| *gone == handle) else { return false };
        self.gone[index].1 -= 1;
        if self.gone[index].1 == 0 {
            self.gone.remove(index);
        }
        true
    }

    fn lose(&mut self, which: impl FnMut(&Record) -> bool) -> Vec<Record> {
        let taken = self.take(which);
        taken.iter().for_each(|record| self.note_lost(record));
        taken
    }

    fn note_lost(&mut self, record: &Record) {
        if record.number != 0 {
            self.lost.push_back(record.number);
        }
    }

    /// Removes windows, with all others that begin at the same addresses. The window made last comes first.
    fn take(&mut self, mut which: impl FnMut(&Record) -> bool) -> Vec<Record> {
        let chosen = self.records.iter().filter(|one| which(one));
        let bases: Vec<u64> = chosen.map(|one| one.range.base).collect();
        let is_one = |one: &mut Record| bases.contains(&one.range.base);
        let mut taken: Vec<Record> = self.records.extract_if(.., is_one).collect();
        taken.reverse();
        // A later deregistration by the program then succeeds, as with NCCL.
        let users = taken.iter().filter(|one| one.users > 0).map(|one| (one.handle, one.users));
        self.gone.extend(users);
        while self.gone.len() > GONE_MAX {
            self.gone.pop_front();
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u64 = 3;

    fn at(base: u64) -> Range {
        Range { base, bytes: 0x1000 }
    }

    fn record(number: Number, base: u64) -> Record {
        let (handle, block, life) = (number as usize * 16, Some(BLOCK), 1);
        Record { number, handle, range: at(base), flags: 1, block, life, users: 1, times: 1 }
    }

    fn ledger(records: &[Record]) -> WindowLedger {
        let mut ledger = WindowLedger::default();
        records.iter().for_each(|record| ledger.made(*record));
        ledger
    }

    fn held(life: u64) -> impl Fn(&Record) -> Standing {
        move |_| Standing::Held { life }
    }

    fn numbers(records: &[Record]) -> Vec<Number> {
        records.iter().map(|record| record.number).collect()
    }

    /// A window is registered, ended and found again, even without an end in the block's next life. The late end does not disturb it.
    #[test]
    fn again() {
        let mut ledger = ledger(&[record(5, 0x1000)]);
        assert_eq!(ledger.end(80, held(1)), Ended::Cached);
        assert_eq!(ledger.end(80, held(1)), Ended::Twice);
        assert_eq!((ledger.claim(at(0x1000), 1, BLOCK), ledger.claim(at(0x1000), 0, BLOCK)), (5, 0));
        assert_eq!((ledger.claim(at(0x2000), 1, BLOCK), ledger.claim(at(0x1000), 1, 4)), (0, 0));
        assert_eq!(ledger.hit(5, 1), Some(80));
        assert!(ledger.is_over(BLOCK, held(1)) && !ledger.is_over(BLOCK, held(2)));
        assert_eq!(ledger.hit(5, 2), Some(80));
        assert_eq!(ledger.end(80, held(2)), Ended::Counted);
        assert!(ledger.is_over(BLOCK, held(2)) && ledger.meet(at(0x1000), held(2)).is_empty());
        assert_eq!(ledger.end(80, held(2)), Ended::Cached);
        assert_eq!(ledger.end(16, held(2)), Ended::Unknown);
    }

    /// A window that NCCL is about to meet is dropped unless the program has it. Its number is told, and a late end is counted.
    #[test]
    fn meets() {
        let mut ledger = ledger(&[record(1, 0x1000), record(2, 0x2000), record(3, 0x8000)]);
        assert_eq!(ledger.end(16, held(1)), Ended::Cached);
        assert!(ledger.meet(at(0x3000), held(1)).is_empty());
        assert_eq!(numbers(&ledger.meet(at(0x1800), held(1))), [1]);
        assert_eq!((ledger.lost(), numbers(&ledger.meet(at(0x1800), held(2)))), (1, vec![2]));
        assert_eq!((ledger.end(32, held(2)), ledger.end(32, held(2))), (Ended::Counted, Ended::Unknown));
        assert!(ledger.forget_names(&[1], held(2)).is_empty());
        assert_eq!((ledger.lost(), ledger.len()), (2, 1));
        assert_eq!(numbers(&ledger.make_way(BLOCK, held(2))), [3]);
    }

    /// A handle that NCCL reuses: the late end counts for the earlier window, and leaves the new one alone.
    #[test]
    fn handles_come_again() {
        let mut ledger = ledger(&[record(1, 0x1000)]);
        assert_eq!(numbers(&ledger.meet(at(0x1000), held(2))), [1]);
        ledger.made(Record { handle: 16, life: 2, ..record(2, 0x4000) });
        assert_eq!(ledger.end(16, held(2)), Ended::Counted);
        assert!(ledger.is_over(BLOCK, held(2)) && !ledger.is_cached(16));
        assert_eq!([ledger.end(16, held(2)), ledger.end(16, held(2))], [Ended::Cached, Ended::Twice]);
    }

    /// Forgotten numbers are not claimed. A window that the program has stays until the program ends it.
    #[test]
    fn forgetting() {
        let mut ledger = ledger(&[record(1, 0x1000), record(2, 0x2000)]);
        assert_eq!(ledger.end(16, held(1)), Ended::Cached);
        assert_eq!(numbers(&ledger.forget_names(&[1, 2, 9], held(1))), [1]);
        assert_eq!((ledger.lost(), ledger.claim(at(0x2000), 1, BLOCK)), (0, 0));
        assert_eq!((ledger.end(32, held(1)), ledger.len()), (Ended::Real, 0));
        assert!(ledger.is_empty());
    }

    /// Of two windows at one address neither is kept without the other: NCCL would forget the wrong one.
    #[test]
    fn at_one_address() {
        let long = Range { bytes: 0x3000, ..at(0x1000) };
        let both =
            || ledger(&[record(1, 0x1000), Record { range: long, ..record(2, 0x1000) }, record(3, 0x2000)]);
        let mut ended = both();
        assert_eq!((ended.claim(at(0x1000), 1, BLOCK), ended.claim(long, 1, BLOCK)), (0, 0));
        assert_eq!(
            [32, 16, 48].map(|handle| ended.end(handle, held(1))),
            [Ended::Real, Ended::Cached, Ended::Cached]
        );
        assert_eq!(ended.claim(at(0x1000), 1, BLOCK), 1);
        // The block was freed, so the program does not have them.
        let mut freed = both();
        assert_eq!(numbers(&freed.meet(Range { base: 0x3800, bytes: 8 }, held(2))), [2, 1]);
        assert_eq!((freed.len(), freed.lost()), (1, 2));
        let mut named = both();
        assert_eq!(numbers(&named.forget_names(&[1], held(2))), [2, 1]);
        assert_eq!((named.len(), named.lost()), (1, 2));
        assert_eq!((numbers(&ended.leave(BLOCK)), ended.len()), (vec![3, 1], 0));
        assert_eq!(numbers(&both().end_cached(held(2))), [3, 2, 1]);
    }

    /// Windows in other memory than the pool's, and in leaving blocks, are not kept.
    #[test]
    fn not_kept() {
        let mut ledger = ledger(&[Record { block: None, ..record(1, 0x1000) }, record(2, 0x2000)]);
        assert!(ledger.meet(at(0x1000), |_| Standing::Leaving).is_empty());
        assert_eq!(ledger.end(16, held(1)), Ended::Real);
        assert_eq!(ledger.end(32, |_| Standing::Leaving), Ended::Real);
        assert_eq!((ledger.lost(), ledger.len()), (1, 0));
        let other = Record { block: Some(BLOCK + 1), users: 0, ..record(4, 0x9000) };
        let mut ledger =
            self::ledger(&[record(3, 0x1000), other, Record { block: None, ..record(5, 0x5000) }]);
        let goes = |one: &Record| if one.block == Some(BLOCK) { held(1)(one) } else { Standing::Leaving };
        assert_eq!((numbers(&ledger.leave_all(goes)), ledger.len()), (vec![4], 2));
    }

    /// A window that the program has still to end stays when its memory goes, so that its handle is not reused before that end.
    #[test]
    fn owed() {
        let leaving = |_: &Record| Standing::Leaving;
        let mut ledger = ledger(&[record(1, 0x1000), record(2, 0x2000)]);
        assert_eq!(ledger.end(32, held(1)), Ended::Cached);
        assert_eq!(ledger.blocks().collect::<Vec<_>>(), [(BLOCK, true), (BLOCK, false)]);
        assert_eq!(ledger.cached().collect::<Vec<_>>(), [(BLOCK, at(0x2000))]);
        assert_eq!(numbers(&ledger.leave(BLOCK)), [2]);
        assert!(ledger.leave_all(leaving).is_empty() && ledger.meet(at(0x1000), leaving).is_empty());
        assert!(ledger.forget_names(&[1], leaving).is_empty());
        assert_eq!((ledger.end(16, leaving), ledger.len()), (Ended::Real, 0));
    }

    /// If NCCL returns one handle twice, it is told of two ends.
    #[test]
    fn counted_by_nccl() {
        let mut ledger = ledger(&[record(1, 0x1000), Record { handle: 16, ..record(2, 0x1000) }]);
        assert_eq!((ledger.len(), ledger.claim(at(0x1000), 1, BLOCK)), (1, 0));
        assert_eq!([ledger.end(16, held(1)), ledger.end(16, held(1))], [Ended::Real; 2]);
        assert_eq!(ledger.end(16, held(1)), Ended::Unknown);
    }

    /// The oldest windows leave if there are too many. `end_cached` and `leave` remove these windows.
    #[test]
    fn limits() {
        let mut ledger = ledger(&[1, 2, 3, 4].map(|number| record(number, number * 0x1000)));
        for handle in [16, 32, 48] {
            assert_eq!(ledger.end(handle, held(1)), Ended::Cached);
        }
        assert_eq!(numbers(&ledger.limit(2)), [1]);
        assert_eq!(numbers(&ledger.end_cached(held(1))), [3, 2]);
        assert_eq!((numbers(&ledger.leave(BLOCK)), ledger.blocks().count()), (vec![], 1));
        assert_eq!((ledger.forget(), ledger.is_empty()), (vec![BLOCK], true));
    }
}
