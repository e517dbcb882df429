//! Tests of failures: they leave nothing behind and say why.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use windlass_base::gpu::failure::Code;
use windlass_base::gpu::types::AccessDescription;
use windlass_transport::heap::{Announcement, Event, Heap, HeapError, Holds, Member, PeerHeap, Place};

use crate::application::*;
use crate::support::*;

const THERE: [Member; 1] = [Member { rank: 1, process: 9 }];

/// Without device memory the error has the call and the numbers, and smaller regions still fit.
#[test]
fn out_of_device_memory() {
    if on_a_gpu() {
        return;
    }
    // SAFETY: as in `start`.
    unsafe { std::env::set_var("WINDLASS_SIM_DEVICE_MEMORY", "50") };
    let application = Application::on(0);
    let heap = application.heap(1 << 30);
    let regions: Vec<_> = (0..12).map(|_| lend(&heap, 4 * MIB)).collect();
    assert_eq!((heap.counters().mapped_bytes, application.free_bytes()), (48 * MIB, 2 * MIB));
    let refusal = heap.lend(4 * MIB, &Holds::new()).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "cuMemCreate answered CUDA_ERROR_OUT_OF_MEMORY (2): bytes 4194304, device 0"
    );
    assert_eq!((heap.counters().mapped_bytes, heap.counters().regions), (48 * MIB, 12));
    let small = lend(&heap, MIB);
    drop((regions, small));
    heap.settle().unwrap();
    assert_eq!(application.free_bytes(), 50 * MIB);
}

unsafe extern "C" fn refuse_map(_: u64, _: usize, _: usize, _: u64, _: u64) -> Code {
    Code(205)
}

unsafe extern "C" fn refuse_access(_: u64, _: usize, _: *const AccessDescription, _: usize) -> Code {
    Code(1)
}

unsafe extern "C" fn refuse_fill(_: u64, _: u8, _: usize, _: usize) -> Code {
    Code(700)
}

/// Growth that fails at any step maps nothing, memory is freed, and the strict simulator finds no leak.
#[test]
fn failed_growth() {
    const TIMES: usize = 16;
    let application = Application::on(0);
    let drivers = [
        with_calls(|calls| calls.cuMemMap = refuse_map),
        with_calls(|calls| calls.cuMemSetAccess = refuse_access),
        with_calls(|calls| calls.cuMemsetD8Async = refuse_fill),
    ];
    let texts = [
        "cuMemMap answered CUDA_ERROR_MAP_FAILED (205): address",
        "cuMemSetAccess answered",
        "cuMemsetD8Async",
    ];
    // After this the driver has made what it needs once.
    let heap = application.heap(64 * MIB);
    drop(lend(&heap, MIB));
    heap.settle().unwrap();
    for (driver, text) in drivers.into_iter().zip(texts) {
        let before = application.free_bytes();
        for _ in 0..TIMES {
            let heap = Heap::open(driver, 0, 64 * MIB).unwrap();
            let refusal = heap.lend(MIB, &Holds::new()).unwrap_err();
            assert!(refusal.to_string().starts_with(text), "{refusal}");
            heap.settle().unwrap();
            assert_eq!(heap.counters().mapped_bytes, 0);
        }
        let after = application.free_bytes();
        // A GPU's driver takes and frees memory for itself; each region would be 2 MiB.
        let slack = if on_a_gpu() { 32 * MIB } else { 0 };
        assert!(before.abs_diff(after) <= slack, "{text}: free before {before}, after {after}");
    }
}

/// An import that fails at any step leaves no mapping, no handle and no addresses.
#[test]
fn failed_imports() {
    let application = Application::on(0);
    let heap = application.heap(64 * MIB);
    let region = lend(&heap, MIB);
    let Announcement { place, descriptor } = region.announce(&THERE).unwrap();
    let (socket, _other) = UnixStream::pair().unwrap();
    let peer = PeerHeap::new(application.driver);
    let map = |peer: &std::sync::Arc<PeerHeap>, place: Place, descriptor| {
        let refusal = peer.map(place, descriptor, &heap, &Holds::new()).unwrap_err();
        assert_eq!(peer.mapped(), (0, 0));
        refusal
    };
    let refusal = map(&peer, place, socket.as_fd());
    assert!(refusal.to_string().starts_with("cuMemImportFromShareableHandle answered"), "{refusal}");
    // More than the imported memory has.
    let larger = Place { bytes: 2 * place.bytes, ..place };
    map(&peer, larger, descriptor.as_fd());
    let outside = Place { offset: place.span_bytes, ..place };
    assert!(matches!(map(&peer, outside, descriptor.as_fd()), HeapError::Strange { .. }));
    for driver in [
        with_calls(|calls| calls.cuMemMap = refuse_map),
        with_calls(|calls| calls.cuMemSetAccess = refuse_access),
    ] {
        map(&PeerHeap::new(driver), place, descriptor.as_fd());
    }
    // Then an import works, and contradictory announcements of the peer do not undo it.
    let mapped = peer.map(place, descriptor.as_fd(), &heap, &Holds::new()).unwrap();
    let other = Place { span_bytes: 2 * place.span_bytes, ..place };
    assert!(peer.map(other, descriptor.as_fd(), &heap, &Holds::new()).is_err());
    let moved = Place { offset: place.bytes, ..place };
    assert!(peer.map(moved, descriptor.as_fd(), &heap, &Holds::new()).is_err());
    assert_eq!(peer.mapped(), (1, place.bytes));
    drop(mapped);
    peer.settle();
    heap.note(Event::Died(9));
    drop(region);
    heap.settle().unwrap();
}

/// In a forked child every call is an error, inherited values can be dropped, and nothing of the parent's changes.
#[test]
fn fork() {
    let application = Application::on(0);
    let heap = application.heap(64 * MIB);
    let peer = PeerHeap::new(application.driver);
    let region = lend(&heap, MIB);
    let Announcement { place, descriptor } = region.announce(&THERE).unwrap();
    let mapped = peer.map(place, descriptor.as_fd(), &heap, &Holds::new()).unwrap();
    // SAFETY: the child only runs what follows, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = matches!(heap.lend(MIB, &Holds::new()), Err(HeapError::ForkedChild))
            && matches!(region.announce(&THERE), Err(HeapError::ForkedChild))
            && matches!(region.is_zeroed(), Err(HeapError::ForkedChild))
            && matches!(heap.settle(), Err(HeapError::ForkedChild))
            && matches!(heap.load(region.address()), Err(HeapError::ForkedChild))
            && matches!(
                peer.map(place, descriptor.as_fd(), &heap, &Holds::new()),
                Err(HeapError::ForkedChild)
            )
            && matches!(Heap::of(0), Err(HeapError::ForkedChild));
        peer.settle();
        drop((region, mapped, peer, heap));
        // SAFETY: no handlers of the parent's run.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut status = -1;
    // SAFETY: the output is a local.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!((peer.mapped().0, heap.counters().regions), (1, 1));
    drop(mapped);
    peer.settle();
    heap.note(Event::Died(9));
    drop(region);
    heap.settle().unwrap();
}
