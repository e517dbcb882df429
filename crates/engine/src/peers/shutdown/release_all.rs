//! All registrations of the process given back while its communicators live, and other threads may be calling.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::features::registration::deregistration::Release;
use crate::features::registration::registering::{End, Registering};
use crate::features::windows::Windows;
use crate::peers::registry;

/// How long other threads' calls and groups are waited for: one may need what this thread has to do yet.
const OUT_WITHIN: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// Why something stays registered, and on how many communicators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StillRegistered {
    /// Other threads are in them.
    InUse(usize),
    /// NCCL keeps it, or uses it for others.
    Kept(usize),
}

/// Windows that the application does not have go, and no rank keeps any more.
fn release_windows() -> Result<(), StillRegistered> {
    let mut rest: Vec<Arc<Windows>> = registry::alive().filter_map(|one| one.windows().cloned()).collect();
    let began = Instant::now();
    loop {
        rest.retain(|one| !one.release());
        if rest.is_empty() {
            return Ok(());
        }
        if began.elapsed() > OUT_WITHIN {
            return Err(StillRegistered::InUse(rest.len()));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// From now on nothing of this process is registered. Waits for registered calls, as NCCL's own ends do; its gates are closed only
/// where nobody is inside, and for no longer than giving back takes, since those calls may wait for one that is to come yet.
pub fn register_nothing() -> Result<(), StillRegistered> {
    release_windows()?;
    registry::end_checking();
    let mut rest: Vec<Arc<Registering>> =
        registry::alive().filter_map(|one| one.registering().cloned()).collect();
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
