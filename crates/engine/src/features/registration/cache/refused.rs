//! Allocations that cannot be registered, so that not every call tries again. Ids are never reused, so freed allocations
//! do no harm here, and are forgotten in time.

/// A list of at most `count_max` ids. The one that was asked for longest ago is forgotten first.
#[derive(Debug)]
pub(crate) struct Refused {
    /// The id that was asked for last is at the end.
    ids: Vec<u64>,
    count_max: usize,
}

impl Refused {
    pub(crate) fn new(count_max: usize) -> Self {
        Refused { ids: Vec::new(), count_max }
    }

    /// Whether this id is in the list. Moves it to the end.
    pub(crate) fn has(&mut self, id: u64) -> bool {
        let Some(at) = self.ids.iter().rposition(|known| *known == id) else { return false };
        if let Some(later) = self.ids.get_mut(at..) {
            later.rotate_left(1);
        }
        true
    }

    /// Adds an id that is not in the list.
    pub(crate) fn enter(&mut self, id: u64) {
        if self.count_max == 0 {
            return;
        }
        if self.ids.len() >= self.count_max {
            self.ids.remove(0);
        }
        self.ids.push(id);
    }
}
