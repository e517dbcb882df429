//! The live windows of a rank on one communicator, numbered by registration, and the window in which an address lies.

use windlass_base::range::Range;

use crate::features::check::entry::Place;

/// `NCCL_WIN_COLL_SYMMETRIC`.
const SYMMETRIC: u32 = 1;
/// How many windows are remembered. The oldest is forgotten first.
const WINDOWS_MAX: usize = 4096;

#[derive(Clone, Copy, Debug)]
struct Live {
    number: u32,
    range: Range,
    flags: u32,
    /// None if the end of a group will make the window.
    handle: Option<usize>,
}

/// The places of a rank's windows.
#[derive(Debug, Default)]
pub(crate) struct Places {
    /// The last number that was given.
    given: u32,
    /// In the order of their numbers.
    live: Vec<Live>,
}

impl Places {
    /// Notes a registration. `handle` is None if the end of a group makes the window.
    pub(crate) fn made(&mut self, range: Range, flags: u32, handle: Option<usize>) {
        self.given += 1;
        if self.live.len() == WINDOWS_MAX {
            self.live.remove(0);
        }
        self.live.push(Live { number: self.given, range, flags, handle });
    }

    /// Notes the end of a window. The handles of windows made in groups are unknown, so these are taken to end in the order of making.
    pub(crate) fn ended(&mut self, handle: usize) {
        let known = self.live.iter().rposition(|one| one.handle == Some(handle));
        let ended = known.or_else(|| self.live.iter().position(|one| one.handle.is_none()));
        if let Some(index) = ended {
            self.live.remove(index);
        }
    }

    /// The place of an address: in the window with the highest base, as NCCL looks it up, and among equal bases in the latest.
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

    /// Windows are numbered by registration. Ended ones are not found, and numbers are not reused.
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

    /// Windows of a group end in their order. A handle that was given twice ends twice.
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

    /// No more windows are remembered than the limit.
    #[test]
    fn limit() {
        let mut places = Places::default();
        (0..=WINDOWS_MAX as u64).for_each(|base| places.made(range(base << 12, 8), SYMMETRIC, None));
        assert_eq!((places.of(0), places.of(1 << 12), places.live.len()), (None, at(2, 0), WINDOWS_MAX));
    }
}
