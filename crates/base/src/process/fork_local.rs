//! A value that a forked child makes anew.

use once_cell::race::OnceBox;
use once_cell::sync::OnceCell;

/// A value of this process, made at its first use. A forked child has none at first, whatever the parent's threads were doing.
/// The child neither reads nor drops the parent's value, since the parent's threads and descriptors are not there.
#[derive(Debug)]
pub struct ForkLocal<T> {
    own: OnceCell<T>,
    /// A cell that threads never wait for: a thread of the parent may be filling it at the fork, and the child has no such
    /// thread.
    of_child: OnceBox<ForkLocal<T>>,
}

impl<T> ForkLocal<T> {
    /// An empty cell.
    pub const fn new() -> ForkLocal<T> {
        ForkLocal { own: OnceCell::new(), of_child: OnceBox::new() }
    }

    /// The value, if it was made in this process.
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
    use std::sync::{Barrier, mpsc};
    use std::time::Duration;

    use super::*;

    /// A thread does not wait for a generation that another thread is making: that thread may exist in the parent
    /// alone.
    #[test]
    fn nobody_is_waited_for() {
        static CELL: ForkLocal<u32> = ForkLocal::new();
        let (go, gone) = mpsc::channel::<()>();
        let begun = std::sync::Arc::new(Barrier::new(2));
        let making = {
            let begun = begun.clone();
            std::thread::spawn(move || {
                CELL.of_child.get_or_init(|| {
                    begun.wait();
                    gone.recv().unwrap();
                    Box::default()
                });
            })
        };
        begun.wait();
        let (tell, told) = mpsc::channel();
        let other = std::thread::spawn(move || tell.send(CELL.behind(1).set(7)));
        assert_eq!(told.recv_timeout(Duration::from_secs(10)), Ok(Ok(())));
        go.send(()).unwrap();
        making.join().unwrap();
        other.join().unwrap().unwrap();
        assert_eq!(CELL.behind(1).get(), Some(&7));
    }

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
