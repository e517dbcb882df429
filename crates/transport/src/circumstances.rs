//! Observes the circumstances on which measured limits depend, from the device, the driver, NCCL's file and the environment.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use windlass_base::config::nccl;
use windlass_base::gpu::Driver;
use windlass_base::gpu::device::Facts;
use windlass_bootstrap::negotiated::bytes::{Writer, checksum};
use windlass_kernels::images;

use crate::tuning;
use crate::tuning::cache::{Circumstances, UNKNOWN, WATTS};
use crate::tuning::file::Multicast;

/// How much of a library is read: its headers, and with them the build id.
const LIBRARY_HEAD_BYTES: u64 = 64 << 10;

/// NCCL as it was loaded.
#[derive(Clone, Copy, Debug)]
pub struct Nccl<'a> {
    /// The path of its library.
    pub path: &'a Path,
    /// Its version code, 0 where it is unknown.
    pub version: i32,
}

/// The circumstances of a communicator of `ranks` ranks on devices like this one. Reads files and asks NVML: not for every call.
pub fn observe(
    driver: &Driver,
    device: &Facts,
    ranks: usize,
    multicast: Multicast,
    nccl: Nccl<'_>,
) -> Circumstances {
    let (links, power) = driver.links_and_power(device.ordinal);
    let number = |value: Option<u32>| value.map_or_else(|| UNKNOWN.to_owned(), |value| value.to_string());
    let (major, minor) = (device.capability / 10, device.capability % 10);
    // Reserved memory differs by some MiB between drivers and machines.
    let gibibytes = device.memory_bytes >> 30;
    Circumstances::new([
        ("ranks", ranks.to_string()),
        ("gpu", format!("{major}.{minor}/{} {gibibytes} GiB", device.multiprocessors)),
        ("nvlinks", number(links)),
        (WATTS, number(power)),
        ("multicast", if multicast == Multicast::Yes { "yes" } else { "no" }.into()),
        ("driver", driver_major()),
        ("nccl", format!("{} {:016x}", nccl.version, file_digest(nccl.path))),
        (
            "windlass",
            format!(
                "{} kernels {} tuning {:016x}",
                env!("CARGO_PKG_VERSION"),
                images::DIGEST,
                tuning::hash()
            ),
        ),
        ("variables", nccl::of_choice().join(" ")),
    ])
}

/// The driver's major version: `580` of the kernel module's `580.159.04`.
fn driver_major() -> String {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    major_of(&text).unwrap_or_else(|| UNKNOWN.into())
}

/// The first word that is a version: `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Release Build`.
fn major_of(text: &str) -> Option<String> {
    let is_version =
        |word: &&str| word.contains('.') && word.starts_with(|first: char| first.is_ascii_digit());
    let version = text.lines().next()?.split_whitespace().find(is_version)?;
    Some(version.split('.').next()?.to_owned())
}

/// A digest of a file's length and beginning, 0 if it cannot be read: tells builds of one release apart, without reading a quarter of a
/// gigabyte.
fn file_digest(path: &Path) -> u64 {
    let read = || {
        let file = File::open(path)?;
        let mut head = Writer::default().u64(file.metadata()?.len()).finish();
        file.take(LIBRARY_HEAD_BYTES).read_to_end(&mut head)?;
        std::io::Result::Ok(checksum(&head))
    };
    read().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The driver's major version is that of its first line, whichever of its modules is loaded.
    #[test]
    fn drivers() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\nGCC version:  gcc 12.3.0\n";
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n";
        assert_eq!([closed, open].map(major_of), [Some("535".into()), Some("580".into())]);
        assert_eq!([major_of(""), major_of("GCC version")], [None, None]);
    }

    /// Files that differ in length or beginning have unlike digests; one that is not there has 0.
    #[test]
    fn files() {
        let folder = tempfile::tempdir().unwrap();
        let of = |name: &str, bytes: &[u8]| {
            std::fs::write(folder.path().join(name), bytes).unwrap();
            file_digest(&folder.path().join(name))
        };
        assert_eq!(of("a", b"one"), of("b", b"one"));
        assert_ne!(of("a", b"one"), of("b", b"two"));
        assert_ne!(of("a", &[0; 100]), of("b", &[0; 101]));
        assert_eq!(file_digest(&folder.path().join("none")), 0);
    }
}
