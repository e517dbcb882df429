//! Allocations that cannot be registered, so that nobody tries again with every call. Ids never come again: what was freed
//! does no harm here, and is forgotten in time.

/// At most so many; what was asked for longest ago is forgotten first.
#[derive(Debug)]
pub(crate) struct Refused {
    /// Asked for last stands last.
    ids: Vec<u64>,
    count_max: usize,
}

impl Refused {
    pub(crate) fn new(count_max: usize) -> Self {
        Refused { ids: Vec::new(), count_max }
    }

    /// Whether this one is here.
    pub(crate) fn has(&mut self, id: u64) -> bool {
        let Some(at) = self.ids.iter().rposition(|known| *known == id) else { return false };
        if let Some(later) = self.ids.get_mut(at..) {
            later.rotate_left(1);
        }
        true
    }

    /// Takes one in that is not here.
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
