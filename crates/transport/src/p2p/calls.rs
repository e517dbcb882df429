//! The p2p transport's calls of the driver beside [`windlass_base::gpu`] (copies, the launch), and its part of the launch resources' host
//! memory. All `unsafe` of the p2p transport is here.

#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use windlass_kernels::arrange::Direction;
use windlass_kernels::growth::Wire;
use windlass_kernels::launch::{GROWTH_REQUESTS_PER_WIRE, Launch, Operation};

use crate::p2p::lists::{self, Run};
use crate::sequencer::LaunchResources;
use windlass_base::gpu::module::{Function, Shape};
use windlass_base::gpu::{Address, Driver, Failure, Home, StreamHandle};

/// `CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN`.
const SHARED_BYTES_OPTIN: u32 = 97;

/// Words that kernels and the host read while kernels run. What the host writes shares no cache line with what kernels write.
#[repr(C)]
struct Head {
    /// Set by the kernel where it wants a larger ring: by wire and peer.
    growth_requests: [[AtomicU8; GROWTH_REQUESTS_PER_WIRE]; 2],
    /// Set by the host to tell kernels of a larger ring: by direction, peer and wire.
    growth: [[[AtomicU64; 2]; PEERS_MAX]; 2],
}

/// Ranks of a communicator that the words have room for; fewer fit a launch.
pub(super) const PEERS_MAX: usize = GROWTH_REQUESTS_PER_WIRE;
const HEAD_BYTES: usize = size_of::<Head>();
const _: () = assert!(HEAD_BYTES.is_multiple_of(128));

/// Bytes of host memory that launch resources have for the p2p transport: the words, then room for lists.
pub const HOST_BYTES: usize = HEAD_BYTES + lists::BYTES;

/// The p2p transport's part of launch resources' memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words<'resources> {
    resources: &'resources LaunchResources,
    base: NonNull<u8>,
}

impl<'resources> Words<'resources> {
    /// None if the launch resources were made with too little room.
    pub(super) fn of(resources: &'resources LaunchResources) -> Option<Words<'resources>> {
        let (base, bytes) = resources.host.beside();
        (bytes >= HOST_BYTES).then_some(Words { resources, base })
    }

    fn head(&self) -> &'resources Head {
        // SAFETY: within the launch resources' memory, see `of`, and aligned; any bytes are a head, and all use it as atomics.
        unsafe { self.base.cast::<Head>().as_ref() }
    }

    /// Where the kernel asks for larger rings.
    pub(super) fn growth_requests_address(&self) -> Address {
        self.head().growth_requests.as_ptr() as Address
    }

    /// The peers for whom the kernel asks for a larger ring, a bit each.
    pub(super) fn growth_requests(&self, wire: Wire) -> u64 {
        let bytes = self.head().growth_requests[wire as usize].iter().enumerate();
        bytes.fold(0, |mask, (peer, byte)| mask | u64::from(byte.load(Ordering::Relaxed) != 0) << peer)
    }

    /// The word that tells the kernel of a larger ring. It is stored once, with release order.
    pub(super) fn growth(&self, direction: Direction, peer: u32, wire: Wire) -> &'resources AtomicU64 {
        &self.growths(direction, peer)[wire as usize]
    }

    /// Where the kernel finds the words of both wires.
    pub(super) fn growth_address(&self, direction: Direction, peer: u32) -> Address {
        self.growths(direction, peer).as_ptr() as Address
    }

    fn growths(&self, direction: Direction, peer: u32) -> &'resources [AtomicU64; 2] {
        &self.head().growth[direction as usize][peer as usize]
    }

    /// Where the room for lists of streams begins.
    pub(super) fn room(&self) -> Address {
        self.base.as_ptr() as Address + HEAD_BYTES as Address
    }

    /// Clears all requests and all larger rings, while no kernel runs.
    pub(super) fn forget_growth(&self) {
        let head = self.head();
        head.growth_requests.iter().flatten().for_each(|byte| byte.store(0, Ordering::Relaxed));
        head.growth.iter().flatten().flatten().for_each(|word| word.store(0, Ordering::Release));
    }

    /// The same for the next communicator.
    pub(super) fn reset(&self) {
        self.forget_growth();
        // This store has release order, for whoever runs kernels afterwards.
        self.resources.host.reset();
    }
}

/// The most bytes of shared memory that a block of this device may have.
pub(super) fn shared_bytes_max(home: &Home) -> Result<u32, Failure> {
    Ok(home.driver.attribute(home.device, SHARED_BYTES_OPTIN)?.max(0) as u32)
}

/// Writes a list into the caller's run, and lets `stream` copy it to the device. The caller keeps the run until the copy, and every replay of
/// it, is done.
pub(super) fn copy_list(
    driver: &Driver,
    run: Run,
    operations: &[Operation],
    to: Address,
    stream: StreamHandle,
) -> Result<(), Failure> {
    let bytes = size_of_val(operations);
    let detail = || format!("bytes {bytes} for {} operations", run.operations());
    if operations.len() > run.operations() {
        return Err(Failure::without_code("a list", "no room", detail()));
    }
    let from = run.address as *mut Operation;
    // SAFETY: a run lies in launch resources or a slab, aligned, and has so much room, see above; the caller owns it.
    unsafe { from.copy_from_nonoverlapping(operations.as_ptr(), operations.len()) };
    // SAFETY: the list lies in our region; both stay until the copy is done.
    let code = unsafe { (driver.calls.cuMemcpyHtoDAsync_v2)(to, from.cast(), bytes, stream.0) };
    driver.check("cuMemcpyHtoDAsync_v2", code, detail)
}

/// Launches the kernel. The driver copies `launch`.
pub(super) fn launch(
    driver: &Driver,
    function: Function,
    stream: StreamHandle,
    shape: &Shape,
    launch: &mut Launch,
) -> Result<(), Failure> {
    // SAFETY: the kernel has this one parameter. Its memory, word and report stay while it runs: the communicator's owner
    // keeps the regions, the launch resources the word; the application vouches for its buffers.
    unsafe { driver.launch(function, stream, shape, &mut [(&raw mut *launch).cast()]) }
}
