//! `windlass run`: runs a command over Windlass, or tells why Windlass would not take effect.

mod decision;
mod frameworks;
mod loading;
mod preloads;
mod shared_memory;

use crate::installation::{self, SimulatorLibraries};
use crate::program::{self, Program};
use crate::search::{self, search};
use crate::{calibrate, text};
use anyhow::{Context, Result};
use clap::Args;
use decision::Situation;
use loading::Loading;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use windlass_base::config::{RUN, Switch, UNMEASURED, parse};
use windlass_base::stats::run::Run;

pub use decision::{Decision, Library, environment_warnings};
pub use frameworks::hint;

/// The exit code of a refusal, as of `env` and `timeout`. The command itself does not use it.
pub const REFUSED: u8 = 125;

/// Options of `windlass run`.
#[derive(Args)]
#[command(after_help = "\
The command gets LD_PRELOAD with Windlass, WINDLASS_NCCL with the real NCCL, WINDLASS_RUN, which names this run, and \
WINDLASS_UNMEASURED, which says why this machine's limits are not measured. Preloaded tracers of NCCL's calls stay in front. \
Windlass's options are environment variables too: `windlass options` prints them.

When the command ends, a line on standard error says how much of it ran in Windlass's kernels, or why nothing did. A command that a \
signal ends prints none: `windlass stats --last` does.

Before its first command on a machine with two or more idle GPUs, `windlass run` measures for about 5 seconds up to which sizes Windlass is \
faster than NCCL. The limits are kept in ~/.cache/windlass; `windlass tune --show` prints them.

With WINDLASS=off, in any of the words off, 0, no and false, the command runs as without Windlass.

Exit code: the command's own. 125: Windlass would not take effect, or an option is unknown, and the command was not run. 126: the command cannot be run. \
127: the command was not found.")]
pub struct Options {
    /// The real NCCL library, as a file or its folder [default: searched, as `windlass doctor` shows]
    #[arg(long, value_name = "PATH", conflicts_with = "simulator")]
    nccl: Option<PathBuf>,
    /// The command runs on the simulator of GPUs and NCCL, whose times say nothing about GPUs
    #[arg(long = "sim")]
    simulator: bool,
    /// The variables are printed, and the command is not run
    #[arg(long)]
    check: bool,
    /// This machine's limits are not measured before the command
    #[arg(long)]
    no_calibrate: bool,
    /// No line at the command's end, and none about the flags of vLLM and SGLang
    #[arg(long)]
    quiet: bool,
    /// The command to run, with its arguments
    #[arg(required = true, trailing_var_arg = true)]
    command: Vec<OsString>,
}

/// Runs the command in place of this process. Returns only if the command does not run, with the exit code.
pub fn run(options: &Options) -> Result<u8> {
    if parse(std::env::vars_os()).startup.windlass == Switch::Off && !options.check && !options.simulator {
        return Ok(run_as_it_is(&options.command));
    }
    let simulator = options.simulator.then(simulator).transpose()?;
    let nccl = simulator.as_ref().map(SimulatorLibraries::nccl).or_else(|| options.nccl.clone());
    let decision = match decide(&options.command, nccl.as_deref()) {
        Ok(decision) => decision,
        Err(code) => return Ok(code),
    };
    let (name, arguments) = options.command.split_first().context("no command")?;
    let mut set = decision.set;
    set.extend(simulator.map(|simulator| ("LD_LIBRARY_PATH", simulator.library_path())));
    if !options.quiet {
        hint(&options.command, |name| std::env::var(name).ok())
            .into_iter()
            .for_each(|hint| text::tell(format_args!("windlass: {hint}\n")));
    }
    if options.check {
        for (name, value) in set {
            text::print(format!("{name}={}\n", value.display()))?;
        }
        return Ok(0);
    }
    if options.no_calibrate {
        set.push((UNMEASURED, "--no-calibrate".into()));
    } else if let Some(code) = calibrate(&mut set) {
        return Ok(code);
    }
    let mut command = Command::new(name);
    command.args(arguments).envs(set).env_remove(RUN);
    if !options.quiet {
        // The exec keeps number and start of this process.
        command.envs(Run::of_this_process().map(|run| (RUN, run.to_string())));
    }
    Ok(failed(name, command.exec()))
}

