//! Finds the processes that a command has started, directly or not: the descendants of this process.

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Makes orphans of the command children of this process, so that they are still found.
pub fn keep_orphans() {
    // If this fails, only processes whose parents have ended are not found.
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
}

/// All living processes of the command.
pub fn look() -> BTreeSet<u32> {
    descendants(&processes(Path::new("/proc")), std::process::id())
}

/// A process as /proc describes it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Process {
    number: u32,
    parent: u32,
    has_ended: bool,
}

fn processes(folder: &Path) -> Vec<Process> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let numbered = entries.filter(|entry| entry.file_name().as_encoded_bytes()[0].is_ascii_digit());
    // A process that has ended meanwhile cannot be read.
    numbered.filter_map(|entry| parse(&std::fs::read_to_string(entry.path().join("stat")).ok()?)).collect()
}

/// Parses `number (name) state parent ...`, where the number of threads is the 18th word from the state on. The name may contain anything.
fn parse(stat: &str) -> Option<Process> {
    let (number, rest) = stat.split_once(" (")?;
    let (_, rest) = rest.rsplit_once(") ")?;
    let words: Vec<&str> = rest.split(' ').collect();
    // If only the main thread has ended, others are left.
    let has_ended = matches!(words[0], "Z" | "X") && words.get(17)?.parse::<u32>().ok()? <= 1;
    Some(Process { number: number.parse().ok()?, parent: words.get(1)?.parse().ok()?, has_ended })
}

fn descendants(processes: &[Process], of: u32) -> BTreeSet<u32> {
    let mut children: BTreeMap<u32, Vec<&Process>> = BTreeMap::new();
    for process in processes {
        children.entry(process.parent).or_default().push(process);
    }
    let mut found = BTreeSet::new();
    let mut waiting = vec![of];
    while let Some(parent) = waiting.pop() {
        for process in children.get(&parent).into_iter().flatten().filter(|process| !process.has_ended) {
            if found.insert(process.number) {
                waiting.push(process.number);
            }
        }
    }
    found
}

/// Sends a signal to each process.
pub fn signal(family: &BTreeSet<u32>, signal: Signal) {
    for process in family.iter().filter_map(|number| Pid::from_raw(*number as i32)) {
        // The process may have ended.
        let _ = kill_process(process, signal);
    }
}

/// Reaps orphans that have ended. The command itself is waited for elsewhere.
pub fn reap(command: Option<u32>) {
    let own = std::process::id();
    let ended = processes(Path::new("/proc")).into_iter();
    let orphans =
        ended.filter(|process| process.has_ended && process.parent == own && Some(process.number) != command);
    for orphan in orphans.filter_map(|process| Pid::from_raw(process.number as i32)) {
        let _ = waitpid(Some(orphan), WaitOptions::NOHANG);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names may have spaces and parentheses.
    #[test]
    fn parses() {
        let process = |number, parent, has_ended| Process { number, parent, has_ended };
        let stat = |begin: &str, threads: u32| {
            parse(&format!("{begin} 17 17 0 -1 4 0 0 0 0 1 1 0 0 20 0 {threads} 0"))
        };
        assert_eq!(stat("17 (a) b (c) S 5", 2), Some(process(17, 5, false)));
        assert_eq!(stat("18 (sh) Z 17", 0), Some(process(18, 17, true)));
        assert_eq!(stat("18 (main thread ended) Z 17", 3), Some(process(18, 17, false)));
        assert_eq!(parse("nonsense"), None);
    }

    /// Descendants are found, without processes of other parents and those that have ended.
    #[test]
    fn finds_descendants() {
        let processes =
            [(2, 1, false), (3, 2, false), (4, 3, false), (5, 3, true), (6, 1, false), (1, 0, false)]
                .map(|(number, parent, has_ended)| Process { number, parent, has_ended });
        assert_eq!(descendants(&processes, 2), BTreeSet::from([3, 4]));
        assert_eq!(descendants(&processes, 9), BTreeSet::new());
    }

    /// A process that this one starts is found.
    #[test]
    fn sees_children() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        assert!(look().contains(&child.id()));
        signal(&BTreeSet::from([child.id()]), Signal::KILL);
        assert!(!child.wait().unwrap().success());
    }
}
