//! Whether somebody has asked this process to end, and that its children end with it.

use anyhow::{Context, Result, ensure};
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag::{register, register_usize};
use std::io::{Error, ErrorKind};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

/// The last signal that came; 0: none.
static SIGNAL: LazyLock<Arc<AtomicUsize>> = LazyLock::new(Arc::default);
/// Whether a signal came since the last [`take`].
static CAME: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// From now on Ctrl-C and its like are noted, and do not end this process. What `nohup` and its like ignore stays ignored.
pub fn note() -> Result<()> {
    let ignored = ignored(&std::fs::read_to_string("/proc/self/status").unwrap_or_default());
    for signal in [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0) {
        register_usize(signal, SIGNAL.clone(), signal as usize)
            .and_then(|_| register(signal, CAME.clone()))
            .context("cannot wait for signals")?;
    }
    Ok(())
}

/// The signal that came.
pub fn look() -> Option<Signal> {
    Signal::from_named_raw(SIGNAL.load(Ordering::Relaxed) as i32)
}

/// An error if a signal came.
pub fn check() -> Result<()> {
    ensure!(look().is_none(), "interrupted");
    Ok(())
}

/// Whether a signal came since the last call.
pub fn take() -> bool {
    CAME.swap(false, Ordering::Relaxed)
}

/// The exit code of an interrupted command, as shells have it.
pub fn exit_code(signal: Signal) -> u8 {
    128 + signal.as_raw() as u8
}

/// The kernel sends `signal` to the command when this process has ended, in whatever way. To be spawned on the main thread: the kernel
/// looks at the end of the thread that spawned it.
pub fn end_with_this_process(command: &mut Command, signal: Signal) -> &mut Command {
    let parent = getpid();
    let before_exec = move || {
        set_parent_process_death_signal(Some(signal))?;
        // This process may have ended before.
        if getppid() == Some(parent) { Ok(()) } else { Err(Error::from(ErrorKind::BrokenPipe)) }
    };
    // SAFETY: the closure makes two system calls and allocates nothing.
    unsafe { command.pre_exec(before_exec) }
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
