//! Makes, finds and removes the files of segments, and tells which belong to processes that have ended.
//!
//! A process keeps its file locked (`flock`) while it lives, and the kernel releases the lock however it ends. So a process
//! that gets the lock knows that the owner has ended, even if containers share `/dev/shm` but not process numbers.
//!
//! - A new file has its name before its lock: another process may lock and remove it. So its maker checks, after it has the
//!   lock, that the file still has its name, and else makes another.
//! - Only the holder of the lock removes a file. A second remover fails to lock it, or sees that the name is gone.
//! - A forked child shares its parent's lock: it [closes it](crate::descriptor::close_in_child). What it maps is [opened
//!   apart](Held::open).
//! - A program that closes all descriptors loses its lock: its file may then be removed, while it counts on.
//!
//! Names are `windlass-USER-PROCESS-TIME-held`. Earlier versions held no lock and wrote no `-held`: there the process number
//! tells. Below `windlass run` a name goes on with `-RUN`. While the [run](Run) lives, the files of its ended processes stay, to be
//! summed at its end. Of other ended processes [the newest](remove_ended) stay, too: somebody may look for a killed rank's calls.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, OFlags, flock, fstat};
use rustix::io::Errno;

use crate::descriptor::Ours;
use crate::stats::run::Run;

/// The folder of segments.
pub const FOLDER: &str = "/dev/shm";
const PREFIX: &str = "windlass-";
const HELD: &str = "held";

/// How often a new file is tried again because another process had its name or its lock.
const TRIES: usize = 8;
/// The most names of the folder that are read at a start, and the most files whose locks are tried. Where there are more,
/// half are the newest, and the next start begins at another file after these.
const NAMES_MAX: usize = 4096;
const LOOKED_AT_MAX: usize = 64;

/// The most files of a run that stay until its end.
pub const FILES_OF_RUN_MAX: usize = 64;
/// The most files of ended processes that stay beside those of runs, for who looks for a killed rank's calls.
const ENDED_MAX: usize = 16;

/// This process's locked file: other processes see by the lock that this one lives.
#[derive(Debug)]
pub struct Held {
    /// The file's path; the name may be gone.
    pub path: PathBuf,
    _lock: Ours,
}

impl Held {
    /// Makes a new, empty file in a folder, named after the process's run.
    pub fn make(folder: &Path, run: Option<Run>) -> io::Result<Held> {
        for _ in 0..TRIES {
            let path = folder.join(name(run));
            let file = match File::options().read(true).write(true).create_new(true).mode(0o600).open(&path) {
                Ok(file) => file,
                // A process of another container has the same number, and made its file at the same moment.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            };
            match hold(file) {
                Ok(Some(lock)) => return Ok(Held { path, _lock: lock }),
                // Another process looks at the file or removes it at this moment. Only the holder of the lock may
                // remove it: what is left, the next start removes.
                Ok(None) => {}
                Err(error) => {
                    let _ = std::fs::remove_file(&path);
                    return Err(error);
                }
            }
        }
        Err(io::Error::other("other processes took every new file for one that was left behind"))
    }

    /// Opens the file a second time, to map it. A forked child keeps its mappings, and with them the locks of the open
    /// files behind them, so the locked descriptor itself is never mapped.
    pub fn open(&self) -> io::Result<File> {
        File::options().read(true).write(true).open(&self.path)
    }
}

fn name(run: Option<Run>) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
    let run = run.map_or(String::new(), |run| format!("-{run}"));
    format!("{PREFIX}{}-{}-{now:x}-{HELD}{run}", rustix::process::getuid().as_raw(), std::process::id())
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

/// The owner of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The user's number.
    pub user: u32,
    /// The process's number in its own container; the process may have ended.
    pub process: u32,
    /// When it made the file, in nanoseconds since 1970.
    pub made_ns: u64,
    /// How other processes can tell whether it lives.
    pub life: Life,
    /// The run to which it belongs.
    pub run: Option<Run>,
}

/// How other processes can tell whether a process lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// By the lock of its file, which it holds.
    Lock,
    /// By its number alone, if it runs in the reader's container.
    Number,
}

/// The owner by the segment's name; none for other files.
pub fn owner(path: &Path) -> Option<Owner> {
    let mut parts = path.file_name()?.to_str()?.strip_prefix(PREFIX)?.split('-');
    let (user, process) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    // Every part is a number, so a name can be shown on a terminal.
    let made_ns = u64::from_str_radix(parts.next()?, 16).ok()?;
    let life = match parts.next() {
        None => Life::Number,
        Some(HELD) => Life::Lock,
        Some(_) => return None,
    };
    let run = parts.next().map(Run::read);
    (parts.next().is_none() && run != Some(None)).then_some(Owner {
        user,
        process,
        made_ns,
        life,
        run: run.flatten(),
    })
}

