//! New memory that holds what released memory held (`WINDLASS_SIM_FORMER=1`): a driver may give the same pages again. Not all of them: whoever
//! keeps numbers beside data would find both as they were.

use crate::code::{CUDA_ERROR_OPERATING_SYSTEM, Code};
use crate::device::Ordinal;
use crate::simulator::{next_identity, number_from_environment};
use crate::sync::lock;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, OnceLock};

/// Files of released memory, the last ones.
static KEPT: Mutex<Vec<(Ordinal, usize, File)>> = Mutex::new(Vec::new());
const KEPT_MAX: usize = 4;
const PART: usize = 4096;

fn is_on() -> bool {
    static ON: OnceLock<bool> = OnceLock::new();
    *ON.get_or_init(|| number_from_environment("WINDLASS_SIM_FORMER") == Some(1))
}

/// Keeps the content of memory that is released.
pub fn keep(file: &OwnedFd, device: Ordinal, bytes: usize) {
    if !is_on() {
        return;
    }
    let mut kept = lock(&KEPT);
    kept.truncate(KEPT_MAX - 1);
    kept.extend(file.try_clone().map(|file| (device, bytes, File::from(file))));
    kept.rotate_right(1);
}

/// Fills half of new memory with the content of the memory of its size that was released last.
pub fn fill(file: &OwnedFd, device: Ordinal, bytes: usize) -> Result<(), Code> {
    let kept = lock(&KEPT);
    let Some((.., former)) = kept.iter().find(|known| (known.0, known.1) == (device, bytes)) else {
        return Ok(());
    };
    let copied = || {
        let (to, mut part) = (File::from(file.try_clone()?), vec![0; PART]);
        let number = next_identity();
        let is_former =
            |at: &usize| (number << 32 | *at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 63 == 1;
        (0..bytes).step_by(PART).filter(is_former).try_for_each(|at| {
            former.read_exact_at(&mut part, at as u64)?;
            to.write_all_at(&part, at as u64)
        })
    };
    copied().map_err(|_: std::io::Error| CUDA_ERROR_OPERATING_SYSTEM)
}
