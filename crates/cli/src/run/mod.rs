//! `windlass run`: runs a command over Windlass, or tells why Windlass would not take effect.

mod decision;
mod frameworks;
mod loading;
mod preloads;
mod shared_memory;

use crate::program::{self, Program};
use crate::search::{Request, search};
use crate::{calibrate, elf, installation, text};
use anyhow::{Context, Result};
use clap::Args;
use decision::Situation;
use loading::Loading;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use windlass_base::config::{RUN, UNMEASURED};
use windlass_base::stats::run::Run;

pub use decision::{Decision, Library, environment_warnings};

/// The exit code of a refusal, as of `env` and `timeout`. The command itself does not use it.
pub const REFUSED: u8 = 125;
const NOT_RUNNABLE: u8 = 126;
const NOT_FOUND: u8 = 127;

/// Options of `windlass run`.
#[derive(Args)]
#[command(after_help = "\
The command gets LD_PRELOAD with Windlass, WINDLASS_NCCL with the real NCCL, WINDLASS_RUN, which names this run, and \
WINDLASS_UNMEASURED, which says why this machine's limits are not measured. Preloaded tracers of NCCL's calls stay in front. \
Windlass's options are environment variables too (docs/options.md).

When the command ends, a line on standard error says how much of it ran in Windlass's kernels, or why nothing did. A command that a \
signal ends prints none: `windlass stats --last` does.

Before its first command on a machine with two or more idle GPUs, `windlass run` measures for about 5 seconds up to which sizes Windlass is \
faster than NCCL. The limits are kept in ~/.cache/windlass; `windlass tune --show` prints them.

Exit code: the command's own. 125: Windlass would not take effect, and the command was not run. 126: the command cannot be run. \
127: the command was not found.")]
pub struct Options {
    /// The real NCCL library, as a file or its folder [default: searched, as `windlass doctor` shows]
    #[arg(long, value_name = "PATH")]
    nccl: Option<PathBuf>,
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
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// Runs the command in place of this process. Returns only if the command does not run, with the exit code.
pub fn run(options: &Options) -> Result<u8> {
    let name = options.command.first().context("no command")?;
    if let Err(error) = program::find_in_path(name) {
        eprintln!("windlass: {error:#}");
        return Ok(NOT_FOUND);
    }
    let decision = decide(&options.command, options.nccl.as_deref())?;
    if decision.tell() {
        return Ok(REFUSED);
    }
    let (name, arguments) = options.command.split_first().context("no command")?;
    let mut set = decision.set;
    if !options.quiet {
        frameworks::hint(&options.command, |name| std::env::var(name).ok())
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
    let failure = command.exec();
    eprintln!("windlass: cannot run {}: {failure}", name.display());
    Ok(if failure.kind() == std::io::ErrorKind::NotFound { NOT_FOUND } else { NOT_RUNNABLE })
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

/// Decides whether to run a command over Windlass and the real NCCL; `nccl` may name that.
pub fn decide(command: &[OsString], nccl: Option<&Path>) -> Result<Decision> {
    let name = command.first().context("no command")?;
    Ok(decision::decide(&situation(command, name, nccl)))
}

fn situation(command: &[OsString], name: &OsString, nccl: Option<&Path>) -> Situation {
    let program = program::look_up(command).map_err(|error| format!("{error:#}"));
    let search = search(&Request { named: nccl, program: program.as_ref().ok() });
    let windlass = installation::windlass_library().and_then(|path| {
        let elf = elf::read(&path)?;
        Ok(Library { path, elf })
    });
    let windlass = windlass.map_err(|error| format!("{error:#}"));
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
        searched: search.describe(),
        real: search.chosen.map(|(path, elf)| Library { path, elf }),
        preloads,
        environment,
    }
}
