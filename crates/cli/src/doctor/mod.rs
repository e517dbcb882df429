//! `windlass doctor`: what would load and why, what this machine can do, and what stands in the way, also of programs
//! that run already.

mod facts;
mod findings;
mod print;
mod running;

use crate::installation::SimulatorLibraries;
use crate::text;
use anyhow::Result;
use clap::Args;
use std::ffi::OsString;
use std::path::PathBuf;

/// Options of `windlass doctor`.
#[derive(Args)]
#[command(
    after_help = "Exit code: 0: Windlass works. 1: Windlass would not take effect, or NCCL would run every call. 2: unknown options. 3: Windlass works, but is limited."
)]
pub struct Options {
    /// Facts and findings are printed as one JSON object
    #[arg(long)]
    json: bool,
    /// The real NCCL library, as a file or its folder [default: searched, and the search is shown]
    #[arg(long, value_name = "PATH", conflicts_with = "simulator")]
    nccl: Option<PathBuf>,
    /// The simulator of GPUs and NCCL is checked, not this machine
    #[arg(long = "sim")]
    simulator: bool,
    /// A command that is checked as `windlass run` would check it; it is not run
    #[arg(trailing_var_arg = true)]
    command: Vec<OsString>,
}

/// Looks, judges and tells; returns the exit code.
pub fn run(options: &Options) -> Result<u8> {
    let simulator = options.simulator.then(SimulatorLibraries::lay_out).transpose()?;
    let nccl = simulator.as_ref().map(SimulatorLibraries::nccl).or_else(|| options.nccl.clone());
    let library_path = simulator.as_ref().map(SimulatorLibraries::library_path);
    let facts = facts::gather(nccl.as_deref(), library_path.as_deref(), &options.command);
    let findings = findings::judge(&facts);
    let verdict = findings::verdict(&facts, &findings);
    if options.json {
        let object = serde_json::json!({"facts": facts, "findings": findings, "verdict": verdict});
        text::print(serde_json::to_string_pretty(&object)? + "\n")?;
    } else {
        text::print(print::text(&facts, &findings, &verdict)?)?;
    }
    Ok(verdict.exit_code)
}
