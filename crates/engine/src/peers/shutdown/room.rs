//! Room on a device that communicators still have which have ended here. It is made before an init is refused for want of any, and before
//! this rank has told others what it has, so that all ranks hear one answer as ever.
//!
//! No peer is waited for: one that has not closed yet may wait for this very rank, which is in its init.

use std::time::{Duration, Instant};

use windlass_base::gpu::Ordinal;

use crate::background::worker;
use crate::peers::setup::transports::LEAVES_WITHIN;
use crate::peers::shutdown::closing::settle;
use crate::peers::shutdown::draining;

const LOOK_EVERY: Duration = Duration::from_micros(100);
/// A kernel that was told to leave may stand behind other work: an init goes on without it.
const CLOSES_WITHIN: Duration = Duration::from_millis(250);

/// What has ended gives back all that nobody needs any more. Waits for nothing.
pub(in crate::peers) fn make() {
    draining::close_over();
    settle();
}

/// The same, with what is just going on this rank's device; until there is enough.
///
/// A kernel that was told to leave waits for nobody, and `windlass-worker` soon lets go of a peer group at which it looked when that ended. But
/// one that stands in a stream behind other work may stay for ever: so only for a while. Not for that thread.
pub(in crate::peers) fn make_soon(device: Ordinal, is_enough: impl FnMut() -> bool) {
    make_while(|| goes(device), is_enough, LEAVES_WITHIN);
}

/// What has just ended on this rank's device is closed before the other ranks hear of this rank in an init: then they have room for it.
/// Takes a moment where something was aborted, or `windlass-worker` looks at it. Not for that thread.
pub(in crate::peers) fn close_soon(device: Ordinal) {
    make_while(|| goes(device), || false, CLOSES_WITHIN);
}

/// Gives back what can go; whether more will.
fn goes(device: Ordinal) -> bool {
    // Asked first: what it lets go of after that may still be draining.
    let is_held = worker::is_looking();
    make();
    is_held || draining::is_any_on(device)
}

fn make_while(goes: impl Fn() -> bool, mut is_enough: impl FnMut() -> bool, within: Duration) {
    let until = Instant::now() + within;
    loop {
        let more = goes();
        if is_enough() || !more || Instant::now() >= until {
            return;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// It is looked until there is enough or nothing goes any more, and else for a while; at least once.
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
