//! Handles of events. One plugin's are its own; of several plugins an event has a number, behind which lie the handles of all.
//!
//! A number is never an address, and no two events of this process share one. Events may be used after their end, as channels come later
//! than the kernel's launch, so a handle's place is taken by a new event only after many others; until then nothing is forgotten.

use super::plugins::PLUGINS_MAX;
use crate::lock::Mutex;

/// How many events are remembered. An older event's end is not told.
const EVENTS_MAX: usize = 1 << 16;

type Joined = (usize, [usize; PLUGINS_MAX]);

/// The last event's number, and the latest events.
static EVENTS: Mutex<(usize, Vec<Joined>)> = Mutex::new((0, Vec::new()));

/// The handle of an event for which each plugin gave its own, or zero.
pub(super) fn join(plugins: usize, each: impl Iterator<Item = usize>) -> usize {
    let mut own = [0; PLUGINS_MAX];
    own.iter_mut().zip(each).for_each(|(place, handle)| *place = handle);
    if plugins == 1 || own == [0; PLUGINS_MAX] {
        return own[0];
    }
    let mut events = EVENTS.lock();
    // Other processes begin elsewhere.
    let number = 1 + events.0.max((std::process::id() as usize) << 32);
    events.0 = number;
    events.1.resize(EVENTS_MAX, (0, own));
    events.1[number % EVENTS_MAX] = (number, own);
    number
}

/// One plugin's own handle of an event; zero if there is none.
pub(super) fn of(plugins: usize, handle: usize, index: usize) -> usize {
    if plugins == 1 || handle == 0 {
        return handle;
    }
    let events = EVENTS.lock();
    events.1.get(handle % EVENTS_MAX).filter(|(number, _)| *number == handle).map_or(0, |(_, own)| own[index])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An event's handles are found until many others have come; those of another process are not.
    #[test]
    fn events_are_forgotten_late() {
        let first = join(2, [7, 0].into_iter());
        assert_eq!((of(2, first, 0), of(2, first, 1), of(2, first + 1, 0), of(2, 0, 0)), (7, 0, 0, 0));
        let _ = (0..EVENTS_MAX - 1).fold(0, |_, _| join(2, [1, 1].into_iter()));
        assert_eq!(of(2, first, 0), 7);
        join(2, [1, 1].into_iter());
        assert_eq!(of(2, first, 0), 0);
    }

    /// An event that no plugin has begun has no handle, and one plugin's handle is the event's.
    #[test]
    fn plain_handles() {
        assert_eq!((join(2, [0, 0].into_iter()), join(1, [9].into_iter()), of(1, 9, 0)), (0, 9, 9));
    }
}
