//! Copies the configuration of one collective call (`nccl…Config`), for calls that NCCL gets later than the application made them.

// The pointer is the application's own argument, as in `init`.
#![allow(unsafe_code, clippy::not_unsafe_ptr_arg_deref)]

use std::ffi::{CStr, CString};
use std::mem::offset_of;

use nccl_sys::{NCCL_API_MAGIC, ncclCollConfig_t};

const KNOWN_BYTES: usize = size_of::<ncclCollConfig_t>();
/// The least size of a configuration: its first fields.
const LEAST_BYTES: usize = offset_of!(ncclCollConfig_t, ext);

/// Whether this is a configuration, by its magic.
pub fn is_one(config: *const ncclCollConfig_t) -> bool {
    // SAFETY: the application's own configuration, which begins with its size and a magic.
    unsafe { (&raw const (*config).magic).read() == NCCL_API_MAGIC }
}

/// A copy of the application's configuration, with a copy of its text.
pub struct OfCall {
    config: Box<ncclCollConfig_t>,
    algorithm: Option<CString>,
}

impl std::fmt::Debug for OfCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OfCall").field("algorithm", &self.algorithm).finish_non_exhaustive()
    }
}

impl OfCall {
    /// Copies the application's configuration. None if NCCL must see it at the call: NCCL may refuse it, or it has parts that are unknown
    /// here (options of other vendors, fields of a newer release).
    // Divergence: NCCL refuses a wrong value at the end of the group, not at the call.
    pub fn of(config: *const ncclCollConfig_t) -> Option<OfCall> {
        // SAFETY: the application's own configuration, which begins with its size and a magic.
        let (size, magic) =
            unsafe { ((&raw const (*config).size).read(), (&raw const (*config).magic).read()) };
        if magic != NCCL_API_MAGIC || !(LEAST_BYTES..=KNOWN_BYTES).contains(&size) {
            return None;
        }
        // SAFETY: a structure of integers and pointers is valid when zeroed.
        let mut copy: Box<ncclCollConfig_t> = Box::new(unsafe { std::mem::zeroed() });
        // SAFETY: as many bytes as the configuration says it has, into one that has room for them.
        unsafe { std::ptr::copy_nonoverlapping(config.cast::<u8>(), (&raw mut *copy).cast::<u8>(), size) };
        if !copy.ext.is_null() {
            return None;
        }
        let mut algorithm = None;
        let reaches = size >= offset_of!(ncclCollConfig_t, algSelection) + size_of::<usize>();
        if reaches && !copy.algSelection.is_null() {
            // SAFETY: NCCL, too, takes it for a string.
            let own = unsafe { CStr::from_ptr(copy.algSelection) }.to_owned();
            copy.algSelection = own.as_ptr();
            algorithm = Some(own);
        }
        Some(OfCall { config: copy, algorithm })
    }

    /// A pointer for NCCL.
    pub fn as_ptr(&self) -> *const ncclCollConfig_t {
        &raw const *self.config
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(algorithm: &CStr) -> ncclCollConfig_t {
        // SAFETY: as above.
        let nothing: ncclCollConfig_t = unsafe { std::mem::zeroed() };
        let (size, magic) = (KNOWN_BYTES, NCCL_API_MAGIC);
        ncclCollConfig_t { size, magic, maxCTAs: 7, algSelection: algorithm.as_ptr(), ..nothing }
    }

    /// A copy has the same contents after the application's own is gone.
    #[test]
    fn copied() {
        let text = CString::new("RING").unwrap();
        let copy = OfCall::of(&given(&text)).unwrap();
        drop(text);
        // SAFETY: the copy's own, and its text's.
        let (most, said) =
            unsafe { ((*copy.as_ptr()).maxCTAs, CStr::from_ptr((*copy.as_ptr()).algSelection)) };
        assert_eq!((most, said), (7, c"RING"));
    }

    /// A configuration that only NCCL can judge is not copied; nor are bytes beyond its size.
    #[test]
    fn not_copied() {
        let good = given(c"RING");
        assert!(OfCall::of(&ncclCollConfig_t { magic: 1, ..good }).is_none());
        assert!(OfCall::of(&ncclCollConfig_t { size: KNOWN_BYTES + 8, ..good }).is_none());
        assert!(OfCall::of(&ncclCollConfig_t { size: 4, ..good }).is_none());
        let ext = std::ptr::dangling_mut();
        assert!(OfCall::of(&ncclCollConfig_t { ext, ..good }).is_none());
        let short = ncclCollConfig_t { size: offset_of!(ncclCollConfig_t, maxCTAs), ..good };
        let copy = OfCall::of(&short).unwrap();
        // SAFETY: the copy's own.
        assert_eq!(unsafe { ((*copy.as_ptr()).maxCTAs, (*copy.as_ptr()).algSelection.is_null()) }, (0, true));
    }
}
