//! Structures that functions of the driver's C interface take.

use std::ffi::c_void;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Location {
    pub(super) kind: u32,
    pub(super) id: i32,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AllocationProperties {
    pub(super) kind: u32,
    pub(super) handle_types: u32,
    pub(super) location: Location,
    pub(super) windows: usize,
    pub(super) compression: u8,
    pub(super) direct_rdma: u8,
    pub(super) usage: u16,
    pub(super) reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AccessDescription {
    pub(super) location: Location,
    pub(super) flags: u32,
}

const _: () = assert!(size_of::<AllocationProperties>() == 32 && size_of::<AccessDescription>() == 12);

/// `CUlaunchAttribute`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Attribute {
    pub(super) id: u32,
    pub(super) pad: u32,
    pub(super) value: [u32; 16],
}

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Debug)]
pub struct LaunchConfiguration {
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) shared_bytes: u32,
    pub(super) stream: usize,
    pub(super) attributes: *const c_void,
    pub(super) attribute_count: u32,
}

const _: () = assert!(size_of::<Attribute>() == 72 && size_of::<LaunchConfiguration>() == 56);
