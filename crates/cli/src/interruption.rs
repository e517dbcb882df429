//! Whether somebody has asked this process to end.

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Notes signals that ask to end.
pub struct Interruption(Arc<AtomicUsize>);

impl Interruption {
    /// From now on Ctrl-C and its like are noted, and do not end this process. What `nohup` and its like ignore stays ignored.
    pub fn note() -> Result<Interruption> {
        let noted = Arc::new(AtomicUsize::new(0));
        let ignored = ignored(&std::fs::read_to_string("/proc/self/status").unwrap_or_default());
        for signal in [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0)
        {
            signal_hook::flag::register_usize(signal, noted.clone(), signal as usize)
                .context("cannot wait for signals")?;
        }
        Ok(Interruption(noted))
    }

    /// The signal that came since the last look.
    pub fn take(&self) -> Option<u8> {
        Self::signal(self.0.swap(0, Ordering::Relaxed))
    }

    /// The signal that came, which stays noted.
    pub fn look(&self) -> Option<u8> {
        Self::signal(self.0.load(Ordering::Relaxed))
    }

    fn signal(noted: usize) -> Option<u8> {
        u8::try_from(noted).ok().filter(|signal| *signal != 0)
    }
}

/// The signals that a process ignores, a bit each.
fn ignored(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ignored signals are bits, from the first signal on.
    #[test]
    fn ignored_signals() {
        assert_eq!(ignored("Name:\tx\nSigBlk:\t0001\nSigIgn:\t0000000000000001\n"), 1 << (SIGHUP - 1));
        assert_eq!(ignored(""), 0);
    }
}