/// Whether a file is one of this user's, and no link.
pub fn is_own(path: &Path) -> bool {
    std::fs::symlink_metadata(path)
        .is_ok_and(|facts| facts.is_file() && facts.uid() == rustix::process::getuid().as_raw())
}

/// The files of a run of this user. A file that another user has made under such a name is none.
pub fn of_run(folder: &Path, run: Run) -> Vec<PathBuf> {
    list(folder).into_iter().filter(|path| own_run(path) == Some(run)).collect()
}

/// The files of a run of this user, and of its runs that have ended.
pub fn of_run_and_ended(folder: &Path, run: Run) -> Vec<PathBuf> {
    let is_over = |of: Run| of == run || !of.is_alive();
    list(folder).into_iter().filter(|path| own_run(path).is_some_and(is_over)).collect()
}

/// The run of a file of this user.
fn own_run(path: &Path) -> Option<Run> {
    let user = rustix::process::getuid().as_raw();
    let run = owner(path).filter(|owner| owner.user == user)?.run?;
    is_own(path).then_some(run)
}

/// This user's run that began last, of those that have files.
pub fn newest_run(folder: &Path) -> Option<Run> {
    list(folder).iter().filter_map(|path| own_run(path)).max()
}

/// Whether the process of a segment has ended. If the file cannot be opened, it counts as alive.
pub fn has_ended(path: &Path) -> bool {
    match owner(path) {
        Some(Owner { life: Life::Lock, .. }) => {
            // A shared lock, so that two processes that look do not take each other for the owner.
            free(path, FlockOperation::NonBlockingLockShared).is_ok_and(|free| free.is_some())
        }
        Some(Owner { process, .. }) => !Path::new(&format!("/proc/{process}")).exists(),
        None => false,
    }
}

/// Removes a segment of this user whose process has ended, and returns whether it did. A file of another user stays, also where root asks:
/// a run of that user may yet sum it, and process numbers may be another container's.
pub fn remove_if_ended(path: &Path) -> io::Result<bool> {
    if !is_own(path) {
        return Ok(false);
    }
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

/// Locks a file that no process has locked. None if a process has, if the file is gone, or if it may not be opened.
fn free(path: &Path, how: FlockOperation) -> io::Result<Option<File>> {
    // Any program may put anything into the folder: this neither follows a link nor waits for a pipe.
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

/// Removes what ended processes of this user have left in a folder, and returns how many; of very many files only a
/// part. The newest [`ENDED_MAX`] stay, and files of a run that lives, up to [`FILES_OF_RUN_MAX`]. So do files of versions without locks, since
/// their process numbers may be another container's.
pub fn remove_ended(folder: &Path) -> usize {
    let user = rustix::process::getuid().as_raw();
    let ours =
        |path: &PathBuf| owner(path).is_some_and(|owner| owner.user == user && owner.life == Life::Lock);
    let mut paths: Vec<PathBuf> = names(folder, NAMES_MAX).filter(ours).collect();
    let mut may_stay: BTreeMap<Run, usize> = BTreeMap::new();
    paths.retain(|path| {
        let Some(run) = owner(path).and_then(|owner| owner.run) else { return true };
        let left = may_stay.entry(run).or_insert_with(|| if run.is_alive() { FILES_OF_RUN_MAX } else { 0 });
        let stays = *left > 0;
        *left = left.saturating_sub(1);
        !stays
    });
    paths.sort_by_key(|path| Reverse(owner(path).map(|owner| owner.made_ns)));
    if let Some(older) = paths.get_mut(LOOKED_AT_MAX / 2..).filter(|older| older.len() > LOOKED_AT_MAX / 2) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        older.rotate_left(now.subsec_nanos() as usize % older.len());
    }
    let mut left = 0;
    let goes = |path: &&PathBuf| {
        // A file without contents lost its maker in a race for its lock.
        let stays = left < ENDED_MAX
            && is_own(path)
            && std::fs::metadata(path).is_ok_and(|facts| facts.len() > 0)
            && has_ended(path);
        left += usize::from(stays);
        !stays && remove_if_ended(path).unwrap_or(false)
    };
    paths.iter().take(LOOKED_AT_MAX).filter(goes).count()
}

#[cfg(test)]
mod tests;
