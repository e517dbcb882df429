use crate::driver::*;

const CHUNK: usize = 2 << 20;
const BUFFER_ID: u32 = 7;

/// `CUmemAllocationProp`: pinned, exported by descriptor, on a device.
pub fn properties(device: u64) -> [u64; 4] {
    [1 | 1 << 32, 1 | device << 32, 0, 0]
}

pub fn map(address: usize, bytes: usize, handle: u64) {
    ok(cuMemMap(address, bytes, 0, handle, 0));
    ok(cuMemSetAccess(address, bytes, &[1, 0, 3], 1));
}

pub fn physical(bytes: usize) -> u64 {
    let mut handle = 0;
    ok(cuMemCreate(&mut handle, bytes, &properties(0), 0));
    handle
}

pub fn reserve(bytes: usize) -> usize {
    made(|out| cuMemAddressReserve(out, bytes, 0, 0, 0))
}

pub fn free_bytes() -> usize {
    let (mut free, mut total) = (0, 0);
    ok(cuMemGetInfo_v2(&mut free, &mut total));
    free
}

#[test]
fn a_device_has_the_memory_that_the_environment_gives_it_and_no_more() {
    // SAFETY: this process runs one test, and no thread of it reads the environment yet.
    unsafe {
        std::env::set_var("WINDLASS_SIM_DEVICES", "3");
        std::env::set_var("WINDLASS_SIM_DEVICE_MEMORY", "16");
    }
    start();
    let (mut count, mut version) = (0, 0);
    ok(cuDeviceGetCount(&mut count));
    ok(cuDriverGetVersion(&mut version));
    assert_eq!((count, version), (3, 13000));
    assert_eq!(free_bytes(), 16 << 20);
    let first = buffer(10 << 20);
    let mut second = 0;
    assert_eq!(cuMemAlloc_v2(&mut second, 7 << 20), 2);
    let mut handle = 0;
    assert_eq!(cuMemCreate(&mut handle, 8 << 20, &properties(0), 0), 2);
    ok(cuMemCreate(&mut handle, 8 << 20, &properties(1), 0));
    ok(cuMemRelease(handle));
    ok(cuMemFree_v2(first));
    assert_eq!(free_bytes(), 16 << 20);
    assert_eq!(cuMemFree_v2(first), 1);
    assert_eq!(cuMemAlloc_v2(&mut second, 0), 1);
}

/// A large range that is cleared reads as zeros, whichever parts were written before; the bytes beside it stay.
#[test]
fn clearing_skips_no_page_that_was_written() {
    start();
    const BYTES: usize = 1 << 20;
    let memory = buffer(BYTES);
    // Two stretches of pages, a page alone, and the bytes at both ends.
    for (at, bytes) in [(0, 100), (90_000, 20_000), (300_001, 5), (BYTES - 70, 70)] {
        ok(cuMemsetD8_v2(memory + at, 0xff, bytes));
    }
    ok(cuMemsetD8_v2(memory + 33, 0, BYTES - 66));
    let mut seen = vec![7_u8; BYTES];
    ok(cuMemcpyDtoH_v2(seen.as_mut_ptr().cast(), memory, BYTES));
    let written: Vec<usize> = (0..BYTES).filter(|at| seen[*at] != 0).collect();
    assert_eq!(written, (0..33).chain(BYTES - 33..BYTES).collect::<Vec<_>>());
    ok(cuMemFree_v2(memory));
}

#[test]
fn pageable_sources_may_be_reused_at_once() {
    start();
    let stream = stream();
    let (first, second) = (buffer(4096), buffer(4096));
    let mut bytes = vec![7_u8; 4096];
    let gate = Gate::in_stream(stream);
    ok(cuMemcpyHtoDAsync_v2(first, bytes.as_ptr().cast(), bytes.len(), stream));
    bytes.fill(0);
    ok(cuMemcpyDtoDAsync_v2(second, first, bytes.len(), stream));
    gate.open();
    ok(cuStreamSynchronize(stream));
    ok(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), second, bytes.len()));
    assert!(bytes.iter().all(|byte| *byte == 7));
    assert_eq!(cuMemcpyHtoD_v2(first, bytes.as_ptr().cast(), 4097), 1);
    [first, second].into_iter().for_each(|address| ok(cuMemFree_v2(address)));
    ok(cuStreamDestroy_v2(stream));
}

