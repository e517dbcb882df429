//! Reads the loader's cache (`/etc/ld.so.cache`): the files that a bare library name may mean.
//!
//! `dlopen("libnccl.so.2")` cannot serve here: this library itself has that name. Only glibc's current format is read
//! (`glibc-ld.so.cache1.1`, `sysdeps/generic/dl-cache.h`), even if an older table stands before it.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
const HEADER_BYTES: usize = 48;
const ENTRY_BYTES: usize = 24;
/// Flags of a libc6 library for this machine (the low 16 bits of an entry's flags).
#[cfg(target_arch = "x86_64")]
const NATIVE_FLAGS: u32 = 0x0303;

/// The files that the cache names for `library`, best first. Empty if the cache cannot be read.
pub fn look_up(cache: &Path, library: &str) -> Vec<PathBuf> {
    std::fs::read(cache).map(|bytes| parse(&bytes, library)).unwrap_or_default()
}

fn parse(bytes: &[u8], library: &str) -> Vec<PathBuf> {
    let Some(start) = bytes.windows(MAGIC.len()).position(|window| window == MAGIC) else {
        return Vec::new();
    };
    let table = &bytes[start..];
    let Some(count) = word(table, MAGIC.len()) else { return Vec::new() };
    (0..count as usize)
        .filter_map(|i| {
            let entry = HEADER_BYTES + i * ENTRY_BYTES;
            let native = word(table, entry)? & 0xffff == NATIVE_FLAGS;
            let name = text(table, word(table, entry + 4)? as usize)?;
            let file = text(table, word(table, entry + 8)? as usize)?;
            (native && name == library.as_bytes()).then(|| PathBuf::from(OsStr::from_bytes(file)))
        })
        .collect()
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn text(bytes: &[u8], at: usize) -> Option<&[u8]> {
    let rest = bytes.get(at..)?;
    Some(&rest[..rest.iter().position(|byte| *byte == 0)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The machine's own cache names libc's file, which exists; an unknown name is not found.
    #[test]
    fn finds_libc() {
        let cache = Path::new("/etc/ld.so.cache");
        let found = look_up(cache, "libc.so.6");
        assert!(found.first().is_some_and(|file| file.exists()), "{found:?}");
        assert!(look_up(cache, "libno-such-library.so.9").is_empty());
    }

    /// A damaged or missing cache gives no files.
    #[test]
    fn survives_damage() {
        let whole = std::fs::read("/etc/ld.so.cache").unwrap();
        for length in (0..whole.len()).step_by(whole.len() / 50 + 1) {
            parse(&whole[..length], "libc.so.6");
        }
        assert!(look_up(Path::new("/no/such/cache"), "libc.so.6").is_empty());
    }
}
