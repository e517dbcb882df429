//! The kernel for the stand-in driver: compiled for threads of this host.

use std::collections::hash_map::DefaultHasher;
use std::fs::{self, File};
use std::hash::{Hash, Hasher};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use windlass_kernels::images::Image;

/// The kernel as a shared object, compiled once per change of its sources, whichever test comes first.
fn object() -> PathBuf {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels");
    let mut hash = DefaultHasher::new();
    for folder in ["device", "host"] {
        let mut paths: Vec<PathBuf> =
            fs::read_dir(kernels.join(folder)).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths.iter().for_each(|path| fs::read(path).unwrap().hash(&mut hash));
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mail-object");
    fs::create_dir_all(&folder).unwrap();
    let object = folder.join(format!("mail-{:016x}.so", hash.finish()));
    // Tests run as processes side by side: one compiles, the others wait.
    let lock = File::create(folder.join("lock")).unwrap();
    lock.lock().unwrap();
    if !object.exists() {
        let unfinished = object.with_extension("part");
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
        let status = Command::new(&compiler)
            .args(["-std=c++17", "-O2", "-g", "-pthread", "-shared", "-fPIC", "-Wl,-z,nodelete", "-o"])
            .arg(&unfinished)
            .arg(kernels.join("host/mail_object.cpp"))
            .status()
            .unwrap_or_else(|error| panic!("a C++ compiler ({compiler}) is needed: {error}"));
        assert!(status.success(), "mail_object.cpp does not compile");
        fs::rename(unfinished, &object).unwrap();
    }
    object
}

pub fn image() -> Image {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    let bytes = BYTES.get_or_init(|| {
        let object = object();
        [b"windlass-sim:", object.as_os_str().as_bytes(), b"\0"].concat()
    });
    Image { name: "host", bytes, has_bulk_copies: true }
}
