//! Reads what may grow in a process from cycle to cycle: memory of its device, and its address space.

use crate::gpu::Gpu;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufRead, BufReader};

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    /// Bytes in use on the device by all processes, from cuMemGetInfo.
    MemoryBytes,
    /// Lines of /proc/self/maps.
    MapLines,
    /// Bytes of all these mappings.
    MapBytes,
}

impl Resource {
    pub const COUNT: usize = Self::ALL.len();
    pub const ALL: [Self; 3] = [Self::MemoryBytes, Self::MapLines, Self::MapBytes];
}

/// The use now, in the order of [`Resource::ALL`].
pub fn now(gpu: &Gpu) -> Result<[i64; Resource::COUNT]> {
    // Read line by line, since a large buffer would be a mapping of its own.
    let maps = BufReader::new(File::open("/proc/self/maps").context("cannot read /proc/self/maps")?);
    let (lines, bytes) = sum(maps)?;
    Ok([gpu.used_bytes()? as i64, lines, bytes])
}

/// The number of mappings, and their bytes.
fn sum(maps: impl BufRead) -> Result<(i64, i64)> {
    let mut sum = (0, 0);
    for line in maps.lines() {
        let line = line?;
        let bytes = bytes(&line).with_context(|| format!("unreadable line of /proc/self/maps: {line:?}"))?;
        sum = (sum.0 + 1, sum.1 + bytes);
    }
    Ok(sum)
}

/// The bytes of a line that begins with `FROM-TO `.
fn bytes(line: &str) -> Option<i64> {
    let (from, to) = line.split(' ').next()?.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    i64::try_from(number(to)?.checked_sub(number(from)?)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines are counted and their ranges added up. The highest addresses do not become negative; a broken line is an
    /// error.
    #[test]
    fn maps() {
        let text = "00400000-00401000 r-xp 00000000 08:01 1 /x\nffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]\n";
        assert_eq!(sum(text.as_bytes()).unwrap(), (2, 8192));
        assert!(sum(&b"2000-1000 r\n"[..]).unwrap_err().to_string().contains("2000-1000"));
    }
}
