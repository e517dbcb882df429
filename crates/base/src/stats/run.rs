//! A run: one `windlass run` with all that its command starts. It goes on as its command in the same process, so the process's
//! number and start tell one run from all others. The variable [`config::RUN`] has both, and is inherited.

use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::config;

/// One run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Run {
    /// When its process began, in clock ticks since the machine's start: the later run is the greater one.
    pub began: u64,
    /// The number of its process.
    pub process: u32,
}

/// The run to which this process belongs, as it was when the library was loaded; process 0 for none.
static PROCESS: AtomicU32 = AtomicU32::new(0);
static BEGAN: AtomicU64 = AtomicU64::new(0);

/// Notes the run to which this process belongs.
pub fn note() {
    if let Some(run) = config::of_run(config::RUN).as_deref().and_then(Run::read) {
        PROCESS.store(run.process, Ordering::Relaxed);
        BEGAN.store(run.began, Ordering::Relaxed);
    }
}

impl Run {
    /// The run to which this process belongs. Reads what was [noted](note), and allocates nothing.
    pub fn noted() -> Option<Run> {
        let run = Run { began: BEGAN.load(Ordering::Relaxed), process: PROCESS.load(Ordering::Relaxed) };
        Some(run).filter(|run| run.process != 0)
    }

    /// The run that this process is, if it is one. None where `/proc` does not say when this process began.
    pub fn of_this_process() -> Option<Run> {
        Some(Run { began: began("self")?, process: std::process::id() })
    }

    /// Reads `PROCESS.START`.
    pub fn read(text: &str) -> Option<Run> {
        let (process, began) = text.split_once('.')?;
        Some(Run { began: began.parse().ok()?, process: process.parse().ok()? })
    }

    /// Whether its process lives. One of a container with other process numbers counts as ended.
    pub fn is_alive(self) -> bool {
        began(&self.process.to_string()) == Some(self.began)
    }
}

impl fmt::Display for Run {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}.{}", self.process, self.began)
    }
}

/// The 22nd field of a process's `stat`. The second one, the program's name, may have spaces and brackets.
fn began(process: &str) -> Option<u64> {
    let stat = std::fs::read(format!("/proc/{process}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    stat.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run is read as it is written, and lives as long as its process.
    #[test]
    fn reads_back() {
        let run = Run::of_this_process().unwrap();
        assert_eq!((Run::read(&run.to_string()), run.is_alive()), (Some(run), true));
        let namesake = Run { began: run.began + 1, ..run };
        assert!(!namesake.is_alive() && namesake > run);
        for text in ["", "7", "7.", ".7", "7.8.9", "-7.8"] {
            assert_eq!(Run::read(text), None, "{text}");
        }
    }
}
