//! The program behind a command: through scripts to the executable that the kernel loads.

use crate::elf::{self, Elf};
use anyhow::{Context, Result, bail};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// A script may name a script as its interpreter; Linux follows four.
const INTERPRETERS_MAX: usize = 5;

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
}

/// Looks up a command as a shell does.
pub fn look_up(command: &OsStr) -> Result<Program> {
    let file = find_in_path(command)?;
    let mut python = None;
    let mut executable = file.clone();
    for _ in 0..INTERPRETERS_MAX {
        if python.is_none() && is_python(&executable) {
            python = Some(executable.clone());
        }
        let Some((interpreter, argument)) = elf::script_interpreter(&executable) else {
            let elf = elf::read(&executable)?;
            let privilege = privilege(&executable)?;
            return Ok(Program { executable, elf, python, privilege });
        };
        executable = match argument {
            Some(program) if interpreter.ends_with("env") => find_in_path(env_program(&program))?,
            _ => interpreter,
        };
    }
    bail!("{} has interpreters that are scripts, more than {INTERPRETERS_MAX} deep", file.display())
}

/// The program that a line like `-S python3 -u` makes `env` run.
fn env_program(arguments: &str) -> &OsStr {
    let mut words = arguments.split_whitespace().filter(|word| !word.starts_with('-') && !word.contains('='));
    OsStr::new(words.next().unwrap_or_default())
}

/// The file that a command name means.
pub fn find_in_path(command: &OsStr) -> Result<PathBuf> {
    if command.as_bytes().contains(&b'/') {
        return std::path::absolute(command)
            .ok()
            .filter(|file| file.exists())
            .with_context(|| format!("no such file: {}", Path::new(command).display()));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|folder| folder.join(command))
        .find(|file| is_executable(file))
        .with_context(|| format!("{}: command not found in PATH", Path::new(command).display()))
}

fn is_executable(file: &Path) -> bool {
    std::fs::metadata(file).is_ok_and(|facts| facts.is_file() && facts.permissions().mode() & 0o111 != 0)
}

/// Whether a file name is one of Python's: `python`, `python3`, `python3.13t`, `pypy3`.
fn is_python(file: &Path) -> bool {
    let name = file.file_name().map(OsStr::to_string_lossy).unwrap_or_default();
    let rest = name.strip_prefix("python").or_else(|| name.strip_prefix("pypy"));
    rest.is_some_and(|rest| {
        rest.chars().all(|letter| letter.is_ascii_digit() || letter == '.' || letter == 't')
    })
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

    /// `env` lines with options and variables.
    #[test]
    fn env_lines() {
        assert_eq!(env_program("python3"), "python3");
        assert_eq!(env_program("-S A=1 python3 -u"), "python3");
    }

    /// Scripts lead to their interpreter, here the shell.
    #[test]
    fn follows_scripts() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("python3");
        std::fs::write(&script, "#!/usr/bin/env sh\n").unwrap();
        let program = look_up(script.as_os_str()).unwrap();
        assert!(program.executable.ends_with("sh"), "{program:?}");
        assert_eq!(program.python.as_deref(), Some(script.as_path()));
        assert_eq!(program.privilege, None);
    }

    /// What is not there is named.
    #[test]
    fn missing() {
        let error = look_up(OsStr::new("no-such-command")).unwrap_err().to_string();
        assert!(error.contains("no-such-command: command not found in PATH"), "{error}");
        assert!(look_up(OsStr::new("/no/such/file")).unwrap_err().to_string().contains("/no/such/file"));
    }
}
