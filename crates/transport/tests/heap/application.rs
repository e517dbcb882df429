//! Shared by the tests: the application around the symmetric heap, and questions about both.

use std::ops::Deref;
use std::sync::Arc;

use windlass_base::gpu::{Calls, Driver};
use windlass_transport::heap::{Heap, Holds, Region};

use crate::support::*;

pub const MIB: u64 = 1 << 20;

/// A program that uses a device by its primary context, which is current on the thread that makes this.
pub struct Application(Primary);

impl Deref for Application {
    type Target = Primary;

    fn deref(&self) -> &Primary {
        &self.0
    }
}

impl Application {
    pub fn on(device: i32) -> Application {
        let primary = Primary::of(device);
        primary.make_current();
        Application(primary)
    }

    pub fn heap(&self, bytes: u64) -> Arc<Heap> {
        Heap::open(self.driver, self.device, bytes).unwrap()
    }

    pub fn free_bytes(&self) -> u64 {
        let (mut free, mut total) = (0, 0);
        ok(cuMemGetInfo_v2(&mut free, &mut total));
        free as u64
    }
}

/// Captures what `body` issues on a stream, in the strictest mode, and returns the graph.
pub fn capture(stream: &AppStream, body: impl FnOnce()) -> usize {
    const GLOBAL: u32 = 0;
    ok(cuStreamBeginCapture_v2(stream.0, GLOBAL));
    body();
    made(|out| cuStreamEndCapture(stream.0, out))
}

/// The same driver with some functions replaced, for as long as the process lives.
pub fn with_calls(change: impl FnOnce(&mut Calls)) -> &'static Driver {
    let mut calls = start().calls;
    change(&mut calls);
    Box::leak(Box::new(Driver::of(calls)))
}

pub fn lend(heap: &Arc<Heap>, bytes: u64) -> Region {
    let region = heap.lend(bytes, &Holds::new()).unwrap();
    region.wait_zeroed(soon()).unwrap();
    region
}

/// Whether a device may read and write at an address.
pub fn may_access(device: i32, at: u64) -> bool {
    const DEVICE: i32 = 1;
    let mut flags = 0;
    ok(cuMemGetAccess(&mut flags, &[DEVICE, device], at));
    flags == 3
}

/// Fills a region, on a non-blocking stream.
pub fn fill(region: &Region, byte: u8) {
    let stream = AppStream::new();
    ok(cuMemsetD8Async(region.address(), byte, region.bytes() as usize, stream.0));
    stream.synchronize();
}

/// Whether every byte of a region has this value.
pub fn holds(region: &Region, byte: u8) -> bool {
    let mut bytes = vec![!byte; region.bytes() as usize];
    let stream = AppStream::new();
    ok(cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), region.address(), bytes.len(), stream.0));
    stream.synchronize();
    bytes.iter().all(|found| *found == byte)
}

pub fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}
