//! A list of weak references to things of this process, such as peer groups, which other threads iterate over.

use std::sync::{Arc, Weak};

use windlass_base::lock::Mutex;

/// A list that does not keep its entries alive. Locked for a push or a copy.
#[derive(Debug)]
pub(crate) struct WeakList<T>(Mutex<Vec<Weak<T>>>);

impl<T> WeakList<T> {
    /// An empty list.
    pub(crate) const fn new() -> WeakList<T> {
        WeakList(Mutex::new(Vec::new()))
    }

    /// Adds an entry.
    pub(crate) fn push(&self, one: &Arc<T>) {
        self.0.lock().push(Arc::downgrade(one));
    }

    /// The living entries. The iterator keeps one entry alive at a time: others end as soon as their owners drop them.
    pub(crate) fn alive(&self) -> impl Iterator<Item = Arc<T>> + use<T> {
        let mut all = self.0.lock();
        all.retain(|one| one.strong_count() > 0);
        let all = all.clone();
        all.into_iter().filter_map(|one| one.upgrade())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An entry whose owner has dropped it is not returned, and takes no memory.
    #[test]
    fn alive() {
        let list = WeakList::new();
        let (one, two) = (Arc::new(1), Arc::new(2));
        list.push(&one);
        list.push(&two);
        assert_eq!(list.alive().map(|one| *one).collect::<Vec<_>>(), [1, 2]);
        drop(one);
        assert_eq!(list.alive().map(|one| *one).collect::<Vec<_>>(), [2]);
        assert_eq!(list.0.lock().len(), 1);
        drop(two);
        assert_eq!(list.alive().count(), 0);
    }
}
