//! What a forked child begins anew.

use once_cell::sync::OnceCell;

/// A value of this process, made at its first use. In a forked child there is none, whatever the parent's threads were doing: the
/// parent's value is never looked at nor dropped there, since its threads and descriptors are not.
#[derive(Debug)]
pub struct ForkLocal<T> {
    own: OnceCell<T>,
    of_child: OnceCell<Box<ForkLocal<T>>>,
}

impl<T> ForkLocal<T> {
    /// None yet.
    pub const fn new() -> ForkLocal<T> {
        ForkLocal { own: OnceCell::new(), of_child: OnceCell::new() }
    }

    /// If there is one.
    pub fn get(&self) -> Option<&T> {
        self.here().get()
    }

    /// The value, made now if there is none.
    pub fn get_or_try_init<E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<&T, E> {
        self.here().get_or_try_init(make)
    }

    fn here(&self) -> &OnceCell<T> {
        self.behind(super::forks())
    }

    fn behind(&self, forks: usize) -> &OnceCell<T> {
        let generation = (0..forks).fold(self, |cell, _| cell.of_child.get_or_init(Box::default));
        &generation.own
    }
}

impl<T> Default for ForkLocal<T> {
    fn default() -> Self {
        ForkLocal::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each generation has its own value.
    #[test]
    fn by_generation() {
        let cell = ForkLocal::new();
        for forks in [0, 1, 5, 2] {
            assert_eq!(cell.behind(forks).get(), None);
            cell.behind(forks).set(forks).unwrap();
        }
        assert_eq!(
            [0, 1, 2, 3, 5].map(|forks| cell.behind(forks).get().copied()),
            [Some(0), Some(1), Some(2), None, Some(5)]
        );
        assert_eq!(cell.get(), Some(&0));
    }
}
