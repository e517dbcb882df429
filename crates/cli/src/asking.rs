//! Questions that load foreign libraries: put to a child process, with a time limit, so that neither a hanging driver
//! nor a crashing library takes this process along, and CUDA is never initialised in a process that starts ranks.

use crate::bench::adaptive::Place;
use crate::interruption::{self, end_with_this_process};
use anyhow::{Context, Result, anyhow, bail};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;
use windlass_base::thread;

/// The hidden subcommand that answers.
pub const SUBCOMMAND: &str = "ask";

/// The time between two looks for an answer.
const PAUSE: Duration = Duration::from_millis(5);
/// For answers that somebody waits for.
pub const TIME_LIMIT: Duration = Duration::from_secs(30);

/// What the CUDA driver says about this machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Gpus {
    /// As `cuDriverGetVersion` gives it: 12080 is CUDA 12.8.
    pub cuda_version: i32,
    /// The kernel driver's version, from NVML.
    pub driver: Option<String>,
    pub devices: Vec<Device>,
    pub pairs: Vec<Pair>,
}

/// One GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Device {
    pub name: String,
    /// Its PCI bus, by which NVML knows it.
    #[serde(default)]
    pub bus: Option<String>,
    pub memory_bytes: u64,
    pub compute_capability: (i32, i32),
    pub multiprocessors: i32,
    /// cuMemCreate, cuMemMap and their kin.
    pub virtual_memory: bool,
    /// Memory shared by file descriptor.
    pub posix_handles: bool,
    /// Memory shared by fabric handle.
    pub fabric_handles: bool,
    pub multicast: bool,
    /// Who uses it now; `None` where NVML is not there.
    #[serde(default)]
    pub load: Option<Load>,
}

/// What NVML says of a GPU's use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Load {
    pub processes: usize,
    pub memory_bytes: u64,
    /// Of the last moments in which kernels ran.
    pub percent: u32,
}

/// Two GPUs, as the first sees the second.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pair {
    pub from: usize,
    pub to: usize,
    pub peer_access: bool,
    pub native_atomics: bool,
    /// Whether NVLink joins them; `None` where NVML cannot say.
    pub nvlink: Option<bool>,
}

/// Asks the CUDA driver; `library_path` replaces `LD_LIBRARY_PATH` of the child.
pub fn gpus(library_path: Option<&OsStr>, limit: Duration) -> Result<Gpus> {
    ask_within(&[OsString::from("gpus")], library_path.map(|path| ("LD_LIBRARY_PATH", path)), limit)
}

/// Asks NVML who uses these devices now: the driver, which takes a second and more to answer, is not asked.
pub fn loads(devices: &[Device], limit: Duration) -> Result<Vec<Option<Load>>> {
    let buses = devices.iter().map(|device| device.bus.clone().unwrap_or_default().into());
    ask_within(&std::iter::once("loads".into()).chain(buses).collect::<Vec<OsString>>(), None, limit)
}

/// Under which circumstances communicators of this many ranks at most would run with the NCCL at a path, from 2 ranks on.
pub fn places(ranks: usize, nccl: &Path, library_path: Option<&OsStr>) -> Result<Vec<Place>> {
    let question = ["places".into(), ranks.to_string().into(), nccl.as_os_str().to_owned()];
    ask(&question, library_path.map(|path| ("LD_LIBRARY_PATH", path)))
}

/// The version code that the NCCL at `path` reports.
pub fn nccl_version(path: &Path) -> Result<i32> {
    ask(&[OsString::from("version"), path.as_os_str().to_owned()], None)
}

/// The version code that Windlass reports over the NCCL at `nccl`: the real one's, if the way through works.
pub fn version_through(windlass: &Path, nccl: &Path) -> Result<i32> {
    let question = [OsString::from("version"), windlass.as_os_str().to_owned()];
    ask(&question, Some(("WINDLASS_NCCL", nccl.as_os_str())))
}

/// Of what the Windlass at `path` was built, as `windlassGetBuild` tells it.
pub fn build(path: &Path) -> Result<String> {
    ask(&[OsString::from("build"), path.as_os_str().to_owned()], None)
}

fn ask<T: for<'de> Deserialize<'de>>(question: &[OsString], variable: Option<(&str, &OsStr)>) -> Result<T> {
    ask_within(question, variable, TIME_LIMIT)
}

fn ask_within<T: for<'de> Deserialize<'de>>(
    question: &[OsString],
    variable: Option<(&str, &OsStr)>,
    limit: Duration,
) -> Result<T> {
    let mut command = Command::new(std::env::current_exe().context("cannot find this executable")?);
    command.arg(SUBCOMMAND).args(question).env_remove("LD_PRELOAD");
    if let Some((name, value)) = variable {
        command.env(name, value);
    }
    let printed = output_within(command, limit)?;
    // Libraries may print before the answer; the answer is the last line.
    let line = printed.lines().last().unwrap_or_default();
    match serde_json::from_str::<Result<T, String>>(line) {
        Ok(answer) => answer.map_err(|reason: String| anyhow!(reason)),
        Err(_) => bail!("no answer, but {line:?}"),
    }
}

/// Standard output of a command that must end with success within `limit`.
pub fn output_within(mut command: Command, limit: Duration) -> Result<String> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    end_with_this_process(&mut command, Signal::KILL);
    let mut child = command.spawn().with_context(|| format!("cannot start {:?}", command.get_program()))?;
    let printed = drain(child.stdout.take());
    let complained = drain(child.stderr.take());
    thread::wait_while(limit, PAUSE, || {
        matches!(child.try_wait(), Ok(None)) && interruption::look().is_none()
    });
    let Some(status) = child.try_wait()? else {
        // Not waited for: what hangs in the driver cannot be killed.
        child.kill()?;
        interruption::check()?;
        bail!("no answer within {} s", limit.as_secs());
    };
    // What the command has left behind may hold the pipes.
    if !thread::wait_while(limit, PAUSE, || !(printed.is_finished() && complained.is_finished())) {
        bail!("ended with {status}, but a process that it started keeps its output open");
    }
    let complaint = complained.join().unwrap_or_default();
    if !status.success() {
        let told = format!("ended with {status}: {}", complaint.trim());
        bail!("{}", told.trim_end_matches(": "));
    }
    Ok(printed.join().unwrap_or_default())
}

/// Reads a pipe to its end on a thread, so that the child never waits for us.
fn drain(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            let _ = pipe.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    /// Output comes back; failures carry what was complained; hanging commands are ended.
    #[test]
    fn output_or_reason() {
        let limit = Duration::from_secs(20);
        assert_eq!(output_within(shell("echo yes"), limit).unwrap(), "yes\n");
        let failed = output_within(shell("echo because >&2; exit 3"), limit).unwrap_err().to_string();
        assert!(failed.contains("because") && failed.contains('3'), "{failed}");
        let hanging = output_within(shell("exec sleep 1000"), Duration::from_millis(50)).unwrap_err();
        assert!(hanging.to_string().contains("within"), "{hanging}");
    }
}
