//! Attributes of addresses, for `cuPointerGetAttribute`.

use crate::code::{CUDA_ERROR_INVALID_VALUE, Code};
use crate::memory::{Address, Kind, Range};
use crate::simulator::simulator;
use crate::sync::lock;
use crate::virtual_memory::HANDLE_DESCRIPTOR;
use std::ffi::c_void;

/// An attribute's value in the width that the driver writes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    Word(u32),
    Long(u64),
}

impl Value {
    /// Writes the value where the application wants it.
    pub fn store(self, to: *mut c_void) -> Result<(), Code> {
        if to.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, and the caller passes room for the attribute's documented type.
        unsafe {
            match self {
                Value::Word(value) => to.cast::<u32>().write_unaligned(value),
                Value::Long(value) => to.cast::<u64>().write_unaligned(value),
            }
        }
        Ok(())
    }
}

/// An attribute of an address; fails if the address is no known memory.
pub fn attribute(address: Address, attribute: u32) -> Result<Value, Code> {
    let simulator = simulator()?;
    let place = lock(&simulator.addresses).find(address).cloned();
    let range = lock(&simulator.ranges).find(address).cloned();
    match (range, place, attribute) {
        (Some(range), _, _) => of_range(&range, address, attribute),
        // A reserved address without a mapping has these attributes only.
        (None, Some(_), 13) => Ok(Value::Word(0)),
        (None, Some(place), 19) => Ok(Value::Long(place.base as u64)),
        (None, Some(place), 18) => Ok(Value::Long(place.bytes as u64)),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

/// The value that `cuPointerGetAttributes` stores for an unknown address; the call succeeds.
pub fn unknown(attribute: u32) -> Result<Value, Code> {
    match attribute {
        2 | 6 | 8 | 10 | 13 | 15 | 16 | 21 => Ok(Value::Word(0)),
        // -2 means no device.
        9 => Ok(Value::Word(-2_i32 as u32)),
        1 | 3 | 4 | 7 | 11 | 12 | 14 | 17..=20 => Ok(Value::Long(0)),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

fn of_range(range: &Range, address: Address, attribute: u32) -> Result<Value, Code> {
    let is_managed = matches!(range.kind, Kind::Managed);
    let host_visible = range.kind.is_host() || is_managed;
    Ok(match attribute {
        // Only allocations of a context have one; mappings and pool blocks belong to a device.
        1 => Value::Long(range.context as u64),
        2 => Value::Word(if range.kind.is_host() { 1 } else { 2 }),
        3 => Value::Long(address as u64),
        4 if host_visible => Value::Long(address as u64),
        4 => return Err(CUDA_ERROR_INVALID_VALUE),
        6 => Value::Word(0),
        7 => Value::Long(range.buffer_id),
        8 => Value::Word(u32::from(is_managed)),
        9 => Value::Word(range.device as u32),
        10 => Value::Word(u32::from(matches!(range.kind, Kind::Device))),
        11 => Value::Long(reserved(range).0 as u64),
        12 => Value::Long(reserved(range).1 as u64),
        13 => Value::Word(1),
        14 => Value::Long(u64::from(handle_types(range))),
        // As in the device attribute.
        15 => Value::Word(0),
        16 => Value::Word(3),
        17 => Value::Long(if let Kind::Pool(pool) = range.kind { pool as u64 } else { 0 }),
        18 => Value::Long(range.bytes as u64),
        19 => Value::Long(range.base as u64),
        20 => Value::Long(block(range)),
        21 => Value::Word(0),
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    })
}

/// The types of handles to which the memory can be exported: none if another process made it.
fn handle_types(range: &Range) -> u32 {
    match &range.kind {
        Kind::Virtual(mapped) if !mapped.physical.is_imported() => {
            mapped.physical.properties.handle_types & HANDLE_DESCRIPTOR
        }
        _ => 0,
    }
}

/// Address and bytes for the range attributes, which of mapped memory give the whole reservation; the mapping attributes give the
/// mapping (seen on an H200, `ctests/programs/buffer_ids.c`). For small blocks the driver gives a mapping of 2 MiB and more, which they
/// share; here each block has its own.
fn reserved(range: &Range) -> (Address, usize) {
    match &range.kind {
        Kind::Virtual(mapped) => (mapped.place.base, mapped.place.bytes),
        _ => (range.base, range.bytes),
    }
}

/// The id of the physical memory, the same for all its mappings.
fn block(range: &Range) -> u64 {
    match &range.kind {
        Kind::Virtual(mapped) => mapped.physical.identity,
        _ => range.buffer_id,
    }
}
