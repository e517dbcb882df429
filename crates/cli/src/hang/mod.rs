//! `windlass hang`: which rank of this host the others wait for.

mod asked;
mod compare;
mod on_gpus;
mod sized;

use crate::text;
use anyhow::{Context, Result};
use clap::Args;
use std::path::Path;
use std::time::Duration;
use windlass_base::stats::calls::{ProcessCalls, processes};
use windlass_base::stats::files;
use windlass_base::stats::segment::Clock;

use compare::{Late, Member};

/// The exit code where a rank is named.
const NAMED: u8 = 3;
/// Who has gone on after so many seconds need not be looked at for longer.
const SOON: f64 = 0.5;

/// Options of `windlass hang`.
#[derive(Args)]
pub struct Options {
    /// A communicator hangs if its ranks have made no call for so many seconds; ranks that wait in kernels are looked at for as long
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0)]
    after: f64,
    /// What is found is printed as JSON, one object a line
    #[arg(long)]
    json: bool,
}

/// Compares the last calls of all processes, and what their kernels wait for, and says which rank has not come to which call.
pub fn run(options: &Options) -> Result<u8> {
    let (seen, found) = look(options.after);
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

/// All processes, and what is found. Ranks that wait on their GPUs are looked at again until they have waited for `after` seconds.
fn look(after: f64) -> (Vec<ProcessCalls>, Vec<Late>) {
    let seen = || processes(Path::new(files::FOLDER), &Clock::measure());
    let mut all = seen();
    let mut found = compare::compare(&all, after);
    let mut waiting = asked::waiting(&live(&compare::silent(&all, after, &found)));
    for pause in [SOON, after] {
        if waiting.is_empty() {
            return (all, found);
        }
        std::thread::sleep(Duration::try_from_secs_f64(pause).unwrap_or_default());
        all = seen();
        found = compare::compare(&all, after);
        let now = asked::waiting(&live(&compare::silent(&all, after, &found)));
        waiting.retain(|one| now.contains(one));
    }
    found.extend(on_gpus::compare(&compare::silent(&all, after, &found), &waiting, after));
    (all, found)
}

/// The ranks that can be asked.
fn live<'a>(communicators: &[Vec<Member<'a>>]) -> Vec<Member<'a>> {
    let lives = |member: &&Member<'_>| member.process.is_alive && member.of.is_live && member.of.token != 0;
    communicators.iter().flatten().filter(lives).copied().collect()
}
