//! Reads the files in which NCCL finds variables that the environment lacks. These are `NCCL_CONF_FILE`, or else `.nccl.conf` in
//! the user's home, and then `/etc/nccl.conf`. The first file that sets a variable counts.
//!
//! NCCL reads the files at its first use and puts their variables into the environment of the process. This may be later than
//! Windlass reads the environment. Read in the sources of 2.18.6 to 2.30.7.

use std::io::Read;
use std::path::{Path, PathBuf};

const EVERYBODYS: &str = "/etc/nccl.conf";
const USERS: &str = ".nccl.conf";
/// NCCL reads a whole file; Windlass reads this much, which is more than any real file has.
const BYTES_MAX: u64 = 1 << 20;

/// The first release that reads NCCL_CONF_FILE.
const NAMED_SINCE: i32 = 22304;
/// The first release that takes the home from the environment and not from `/etc/passwd`.
const HOME_SINCE: i32 = 23003;

/// The files that a release reads (version 0 if unknown), in the order in which they count. `named` is the value of
/// NCCL_CONF_FILE.
pub(super) fn files(
    named: Option<PathBuf>,
    home: impl FnOnce(i32) -> Option<PathBuf>,
    version: i32,
) -> Vec<PathBuf> {
    let reads_named = version == 0 || version >= NAMED_SINCE;
    let named = named.filter(|named| reads_named && !named.as_os_str().is_empty());
    let first = named.or_else(|| home(version).map(|home| home.join(USERS)));
    first.into_iter().chain([PathBuf::from(EVERYBODYS)]).collect()
}

/// The home folder in which a release looks. For a user who is not in `/etc/passwd`, this is the environment's.
pub(super) fn home(version: i32) -> Option<PathBuf> {
    if version >= HOME_SINCE {
        return std::env::var_os("HOME").map(PathBuf::from);
    }
    let user = rustix::process::getuid().as_raw();
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    home_of(user, &users).or_else(std::env::home_dir)
}

/// The home of a user in the text of `/etc/passwd`.
fn home_of(user: u32, users: &str) -> Option<PathBuf> {
    let is_his = |line: &&str| line.split(':').nth(2).and_then(|number| number.parse().ok()) == Some(user);
    let home = users.lines().find(is_his)?.split(':').nth(5)?;
    Some(PathBuf::from(home))
}

/// The text of a file, at most [`BYTES_MAX`]; empty if the file cannot be read.
pub(super) fn read(file: &Path) -> String {
    let mut bytes = Vec::new();
    let opened = std::fs::File::open(file);
    let _ = opened.and_then(|opened| opened.take(BYTES_MAX).read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The variables of a file's lines. As in NCCL, blanks belong to names and values, even around the equals sign.
pub(super) fn variables(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split('\n').filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once('='))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file of NCCL_CONF_FILE takes the place of the user's own; `/etc/nccl.conf` comes last.
    #[test]
    fn order_of_files() {
        let home = |_| Some(PathBuf::from("/home/one"));
        assert_eq!(files(None, home, 0), [Path::new("/home/one/.nccl.conf"), Path::new("/etc/nccl.conf")]);
        assert_eq!(files(Some("".into()), home, 22809).len(), 2);
        assert_eq!(files(Some("/x".into()), home, 21806), files(None, home, 21806));
        assert_eq!(files(Some("/x".into()), home, 22304), [Path::new("/x"), Path::new("/etc/nccl.conf")]);
        assert_eq!(files(None, |_| None, 0), [Path::new("/etc/nccl.conf")]);
    }

    /// Users are found by number; broken lines are skipped.
    #[test]
    fn homes() {
        let users = "root:x:0:0:root:/root:/bin/bash\nbroken\none:x:1000:7:One:/home/one:/bin/sh\n";
        assert_eq!(home_of(1000, users), Some("/home/one".into()));
        assert_eq!((home_of(0, users), home_of(7, users)), (Some("/root".into()), None));
    }

    /// A comment has its `#` at the beginning of the line; a value goes on to the end of its line.
    #[test]
    fn lines() {
        let text = "#NCCL_A=1\nNCCL_B=2=3\n\nnothing\nNCCL_C= 4 \n #NCCL_D=5\nNCCL_E=6";
        let expected = [("NCCL_B", "2=3"), ("NCCL_C", " 4 "), (" #NCCL_D", "5"), ("NCCL_E", "6")];
        assert_eq!(variables(text).collect::<Vec<_>>(), expected);
    }

    /// A file that is missing, or a folder, gives an empty text.
    #[test]
    fn missing() {
        assert_eq!(read(Path::new("/nowhere/nccl.conf")) + &read(Path::new("/")), "");
    }
}
