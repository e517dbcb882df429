//! The files of segments: whose they are, and which are of processes that have ended.
//!
//! A process keeps its file locked (`flock`) for as long as it lives, and the kernel lets go however it ends. So whoever
//! gets the lock knows that the process has ended, also where its number says nothing: containers may share `/dev/shm`
//! and not their processes. It removes the file before it lets go. No step needs another one to have been seen:
//!
//! - A new file has its name before its lock, and another process may get that first and remove it. Whoever makes one
//!   looks after it has the lock whether the file still has its name, which nobody takes from it then, and else makes
//!   another. One that is killed in between leaves a file that can be locked.
//! - Of two that remove, one gets the lock, or the second sees that the file has lost its name. A name goes only by who has
//!   the lock, so it is that file's as long.
//! - A forked child shares its parent's lock, so it [closes it](crate::descriptor::close_in_child), and what it keeps is
//!   [opened apart](Held::open).
//! - A program that closes all descriptors loses its lock; its counters may then go from here, and it counts on.
//!
//! Names are `windlass-USER-PROCESS-TIME-held`. Those of versions that held no lock lack the last part: of them the process's
//! number must tell, where somebody asks for it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, OFlags, flock, fstat};
use rustix::io::Errno;

use crate::descriptor::Ours;

/// Where segments lie.
pub const FOLDER: &str = "/dev/shm";
const PREFIX: &str = "windlass-";
const HELD: &str = "held";

/// Times that a new file is made again because another process had its name or its lock.
const TRIES: usize = 8;
/// Names of the folder that are read at a start, and files whose locks are tried. Where there are more the next start goes
/// on elsewhere.
const NAMES_MAX: usize = 4096;
const LOOKED_AT_MAX: usize = 64;

/// A file of this process, which is known to live for as long as this does.
#[derive(Debug)]
pub struct Held {
    path: PathBuf,
    _lock: Ours,
}

impl Held {
    /// A new file in a folder, empty.
    pub fn make(folder: &Path) -> io::Result<Held> {
        for _ in 0..TRIES {
            let path = folder.join(name());
            let file = match File::options().read(true).write(true).create_new(true).mode(0o600).open(&path) {
                Ok(file) => file,
                // Of a namesake in another container, at the same moment.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            };
            match hold(file) {
                Ok(Some(lock)) => return Ok(Held { path, _lock: lock }),
                // Looked at or removed in this very moment. Whoever removes it has the lock, which we have not: what is
                // left the next start removes.
                Ok(None) => {}
                Err(error) => {
                    let _ = std::fs::remove_file(&path);
                    return Err(error);
                }
            }
        }
        Err(io::Error::other("other processes took every new file for one that was left behind"))
    }

    /// Its name, which it may have lost.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file once more, to be mapped. A forked child keeps what is mapped, and with it the locks of what it is mapped
    /// from: never from the file that is held.
    pub fn open(&self) -> io::Result<File> {
        File::options().read(true).write(true).open(&self.path)
    }
}

fn name() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
    format!("{PREFIX}{}-{}-{now:x}-{HELD}", rustix::process::getuid().as_raw(), std::process::id())
}

fn hold(file: File) -> io::Result<Option<Ours>> {
    let file = Ours::new(OwnedFd::from(file))?;
    let held = lock(&file, FlockOperation::NonBlockingLockExclusive)? && has_name(&file)?;
    Ok(held.then_some(file))
}

fn lock(file: impl AsFd, how: FlockOperation) -> rustix::io::Result<bool> {
    match flock(file, how) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error),
    }
}

fn has_name(file: impl AsFd) -> rustix::io::Result<bool> {
    Ok(fstat(file)?.st_nlink > 0)
}

/// The files of all segments in a folder.
pub fn list(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = names(folder, usize::MAX).collect();
    paths.sort();
    paths
}

fn names(folder: &Path, names_max: usize) -> impl Iterator<Item = PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().take(names_max);
    let ours = |name: &std::ffi::OsString| name.as_encoded_bytes().starts_with(PREFIX.as_bytes());
    let folder = folder.to_owned();
    entries.filter_map(|entry| Some(entry.ok()?.file_name())).filter(ours).map(move |name| folder.join(name))
}

/// Whose a segment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The user's number.
    pub user: u32,
    /// The process, which may have ended, by its number where it runs.
    pub process: u32,
    /// How its life can be told.
    pub life: Life,
}

/// How the life of a process can be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// It holds the lock of its file.
    Lock,
    /// By its number alone, if it runs where we do.
    Number,
}

/// By the segment's name; none for other files.
pub fn owner(path: &Path) -> Option<Owner> {
    let mut parts = path.file_name()?.to_str()?.strip_prefix(PREFIX)?.split('-');
    let (user, process) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    let life = if parts.nth(1) == Some(HELD) { Life::Lock } else { Life::Number };
    Some(Owner { user, process, life })
}

/// Whether the process of a segment has ended. What cannot be opened counts as living.
pub fn has_ended(path: &Path) -> bool {
    match owner(path) {
        Some(Owner { life: Life::Lock, .. }) => {
            // Shared, so that one who looks does not make another see life.
            free(path, FlockOperation::NonBlockingLockShared).is_ok_and(|free| free.is_some())
        }
        Some(Owner { process, .. }) => !Path::new(&format!("/proc/{process}")).exists(),
        None => false,
    }
}

/// Removes a segment whose process has ended, and says whether it did. A file that is another user's alone stays.
pub fn remove_if_ended(path: &Path) -> io::Result<bool> {
    let _lock = match owner(path) {
        Some(Owner { life: Life::Lock, .. }) => match free(path, FlockOperation::NonBlockingLockExclusive)? {
            None => return Ok(false),
            lock => lock,
        },
        _ if has_ended(path) => None,
        _ => return Ok(false),
    };
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        removed => removed.map(|()| true),
    }
}

/// A file that nobody holds, locked by us; none if somebody does, if it is gone or cannot be opened.
fn free(path: &Path, how: FlockOperation) -> io::Result<Option<File>> {
    // Anybody may put anything there: neither a link is followed, nor a pipe waited for.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = match File::options().read(true).custom_flags(flags.bits() as i32).open(path) {
        Ok(file) => file,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let free = lock(&file, how)? && has_name(&file)?;
    Ok(free.then_some(file))
}

/// Removes what killed processes of this user have left in a folder, and says how much; of very many a part. Of processes
/// that hold no lock everything stays: their numbers might be another container's.
pub fn remove_ended(folder: &Path) -> usize {
    let user = rustix::process::getuid().as_raw();
    let ours =
        |path: &PathBuf| owner(path).is_some_and(|owner| owner.user == user && owner.life == Life::Lock);
    let mut paths: Vec<PathBuf> = names(folder, NAMES_MAX).filter(ours).collect();
    if paths.len() > LOOKED_AT_MAX {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let begin = now.subsec_nanos() as usize % paths.len();
        paths.rotate_left(begin);
    }
    paths.iter().take(LOOKED_AT_MAX).filter(|path| remove_if_ended(path).unwrap_or(false)).count()
}

#[cfg(test)]
mod tests;
