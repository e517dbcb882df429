//! Deregisters everything of the process while its communicators live and other threads may be calling.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::features::registration::deregistration::Release;
use crate::features::registration::registering::{End, Registering};
use crate::features::windows::Windows;
use crate::peers::registry;
use windlass_base::thread;

/// How long calls and groups of other threads are waited for. One of them may need this thread.
const OUT_WITHIN: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// Why something stays registered. The number counts communicators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StillRegistered {
    /// Other threads are inside calls of them.
    InUse(usize),
    /// NCCL keeps a registration, or uses it for other communicators.
    Kept(usize),
}

/// Deregisters the kept windows that the program does not have, and ends keeping. Waits for other threads up to [`OUT_WITHIN`].
fn release_windows() -> Result<(), StillRegistered> {
    let mut rest: Vec<Arc<Windows>> =
        registry::alive().filter_map(|one| one.features.windows.as_ref().cloned()).collect();
    let is_over = thread::wait_while(OUT_WITHIN, LOOK_EVERY, || {
        rest.retain(|one| !one.release());
        !rest.is_empty()
    });
    if is_over { Ok(()) } else { Err(StillRegistered::InUse(rest.len())) }
}

/// Deregisters all buffers and windows of this process, and registers none from now on. Waits for registered calls, as NCCL's own ends do.
/// Gates are closed only while no thread is inside, and only while deregistering: those calls may wait for a later one.
pub fn register_nothing() -> Result<(), StillRegistered> {
    release_windows()?;
    let mut rest: Vec<Arc<Registering>> =
        registry::alive().filter_map(|one| one.features.registering.as_ref().cloned()).collect();
    let (mut kept, mut in_use_since) = (0, None);
    while !rest.is_empty() {
        let mut in_use = 0;
        rest.retain(|one| {
            let release = one.release();
            kept += usize::from(release == Release::Ended(End::Left));
            in_use += usize::from(release == Release::InUse);
            !matches!(release, Release::Ended(_))
        });
        if in_use == 0 {
            in_use_since = None;
        } else if in_use_since.get_or_insert_with(Instant::now).elapsed() > OUT_WITHIN {
            return Err(StillRegistered::InUse(in_use));
        }
        std::thread::sleep(LOOK_EVERY);
    }
    if kept == 0 { Ok(()) } else { Err(StillRegistered::Kept(kept)) }
}
