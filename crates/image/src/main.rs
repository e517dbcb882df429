//! `/install` of the container image: copies Windlass into a volume, where the containers that run programs find it. The image
//! has no shell and no C library, so this program is linked statically.

mod copy;

use std::path::Path;
use std::process::ExitCode;

/// The folders of an installation. The image's root is an installation, beside the container runtime's own files.
const FOLDERS: [&str; 4] = ["bin", "include", "lib", "share"];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [volume] = arguments.as_slice() else {
        eprintln!(
            "usage: /install FOLDER, where FOLDER is a volume that is mounted; /to unless said otherwise"
        );
        return ExitCode::from(2);
    };
    match install(Path::new("/"), Path::new(volume)) {
        Ok(files) => {
            println!("Windlass {} is in the volume: {files} files", env!("CARGO_PKG_VERSION"));
            ExitCode::SUCCESS
        }
        Err(reason) => {
            eprintln!("{reason}");
            ExitCode::FAILURE
        }
    }
}

/// Copies the installation in `root` into `volume`. Returns the number of its files.
fn install(root: &Path, volume: &Path) -> Result<u64, String> {
    if !volume.is_dir() {
        return Err(format!("{} is no folder: mount a volume there, as `-v windlass:/to`", volume.display()));
    }
    let mut files = 0;
    for folder in FOLDERS {
        let from = root.join(folder);
        files += copy::tree(&from, &volume.join(folder)).map_err(|(path, error)| {
            format!("cannot copy {} to {}: {error}", path.display(), volume.display())
        })?;
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A forgotten mount is refused: files in the container itself would be lost with it.
    #[test]
    fn a_missing_volume_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let said = install(folder.path(), &folder.path().join("to")).unwrap_err();
        assert!(said.contains("mount a volume"), "{said}");
    }

    /// Files beside an installation, such as a container runtime's, are not copied.
    #[test]
    fn an_installation_is_copied_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let (root, volume) = (folder.path().join("root"), folder.path().join("to"));
        for name in FOLDERS.into_iter().chain(["etc"]) {
            std::fs::create_dir_all(root.join(name)).unwrap();
            std::fs::write(root.join(name).join("file"), name).unwrap();
        }
        std::fs::create_dir(&volume).unwrap();
        assert_eq!(install(&root, &volume), Ok(4));
        assert_eq!(std::fs::read_to_string(volume.join("lib/file")).unwrap(), "lib");
        assert!(!volume.join("etc").exists());
    }
}
