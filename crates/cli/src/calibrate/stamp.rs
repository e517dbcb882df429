//! The stamp of a measured machine: a file whose name is a digest of facts that can be read quickly, without CUDA and NVML.
//!
//! It is finer than the [circumstances](windlass_transport::circumstances) of cells: if a fact has changed, the machine is measured
//! again, even if its cells still hold.

use crate::bench::record::date;
use crate::built;
use crate::limits::store::Folder;
use anyhow::Result;
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use windlass_base::config::nccl;
use windlass_bootstrap::negotiated::bytes::checksum;

const DRIVER: &str = "/proc/driver/nvidia/version";
const GPUS: &str = "/proc/driver/nvidia/gpus";

/// A stamp, whose file may or may not exist.
pub struct Stamp {
    /// The name of the stamp's file.
    pub name: String,
    facts: String,
}

impl Stamp {
    /// The stamp of the libraries with which a command would run.
    pub fn of(nccl: &Path, windlass: &Path, is_simulator: bool) -> Stamp {
        let visible =
            |name: &str| name == "CUDA_VISIBLE_DEVICES" || is_simulator && name.starts_with("WINDLASS_SIM_");
        let set: BTreeSet<String> = std::env::vars_os()
            .filter(|(name, _)| visible(&name.to_string_lossy()))
            .map(|(name, value)| format!("\n{}={}", name.to_string_lossy(), value.to_string_lossy()))
            .collect();
        Stamp::of_facts(
            [
                format!("{}\n", built::line()),
                file(nccl),
                file(windlass),
                std::fs::read_to_string(DRIVER).unwrap_or_default(),
                format!("{} GPUs\n", gpus_most()),
                gpus(),
                nccl::of_choice().join("\n"),
                set.into_iter().collect(),
            ]
            .concat(),
        )
    }

    fn of_facts(facts: String) -> Stamp {
        Stamp { name: format!("measured-{:016x}.txt", checksum(facts.as_bytes())), facts }
    }

    /// What was told when the stamp was made, if this user can read it, or when a delay began that is not over.
    pub fn line(&self, folder: &Folder) -> Option<String> {
        let later = || {
            let text = folder.text(&self.later()).filter(|text| is_ahead(text, SystemTime::now()))?;
            Some(text.split_once('\n').unwrap_or_default().1.to_owned())
        };
        let text = folder.text(&self.name).or_else(later)?;
        let told = text.lines().next().and_then(|first| first.split_once(' '));
        Some(told.unwrap_or_default().1.to_owned())
    }

    /// Notes that runs shall not measure again for this time.
    pub fn put_off(&self, folder: &Folder, by: Duration, line: &str) -> Result<()> {
        let until = SystemTime::now() + by;
        let seconds = until.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        folder.write(&self.later(), &format!("{seconds} {}\n{}", date(until), self.text(line)))
    }

    fn later(&self) -> String {
        format!("not-before-{}", self.name)
    }

    /// The text for people: the date, the result, and the facts on which the stamp depends.
    pub fn text(&self, line: &str) -> String {
        format!("{} {line}\n\n{}\n", date(SystemTime::now()), self.facts)
    }
}

/// Whether a note's time, seconds since 1970 in its first word, is in the future. An unreadable time is over.
fn is_ahead(text: &str, now: SystemTime) -> bool {
    let seconds = text.split_whitespace().next().and_then(|word| word.parse().ok());
    seconds.is_some_and(|seconds| UNIX_EPOCH + Duration::from_secs(seconds) > now)
}

/// The most GPUs that this machine may have, by its files.
pub fn gpus_most() -> usize {
    let listed = entries(Path::new(GPUS)).len();
    let is_gpu = |name: &&String| {
        name.strip_prefix("nvidia")
            .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    listed.max(entries(Path::new("/dev")).iter().filter(is_gpu).count())
}

fn entries(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// The model and UUID of each GPU.
fn gpus() -> String {
    let files =
        entries(Path::new(GPUS)).into_iter().map(|name| Path::new(GPUS).join(name).join("information"));
    files.map(|file| identity(&std::fs::read_to_string(file).unwrap_or_default())).collect()
}

fn identity(information: &str) -> String {
    let is_identity = |line: &&str| line.starts_with("Model:") || line.starts_with("GPU UUID:");
    information.lines().filter(is_identity).map(|line| format!("{line}\n")).collect()
}

fn file(path: &Path) -> String {
    let path_text = path.display();
    std::fs::metadata(path).map_or(format!("{path_text}\n"), |facts| {
        format!("{path_text} {} {}.{:09}\n", facts.len(), facts.mtime(), facts.mtime_nsec())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A GPU's identity is in the stamp, its state is not.
    #[test]
    fn identities() {
        let text =
            "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 160\nGPU UUID: \t GPU-1\nVideo BIOS: \t 96\n";
        assert_eq!(identity(text), "Model: \t\t NVIDIA H100 80GB HBM3\nGPU UUID: \t GPU-1\n");
        assert_eq!(identity(""), "");
    }

    /// Another file has another stamp, and so has the same file after a change.
    #[test]
    fn names() {
        let folder = tempfile::tempdir().unwrap();
        let nccl = folder.path().join("libnccl.so.2");
        let name = |nccl: &Path| Stamp::of(nccl, Path::new("/w"), false).name;
        let without = name(&nccl);
        std::fs::write(&nccl, "one").unwrap();
        let with = name(&nccl);
        assert_ne!(without, with);
        assert_eq!(with, name(&nccl));
        std::fs::write(&nccl, "three").unwrap();
        assert_ne!(name(&nccl), with);
        assert_eq!(with.len(), "measured-0123456789abcdef.txt".len());
        assert!(Stamp::of_facts("x".into()).text("done").ends_with("done\n\nx\n"));
    }
}
