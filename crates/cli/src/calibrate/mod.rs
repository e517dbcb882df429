//! Measures this machine's limits once, before `windlass run` starts a command, and keeps them.
//!
//! If a stamp says that the machine was measured, nothing else is done. Otherwise child processes measure on the GPUs that the command will
//! see, if these are idle; this process never uses CUDA. A failure is told in one line, and the command runs.

mod idle;
pub mod stamp;
mod whether;

use crate::bench::adaptive::Effort;
use crate::limits::measure::{OfRanks, measure};
use crate::limits::store::{Folder, Kept};
use crate::limits::written;
use crate::machine::{Machine, MachineRequest};
use crate::{asking, installation, interruption};
use anyhow::Context;
use stamp::Stamp;
use std::path::Path;
use std::time::{Duration, Instant};
use windlass_base::config::{self, Parsed};

/// The most time from the first question to the driver; then all children are killed.
const TIME_MAX: Duration = Duration::from_secs(15);

/// The most time for the driver's answer: an unused driver takes seconds.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// If GPUs are in use, runs ask again only after this time, since asking the driver takes a second or more.
const WHILE_IN_USE: Duration = Duration::from_secs(15 * 60);

/// After a failed measurement, runs measure again only after this time.
const AFTER_FAILURE: Duration = Duration::from_secs(24 * 3600);

/// How the cells' lines name this measurement.
const HOW: &str = "run";

const NOT_KEPT: &str = "limits of this machine are not measured, because they cannot be kept";

/// Which limits hold if nothing is measured.
const OTHERS_HOLD: &str = "the built-in ones hold";

/// Measures if it is time to. Returns why nothing is measured, empty if it is; or an exit code if the command must not run, because this
/// process was asked to end.
pub fn before_command(nccl: &Path, windlass: &Path) -> Result<String, u8> {
    let not = |line: String| {
        say(&line);
        Ok(why_not(&line).to_owned())
    };
    let (folder, stamp) = match due(nccl, windlass, say) {
        Ok(due) => due,
        Err(why) => return Ok(why),
    };
    if let Err(error) = folder.prepare() {
        return not(format!("{NOT_KEPT}: {error:#}"));
    }
    let lock = match folder.lock() {
        // Another process may have finished just now.
        Ok(Some(_)) if let Some(line) = stamp.line(&folder) => return Ok(why_not(&line).to_owned()),
        Ok(Some(lock)) => lock,
        Ok(None) => {
            let line =
                format!("another process measures this machine's limits now; for this command {OTHERS_HOLD}");
            return not(line);
        }
        Err(error) => return not(format!("limits of this machine are not measured: {error:#}")),
    };
    if interruption::note().is_err() {
        return Ok(String::new());
    }
    let request = MachineRequest::within(ANSWER_MAX, installation::is_simulator(nccl));
    let told = measure_once(nccl, windlass, &folder, request);
    if let Some(signal) = interruption::look() {
        return Err(interruption::exit_code(signal));
    }
    let noted = match &told {
        Told::Once(line) => folder.write(&stamp.name, &stamp.text(line)),
        // If the delay cannot be noted, the next run tries again.
        Told::Later(by, line) => stamp.put_off(&folder, *by, line).or(Ok(())),
    };
    let (Told::Once(line) | Told::Later(_, line)) = told;
    match noted {
        Ok(()) => say(&line),
        Err(error) => say(&format!("{line}; each run will measure again: {error:#}")),
    }
    drop(lock);
    // A signal up to here was meant for this process.
    interruption::look()
        .map_or_else(|| Ok(why_not(&line).to_owned()), |signal| Err(interruption::exit_code(signal)))
}

/// Where to keep what a run would measure now; or why it would not, as far as that is known without a GPU, empty if all is measured. `tell`
/// gets what the user does not expect.
pub fn due(nccl: &Path, windlass: &Path, tell: impl Fn(&str)) -> Result<(Folder, Stamp), String> {
    let Parsed { startup, config, .. } = config::parse(std::env::vars_os());
    let is_simulator = installation::is_simulator(nccl);
    let variable = |name: &str| std::env::var(name).ok();
    if let Some(why) = whether::decide(&startup, &config, is_simulator, variable, stamp::gpus_most) {
        return Err(why.into());
    }
    let folder = Folder::of(&config).and_then(|folder| folder.context("the cache is off"));
    let folder = folder.map_err(|error| {
        let line = format!("{NOT_KEPT}: {error:#}");
        tell(&line);
        why_not(&line).to_owned()
    })?;
    let stamp = Stamp::of(nccl, windlass, is_simulator);
    match stamp.line(&folder) {
        Some(line) => Err(why_not(&line).to_owned()),
        None => Ok((folder, stamp)),
    }
}

/// Why nothing was measured, of a line that was told; empty if something was.
fn why_not(line: &str) -> &str {
    let is_not = ["not measured", "not be measured", "left out", "another process"];
    if !is_not.iter().any(|words| line.contains(words)) {
        return "";
    }
    let why = line.split_once(": ").map_or(line, |(_, why)| why);
    why.split(';').next().unwrap_or(why)
}

fn say(line: &str) {
    say!("windlass: {line}");
}

/// What to report at the end.
enum Told {
    /// The machine gets a stamp: later runs do not measure.
    Once(String),
    /// Runs measure again after this time.
    Later(Duration, String),
}

fn measure_once(nccl: &Path, windlass: &Path, folder: &Folder, request: MachineRequest) -> Told {
    let began = Instant::now();
    let failed = |error: anyhow::Error| {
        Told::Later(
            AFTER_FAILURE,
            format!(
                "limits of this machine could not be measured: {error:#}; {OTHERS_HOLD}, and runs try again in a day (`windlass tune` at once)"
            ),
        )
    };
    let machine = match Machine::prepare(request, None, || Ok(nccl.to_owned())) {
        Ok(machine) => machine,
        Err(error) => return failed(error),
    };
    let devices = &machine.gpus.devices;
    match idle::judge(devices, machine.is_simulated()) {
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
    let effort = Effort::quick(devices.len(), &machine).after(began.elapsed());
    if effort.numbers.is_empty() {
        return Told::Once(format!("limits of this machine are not measured: {}", whether::ONE_GPU));
    }
    say("measuring up to which sizes Windlass is faster here: once, about 5 s (--no-calibrate: never)");
    let found = measure(&machine, windlass, &effort, Some(began + TIME_MAX), |_, _| {});
    // This command's own processes have ended.
    let loads = asking::loads(devices, ANSWER_MAX).unwrap_or_default();
    if let Some(why) = idle::processes(&loads) {
        let line = format!("what was measured of this machine is left out: {why} meanwhile; {OTHERS_HOLD}");
        return Told::Later(WHILE_IN_USE, line);
    }
    // Limits that `windlass tune` has measured under the same circumstances took longer to measure, and stay.
    let keep = |found: &Vec<OfRanks>| found.iter().try_for_each(|found| folder.keep(found, HOW, Kept::Stays));
    match found.and_then(|found| keep(&found).map(|()| found)) {
        Ok(found) => Told::Once(closing(&found, began.elapsed(), folder.path())),
        Err(error) => failed(error),
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
