//! The files in which NCCL finds variables that the environment does not have: `NCCL_CONF_FILE`, or else `.nccl.conf` in the
//! user's home, and then `/etc/nccl.conf`. Whichever says a variable first counts. NCCL reads them at its first use and puts
//! them into the environment of the process, which may be later than we read that.

use std::io::Read;
use std::path::{Path, PathBuf};

const EVERYBODYS: &str = "/etc/nccl.conf";
const USERS: &str = ".nccl.conf";
/// NCCL reads all of a file; nobody writes so much.
const BYTES_MAX: u64 = 1 << 20;

/// The files, in the order in which they count. `named` is NCCL_CONF_FILE.
pub fn files(named: Option<PathBuf>, home: impl FnOnce() -> Option<PathBuf>) -> Vec<PathBuf> {
    let named = named.filter(|named| !named.as_os_str().is_empty());
    let first = named.or_else(|| home().map(|home| home.join(USERS)));
    first.into_iter().chain([PathBuf::from(EVERYBODYS)]).collect()
}

/// The home of a user as the list of users has it, which NCCL asks and not `HOME`.
pub fn home_of(user: u32, users: &str) -> Option<PathBuf> {
    let is_his = |line: &&str| line.split(':').nth(2).and_then(|number| number.parse().ok()) == Some(user);
    let home = users.lines().find(is_his)?.split(':').nth(5)?;
    Some(PathBuf::from(home))
}

/// What a file says; nothing if it is not there.
pub fn read(file: &Path) -> String {
    let mut bytes = Vec::new();
    let opened = std::fs::File::open(file);
    let _ = opened.and_then(|opened| opened.take(BYTES_MAX).read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The variables of a file's lines, as NCCL takes them: no blank is left out, not even around the equals sign.
pub fn variables(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split('\n').filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once('='))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file that is named takes the place of the user's own, and everybody's comes last.
    #[test]
    fn order_of_files() {
        let home = || Some(PathBuf::from("/home/one"));
        assert_eq!(files(None, home), [Path::new("/home/one/.nccl.conf"), Path::new("/etc/nccl.conf")]);
        assert_eq!(files(Some("".into()), home).len(), 2);
        assert_eq!(files(Some("/x".into()), home), [Path::new("/x"), Path::new("/etc/nccl.conf")]);
        assert_eq!(files(None, || None), [Path::new("/etc/nccl.conf")]);
    }

    /// Users are found by number; broken lines are none.
    #[test]
    fn homes() {
        let users = "root:x:0:0:root:/root:/bin/bash\nbroken\none:x:1000:7:One:/home/one:/bin/sh\n";
        assert_eq!(home_of(1000, users), Some("/home/one".into()));
        assert_eq!((home_of(0, users), home_of(7, users)), (Some("/root".into()), None));
    }

    /// Comments begin the line; a value goes on to the end of its line.
    #[test]
    fn lines() {
        let text = "#NCCL_A=1\nNCCL_B=2=3\n\nnothing\nNCCL_C= 4 \n #NCCL_D=5\nNCCL_E=6";
        let expected = [("NCCL_B", "2=3"), ("NCCL_C", " 4 "), (" #NCCL_D", "5"), ("NCCL_E", "6")];
        assert_eq!(variables(text).collect::<Vec<_>>(), expected);
    }

    /// A file that is not there, or no file at all, says nothing.
    #[test]
    fn missing() {
        assert_eq!(read(Path::new("/nowhere/nccl.conf")) + &read(Path::new("/")), "");
    }
}
