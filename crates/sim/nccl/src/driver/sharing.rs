//! Maps memory of several processes side by side into one range of addresses.

use super::*;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: c_int = 1;

/// Reserved addresses, with the mappings made in them.
pub struct Space {
    pub at: usize,
    bytes: usize,
    mapped: Vec<(usize, usize)>,
}

// SAFETY, for all unsafe blocks below: pointers are to locals, and the driver checks addresses and handles.
impl Driver {
    /// Makes a descriptor of the memory at `address`, by which other processes open it.
    pub fn export(&self, address: usize) -> Outcome<OwnedFd> {
        let handle = self.retain(address)?;
        let mut descriptor = -1;
        // SAFETY: see above.
        let code =
            unsafe { (self.export_handle)(&mut descriptor, handle, HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) };
        // SAFETY: retained just now.
        unsafe { (self.memory_release)(handle) };
        check(code, "cuMemExportToShareableHandle")?;
        // SAFETY: fresh, and ours.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    pub fn reserve_space(&self, bytes: usize) -> Outcome<Space> {
        Ok(Space { at: self.reserve(bytes, 0)?, bytes, mapped: Vec::new() })
    }

    /// Maps `bytes` of an exported file at `at` in the space, for `device`.
    pub fn map_shared(
        &self,
        space: &mut Space,
        at: usize,
        bytes: usize,
        file: &OwnedFd,
        device: c_int,
    ) -> Outcome {
        let mut handle = 0;
        let descriptor = file.as_raw_fd() as usize;
        // SAFETY: see above; the descriptor travels as the pointer.
        let code =
            unsafe { (self.import_handle)(&mut handle, descriptor, HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) };
        check(code, "cuMemImportFromShareableHandle")?;
        self.place(handle, at, bytes, device..device + 1)?;
        space.mapped.push((at, bytes));
        Ok(())
    }

    pub fn free_space(&self, space: &Space) {
        // SAFETY: mapped and reserved above; nobody uses the addresses any more.
        unsafe {
            for &(at, bytes) in &space.mapped {
                (self.memory_unmap)(at, bytes);
            }
            (self.address_free)(space.at, space.bytes);
        }
    }
}
