//! Man pages and completions for shells, from the description of the command.

use crate::text;
use anyhow::{Context, Result};
use clap::{Args, CommandFactory};
use clap_complete::Shell;
use std::path::{Path, PathBuf};

/// Options of `windlass completions`.
#[derive(Args)]
pub struct Completions {
    /// The shell
    shell: Shell,
}

/// Options of `windlass manual`.
#[derive(Args)]
pub struct Manual {
    /// The folder, such as /usr/local/share
    folder: PathBuf,
}

/// Prints the completions of a shell.
pub fn completions(Completions { shell }: &Completions) -> Result<()> {
    text::print(of_shell(*shell))
}

fn of_shell(shell: Shell) -> String {
    let mut out = Vec::new();
    clap_complete::generate(shell, &mut crate::Command::command(), "windlass", &mut out);
    String::from_utf8_lossy(&out).into_owned()
}

/// Writes all man pages and completions to where shells look below a folder.
pub fn write(Manual { folder }: &Manual) -> Result<()> {
    let man = folder.join("man/man1");
    let cannot = |path: &Path| format!("cannot write {}", path.display());
    std::fs::create_dir_all(&man).with_context(|| cannot(&man))?;
    clap_mangen::generate_to(crate::Command::command(), &man).with_context(|| cannot(&man))?;
    for (shell, path) in [
        (Shell::Bash, "bash-completion/completions/windlass"),
        (Shell::Zsh, "zsh/site-functions/_windlass"),
        (Shell::Fish, "fish/vendor_completions.d/windlass.fish"),
    ] {
        let file = folder.join(path);
        let made = file.parent().map_or(Ok(()), std::fs::create_dir_all);
        made.and_then(|()| std::fs::write(&file, of_shell(shell))).with_context(|| cannot(&file))?;
    }
    Ok(())
}