/// With Windlass off nothing can stand in the way of the command.
fn run_as_it_is(command: &[OsString]) -> u8 {
    let Some((name, arguments)) = command.split_first() else { return REFUSED };
    if let Err(problem) = program::find_in_path(name) {
        return not_started(&problem);
    }
    failed(name, Command::new(name).args(arguments).exec())
}

fn not_started(problem: &program::NotRun) -> u8 {
    text::tell(format_args!("windlass: {problem}\nwindlass: nothing was started\n"));
    problem.code
}

fn failed(name: &OsStr, failure: std::io::Error) -> u8 {
    text::tell(format_args!("windlass: cannot run {}: {failure}\n", name.display()));
    if failure.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 }
}

/// The simulator's libraries, in a folder that stays: the command takes the place of this process.
fn simulator() -> Result<SimulatorLibraries> {
    let cache = parse(std::env::vars_os()).config.cache;
    let folder = cache
        .folder()
        .context("--sim: expected a folder of limits to lay the simulator out in, but WINDLASS_CACHE=off")?;
    SimulatorLibraries::lay_out_in(folder.join("simulator"))
}

/// Measures this machine if it is time to, and sets the variable that says why nothing is measured. Returns the exit code if the user
/// interrupts it.
pub fn calibrate(set: &mut Vec<(&str, OsString)>) -> Option<u8> {
    let (_, nccl) = set.iter().find(|(name, _)| *name == "WINDLASS_NCCL")?;
    match calibrate::before_command(Path::new(nccl), &installation::windlass_library().ok()?) {
        Ok(why) => {
            set.push((UNMEASURED, why.into()));
            None
        }
        Err(code) => Some(code),
    }
}

/// The reason why a program would not load this library as a preload.
pub fn refuse(program: &Program, windlass: Option<&Library>) -> Option<String> {
    let unloadable =
        |windlass: &Library| loading::refuse(program, windlass, &loading::look(program, &windlass.elf));
    decision::refuse_program(program).or_else(|| windlass.and_then(unloadable))
}

/// Names the libraries that LD_PRELOAD has already, and their places.
pub fn preloads(environment: &BTreeMap<OsString, OsString>, windlass: &Library) -> Option<String> {
    preloads::told(&preloads::look(environment, windlass))
}

/// Decides how to run a command over Windlass and the real NCCL; `nccl` may name that. If it cannot be run, prints why and returns the exit code.
pub fn decide(command: &[OsString], nccl: Option<&Path>) -> Result<Decision, u8> {
    let name = command.first().ok_or(REFUSED)?;
    if let Err(problem) = program::find_in_path(name) {
        return Err(not_started(&problem));
    }
    let decision = decision::decide(&situation(command, name, nccl));
    if decision.tell() { Err(REFUSED) } else { Ok(decision) }
}

fn situation(command: &[OsString], name: &OsString, nccl: Option<&Path>) -> Situation {
    let program = program::look_up(command).map_err(|error| format!("{error:#}"));
    let search = search(nccl, program.as_ref().ok());
    let windlass = Library::installed().map_err(|error| format!("{error:#}"));
    let environment = std::env::vars_os().collect();
    let preloads =
        windlass.as_ref().map(|windlass| preloads::look(&environment, windlass)).unwrap_or_default();
    let loading = match (&program, &windlass) {
        (Ok(program), Ok(windlass)) => loading::look(program, &windlass.elf),
        _ => Loading::default(),
    };
    Situation {
        command: name.clone(),
        program,
        windlass,
        loading,
        shared_memory: shared_memory::look(),
        not_found: format!(
            "{}; --sim needs none, and no GPU. Looked at:\n{}",
            search::not_found(&search.looked, " for this command"),
            search.describe()
        ),
        real: search.chosen.map(|(path, elf)| Library { path, elf }),
        preloads,
        environment,
    }
}
