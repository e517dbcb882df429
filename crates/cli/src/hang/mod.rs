//! `windlass hang`: which rank of this host the others wait for.

mod compare;
mod sized;

use crate::text;
use anyhow::{Context, Result};
use clap::Args;
use std::path::Path;
use windlass_base::stats::calls::processes;
use windlass_base::stats::files;
use windlass_base::stats::segment::Clock;

/// The exit code where a rank is named.
const NAMED: u8 = 3;

/// Options of `windlass hang`.
#[derive(Args)]
pub struct Options {
    /// A communicator hangs if its ranks have made no call for so many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0)]
    after: f64,
    /// What is found is printed as JSON, one object a line
    #[arg(long)]
    json: bool,
}

/// Compares the last calls of all processes, and says which rank has not come to which call.
pub fn run(options: &Options) -> Result<u8> {
    let seen = processes(Path::new(files::FOLDER), &Clock::measure());
    let found = compare::compare(&seen, options.after);
    if options.json {
        for one in &found {
            text::print(serde_json::to_string(one).context("cannot write a finding as JSON")? + "\n")?;
        }
    } else if found.is_empty() {
        let alive = seen.iter().filter(|process| process.is_alive).count();
        text::print(format!("no rank is late, of {alive} processes with communicators\n"))?;
    } else {
        found
            .iter()
            .try_for_each(|one| text::print(format!("communicator {}: {}\n", one.communicator, one.text)))?;
    }
    Ok(if found.is_empty() { 0 } else { NAMED })
}
