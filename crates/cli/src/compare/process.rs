//! Runs the command once: in a process group of its own, watched, and ended with all processes that it has started.

use super::family;
use crate::interruption::{self, end_with_this_process};
use anyhow::{Context, Result};
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use windlass_base::config::RUN;
use windlass_base::thread;

/// The least and the most time between two looks at the processes: short at first, so that short programs are seen.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(100);
/// Looks take at most this part of a processor.
const PART_OF_PROCESSOR: u32 = 20;
/// How long processes that the command leaves behind may take to end by themselves.
const GRACE: Duration = Duration::from_secs(5);
/// From a signal to SIGKILL: less than schedulers give, since who kills this process leaves its command's children.
const UNTIL_KILLED: Duration = Duration::from_secs(2);
/// Signals within this time are one request: `timeout` and launchers signal this process and its group.
const ONE_REQUEST: Duration = Duration::from_millis(200);
/// Killed processes that wait in the driver may never end.
const UNTIL_LEFT: Duration = Duration::from_secs(5);
/// How many bytes and lines of an output's end are reported.
const TAIL_BYTES: usize = 16 << 10;
const TAIL_LINES: usize = 20;

/// How a run ended.
pub enum Outcome {
    Ended {
        status: ExitStatus,
        /// Seconds from the start of the command to its end.
        seconds: f64,
        /// Processes that had to be ended afterwards.
        left_behind: usize,
    },
    /// This process was asked to end, and has ended all processes that it started.
    Interrupted,
}

/// Runs the command to its end, with variables set or unset, and a file for both of its outputs. Calls `look` with its processes repeatedly.
pub fn run(
    command: &[OsString],
    variables: Vec<(OsString, Option<OsString>)>,
    log: &Path,
    mut look: impl FnMut(&BTreeSet<u32>),
) -> Result<Outcome> {
    let log = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    let (name, arguments) = command.split_first().context("no command")?;
    let mut command = Command::new(name);
    command.args(arguments).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0);
    command.env_remove(RUN);
    for (name, value) in variables {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    // Launchers end their own processes at SIGTERM.
    end_with_this_process(&mut command, Signal::TERM);
    let began = Instant::now();
    let mut child = command.spawn().with_context(|| format!("cannot run {}", name.display()))?;
    let process = child.id();
    let (sender, ended) = mpsc::channel();
    std::thread::spawn(move || {
        let status = child.wait();
        // The receiver waits for it.
        let _ = sender.send(status.map(|status| (status, began.elapsed())));
    });
    let mut pause = PAUSE_MIN;
    let status = loop {
        if let Ok(status) = ended.recv_timeout(pause) {
            break status;
        }
        if let Some(signal) = interruption::look() {
            end_all(signal);
            return Ok(Outcome::Interrupted);
        }
        let looked = Instant::now();
        look(&family::look());
        family::reap(Some(process));
        pause = (2 * pause).min(PAUSE_MAX).max(PART_OF_PROCESSOR * looked.elapsed());
    };
    let (status, lasted) = status.context("cannot wait for the command")?;
    let left_behind = end_what_is_left();
    if interruption::look().is_some() {
        return Ok(Outcome::Interrupted);
    }
    Ok(Outcome::Ended { status, seconds: lasted.as_secs_f64(), left_behind })
}

/// Waits for processes that the command has left behind, then ends them. Returns how many that were.
fn end_what_is_left() -> usize {
    let mut left = 0;
    let waits = || {
        family::reap(None);
        left = family::look().len();
        left > 0 && interruption::look().is_none()
    };
    thread::wait_while(GRACE, PAUSE_MIN, waits);
    if left > 0 {
        end_all(interruption::look().unwrap_or(Signal::TERM));
    }
    left
}

/// Sends the signal to all processes of the command at once, and SIGKILL to those that do not end in time or before the next request.
fn end_all(signal: Signal) {
    family::signal(&family::look(), signal);
    let began = Instant::now();
    let mut kills = false;
    thread::wait_while(UNTIL_KILLED + UNTIL_LEFT, PAUSE_MIN, || {
        family::reap(None);
        let left = family::look();
        kills |= interruption::take() && began.elapsed() > ONE_REQUEST || began.elapsed() > UNTIL_KILLED;
        if kills {
            family::signal(&left, Signal::KILL);
        }
        !left.is_empty()
    });
}

/// The last lines of an output.
pub fn tail(log: &Path) -> String {
    let bytes = std::fs::read(log).unwrap_or_default();
    let end = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(TAIL_BYTES)..]).into_owned();
    let lines: Vec<&str> = end.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only the last lines are given; none of a missing output.
    #[test]
    fn tails() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let lines: Vec<String> = (0..5000).map(|line| format!("line {line}")).collect();
        std::fs::write(&log, lines.join("\n")).unwrap();
        assert_eq!(tail(&log), lines[4980..].join("\n"));
        assert_eq!(tail(&folder.path().join("none")), "");
    }
}
