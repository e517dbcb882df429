//! The program behind a command: through scripts to the executable that the kernel loads.

use crate::elf::{self, Elf};
use crate::script;
use anyhow::{Context, Result, bail};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// A script may name a script as its interpreter; Linux follows four.
const INTERPRETERS_MAX: usize = 5;

/// Why a command cannot be run.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{what}")]
pub struct NotRun {
    /// The exit code of a shell: 127 if it was not found, else 126.
    pub code: u8,
    what: String,
}

/// A command, looked up.
#[derive(Clone, Debug)]
pub struct Program {
    /// The executable that is loaded in the end: the file itself, or the interpreter of a script.
    pub executable: PathBuf,
    pub elf: Elf,
    /// The Python that runs, if a name on the way says so.
    pub python: Option<PathBuf>,
    /// Why the loader would ignore LD_PRELOAD, if it would.
    pub privilege: Option<String>,
    /// The argument by which `env` starts it without LD_PRELOAD.
    pub cleared_by: Option<String>,
}

/// Looks up a command as a shell does, and behind `env` the command that this starts.
pub fn look_up(command: &[OsString]) -> Result<Program> {
    let (name, arguments) = command.split_first().context("no command")?;
    let program = follow(name)?;
    if Path::new(name).file_name() != Some(OsStr::new("env")) {
        return Ok(program);
    }
    let env = script::env(arguments);
    // What is not found that way `env` itself shall say.
    let started = if env.command.is_empty() { None } else { look_up(env.command).ok() };
    let started = started.unwrap_or(program);
    Ok(Program { cleared_by: env.clears.or(started.cleared_by), ..started })
}

/// From a name through scripts to the executable.
fn follow(name: &OsStr) -> Result<Program> {
    let file = find_in_path(name)?;
    let mut python = None;
    let mut executable = file.clone();
    for _ in 0..INTERPRETERS_MAX {
        if python.is_none() && is_python(&executable) {
            python = Some(executable.clone());
        }
        let Some((interpreter, argument)) = script::interpreter(&executable) else {
            if script::is_text(&executable) {
                // As shells and `execvp` run a script without a first line.
                executable = "/bin/sh".into();
                continue;
            }
            let elf = elf::read(&executable)?;
            let privilege = privilege(&executable)?;
            return Ok(Program { executable, elf, python, privilege, cleared_by: None });
        };
        executable = match argument {
            Some(program) if interpreter.ends_with("env") => find_in_path(script::env_program(&program))?,
            _ => interpreter,
        };
    }
    bail!("{} has interpreters that are scripts, more than {INTERPRETERS_MAX} deep", file.display())
}

/// The file that a command name means.
pub fn find_in_path(command: &OsStr) -> Result<PathBuf, NotRun> {
    let name = Path::new(command).display();
    let not_run = |code: u8, what: String| NotRun { code, what };
    if !command.as_bytes().contains(&b'/') {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let found =
            std::env::split_paths(&path).map(|folder| folder.join(command)).find(|file| is_executable(file));
        return found.ok_or_else(|| not_run(127, format!("{name}: command not found in PATH")));
    }
    match std::path::absolute(command).ok().filter(|file| file.exists()) {
        None => Err(not_run(127, format!("no such file: {name}"))),
        Some(folder) if folder.is_dir() => {
            Err(not_run(126, format!("{name} is a folder, expected a program")))
        }
        Some(file) if !is_executable(&file) => {
            Err(not_run(126, format!("{name} is not executable (chmod +x {name})")))
        }
        Some(file) => Ok(file),
    }
}

fn is_executable(file: &Path) -> bool {
    std::fs::metadata(file).is_ok_and(|facts| facts.is_file() && facts.permissions().mode() & 0o111 != 0)
}

/// Whether a file name is one of Python's: `python`, `python3`, `python3.13t`, `pypy3`.
fn is_python(file: &Path) -> bool {
    let name = file.file_name().map(OsStr::to_string_lossy).unwrap_or_default();
    let rest = name.strip_prefix("python").or_else(|| name.strip_prefix("pypy"));
    rest.is_some_and(|rest| rest.chars().all(|letter| "0123456789.t".contains(letter)))
}

/// The loader ignores LD_PRELOAD (but for libraries in its own folders) where the program gains rights.
fn privilege(executable: &Path) -> Result<Option<String>> {
    let facts =
        std::fs::metadata(executable).with_context(|| format!("cannot read {}", executable.display()))?;
    let (user, group) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let mode = facts.permissions().mode();
    if mode & 0o4000 != 0 && facts.uid() != user {
        return Ok(Some(format!("it is set-user-id to user {}", facts.uid())));
    }
    if mode & 0o2000 != 0 && mode & 0o010 != 0 && facts.gid() != group {
        return Ok(Some(format!("it is set-group-id to group {}", facts.gid())));
    }
    if user != 0 && has_capabilities(executable) {
        return Ok(Some("it has file capabilities".into()));
    }
    Ok(None)
}

fn has_capabilities(executable: &Path) -> bool {
    // No room is given: only the length is asked for.
    rustix::fs::getxattr(executable, "security.capability", &mut [0_u8; 0]).is_ok_and(|bytes| bytes > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of Pythons and of programs that only begin like one.
    #[test]
    fn pythons() {
        for (name, expected) in [
            ("/usr/bin/python3", true),
            ("/x/python3.13t", true),
            ("pypy3", true),
            ("/usr/bin/python3-config", false),
            ("/usr/bin/torchrun", false),
        ] {
            assert_eq!(is_python(Path::new(name)), expected, "{name}");
        }
    }

    fn look_up_words(words: &[&str]) -> Result<Program> {
        look_up(&words.iter().map(OsString::from).collect::<Vec<_>>())
    }

    /// Scripts lead to their interpreter, here the shell.
    #[test]
    fn follows_scripts() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("python3");
        std::fs::write(&script, "#!/usr/bin/env sh\n").unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
        let script = script.display().to_string();
        for command in [&[&*script][..], &["env", "A=1", &script, "train.py"]] {
            let program = look_up_words(command).unwrap();
            assert!(program.executable.ends_with("sh"), "{program:?}");
            assert_eq!(program.python.as_deref(), Some(Path::new(&script)));
            assert_eq!((program.privilege, program.cleared_by), (None, None));
        }
    }

    /// `env` may take the preload away; a command that is not there is left to it.
    #[test]
    fn through_env() {
        let cleared = look_up_words(&["env", "-i", "sh"]).unwrap();
        assert!(cleared.executable.ends_with("sh"), "{cleared:?}");
        assert_eq!(cleared.cleared_by.as_deref(), Some("-i"));
        assert!(look_up_words(&["env", "no-such-command"]).unwrap().executable.ends_with("env"));
    }

    /// What is not there is named.
    #[test]
    fn missing() {
        let error = look_up_words(&["no-such-command"]).unwrap_err().to_string();
        assert!(error.contains("no-such-command: command not found in PATH"), "{error}");
        assert!(look_up_words(&["/no/such/file"]).unwrap_err().to_string().contains("/no/such/file"));
    }
}