#[test]
fn a_range_mapped_again_is_another_buffer() {
    start();
    let base = reserve(2 * CHUNK);
    let (first, second) = (physical(CHUNK), physical(CHUNK));
    map(base, CHUNK, first);
    map(base + CHUNK, CHUNK, second);
    let ids = [attribute(base, BUFFER_ID), attribute(base + CHUNK, BUFFER_ID)];
    assert_ne!(ids[0], ids[1]);
    let (mut start, mut bytes) = (0, 0);
    ok(cuMemGetAddressRange_v2(&mut start, &mut bytes, base + CHUNK + 5));
    assert_eq!((start, bytes), (base + CHUNK, CHUNK));
    assert_eq!(cuMemMap(base, CHUNK, 0, second, 0), 208);
    assert_eq!(cuMemUnmap(base, CHUNK / 2), 1);
    assert_eq!(cuMemAddressFree(base, 2 * CHUNK), 1);
    ok(cuMemUnmap(base, CHUNK));
    map(base, CHUNK, first);
    assert!(!ids.contains(&attribute(base, BUFFER_ID)));
    // Memory of released handles lives on in its mappings, and its handles can be retained again.
    ok(cuMemRelease(first));
    ok(cuMemRelease(second));
    let mut again = 0;
    ok(cuMemRetainAllocationHandle(&mut again, base + 1));
    assert_eq!(again, first);
    ok(cuMemRelease(again));
    assert_eq!(cuMemRelease(again), 1);
    ok(cuMemUnmap(base, 2 * CHUNK));
    ok(cuMemAddressFree(base, 2 * CHUNK));
    assert_eq!(free_bytes(), 1 << 30);
}

/// For mapped memory the range attributes give the reservation, the mapping attributes the mapping. The block id is the handle's, the
/// buffer id is different for each mapping.
#[test]
fn mapped_memory_says_where_it_lies() {
    start();
    let (base_of, bytes_of, mapping_bytes, mapping_base, block) = (11, 12, 18, 19, 20);
    let reserved = reserve(4 * CHUNK);
    let handle = physical(CHUNK);
    let seen: Vec<[u64; 2]> = [reserved, reserved + 2 * CHUNK]
        .into_iter()
        .map(|at| {
            map(at, CHUNK, handle);
            assert_eq!(attribute(at + 5, base_of), reserved as u64);
            assert_eq!(attribute(at + 5, bytes_of), 4 * CHUNK as u64);
            assert_eq!(attribute(at + 5, mapping_base), at as u64);
            assert_eq!(attribute(at + 5, mapping_bytes), CHUNK as u64);
            [attribute(at, BUFFER_ID), attribute(at, block)]
        })
        .collect();
    assert_ne!(seen[0][0], seen[1][0]);
    assert_eq!(seen[0][1], seen[1][1]);
    for at in [reserved, reserved + 2 * CHUNK] {
        ok(cuMemUnmap(at, CHUNK));
    }
    ok(cuMemRelease(handle));
    ok(cuMemAddressFree(reserved, 4 * CHUNK));
}

/// The attributes of an address, read in one call.
fn attributes<const N: usize>(address: usize, kinds: [u32; N]) -> [u64; N] {
    let mut values = [0_u64; N];
    let places = values.each_mut().map(|value| std::ptr::from_mut(value).cast());
    ok(cuPointerGetAttributes(N as u32, kinds.as_ptr(), places.as_ptr(), address));
    values
}

/// Maps the memory at an address a second time, as code does that did not allocate it.
pub fn alias(of: usize, bytes: usize) -> usize {
    let mut handle = 0;
    ok(cuMemRetainAllocationHandle(&mut handle, of));
    let at = reserve(bytes);
    map(at, bytes, handle);
    ok(cuMemRelease(handle));
    at
}

pub fn unmap(at: usize, bytes: usize) {
    ok(cuMemUnmap(at, bytes));
    ok(cuMemAddressFree(at, bytes));
}

fn write(at: usize, word: u32) {
    ok(cuMemcpyHtoD_v2(at, (&raw const word).cast(), 4));
}

fn read(at: usize) -> u32 {
    let mut word = 0_u32;
    ok(cuMemcpyDtoH_v2((&raw mut word).cast(), at, 4));
    word
}

/// An alias has the same bytes and another buffer id; the memory stays until the last handle and mapping have gone.
#[test]
fn memory_can_be_mapped_twice() {
    start();
    let (handle_types, mapping_bytes, mapping_base, block) = (14, 18, 19, 20);
    let kinds = [BUFFER_ID, mapping_base, mapping_bytes, handle_types, block];
    let first = reserve(2 * CHUNK);
    let handle = physical(2 * CHUNK);
    map(first, 2 * CHUNK, handle);
    ok(cuMemRelease(handle));
    let second = alias(first + CHUNK + 5, 2 * CHUNK);
    assert_ne!(first, second);
    write(first + CHUNK, 7);
    assert_eq!(read(second + CHUNK), 7);
    write(second + 8, 9);
    assert_eq!(read(first + 8), 9);
    let (of_first, of_second) = (attributes(first + CHUNK, kinds), attributes(second + CHUNK, kinds));
    assert_ne!(of_first[0], of_second[0]);
    assert_eq!(of_second[1..4], [second as u64, 2 * CHUNK as u64, 1]);
    assert_eq!(of_first[1..4], [first as u64, 2 * CHUNK as u64, 1]);
    assert_eq!(of_first[4], of_second[4]);
    // The first mapping is unmapped: its addresses are unknown then, the alias stays.
    let used = free_bytes();
    unmap(first, 2 * CHUNK);
    assert_eq!(attributes(first, kinds)[0], 0);
    assert_eq!((free_bytes(), read(second + 8)), (used, 9));
    assert_eq!(attributes(second + CHUNK, kinds), of_second);
    // An alias of the alias, and the handle alone.
    let third = alias(second, 2 * CHUNK);
    unmap(second, 2 * CHUNK);
    assert_eq!(read(third + CHUNK), 7);
    let mut again = 0;
    ok(cuMemRetainAllocationHandle(&mut again, third));
    unmap(third, 2 * CHUNK);
    assert_eq!(free_bytes(), used);
    ok(cuMemRelease(again));
    assert_eq!(free_bytes(), used + 2 * CHUNK);
}

