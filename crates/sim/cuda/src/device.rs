//! Devices: their attributes, and the accounting of their memory.

use crate::code::{CUDA_ERROR_OUT_OF_MEMORY, Code};
use crate::context::Primary;
use crate::holders;
use crate::mapping::{anonymous_file, discard, grow};
use crate::sync::lock;
use crate::table::Handle;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

/// `CUdevice`.
pub type Ordinal = i32;

pub struct Device {
    pub ordinal: Ordinal,
    /// Few by default: a simulated kernel has a host thread for every warp, and its grid grows with the device.
    pub multiprocessors: i32,
    /// Compute capability, 90 for 9.0.
    pub capability: i32,
    pub memory: Arc<DeviceMemory>,
    pub primary: Mutex<Primary>,
    pub pools: Mutex<Pools>,
}

/// Handles of the device's default pool and of the pool that allocations use now.
#[derive(Default)]
pub struct Pools {
    pub default: Handle,
    pub current: Handle,
}

impl Device {
    pub fn new(ordinal: Ordinal, bytes: usize, multiprocessors: i32, capability: i32) -> Self {
        Device {
            ordinal,
            multiprocessors,
            capability,
            memory: Arc::new(DeviceMemory { ordinal, total: bytes, state: Mutex::default() }),
            primary: Mutex::default(),
            pools: Mutex::default(),
        }
    }

    pub fn uuid(&self) -> [u8; 16] {
        let mut uuid = *b"windlass-sim-gpu";
        uuid[15] = self.ordinal as u8;
        uuid
    }

    pub fn bus(&self) -> i32 {
        self.ordinal + 1
    }

    pub fn bus_id(&self) -> String {
        format!("0000:{:02X}:00.0", self.bus())
    }

    /// The value of a `CUdevice_attribute`: that of an H200 where programs might look (but for multiprocessors and capability), else 0.
    pub fn attribute(&self, attribute: u32) -> Option<i32> {
        let value = match attribute {
            1..=3 => 1024,
            4 => 64,
            5 => i32::MAX,
            6 | 7 => 65535,
            8 => 48 << 10,
            9 => 64 << 10,
            10 => 32,
            11 => i32::MAX,
            12 | 82 => 65536,
            13 => 1_980_000,
            14 => 512,
            15 | 19 | 31 | 32 | 41 | 78..=80 | 83 | 86..=91 => attribute_flag(attribute),
            16 => self.multiprocessors,
            30 => 512,
            33 => self.bus(),
            36 => 3_201_000,
            37 => 6144,
            38 => 60 << 20,
            39 => 2048,
            40 => 3,
            51 => 32,
            75 => self.capability / 10,
            76 => self.capability % 10,
            81 => 228 << 10,
            85 => self.ordinal,
            92..=95 | 99 | 102 | 103 | 115 | 120 | 122 | 123 | 125 => 1,
            96 | 98 => 0,
            97 => 227 << 10,
            106 => 32,
            108 => 30 << 20,
            109 => 128 << 20,
            111 => 1024,
            119 => 1,
            126 => 4,
            131 | 134 => 0,
            0 | 146.. => return None,
            _ => 0,
        };
        Some(value)
    }
}

/// Attributes that are 0 or 1.
fn attribute_flag(attribute: u32) -> i32 {
    // No native host atomics, no pageable memory access: with those, tests would miss bugs that occur on a PCIe machine.
    i32::from(!matches!(attribute, 86 | 88))
}

/// The memory of one device in this process: an allowance in bytes, and one sparse file with the blocks of `cuMemAlloc`. Offsets are
/// never used twice, so that a process that still maps a freed block over IPC never sees data of another block.
pub struct DeviceMemory {
    pub ordinal: Ordinal,
    pub total: usize,
    state: Mutex<MemoryState>,
}

#[derive(Default)]
struct MemoryState {
    used: usize,
    file: Option<Arc<OwnedFd>>,
    next: usize,
    lent: Vec<Lent>,
}

/// Memory that this process has released and other processes still hold: it still counts as used.
struct Lent {
    file: OwnedFd,
    _charge: Charge,
}

/// Bytes taken from a device's allowance, given back when dropped.
pub struct Charge {
    memory: Arc<DeviceMemory>,
    bytes: usize,
}

/// A part of the device's file, emptied when dropped.
pub struct Block {
    pub file: Arc<OwnedFd>,
    pub offset: usize,
    pub bytes: usize,
    _charge: Charge,
}

impl DeviceMemory {
    pub fn free(&self) -> usize {
        self.take_back();
        self.total - lock(&self.state).used
    }

    /// Stops counting memory that no other process holds any more.
    fn take_back(&self) {
        let mut state = lock(&self.state);
        let (lent, returned) =
            std::mem::take(&mut state.lent).into_iter().partition(|lent| holders::exist(&lent.file));
        state.lent = lent;
        drop(state);
        // Dropping the charges takes the lock.
        drop::<Vec<Lent>>(returned);
    }

    pub fn charge(self: &Arc<Self>, bytes: usize) -> Result<Charge, Code> {
        self.take_back();
        let mut state = lock(&self.state);
        let used = state
            .used
            .checked_add(bytes)
            .filter(|used| *used <= self.total)
            .ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        state.used = used;
        Ok(Charge { memory: self.clone(), bytes })
    }

    pub fn block(self: &Arc<Self>, bytes: usize) -> Result<Block, Code> {
        let charge = self.charge(bytes)?;
        let mut state = lock(&self.state);
        let file = match &state.file {
            Some(file) => file.clone(),
            None => Arc::new(anonymous_file(&format!("sim-cuda-memory-{}", self.ordinal), 0)?),
        };
        state.file = Some(file.clone());
        let offset = state.next;
        grow(&file, offset + bytes)?;
        state.next += bytes;
        Ok(Block { file, offset, bytes, _charge: charge })
    }
}

impl Charge {
    /// Keeps counting the bytes until no other process holds the memory of `file`.
    pub fn lend(self, file: OwnedFd) {
        let memory = self.memory.clone();
        lock(&memory.state).lent.push(Lent { file, _charge: self });
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        lock(&self.memory.state).used -= self.bytes;
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        discard(&self.file, self.offset, self.bytes);
    }
}
