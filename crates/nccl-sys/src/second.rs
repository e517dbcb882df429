//! Finds NCCLs that are mapped beside the opened one. They do not know Windlass's handles, and calls into them bypass
//! Windlass.
//!
//! Only objects that export NCCL's functions are found: neither a statically linked NCCL with hidden symbols, nor one in
//! another namespace of the loader (`dlmopen`). Interposers, which pass calls on, are none, unless they export NCCL's
//! second names (`pnccl…`), too.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use crate::exported::Exports;
use crate::objects::{self, Object};
use crate::slots::{Entry, SLOTS};

/// The files of the other NCCLs, in the order of mapping; empty while no NCCL was opened. The loader maps each file
/// once, so two objects are two copies, even under one path.
pub fn beside_the_opened() -> Vec<PathBuf> {
    let opened = SLOTS[Entry::ncclGetVersion as usize].load(Ordering::Acquire) as usize;
    if opened == 0 {
        return Vec::new();
    }
    beside(&objects::mapped(), opened)
}

/// As [`beside_the_opened`]. `opened` is an address in the text of the opened NCCL.
fn beside(mapped: &[Object], opened: usize) -> Vec<PathBuf> {
    let opened = objects::holding(mapped, opened).map(|object| object.text);
    let others =
        mapped.iter().filter(|object| object.exports == Exports::Nccl && Some(object.text) != opened);
    others.map(|object| object.path.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The opened NCCL, Windlass and other objects do not count; a second copy of the same path does.
    #[test]
    fn second() {
        let object = |path: &str, start: usize, exports: Exports| Object {
            path: path.into(),
            text: (start, 0x100),
            exports,
            ..Object::default()
        };
        let mut mapped = vec![
            object("/bin/program", 0x1000, Exports::Other),
            object("/w/libwindlass.so", 0x2000, Exports::Windlass),
            object("/a/libnccl.so.2", 0x3000, Exports::Nccl),
            object("/plugins/libnccl-net.so", 0x4000, Exports::Other),
            object("/t/libtracer.so", 0x7000, Exports::Interposer),
        ];
        assert_eq!(beside(&mapped, 0x3010), Vec::<PathBuf>::new());
        mapped.push(object("/x/libtorch_cuda.so", 0x5000, Exports::Nccl));
        mapped.push(object("/a/libnccl.so.2", 0x6000, Exports::Nccl));
        assert_eq!(beside(&mapped, 0x3010), [PathBuf::from("/x/libtorch_cuda.so"), "/a/libnccl.so.2".into()]);
    }
}
