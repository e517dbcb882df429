//! Before `windlass run` starts a command: this machine's limits, measured once and kept.
//!
//! Where a machine was measured before, a stamp says so, and that is all that is looked at. Else child processes measure on the GPUs that
//! the command will see, if these are idle; this process never touches CUDA. Whatever goes wrong is told in one line, and the command runs.

mod idle;
pub mod stamp;
mod whether;

use crate::asking;
use crate::bench::adaptive::Effort;
use crate::installation;
use crate::interruption::Interruption;
use crate::limits::measure::{OfRanks, measure};
use crate::limits::store::{Folder, Kept};
use crate::limits::written;
use crate::machine::{Machine, MachineRequest};
use crate::ranks::Ending;
use anyhow::Result;
use stamp::Stamp;
use std::path::Path;
use std::time::{Duration, Instant};
use whether::Whether;
use windlass_base::config::{self, Parsed};

/// From the first question to the driver on; then all children are killed.
const TIME_MAX: Duration = Duration::from_secs(15);

/// For the driver's answer: a cold one takes seconds.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Runs do not look again for so long whether GPUs are idle: to ask the driver takes a second or more.
const WHILE_IN_USE: Duration = Duration::from_secs(15 * 60);

/// Nor do they measure again for so long after that has failed.
const AFTER_FAILURE: Duration = Duration::from_secs(24 * 3600);

/// What the cells' lines call it.
const HOW: &str = "run";

/// Where the cells come from that hold when nothing is measured.
const OTHERS_HOLD: &str = "the built-in ones hold";

/// Measures if it is time to. Answers the exit code where the command is not to be run, because somebody has asked this process to end.
pub fn before_command(nccl: &Path, windlass: &Path) -> Option<u8> {
    let Parsed { startup, config, .. } = config::parse(std::env::vars_os());
    let is_simulator = installation::is_simulator(nccl);
    let variable = |name: &str| std::env::var(name).ok();
    match whether::decide(&startup, &config, is_simulator, variable, stamp::gpus_most) {
        Whether::No => return None,
        Whether::Yes => {}
    }
    let prepared = Folder::of(&config).and_then(|folder| {
        let Some(folder) = folder else { return Ok(None) };
        let stamp = Stamp::of(nccl, windlass, is_simulator);
        if stamp.is_in(&folder) {
            return Ok(None);
        }
        folder.prepare()?;
        Ok(Some((folder, stamp)))
    });
    let (folder, stamp) = match prepared {
        Ok(Some(prepared)) => prepared,
        Ok(None) => return None,
        Err(error) => {
            say(&format!("limits of this machine are not measured, because they cannot be kept: {error:#}"));
            return None;
        }
    };
    let lock = match folder.lock() {
        // Another may have finished just now.
        Ok(Some(_)) if stamp.is_in(&folder) => return None,
        Ok(Some(lock)) => lock,
        Ok(None) => {
            say(&format!(
                "another process measures this machine's limits now; for this command {OTHERS_HOLD}"
            ));
            return None;
        }
        Err(error) => {
            say(&format!("limits of this machine are not measured: {error:#}"));
            return None;
        }
    };
    let interruption = Interruption::note().ok()?;
    let request = MachineRequest::within(ANSWER_MAX, is_simulator);
    let told = Session { nccl, windlass, folder: &folder, request, interruption: &interruption }.run();
    if let Some(signal) = interruption.look() {
        return Some(128 + signal);
    }
    match told {
        Told::Once(line) => {
            if let Err(error) = folder.write(&stamp.name, &stamp.text(&line)) {
                say(&format!("{line}; each run will measure again: {error:#}"));
            } else {
                say(&line);
            }
        }
        Told::Later(by, line) => {
            // Where that cannot be noted the next run tries again.
            let _ = stamp.put_off(&folder, by, &line);
            say(&line);
        }
    }
    drop(lock);
    // A signal until here was for this process.
    interruption.look().map(|signal| 128 + signal)
}

fn say(line: &str) {
    eprintln!("windlass: {line}");
}

/// What is said at the end.
enum Told {
    /// With a stamp: later runs do not measure.
    Once(String),
    /// Runs try again after so long.
    Later(Duration, String),
}

struct Session<'a> {
    nccl: &'a Path,
    windlass: &'a Path,
    folder: &'a Folder,
    request: MachineRequest,
    interruption: &'a Interruption,
}

impl Session<'_> {
    fn run(&self) -> Told {
        let began = Instant::now();
        let failed = |error: anyhow::Error| {
            Told::Later(
                AFTER_FAILURE,
                format!(
                    "limits of this machine could not be measured: {error:#}; {OTHERS_HOLD}, and runs try again in a day (`windlass tune` at once)"
                ),
            )
        };
        let machine = match self.machine() {
            Ok(machine) => machine,
            Err(error) => return failed(error),
        };
        match idle::judge(&machine.gpus.devices, machine.is_simulated()) {
            idle::Judgement::Idle => {}
            idle::Judgement::InUse(why) => {
                let line = format!("limits of this machine are not measured: {why}; {OTHERS_HOLD}");
                return Told::Later(WHILE_IN_USE, line);
            }
            idle::Judgement::Unknown => {
                return Told::Once(format!(
                    "limits of this machine are not measured, because NVML does not say whether its GPUs are idle; {OTHERS_HOLD} (`windlass tune` measures)"
                ));
            }
        }
        let effort = Effort::quick(machine.gpus.devices.len(), &machine).after(began.elapsed());
        if effort.numbers.is_empty() {
            return Told::Once("limits of this machine are not measured: the command sees one GPU".into());
        }
        say(
            "measuring up to which sizes Windlass is faster here: once, about 5 s (WINDLASS_CALIBRATE=off: never)",
        );
        let ending = Ending { deadline: Some(began + TIME_MAX), interruption: Some(self.interruption) };
        let found = measure(&machine, self.windlass, &effort, ending, |_, _| {});
        if let Some(why) = self.disturbance(&machine) {
            let line =
                format!("what was measured of this machine is left out: {why} meanwhile; {OTHERS_HOLD}");
            return Told::Later(WHILE_IN_USE, line);
        }
        match found.and_then(|found| self.keep(&found).map(|()| found)) {
            Ok(found) => Told::Once(closing(&found, began.elapsed(), self.folder.path())),
            Err(error) => failed(error),
        }
    }

    /// Whether another process has come to the GPUs: its own have left by now.
    fn disturbance(&self, measured: &Machine) -> Option<String> {
        idle::processes(&asking::loads(&measured.gpus.devices, ANSWER_MAX).ok()?)
    }

    fn machine(&self) -> Result<Machine> {
        Machine::prepare(self.request, None, || Ok(self.nccl.to_owned()))
    }

    fn keep(&self, found: &[OfRanks]) -> Result<()> {
        // What `windlass tune` has measured under the same circumstances took longer, and stays.
        found.iter().try_for_each(|found| self.folder.keep(found, HOW, Kept::Stays))
    }
}

fn closing(found: &[OfRanks], took: Duration, folder: &Path) -> String {
    if !found.iter().any(|found| found.is_native) {
        return "Windlass's kernels run no collectives here (`windlass doctor` and WINDLASS_LOG=info say why)".into();
    }
    let limits = written::line(found);
    let limits = if limits.is_empty() { "nothing within the time".to_owned() } else { limits };
    format!("measured this machine in {:.1} s: {limits}; kept in {}", took.as_secs_f64(), folder.display())
}
