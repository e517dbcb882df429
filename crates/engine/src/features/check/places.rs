//! The live windows of a rank on one communicator, by number: which registration made each.

use windlass_base::range::Range;

use crate::features::check::entry::Place;

/// `NCCL_WIN_COLL_SYMMETRIC`.
const SYMMETRIC: u32 = 1;
/// So many are remembered; the oldest goes first.
const WINDOWS_MAX: usize = 4096;

#[derive(Clone, Copy, Debug)]
struct Live {
    number: u32,
    range: Range,
    flags: u32,
    /// None: the end of its group will make it.
    handle: Option<usize>,
}

/// Where a rank's windows lie.
#[derive(Debug, Default)]
pub(crate) struct Places {
    /// Numbers that were given.
    given: u32,
    /// In the order of their numbers.
    live: Vec<Live>,
}

impl Places {
    /// A registration has made a window, with this handle, or a group will.
    pub(crate) fn made(&mut self, range: Range, flags: u32, handle: Option<usize>) {
        self.given += 1;
        if self.live.len() == WINDOWS_MAX {
            self.live.remove(0);
        }
        self.live.push(Live { number: self.given, range, flags, handle });
    }

    /// One has ended. Of a group's the handle was never seen: those end in the order in which they were made, as far as can be told.
    pub(crate) fn ended(&mut self, handle: usize) {
        let known = self.live.iter().rposition(|one| one.handle == Some(handle));
        let ended = known.or_else(|| self.live.iter().position(|one| one.handle.is_none()));
        if let Some(index) = ended {
            self.live.remove(index);
        }
    }

    /// Where an address lies: in the window that begins last, as NCCL looks it up, of several at one address in the latest.
    pub(crate) fn of(&self, address: u64) -> Option<Place> {
        let byte = Range { base: address, bytes: 1 };
        let around = self.live.iter().filter(|one| one.range.contains(byte));
        let Live { number, range, flags, .. } = *around.max_by_key(|one| (one.range.base, one.number))?;
        let is_symmetric = flags & SYMMETRIC != 0;
        Some(Place { window: number, is_symmetric, offset: address - range.base })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(base: u64, bytes: u64) -> Range {
        Range { base, bytes }
    }

    fn at(window: u32, offset: u64) -> Option<Place> {
        Some(Place { window, is_symmetric: true, offset })
    }

    /// Windows are numbered by registration, ended ones are not found, and numbers never come again.
    #[test]
    fn numbers() {
        let mut places = Places::default();
        places.made(range(0x1000, 0x1000), SYMMETRIC, Some(1));
        places.made(range(0x1800, 0x100), SYMMETRIC, Some(2));
        assert_eq!(
            [places.of(0x1010), places.of(0x1810), places.of(0x1900)],
            [at(1, 0x10), at(2, 0x10), at(1, 0x900)]
        );
        assert_eq!((places.of(0xfff), places.of(0x2000)), (None, None));
        places.ended(2);
        places.ended(7);
        assert_eq!(places.of(0x1810), at(1, 0x810));
        places.made(range(0x1000, 0x1000), 0, Some(2));
        assert_eq!(places.of(0x1000), Some(Place { window: 3, is_symmetric: false, offset: 0 }));
    }

    /// A group's are ended in their order; one handle that came twice ends twice.
    #[test]
    fn ends() {
        let mut places = Places::default();
        places.made(range(0x1000, 0x1000), SYMMETRIC, None);
        places.made(range(0x4000, 0x1000), SYMMETRIC, None);
        places.made(range(0x8000, 0x1000), SYMMETRIC, Some(1));
        places.made(range(0x8000, 0x1000), SYMMETRIC, Some(1));
        places.ended(99);
        assert_eq!((places.of(0x1000), places.of(0x4000)), (None, at(2, 0)));
        places.ended(1);
        assert_eq!(places.of(0x8000), at(3, 0));
        places.ended(1);
        assert_eq!(places.of(0x8000), None);
    }

    /// There are as many as may be.
    #[test]
    fn limit() {
        let mut places = Places::default();
        (0..=WINDOWS_MAX as u64).for_each(|base| places.made(range(base << 12, 8), SYMMETRIC, None));
        assert_eq!((places.of(0), places.of(1 << 12), places.live.len()), (None, at(2, 0), WINDOWS_MAX));
    }
}
