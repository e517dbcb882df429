//! Asks the driver what it knows of an address. The calls change nothing, do not wait and need no context, so they may be made in the middle
//! of any call, also in a capture (`ctests/programs/buffer_ids.c`).

use std::ffi::{c_uint, c_void};

use crate::gpu::failure::SUCCESS;
use crate::gpu::{Address, Driver, Ordinal};

/// `CUpointer_attribute`. Each fits a word of 8 bytes.
const MEMORY_TYPE: c_uint = 2;
const BUFFER_ID: c_uint = 7;
const IS_MANAGED: c_uint = 8;
const DEVICE_ORDINAL: c_uint = 9;
const IS_LEGACY_CUDA_IPC_CAPABLE: c_uint = 10;
const RANGE_START_ADDR: c_uint = 11;
const RANGE_SIZE: c_uint = 12;
const ALLOWED_HANDLE_TYPES: c_uint = 14;
const MEMPOOL_HANDLE: c_uint = 17;
const MAPPING_SIZE: c_uint = 18;
const MAPPING_BASE_ADDR: c_uint = 19;

/// `CU_MEMORYTYPE_HOST`.
const HOST: u64 = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: u64 = 1;

/// A range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First address.
    pub base: Address,
    /// How many bytes.
    pub bytes: u64,
}

/// What is at an address, in the driver's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// `BUFFER_ID`, which no other allocation of this process ever has.
    pub id: u64,
    /// `RANGE_*`: for mapped memory the whole reservation.
    pub range: Extent,
    /// `MAPPING_*`: for memory that the driver maps itself, the block that it is cut from.
    pub mapping: Extent,
    /// The device of the memory.
    pub device: Ordinal,
    /// Whether it is host memory, allocated by the driver or registered with it.
    pub is_host: bool,
    /// Whether it is managed memory, wherever it is now.
    pub is_managed: bool,
    /// Whether it is of a stream's pool, this process's or a peer's.
    pub is_of_pool: bool,
    /// Whether peers may open it by `cuIpcGetMemHandle`: only of `cuMemAlloc`.
    pub has_legacy_ipc: bool,
    /// `ALLOWED_HANDLE_TYPES`: the kinds of handle by which peers may open it, bits of `CUmemAllocationHandleType`.
    pub handles: u64,
}

impl Attributes {
    /// Whether peers may open it by file descriptor.
    pub fn has_descriptor(&self) -> bool {
        self.handles & DESCRIPTOR != 0
    }
}

impl Driver {
    /// The id of the allocation at an address; none if there is none, or the driver does not answer. Takes 65 ns on an H200, and 105 if there is
    /// no allocation.
    #[inline]
    pub fn buffer_id(&self, at: Address) -> Option<u64> {
        self.pointer_attributes([BUFFER_ID], at).map(|[id]| id).filter(|id| *id != 0)
    }

    /// The kinds of handle by which peers may open the memory at an address. Bits of `CUmemAllocationHandleType`: 1 for a file descriptor, 8 for a
    /// fabric handle. 0 if there is no memory, or no answer. NCCL chooses among them itself.
    pub fn handle_types(&self, at: Address) -> u64 {
        self.pointer_attributes([ALLOWED_HANDLE_TYPES], at).map_or(0, |[handles]| handles)
    }

    /// All attributes of an address at once. Takes 110 ns.
    pub fn attributes(&self, at: Address) -> Option<Attributes> {
        let asked = [
            BUFFER_ID,
            RANGE_START_ADDR,
            RANGE_SIZE,
            MAPPING_BASE_ADDR,
            MAPPING_SIZE,
            DEVICE_ORDINAL,
            MEMORY_TYPE,
            IS_MANAGED,
            MEMPOOL_HANDLE,
            IS_LEGACY_CUDA_IPC_CAPABLE,
            ALLOWED_HANDLE_TYPES,
        ];
        let answers = self.pointer_attributes(asked, at)?;
        let [id, range, range_bytes, mapping, mapping_bytes, device, kind, managed, pool, ipc, handles] =
            answers;
        (id != 0).then_some(Attributes {
            id,
            range: Extent { base: range, bytes: range_bytes },
            mapping: Extent { base: mapping, bytes: mapping_bytes },
            device: device as u32 as Ordinal,
            is_host: kind == HOST,
            is_managed: managed != 0,
            is_of_pool: pool != 0,
            has_legacy_ipc: ipc != 0,
            handles,
        })
    }

    /// Whether memory of a handle (`cuMemCreate`, or imported) is mapped there; memory that the driver maps itself has none. Takes 92 ns if so,
    /// else 1 us.
    pub fn is_mapped_by_handle(&self, at: Address) -> bool {
        let mut handle = 0;
        // SAFETY: the output is a local; any address may be asked for.
        let code = unsafe { (self.calls.cuMemRetainAllocationHandle)(&mut handle, at as *mut c_void) };
        if code != SUCCESS {
            return false;
        }
        // SAFETY: the one reference that was just taken; the mapping keeps the memory.
        let code = unsafe { (self.calls.cuMemRelease)(handle) };
        self.note("cuMemRelease", code, || format!("of address {at:#x}"));
        true
    }

    /// Asks by `cuPointerGetAttributes`, which returns zeros for an unknown address. That is four times faster than the error of
    /// `cuPointerGetAttribute`.
    #[inline]
    fn pointer_attributes<const COUNT: usize>(
        &self,
        asked: [c_uint; COUNT],
        at: Address,
    ) -> Option<[u64; COUNT]> {
        let mut answers = [0_u64; COUNT];
        let mut places = answers.each_mut().map(|answer| (&raw mut *answer).cast::<c_void>());
        // SAFETY: a list of attributes and one of places for them, each eight bytes, which is the widest of those above.
        let code = unsafe {
            (self.calls.cuPointerGetAttributes)(COUNT as c_uint, asked.as_ptr(), places.as_mut_ptr(), at)
        };
        (code == SUCCESS).then_some(answers)
    }
}