/// An exported descriptor holds the memory, and so does a handle imported from it.
#[test]
fn descriptors_hold_memory() {
    start();
    let whole = free_bytes();
    let handle = physical(CHUNK);
    let mut descriptor = -1;
    ok(cuMemExportToShareableHandle(&mut descriptor, handle, 1, 0));
    ok(cuMemRelease(handle));
    assert_eq!(free_bytes(), whole - CHUNK);
    let mut imported = 0;
    ok(cuMemImportFromShareableHandle(&mut imported, descriptor as usize, 1));
    // SAFETY: exported for this test.
    unsafe { libc::close(descriptor) };
    assert_eq!(free_bytes(), whole - CHUNK);
    let at = reserve(CHUNK);
    map(at, CHUNK, imported);
    ok(cuMemRelease(imported));
    assert_eq!(free_bytes(), whole - CHUNK);
    unmap(at, CHUNK);
    assert_eq!(free_bytes(), whole);
}

/// Memory that a descriptor still holds cannot be allocated again.
#[test]
fn held_memory_is_not_given_twice() {
    // SAFETY: this process runs one test, and no thread of it reads the environment yet.
    unsafe { std::env::set_var("WINDLASS_SIM_DEVICE_MEMORY", "4") };
    start();
    let handle = physical(2 * CHUNK);
    let mut descriptor = -1;
    ok(cuMemExportToShareableHandle(&mut descriptor, handle, 1, 0));
    ok(cuMemRelease(handle));
    let mut other = 0;
    assert_eq!(cuMemCreate(&mut other, CHUNK, &properties(0), 0), 2);
    // SAFETY: exported for this test.
    unsafe { libc::close(descriptor) };
    ok(cuMemCreate(&mut other, 2 * CHUNK, &properties(0), 0));
    ok(cuMemRelease(other));
}

#[test]
fn pool_blocks_live_until_the_stream_frees_them() {
    start();
    let stream = stream();
    let block = made(|out| cuMemAllocAsync(out, 4096, stream));
    let id = attribute(block, BUFFER_ID);
    let gate = Gate::in_stream(stream);
    ok(cuMemFreeAsync(block, stream));
    assert_eq!(cuMemFreeAsync(block, stream), 1);
    assert_eq!(attribute(block, BUFFER_ID), id);
    gate.open();
    ok(cuStreamSynchronize(stream));
    let mut value = 0_u64;
    assert_eq!(cuPointerGetAttribute((&raw mut value).cast(), BUFFER_ID, block), 1);
    ok(cuStreamDestroy_v2(stream));
}

#[test]
fn pointers_say_what_they_are() {
    let context = start();
    let device = buffer(1000);
    let host = made(|out| cuMemHostAlloc(out, 1000, 0));
    let own = vec![0_u8; 1000];
    let registered = own.as_ptr() as usize;
    assert_eq!(cuMemHostUnregister(registered), 713);
    ok(cuMemHostRegister_v2(registered, own.len(), 0));
    assert_eq!(cuMemHostRegister_v2(registered + 10, 10, 0), 712);
    let (context_of, memory_type, ordinal, legacy_ipc, base, bytes) = (1, 2, 9, 10, 11, 12);
    assert_eq!(attribute(device + 5, context_of), context as u64);
    assert_eq!(attribute(device + 5, memory_type), 2);
    assert_eq!(attribute(device + 5, ordinal), 0);
    assert_eq!(attribute(device + 5, legacy_ipc), 1);
    assert_eq!(attribute(device + 5, base), device as u64);
    assert_eq!(attribute(device + 5, bytes), 1000);
    assert_eq!(attribute(host, memory_type), 1);
    assert_eq!(attribute(registered + 999, memory_type), 1);
    assert_eq!(cuMemFree_v2(host), 1);
    ok(cuMemHostUnregister(registered));
    ok(cuMemFreeHost(host));
    ok(cuMemFree_v2(device));
}
