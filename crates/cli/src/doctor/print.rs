//! Facts and findings for people.

use super::facts::Facts;
use super::findings::{Finding, Level, Verdict};
use crate::asking::Gpus;
use crate::nccl::version_text;
use crate::text;
use anstyle::{AnsiColor, Style};
use std::fmt::Write;

/// The whole answer.
pub fn text(facts: &Facts, findings: &[Finding], verdict: &Verdict) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_all(&mut out, facts, findings, verdict);
    out
}

fn write_all(out: &mut String, facts: &Facts, findings: &[Finding], verdict: &Verdict) -> std::fmt::Result {
    match (&facts.windlass, &facts.windlass_problem) {
        (Some(path), _) => {
            let build = facts.build.as_deref().unwrap_or("of an unknown build");
            writeln!(out, "Windlass {}\n  {build}", path.display())?;
        }
        (None, problem) => writeln!(out, "Windlass: {}", problem.as_deref().unwrap_or("not found"))?,
    }
    writeln!(out, "\nthe real NCCL, in the order of the search:")?;
    for looked in &facts.search {
        let result = looked.refused.as_deref().unwrap_or("TAKEN");
        writeln!(out, "  {} ({}): {result}", looked.path.display(), looked.because)?;
    }
    if let Some(version) = facts.nccl.as_ref().and_then(|nccl| nccl.version) {
        writeln!(out, "  version {}", version_text(version))?;
    }
    match (&facts.gpus, &facts.gpus_problem) {
        (Some(gpus), _) => write_gpus(out, gpus)?,
        (None, problem) => writeln!(out, "\nGPUs: {}", problem.as_deref().unwrap_or("not asked"))?,
    }
    if let Some(room) = facts.shared_memory {
        writeln!(out, "\n/dev/shm: {} MiB, {} MiB free", room.total_bytes >> 20, room.free_bytes >> 20)?;
    }
    if !facts.variables.is_empty() {
        writeln!(out, "\nenvironment:")?;
        for (name, value) in &facts.variables {
            writeln!(out, "  {name}={value}")?;
        }
    }
    writeln!(out, "\nfindings:")?;
    for finding in findings {
        let (level, style) = match finding.level {
            Level::Good => ("good   ", AnsiColor::Green.on_default()),
            Level::Note => ("note   ", AnsiColor::Cyan.on_default()),
            Level::Limited => ("LIMITED", AnsiColor::Yellow.on_default()),
            Level::Broken => ("BROKEN ", AnsiColor::Red.on_default()),
        };
        writeln!(out, "  {style}{level}{style:#} {}", finding.what)?;
    }
    let bold = Style::new().bold();
    writeln!(out, "\n{bold}verdict: {}{bold:#}\nnext: {}", verdict.verdict, verdict.next)
}

fn write_gpus(out: &mut String, gpus: &Gpus) -> std::fmt::Result {
    let driver = gpus.driver.as_deref().unwrap_or("unknown");
    let (major, minor) = (gpus.cuda_version / 1000, gpus.cuda_version / 10 % 100);
    writeln!(out, "\nGPUs (driver {driver}, CUDA {major}.{minor}):")?;
    let head = [
        "",
        "name",
        "memory",
        "capability",
        "virtual memory",
        "descriptor handles",
        "CUDA fabric handles",
        "multicast",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for (ordinal, device) in gpus.devices.iter().enumerate() {
        let (major, minor) = device.compute_capability;
        let flags = [device.virtual_memory, device.posix_handles, device.fabric_handles, device.multicast];
        let mut line = vec![
            ordinal.to_string(),
            device.name.clone(),
            format!("{} MiB", device.memory_bytes >> 20),
            format!("{major}.{minor}"),
        ];
        line.extend(flags.map(yes_or_no));
        lines.push(line);
    }
    out.push_str(&text::table(&lines, &[0, 2]));
    if gpus.devices.len() < 2 {
        return Ok(());
    }
    writeln!(
        out,
        "\nfrom row to column: L NVLink, P peer access only, ? peer access by unknown link, - none"
    )?;
    let mut lines = vec![(0..gpus.devices.len()).map(|to| to.to_string()).collect::<Vec<_>>()];
    lines[0].insert(0, String::new());
    for from in 0..gpus.devices.len() {
        let mut line = vec![from.to_string()];
        line.extend((0..gpus.devices.len()).map(|to| link(gpus, from, to).to_owned()));
        lines.push(line);
    }
    out.push_str(&text::table(&lines, &[0]));
    Ok(())
}

fn yes_or_no(has: bool) -> String {
    if has { "yes" } else { "no" }.to_owned()
}

fn link(gpus: &Gpus, from: usize, to: usize) -> &'static str {
    let Some(pair) = gpus.pairs.iter().find(|pair| (pair.from, pair.to) == (from, to)) else { return "." };
    match (pair.peer_access, pair.nvlink) {
        (false, _) => "-",
        (true, Some(true)) => "L",
        (true, Some(false)) => "P",
        (true, None) => "?",
    }
}
