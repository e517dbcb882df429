//! Which commit is checked out: a part of the build scripts of the library and of the command, which tell it as their own.
//!
//! Read from the files of git: a build needs no git, and a `.git` of a folder further out is not this tree's. Changes that are not
//! committed are not seen.

use std::path::{Path, PathBuf};

/// Gives the commit to the code as the variable `WINDLASS_COMMIT`. A build of sources without `.git` may get it by this very variable.
pub fn tell(repository: &Path) {
    println!("cargo::rerun-if-env-changed=WINDLASS_COMMIT");
    let named = std::env::var("WINDLASS_COMMIT").ok().filter(|named| !named.is_empty());
    let commit = named.or_else(|| checked_out(repository)).unwrap_or_else(|| "unknown".into());
    println!("cargo::rustc-env=WINDLASS_COMMIT={commit}");
}

fn checked_out(repository: &Path) -> Option<String> {
    let git = folder(&repository.join(".git"))?;
    // A worktree has a folder of its own, and its branches in the repository's.
    let common = read(&git.join("commondir")).map_or_else(|| git.clone(), |common| git.join(common));
    let head = read(&git.join("HEAD"))?;
    let branch = head.strip_prefix("ref: ");
    // The log of HEAD changes with each commit, wherever git keeps the branch.
    let mut watched = vec![git.join("HEAD"), git.join("logs/HEAD"), common.join("packed-refs")];
    watched.extend(branch.map(|branch| common.join(branch)));
    for file in watched.iter().filter(|file| file.exists()) {
        println!("cargo::rerun-if-changed={}", file.display());
    }
    let Some(branch) = branch else { return Some(head) };
    read(&common.join(branch)).or_else(|| packed(&read(&common.join("packed-refs"))?, branch))
}

/// Git's folder: `.git` itself, or what it names where it is a file.
fn folder(git: &Path) -> Option<PathBuf> {
    if git.is_dir() {
        return Some(git.to_owned());
    }
    let named = read(git)?;
    Some(git.parent()?.join(named.strip_prefix("gitdir: ")?))
}

/// A branch in git's list of many: lines of commit and name.
fn packed(list: &str, branch: &str) -> Option<String> {
    list.lines().find_map(|line| line.strip_suffix(branch)?.strip_suffix(' ')).map(str::to_owned)
}

fn read(file: &Path) -> Option<String> {
    Some(std::fs::read_to_string(file).ok()?.trim().to_owned())
}
