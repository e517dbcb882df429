//! `windlass run`: runs a command over Windlass, or says why that would not take effect.

mod decision;

use crate::search::{Request, search};
use crate::{elf, installation, program, text};
use anyhow::{Context, Result};
use clap::Args;
use decision::{Decision, Library, Situation};
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

pub use decision::{environment_warnings, refuse_program};

/// Exit code of a refusal, as `env` and `timeout` have it: no code of the command itself.
pub const REFUSED: u8 = 125;

/// Options of `windlass run`.
#[derive(Args)]
pub struct Options {
    /// The real NCCL library [default: searched, see `windlass doctor`]
    #[arg(long, value_name = "PATH")]
    nccl: Option<PathBuf>,
    /// Only say what would be done
    #[arg(long)]
    check: bool,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// Runs the command in place of this process; returns only with an exit code for what did not happen.
pub fn run(options: &Options) -> Result<u8> {
    let (name, arguments) = options.command.split_first().context("no command")?;
    let Decision { refusals, warnings, set } = decision::decide(&situation(options, name));
    for warning in warnings {
        eprintln!("windlass: warning: {warning}");
    }
    if !refusals.is_empty() {
        for refusal in refusals {
            eprintln!("windlass: {refusal}");
        }
        eprintln!("windlass: not run, because Windlass would not take effect");
        return Ok(REFUSED);
    }
    if options.check {
        for (name, value) in set {
            text::print(format!("{name}={}\n", value.display()))?;
        }
        return Ok(0);
    }
    let failure = Command::new(name).args(arguments).envs(set).exec();
    eprintln!("windlass: cannot run {}: {failure}", name.display());
    Ok(if failure.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 })
}

fn situation(options: &Options, name: &OsString) -> Situation {
    let program = program::look_up(name).map_err(|error| format!("{error:#}"));
    let search = search(&Request { named: options.nccl.as_deref(), program: program.as_ref().ok() });
    let windlass = installation::windlass_library().and_then(|path| {
        let elf = elf::read(&path)?;
        Ok(Library { path, elf })
    });
    Situation {
        command: name.clone(),
        program,
        windlass: windlass.map_err(|error| format!("{error:#}")),
        searched: search.describe(),
        real: search.chosen.map(|(path, elf)| Library { path, elf }),
        environment: std::env::vars_os().collect(),
    }
}
