//! Argument types for pointers from C, so that null checks and the unsafe reads and writes are written once.

use crate::code::{CUDA_ERROR_INVALID_VALUE, Code};
use std::ffi::{CStr, c_char};

/// An output pointer. Null is an error unless the call says that it is optional.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    /// A null output: values set on it are dropped.
    pub fn none() -> Self {
        Out(std::ptr::null_mut())
    }

    /// An output for calls within the library; `value` must outlive it.
    pub fn to(value: &mut T) -> Self {
        Out(value)
    }

    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// Fails on a null pointer. Exports call it before they have any effect.
    pub fn check(&self) -> Result<(), Code> {
        if self.0.is_null() { Err(CUDA_ERROR_INVALID_VALUE) } else { Ok(()) }
    }

    pub fn set(&self, value: T) -> Result<(), Code> {
        self.check()?;
        // SAFETY: not null, and the ABI makes the caller pass room for one `T`; C does not guarantee alignment of handle blobs.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    pub fn set_if_wanted(&self, value: T) {
        if !self.0.is_null() {
            // SAFETY: as in `set`.
            unsafe { self.0.write_unaligned(value) };
        }
    }

    pub fn get(&self) -> Result<T, Code>
    where
        T: Copy,
    {
        self.check()?;
        // SAFETY: as in `set`; used for arguments that are read and written.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// Writes the first `room` of `values`.
    pub fn fill(&self, room: usize, values: &[T])
    where
        T: Copy,
    {
        for (index, value) in values.iter().take(room).enumerate() {
            // SAFETY: the caller says that there is room for `room` elements.
            unsafe { self.0.add(index).write_unaligned(*value) };
        }
    }
}

/// An input pointer to one value or an array.
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T> From<*const T> for In<T> {
    fn from(pointer: *const T) -> Self {
        In(pointer)
    }
}

impl<T: Copy> In<T> {
    /// A null input.
    pub fn none() -> Self {
        In(std::ptr::null())
    }

    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }

    pub fn get(&self) -> Result<T, Code> {
        self.at(0)
    }

    pub fn at(&self, index: usize) -> Result<T, Code> {
        if self.0.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, and the ABI makes the caller pass at least `index + 1` elements.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }

    /// The first `count` elements; null is allowed when there are none.
    pub fn list(&self, count: usize) -> Result<Vec<T>, Code> {
        (0..count).map(|index| self.at(index)).collect()
    }
}

/// A NUL-terminated string from C.
#[repr(transparent)]
pub struct Text(*const c_char);

impl Text {
    pub fn get(&self) -> Result<&CStr, Code> {
        if self.0.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null; the ABI makes the caller pass a terminated string that outlives the call.
        Ok(unsafe { CStr::from_ptr(self.0) })
    }
}

/// Copies a string into a C buffer of `room` bytes, cut and terminated.
pub fn copy_text(to: &Out<u8>, room: i32, text: &str) -> Result<(), Code> {
    to.check()?;
    let room = usize::try_from(room).ok().filter(|room| *room > 0).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let mut bytes = text.as_bytes()[..text.len().min(room - 1)].to_vec();
    bytes.push(0);
    to.fill(room, &bytes);
    Ok(())
}
