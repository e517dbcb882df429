//! The folder of limits. Files are written as a whole or not at all, so a process that reads meanwhile finds the old file.

use super::measure::OfRanks;
use super::written::{self, Tuned};
use anyhow::{Context, Result, bail};
use rustix::fs::OFlags;
use std::fs::{DirBuilder, File, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use windlass_base::config::{Cache, Config};
use windlass_transport::tuning::cache::{self, CACHE_BYTES_MAX, Circumstances};
use windlass_transport::tuning::file::Table;

/// The file that the measuring process locks.
const LOCK: &str = "lock";

/// The folder of the cache.
#[derive(Clone, Debug)]
pub struct Folder(PathBuf);

/// The approximate size of a cell file. If there is no room for it, nothing is measured.
const ROOM_BYTES: usize = 16 << 10;

/// What happens to a cell that is already in the folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    Stays,
    IsReplaced,
}

impl Folder {
    /// The folder by the options; none if they switch the cache off.
    pub fn of(config: &Config) -> Result<Option<Folder>> {
        match (&config.cache, config.cache.folder()) {
            (Cache::Off, _) => Ok(None),
            (_, Some(folder)) => Ok(Some(Folder(std::path::absolute(folder)?))),
            (_, None) => bail!("neither HOME nor XDG_CACHE_HOME is an absolute path"),
        }
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Makes the folder, for this user alone, if it does not exist. Fails if it cannot be written.
    pub fn prepare(&self) -> Result<()> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.0);
        made.with_context(|| format!("cannot make {}", self.0.display()))?;
        let room = self.temporary()?.write_all(&[b'\n'; ROOM_BYTES]);
        room.with_context(|| format!("cannot write in {}", self.0.display()))
    }

    /// Locks the folder: no other process measures while the file is open. None while another process has the lock.
    pub fn lock(&self) -> Result<Option<File>> {
        let path = self.0.join(LOCK);
        // Root may have the home of a user, who could have a link there.
        let flags = OFlags::NOFOLLOW.bits() as i32;
        let file = File::options().create(true).append(true).custom_flags(flags).open(&path);
        let file = file.with_context(|| format!("cannot open {}", path.display()))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => {
                Err(error).with_context(|| format!("cannot lock {}", path.display()))
            }
        }
    }

    /// The text of a file; none if it cannot be read.
    pub fn text(&self, name: &str) -> Option<String> {
        let mut text = String::new();
        File::open(self.0.join(name)).ok()?.take(CACHE_BYTES_MAX as u64).read_to_string(&mut text).ok()?;
        Some(text)
    }

    /// Writes a file in one step, readable for this user alone.
    pub fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.0.join(name);
        let mut file = self.temporary()?;
        file.write_all(text.as_bytes()).with_context(|| format!("cannot write {}", path.display()))?;
        file.persist(&path).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(())
    }

    /// The text of the table for these circumstances, if there is one. An error says why it does not count.
    pub fn read(&self, circumstances: &Circumstances) -> Result<Option<String>, String> {
        let path = self.0.join(circumstances.file_name());
        let Ok(file) = File::open(&path) else { return Ok(None) };
        let mut text = String::new();
        let read = file.take(CACHE_BYTES_MAX as u64 + 1).read_to_string(&mut text);
        let table = read.map_err(|error| error.to_string()).and_then(|_| {
            cache::parse(&text, circumstances)?;
            Ok(cache::split(&text)?.1.to_owned())
        });
        let told = |why| {
            format!(
                "{}: expected limits measured here, and it is left out: {why}; the built-in limits hold (remove it)",
                path.display()
            )
        };
        table.map(Some).map_err(told)
    }

    /// Keeps the limits that were found, beside those already kept under the same circumstances.
    pub fn keep(&self, found: &OfRanks, how: &str, kept: Kept) -> Result<()> {
        let circumstances = found.group.place.circumstances();
        let before = self.read(&circumstances).ok().flatten().unwrap_or_default();
        let known = Table::parse(&before).unwrap_or_default();
        let is_new = |tuned: &&Tuned| kept == Kept::IsReplaced || known.get(&tuned.cell.key).is_none();
        let new = found.tuned.iter().filter(is_new);
        let cells: Vec<_> = new.map(|tuned| (tuned.cell.key, written::block(tuned, how))).collect();
        if cells.is_empty() {
            return Ok(());
        }
        self.write(&circumstances.file_name(), &cache::text(&circumstances, &cache::merge(&before, &cells)))
    }

    fn temporary(&self) -> Result<tempfile::NamedTempFile> {
        let made = tempfile::Builder::new().prefix(".writing-").tempfile_in(&self.0);
        made.with_context(|| format!("cannot write in {}", self.0.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn folder(path: &Path) -> Folder {
        Folder(path.join("deep/windlass"))
    }

    /// The folder and its files are for one user alone; no other file is left behind.
    #[test]
    fn private() {
        let place = tempfile::tempdir().unwrap();
        let folder = folder(place.path());
        folder.prepare().unwrap();
        folder.prepare().unwrap();
        folder.write("a", "one").unwrap();
        folder.write("a", "two").unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(folder.path()), mode(&folder.path().join("a"))), (0o700, 0o600));
        assert_eq!(std::fs::read_to_string(folder.path().join("a")).unwrap(), "two");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(folder.text("a").is_some() && folder.text("b").is_none());
    }

    /// One process has the lock at a time; then the next gets it.
    #[test]
    fn locks() {
        let place = tempfile::tempdir().unwrap();
        let folder = folder(place.path());
        folder.prepare().unwrap();
        let first = folder.lock().unwrap();
        assert!(first.is_some() && folder.lock().unwrap().is_none());
        drop(first);
        assert!(folder.lock().unwrap().is_some());
        // A link is not followed.
        std::fs::remove_file(folder.path().join(LOCK)).unwrap();
        std::os::unix::fs::symlink(place.path().join("elsewhere"), folder.path().join(LOCK)).unwrap();
        assert!(folder.lock().is_err() && !place.path().join("elsewhere").exists());
    }

    /// If the folder cannot be written, the error names it.
    #[test]
    fn unwritable() {
        let place = tempfile::tempdir().unwrap();
        std::fs::write(place.path().join("deep"), "a file").unwrap();
        let told = format!("{:#}", folder(place.path()).prepare().unwrap_err());
        assert!(told.starts_with("cannot make ") && told.contains("deep/windlass"), "{told}");
        let told = format!("{:#}", Folder("/proc/self".into()).prepare().unwrap_err());
        assert!(told.starts_with("cannot write in /proc/self"), "{told}");
    }

    /// A broken file counts as none; a whole one is read back.
    #[test]
    fn broken() {
        let place = tempfile::tempdir().unwrap();
        let folder = folder(place.path());
        folder.prepare().unwrap();
        let here = Circumstances::new([("ranks", "2".to_owned())]);
        assert_eq!(folder.read(&here), Ok(None));
        let table = "windlass-tuning 1\nall_reduce ranks 2 gpu 9.0/132 multicast no native_bytes_max 1M\n";
        let text = cache::text(&here, table);
        folder.write(&here.file_name(), &text).unwrap();
        assert_eq!(folder.read(&here), Ok(Some(table.to_owned())));
        for broken in [&text[..text.len() / 2], "windlass-cache 9\n", "", "\0\u{7f}"] {
            folder.write(&here.file_name(), broken).unwrap();
            let told = folder.read(&here).unwrap_err();
            assert!(told.contains(&here.file_name()) && told.contains("the built-in limits hold"), "{told}");
        }
    }
}
