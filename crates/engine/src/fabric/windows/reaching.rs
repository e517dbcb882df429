//! Where a window's ranks are: NCCL maps every rank's memory on every rank's device, and a window's handle is the address of device
//! memory that says where (`ncclWindow_vidmem`, which programs' own kernels have inlined).

use crate::fabric::Fabric;
use crate::windows::Reach;

use super::Windows;

/// The memory's beginning, alike in all releases that were looked at: the host's own; rank 0's block, and as far into it as this rank's window
/// begins in its own block; this rank among those of the host and among all; how far apart ranks are, in units of 4 GiB.
const WORDS: usize = 4;
const STRIDE_UNIT_LOG2: u32 = 32;

impl Windows {
    /// What the handle of a window says that begins here, in this block; none where that is not what was expected.
    pub(super) fn reach(&self, fabric: &Fabric, handle: usize, begin: u64, block: u64) -> Option<Reach> {
        let mut words = [0; WORDS];
        match fabric.read(handle as u64, &mut words) {
            Ok(()) => reach_of(words, self.rank, begin, block),
            Err(why) => {
                log::debug!("rank {}: a window's handle cannot be read: {why}", self.rank);
                None
            }
        }
    }
}

/// All ranks of a fabric are of one host, so this rank has one number.
fn reach_of([_, first, ranks, stride]: [u64; WORDS], rank: u32, begin: u64, block: u64) -> Option<Reach> {
    let first = first.checked_sub(begin.checked_sub(block)?)?;
    let (of_host, of_all, stride) = (ranks as u32, (ranks >> 32) as u32, stride as u32);
    let is_sound = first != 0 && first.is_multiple_of(16) && stride > 0 && (of_host, of_all) == (rank, rank);
    is_sound.then(|| Reach { own: block, first, stride: u64::from(stride) << STRIDE_UNIT_LOG2 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read() {
        let other = 0xabcd_0000_0000;
        let words = [77, (1 << 45) + 4096, 3 << 32 | 3, other | 2];
        let reach = Reach { own: 8192, first: 1 << 45, stride: 2 << 32 };
        assert_eq!(reach_of(words, 3, 12288, 8192), Some(reach));
        assert_eq!(reach_of(words, 3, 4096, 8192), None);
        let unsound = [
            [77, 0, 3 << 32 | 3, 2],
            [77, 8, 3 << 32 | 3, 2],
            [77, 1 << 45, 3 << 32 | 3, other],
            [77, 1 << 45, 3 << 32 | 1, 2],
            [77, 1 << 45, 1 << 32 | 3, 2],
        ];
        assert!(unsound.iter().all(|words| reach_of(*words, 3, 8192, 8192).is_none()));
    }
}
