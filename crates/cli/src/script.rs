//! What a command says about the program that it starts: the first lines of a script, and the words after `env`.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Bytes of a script's beginning in which its interpreter is looked for.
const BEGINNING_MAX: u64 = 2048;

/// The interpreter of a script: the program and its argument.
pub fn interpreter(path: &Path) -> Option<(PathBuf, Option<String>)> {
    interpreter_of(&beginning(path)?)
}

/// Whether a file is no program of the kernel's, but text.
pub fn is_text(path: &Path) -> bool {
    beginning(path).is_some_and(|beginning| !beginning.contains(&0))
}

fn beginning(path: &Path) -> Option<Vec<u8>> {
    let mut beginning = Vec::new();
    File::open(path).ok()?.take(BEGINNING_MAX).read_to_end(&mut beginning).ok()?;
    Some(beginning)
}

fn interpreter_of(beginning: &[u8]) -> Option<(PathBuf, Option<String>)> {
    let mut lines = beginning.strip_prefix(b"#!")?.split(|byte| *byte == b'\n');
    let line = String::from_utf8_lossy(lines.next()?);
    let (program, argument) = match line.trim().split_once(char::is_whitespace) {
        Some((program, argument)) => (program, Some(argument.trim().to_owned())),
        None => (line.trim(), None),
    };
    if program.is_empty() {
        return None;
    }
    if let Some(python) = lines.next().filter(|_| program.ends_with("sh")).and_then(behind_a_shell) {
        return Some((python, None));
    }
    Some((PathBuf::from(program), argument.filter(|text| !text.is_empty())))
}

/// The Python of a script that pip wrote for one whose path is too long for a first line, or has a space: its second line is
/// `'''exec' "/a path/python" "$0" "$@"`, which the shell runs, and Python takes for the beginning of a text.
fn behind_a_shell(line: &[u8]) -> Option<PathBuf> {
    let rest = line.strip_prefix(b"'''exec' ")?;
    let python = match rest.strip_prefix(b"\"") {
        Some(quoted) => quoted.split(|byte| *byte == b'"').next()?,
        None => rest.split(|byte| *byte == b' ').next()?,
    };
    python.starts_with(b"/").then(|| PathBuf::from(OsStr::from_bytes(python)))
}

/// The program that a line like `-S python3 -u` makes `env` run.
pub fn env_program(arguments: &str) -> &OsStr {
    let mut words = arguments.split_whitespace().filter(|word| !word.starts_with('-') && !word.contains('='));
    OsStr::new(words.next().unwrap_or_default())
}

/// What `env` does before it starts a command.
#[derive(Debug, Default, PartialEq)]
pub struct Env<'a> {
    /// The command that it starts; empty where that is not known.
    pub command: &'a [OsString],
    /// The argument that takes LD_PRELOAD away.
    pub clears: Option<String>,
}

/// Reads the words after `env`.
pub fn env(arguments: &[OsString]) -> Env<'_> {
    let mut found = Env::default();
    let mut changes_path = false;
    let mut place = 0;
    let mut options_end = false;
    while let Some(word) = arguments.get(place) {
        let text = word.to_string_lossy();
        let is_option = !options_end && text.starts_with('-');
        let (steps, clears) = match &*text {
            "--" if !options_end => {
                options_end = true;
                (1, None)
            }
            "-" | "-i" | "--ignore-environment" if is_option => (1, Some(text.to_string())),
            "-0" | "--null" | "-v" | "--debug" if is_option => (1, None),
            "-u" | "--unset" if is_option => {
                let name = arguments.get(place + 1).filter(|name| *name == "LD_PRELOAD");
                (2, name.map(|_| format!("{text} LD_PRELOAD")))
            }
            "-C" | "--chdir" if is_option => (2, None),
            unset if is_option && unset.starts_with("--unset=") => {
                (1, (unset == "--unset=LD_PRELOAD").then(|| unset.to_owned()))
            }
            // Its own way to split words, and whatever newer versions have.
            _ if is_option => return found,
            assignment if assignment.contains('=') => {
                options_end = true;
                changes_path |= assignment.starts_with("PATH=");
                (1, assignment.starts_with("LD_PRELOAD=").then(|| assignment.to_owned()))
            }
            _ => break,
        };
        found.clears = clears.or(found.clears);
        place += steps;
    }
    let command = arguments.get(place..).unwrap_or_default();
    // By another PATH the name may mean another program.
    let is_known = command.first().is_some_and(|name| !changes_path || name.as_bytes().contains(&b'/'));
    found.command = if is_known { command } else { &[] };
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Interpreter lines with and without an argument.
    #[test]
    fn interpreter_lines() {
        assert_eq!(interpreter_of(b"#!/bin/sh\nexit"), Some(("/bin/sh".into(), None)));
        assert_eq!(
            interpreter_of(b"#! /usr/bin/env python3 \nimport"),
            Some(("/usr/bin/env".into(), Some("python3".into())))
        );
        assert_eq!(interpreter_of(b"\x7fELF"), None);
    }

    /// Scripts of pip whose Python has a long path, or one with spaces.
    #[test]
    fn python_behind_a_shell() {
        let python = |line: &str| interpreter_of(format!("#!/bin/sh\n{line}\n' '''\n").as_bytes()).unwrap().0;
        assert_eq!(python("'''exec' /long/bin/python3.12 \"$0\" \"$@\""), Path::new("/long/bin/python3.12"));
        assert_eq!(
            python("'''exec' \"/my place/bin/python\" \"$0\" \"$@\""),
            Path::new("/my place/bin/python")
        );
        assert_eq!(python("exec python3 \"$0\""), Path::new("/bin/sh"));
    }

    /// Lines of `env` with options and variables.
    #[test]
    fn env_lines() {
        assert_eq!(env_program("python3"), "python3");
        assert_eq!(env_program("-S A=1 python3 -u"), "python3");
    }

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    /// Options and variables are passed over, to the command.
    #[test]
    fn env_commands() {
        for (line, command) in [
            ("python3 train.py", "python3 train.py"),
            ("A=1 B=2 python3 -u train.py", "python3 -u train.py"),
            ("-u A -C /tmp --unset=B -- A=1 python3", "python3"),
            ("PATH=/x python3", ""),
            ("PATH=/x /x/python3", "/x/python3"),
            ("-S python3", ""),
            ("-u", ""),
            ("", ""),
        ] {
            let arguments = words(line);
            assert_eq!(env(&arguments), Env { command: &words(command), clears: None }, "{line}");
        }
    }

    /// What takes the preload away again is told, by its words.
    #[test]
    fn env_without_preload() {
        for (line, clears) in [
            ("-i python3", "-i"),
            ("- python3", "-"),
            ("-u LD_PRELOAD python3", "-u LD_PRELOAD"),
            ("--unset=LD_PRELOAD python3", "--unset=LD_PRELOAD"),
            ("LD_PRELOAD= python3", "LD_PRELOAD="),
        ] {
            assert_eq!(env(&words(line)).clears.as_deref(), Some(clears), "{line}");
        }
    }
}
