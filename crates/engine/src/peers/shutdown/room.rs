//! Frees device memory that ended communicators still hold. An init does that before it is refused for lack of memory, and before this rank
//! has told others what it has, so that all ranks see one outcome.
//!
//! No peer is waited for: one that has not closed yet may wait for this very rank in its init.

use std::time::Duration;

use windlass_base::gpu::Ordinal;
use windlass_base::thread;

use crate::background::worker;
use crate::peers::setup::transports::LEAVES_WITHIN;
use crate::peers::shutdown::closing::settle;
use crate::peers::shutdown::draining;

const LOOK_EVERY: Duration = Duration::from_micros(100);
/// A kernel that was told to leave may stand behind other work. The init goes on after this time.
const CLOSES_WITHIN: Duration = Duration::from_millis(250);

/// Frees all memory of ended communicators that no rank needs any more. Does not wait.
fn make() {
    draining::close_over();
    settle();
}

/// The same, and waits for communicators that are just ending on this device, until `is_enough`. At most `LEAVES_WITHIN`.
///
/// A kernel that was told to leave soon does, and the background worker soon lets go of a peer group that it looks at. But a kernel
/// behind other work of its stream may stay for ever. Not to be called on the background worker.
pub(in crate::peers) fn make_soon(device: Ordinal, is_enough: impl FnMut() -> bool) {
    make_while(|| goes(device), is_enough, LEAVES_WITHIN);
}

/// Closes what has just ended on this device before other ranks hear of this rank in an init, so that they have that memory. Waits up to
/// [`CLOSES_WITHIN`], where a communicator was aborted or the worker looks at one. Not to be called on the background worker.
pub(in crate::peers) fn close_soon(device: Ordinal) {
    make_while(|| goes(device), || false, CLOSES_WITHIN);
}

/// Frees what can be freed. Returns whether more will be.
fn goes(device: Ordinal) -> bool {
    // Asked first, because what the worker lets go of after that may still be draining.
    let is_held = worker::is_looking();
    make();
    is_held || draining::is_any_on(device)
}

fn make_while(goes: impl Fn() -> bool, mut is_enough: impl FnMut() -> bool, within: Duration) {
    thread::wait_while(within, LOOK_EVERY, || {
        let more = goes();
        !is_enough() && more
    });
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Looks until there is enough or nothing more ends, at most for the given time, and at least once.
    #[test]
    fn waits_for_what_goes() {
        let looks = |goes: u32, enough: u32, within: Duration| {
            let looks = Cell::new(0);
            make_while(|| looks.replace(looks.get() + 1) < goes, || looks.get() >= enough, within);
            looks.get()
        };
        let long = Duration::from_secs(60);
        assert_eq!(
            [looks(0, 9, long), looks(5, 9, long), looks(9, 3, long), looks(9, 9, Duration::ZERO)],
            [1, 6, 3, 1]
        );
    }
}
