//! Copies a tree of files over another one, which may be in use.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Copies all files and links below `from` with their modes. Returns their number, or the first path that fails with
/// its error.
pub fn tree(from: &Path, to: &Path) -> Result<u64, (PathBuf, io::Error)> {
    let of = |path: &Path| {
        let path = path.to_owned();
        move |error| (path, error)
    };
    fs::create_dir_all(to).map_err(of(from))?;
    let mut files = 0;
    for entry in fs::read_dir(from).map_err(of(from))? {
        let entry = entry.map_err(of(from))?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type().map_err(of(&source))?.is_dir() {
            files += tree(&source, &target)?;
        } else {
            file(&source, &target).map_err(of(&source))?;
            files += 1;
        }
    }
    Ok(files)
}

/// Copies a file or a link. A file in use is replaced, never overwritten: a process that has mapped it would crash.
fn file(from: &Path, to: &Path) -> io::Result<()> {
    let mut new = to.as_os_str().to_owned();
    new.push(".new");
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    if from.is_symlink() {
        symlink(fs::read_link(from)?, &new)?;
    } else {
        fs::copy(from, &new)?;
    }
    fs::rename(&new, to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    /// Links stay links, modes are kept, and a second copy replaces files that are in use.
    #[test]
    fn links_and_modes_are_kept_and_files_are_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        fs::create_dir_all(from.join("inner")).unwrap();
        let program = from.join("inner/program");
        fs::write(&program, "one").unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        symlink("program", from.join("inner/link")).unwrap();

        assert_eq!(tree(&from, &to).unwrap(), 2);
        let copied = to.join("inner/program");
        assert_eq!(fs::read_link(to.join("inner/link")).unwrap(), Path::new("program"));
        assert_eq!(copied.metadata().unwrap().mode() & 0o777, 0o755);

        let in_use = fs::File::open(&copied).unwrap();
        fs::write(&program, "two").unwrap();
        assert_eq!(tree(&from, &to).unwrap(), 2);
        assert_eq!(io::read_to_string(in_use).unwrap(), "one");
        assert_eq!(fs::read_to_string(&copied).unwrap(), "two");
        assert_eq!(fs::read_dir(to.join("inner")).unwrap().count(), 2, "nothing half copied is left");
    }
}
