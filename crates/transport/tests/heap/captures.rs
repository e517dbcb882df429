//! Tests beside captures of the application: captures survive the calls of the symmetric heap, and their graphs hold regions.

use std::os::fd::AsFd;
use std::sync::Arc;

use windlass_transport::heap::{Announcement, Event, Holds, Member, PeerHeap};

use crate::application::*;
use crate::support::*;

const THERE: [Member; 1] = [Member { rank: 1, process: 9 }];

/// With a capture in the strictest mode on the calling thread a symmetric heap opens, grows, zeroes, announces, maps a peer, probes
/// and takes back, and the capture is complete.
#[test]
fn everything_works_beside_a_capture() {
    let application = Application::on(0);
    let stream = AppStream::new();
    let target = application.heap(64 * MIB);
    let target = lend(&target, MIB);
    let graph = capture(&stream, || {
        ok(cuMemsetD32Async(target.address(), 7, 1, stream.0));
        let heap = application.heap(64 * MIB);
        let peer = PeerHeap::new(application.driver);
        let region = lend(&heap, 40 * MIB);
        let Announcement { place, descriptor } = region.announce(&THERE).unwrap();
        region.allow(1).unwrap();
        let mapped = peer.map(place, descriptor.as_fd(), &heap, &Holds::new()).unwrap();
        heap.probe(region.address(), 0, mapped.address + 4, 5).unwrap();
        heap.note(Event::Died(9));
        drop((region, mapped));
        peer.settle();
        heap.settle().unwrap();
        assert_eq!(heap.counters().mapped_bytes, 0);
        ok(cuMemsetD32Async(target.address() + 4, 8, 1, stream.0));
    });
    assert!(holds(&target, 0), "captured, not run");
    ok(cuGraphDestroy(graph));
    // Proof that the test can fail: without the guard this breaks the capture.
    ok(cuStreamBeginCapture_v2(stream.0, 0));
    let mut none = 0;
    assert_eq!(cuStreamQuery(AppStream::new().0), 900);
    assert_eq!(cuStreamEndCapture(stream.0, &mut none), 901);
    let heap = target.heap.clone();
    drop(target);
    heap.settle().unwrap();
}

/// A graph, and then its executable graph, hold the regions of the communicator and its mappings of peers. The destructor of the
/// user object only sets a mark, and the next `settle` frees all.
#[test]
fn graphs_hold_regions() {
    let application = Application::on(0);
    let (stream, other) = (AppStream::new(), AppStream::new());
    let heap = application.heap(64 * MIB);
    let peer = PeerHeap::new(application.driver);
    let holds = Holds::new();
    let region = heap.lend(MIB, &holds).unwrap();
    region.wait_zeroed(soon()).unwrap();
    let Announcement { place, descriptor } = region.announce(&THERE).unwrap();
    let mapped = peer.map(place, descriptor.as_fd(), &heap, &holds).unwrap();
    drop(descriptor);
    assert_eq!(application.driver.capture_of(stream.handle()).unwrap(), None);
    let graph = capture(&stream, || {
        let capture = application.driver.capture_of(stream.handle()).unwrap().unwrap();
        // Every operation of a capture calls `hold`; the first call counts.
        for _ in 0..3 {
            holds.hold(application.driver, capture).unwrap();
        }
    });
    let second = capture(&other, || {
        let capture = application.driver.capture_of(other.handle()).unwrap().unwrap();
        holds.hold(application.driver, capture).unwrap();
    });
    let executable = made(|out| cuGraphInstantiateWithFlags(out, graph, 0));
    assert!(!holds.are_none());
    heap.note(Event::Died(9));
    drop((region, mapped));
    let settle = || {
        heap.settle().unwrap();
        peer.settle();
        (heap.counters().mapped_bytes, peer.mapped().1)
    };
    ok(cuGraphDestroy(graph));
    assert_eq!(settle(), (2 * MIB, 2 * MIB));
    assert_eq!(heap.counters().waiting_bytes, 2 * MIB);
    ok(cuGraphExecDestroy(executable));
    assert_eq!(settle(), (2 * MIB, 2 * MIB), "the second graph");
    ok(cuGraphDestroy(second));
    eventually("the destructors ran", || holds.are_none());
    assert_eq!(settle(), (0, 0));
    assert_eq!(Arc::strong_count(&holds), 1, "nothing keeps the communicator");
}

/// A capture that fails releases what it held. Holding for a graph that does not exist is an error and holds nothing.
#[test]
fn failed_captures_let_go() {
    let application = Application::on(0);
    let stream = AppStream::new();
    let holds = Holds::new();
    ok(cuStreamBeginCapture_v2(stream.0, 0));
    let capture = application.driver.capture_of(stream.handle()).unwrap().unwrap();
    holds.hold(application.driver, capture).unwrap();
    // Breaks the capture.
    assert_eq!(cuStreamQuery(stream.0), 900);
    let mut none = 0;
    assert_eq!(cuStreamEndCapture(stream.0, &mut none), 901);
    eventually("the destructor ran", || holds.are_none());
    let gone = windlass_base::gpu::stream::Capture { id: capture.id + 1, graph: capture.graph };
    let failure = holds.hold(application.driver, gone).unwrap_err();
    assert_eq!(failure.call, "cuGraphRetainUserObject");
    eventually("the destructor ran", || holds.are_none());
    assert_eq!(Arc::strong_count(&holds), 1);
}
