//! Checks the folder `/dev/shm` as a process finds it. Windlass keeps its counters there, and NCCL the memory that
//! ranks share.

use rustix::fs::{Access, access, statvfs};
use std::path::Path;
use windlass_base::config::{Startup, Switch};
use windlass_base::stats::files::FOLDER;
use windlass_base::stats::segment::Segment;

/// The free bytes of the folder, or why it cannot be written.
pub type Room = Result<u64, String>;

pub fn look() -> Room {
    look_at(Path::new(FOLDER))
}

fn look_at(folder: &Path) -> Room {
    match std::fs::metadata(folder) {
        Err(error) => return Err(error.to_string()),
        Ok(facts) if !facts.is_dir() => return Err("not a folder".into()),
        Ok(_) => {}
    }
    access(folder, Access::WRITE_OK | Access::EXEC_OK).map_err(|error| error.to_string())?;
    let room = statvfs(folder).map_err(|error| error.to_string())?;
    Ok(room.f_bavail * room.f_frsize)
}

/// The reason to refuse a program that would run without counters unnoticed. None if the options switch counters off.
pub fn refuse(room: &Room, options: &Startup) -> Option<String> {
    let reason = room.as_ref().err()?;
    let counts = options.windlass == Switch::On && options.stats == Switch::On;
    counts.then(|| {
        format!(
            "{FOLDER} cannot be written ({reason}), but Windlass keeps its counters there, and NCCL shares memory there: \
             mount it (docker run --shm-size=1g), or set WINDLASS_STATS=off to run without counters"
        )
    })
}

/// A warning if the counters of a process do not fit.
pub fn warn(room: &Room, options: &Startup) -> Option<String> {
    let needed = size_of::<Segment>() as u64;
    let free = *room.as_ref().ok()?;
    (free < needed && options.windlass == Switch::On && options.stats == Switch::On).then(|| {
        format!(
            "{FOLDER} has {} KiB free, but a process's counters take {} KiB: `windlass stats` will not see it",
            free >> 10,
            needed.div_ceil(1 << 10)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder has room; a missing folder or another file has none, with the reason.
    #[test]
    fn looks() {
        let folder = tempfile::tempdir().unwrap();
        assert!(look_at(folder.path()).unwrap() > 0);
        assert!(look_at(&folder.path().join("none")).unwrap_err().contains("No such file"));
        assert_eq!(look_at(Path::new("/proc/self/status")), Err("not a folder".into()));
    }

    /// Without the folder a program is refused, unless it does not count.
    #[test]
    fn refuses() {
        let missing: Room = Err("No such file or directory".into());
        let refusal = refuse(&missing, &Startup::default()).unwrap();
        assert!(refusal.starts_with("/dev/shm cannot be written (No such file or directory)"), "{refusal}");
        let off = Startup { stats: Switch::Off, ..Startup::default() };
        assert_eq!(refuse(&missing, &off), None);
        assert_eq!(refuse(&Ok(0), &Startup::default()), None);
    }

    /// Too little room only gives a warning, with both sizes.
    #[test]
    fn warns() {
        let warning = warn(&Ok(64 << 10), &Startup::default()).unwrap();
        assert!(warning.starts_with("/dev/shm has 64 KiB free, but a process's counters take "), "{warning}");
        assert_eq!(warn(&Ok(1 << 30), &Startup::default()), None);
        assert_eq!(warn(&Err("x".into()), &Startup::default()), None);
    }
}
