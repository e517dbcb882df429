//! What this process has several of and other threads look through: each entry is alive as long as its owner has it.

use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A list that owns nothing.
#[derive(Debug)]
pub(crate) struct WeakList<T>(Mutex<Vec<Weak<T>>>);

impl<T> WeakList<T> {
    /// An empty one.
    pub(crate) const fn new() -> WeakList<T> {
        WeakList(Mutex::new(Vec::new()))
    }

    /// Adds one.
    pub(crate) fn push(&self, one: &Arc<T>) {
        self.lock().push(Arc::downgrade(one));
    }

    /// Those that are alive. An iterator holds one at a time: an owner that lets go meanwhile ends it at once, but for that one.
    pub(crate) fn alive(&self) -> impl Iterator<Item = Arc<T>> + use<T> {
        let mut all = self.lock();
        all.retain(|one| one.strong_count() > 0);
        let all = all.clone();
        all.into_iter().filter_map(|one| one.upgrade())
    }

    /// Whether none is alive.
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().iter().all(|one| one.strong_count() == 0)
    }

    /// Held for a push or a copy.
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Weak<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What has no owner any more is not given, and keeps no place.
    #[test]
    fn alive() {
        let list = WeakList::new();
        assert!(list.is_empty());
        let (one, two) = (Arc::new(1), Arc::new(2));
        list.push(&one);
        list.push(&two);
        assert_eq!(list.alive().map(|one| *one).collect::<Vec<_>>(), [1, 2]);
        drop(one);
        assert_eq!(list.alive().map(|one| *one).collect::<Vec<_>>(), [2]);
        assert_eq!(list.lock().len(), 1);
        drop(two);
        assert!(list.is_empty());
    }
}
