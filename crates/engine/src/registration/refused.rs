//! Allocations that cannot be registered, so that nobody tries again with every call.

use crate::range::Ranges;
use crate::registration::entry::{BufferId, Key};

/// At most so many; what was asked for longest ago is forgotten first.
#[derive(Debug)]
pub(super) struct Refused {
    ids: Ranges<(BufferId, u64)>,
    entries_max: usize,
}

impl Refused {
    pub fn new(entries_max: usize) -> Self {
        Refused { ids: Ranges::new(), entries_max }
    }

    /// Whether this one is here.
    pub fn has(&mut self, key: Key, clock: u64) -> bool {
        match self.ids.find_mut(key.range.base) {
            Some((range, (id, asked_at))) if range == key.range && *id == key.id => {
                *asked_at = clock;
                true
            }
            _ => false,
        }
    }

    /// Takes it in; what was at its addresses is no more.
    pub fn enter(&mut self, key: Key, clock: u64) {
        let gone: Vec<u64> = self.ids.overlapping(key.range).map(|(range, _)| range.base).collect();
        for base in gone {
            self.ids.remove(base);
        }
        if self.entries_max == 0 {
            return;
        }
        if self.ids.len() >= self.entries_max {
            let oldest = self.ids.iter().min_by_key(|(_, (_, asked_at))| *asked_at);
            if let Some(base) = oldest.map(|(range, _)| range.base) {
                self.ids.remove(base);
            }
        }
        // Nothing overlaps it any more.
        let _ = self.ids.insert(key.range, (key.id, clock));
    }

    pub fn len(&self) -> usize {
        self.ids.len()
    }
}
