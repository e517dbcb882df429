//! Facts and findings for people.

use super::facts::Facts;
use super::findings::{Finding, Level, Verdict};
use crate::asking::{Device, Gpus};
use crate::nccl::version_text;
use crate::text;
use anstyle::{AnsiColor, Style};
use std::fmt::Write;

/// The whole answer.
pub fn text(facts: &Facts, findings: &[Finding], verdict: &Verdict) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    match (&facts.windlass, &facts.windlass_problem) {
        (Some(path), _) => {
            let build = facts.build.as_deref().unwrap_or("of an unknown build");
            writeln!(&mut out, "Windlass {}\n  {build}", path.display())?;
        }
        (None, problem) => writeln!(&mut out, "Windlass: {}", problem.as_deref().unwrap_or("not found"))?,
    }
    writeln!(&mut out, "\nthe real NCCL, in the order of the search:")?;
    for looked in &facts.search {
        let result = looked.refused.as_deref().unwrap_or("TAKEN");
        writeln!(&mut out, "  {} ({}): {result}", looked.path.display(), looked.because)?;
    }
    if let Some(version) = facts.nccl.as_ref().and_then(|nccl| nccl.version) {
        writeln!(&mut out, "  version {}", version_text(version))?;
    }
    match (&facts.gpus, &facts.gpus_problem) {
        (Some(gpus), _) => write_gpus(&mut out, gpus)?,
        (None, problem) => writeln!(&mut out, "\nGPUs: {}", problem.as_deref().unwrap_or("not asked"))?,
    }
    if let Some(room) = facts.shared_memory {
        writeln!(&mut out, "\n/dev/shm: {} MiB, {} MiB free", room.total_bytes >> 20, room.free_bytes >> 20)?;
    }
    if !facts.variables.is_empty() {
        writeln!(&mut out, "\nenvironment:")?;
        for (name, value) in &facts.variables {
            writeln!(&mut out, "  {name}={value}")?;
        }
    }
    writeln!(&mut out, "\nfindings:")?;
    for finding in findings {
        let (level, style) = match finding.level {
            Level::Good => ("good   ", AnsiColor::Green.on_default()),
            Level::Note => ("note   ", AnsiColor::Cyan.on_default()),
            Level::Limited => ("LIMITED", AnsiColor::Yellow.on_default()),
            Level::Broken => ("BROKEN ", AnsiColor::Red.on_default()),
        };
        writeln!(&mut out, "  {style}{level}{style:#} {}", finding.what)?;
    }
    let bold = Style::new().bold();
    writeln!(&mut out, "\n{bold}verdict: {}{bold:#}\nnext: {}", verdict.verdict, verdict.next)?;
    Ok(out)
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
    let row = |(ordinal, device): (usize, &Device)| {
        let (major, minor) = device.compute_capability;
        vec![
            ordinal.to_string(),
            device.name.clone(),
            format!("{} MiB", device.memory_bytes >> 20),
            format!("{major}.{minor}"),
            yes_or_no(device.virtual_memory),
            yes_or_no(device.posix_handles),
            yes_or_no(device.fabric_handles),
            yes_or_no(device.multicast),
        ]
    };
    out.push_str(&text::table(&head, gpus.devices.iter().enumerate().map(row), &[0, 2]));
    if gpus.devices.len() < 2 {
        return Ok(());
    }
    writeln!(
        out,
        "\nfrom row to column: L NVLink, P peer access only, ? peer access by unknown link, - none"
    )?;
    let all = 0..gpus.devices.len();
    let head = std::iter::once(String::new()).chain(all.clone().map(|to| to.to_string())).collect();
    let row = |from: usize| {
        std::iter::once(from.to_string())
            .chain(all.clone().map(|to| link(gpus, from, to).to_owned()))
            .collect()
    };
    out.push_str(&text::table(&[], std::iter::once(head).chain(all.clone().map(row)), &[0]));
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
