//! Tests of contexts: which one is current on the calling thread after calls of the symmetric heap.

use std::sync::Arc;

use windlass_base::gpu::Driver;
use windlass_base::gpu::context::Home;
use windlass_transport::heap::{Heap, Holds, settle};

use crate::application::*;
use crate::support::*;

fn current(driver: &Driver) -> usize {
    // SAFETY: the output is a local.
    made(|out| unsafe { (driver.calls.cuCtxGetCurrent)(out) }.0)
}

/// The context that is current before a call is current after it, also none.
#[test]
fn the_current_context_comes_back() {
    let application = Application::on(0);
    let other = Application::on(1);
    let heap = application.heap(16 * MIB);
    for context in [other.context, application.context, 0] {
        ok(cuCtxSetCurrent(context));
        let region = lend(&heap, MIB);
        assert_eq!(current(application.driver), context);
        drop(region);
        heap.settle().unwrap();
        assert!(heap.lend(MIB << 20, &windlass_transport::heap::Holds::new()).is_err());
        assert_eq!(current(application.driver), context);
    }
    assert_eq!(application.driver.current_device().unwrap(), None);
}

/// An application with a context of its own gets no primary context beside it.
#[test]
fn a_context_of_the_applications_own() {
    let driver = start();
    let context = made(|out| cuCtxCreate_v2(out, 0, 0));
    let is_active = |device| {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: the outputs are locals.
        ok(unsafe { (driver.calls.cuDevicePrimaryCtxGetState)(device, &mut flags, &mut active) }.0);
        active != 0
    };
    assert!(!is_active(0) && !is_active(1), "nobody has used them");
    let heap = Heap::open(driver, 0, 16 * MIB).unwrap();
    drop(lend(&heap, MIB));
    heap.settle().unwrap();
    assert!(!is_active(0));
    drop(heap);
    assert_eq!(current(driver), context);
    // With a context of another device current, the primary context is taken.
    let heap = Heap::open(driver, 1, 16 * MIB).unwrap();
    drop(lend(&heap, MIB));
    heap.settle().unwrap();
    assert!(is_active(1));
    drop(heap);
    assert!(is_active(1), "kept: a release could take a reference that the application took after a reset");
    ok(cuDevicePrimaryCtxRelease_v2(1));
    assert!(!is_active(1), "retained more than once");
    ok(cuCtxDestroy_v2(context));
}

/// After a reset the device gets another symmetric heap. Regions of the former one can still be returned, also one that was being
/// zeroed. The former heap lends nothing more, and its end releases no reference to the new context.
#[test]
fn a_context_that_was_reset() {
    if on_a_gpu() {
        return;
    }
    let before = Application::on(0);
    let free_bytes = before.free_bytes();
    let heap = Heap::of(0).unwrap();
    let (region, being_zeroed) = (lend(&heap, MIB), heap.lend(MIB, &Holds::new()).unwrap());
    assert!(Home::if_primary(before.driver, 0).is_some());
    ok(cuCtxSetCurrent(0));
    ok(cuDevicePrimaryCtxReset_v2(0));
    assert!(
        Home::if_primary(before.driver, 0).is_none() && !before.driver.has_primary_context(0),
        "made again"
    );
    let after = Application::on(0);
    let next = Heap::of(0).unwrap();
    assert!(!Arc::ptr_eq(&heap, &next) && Arc::ptr_eq(&next, &Heap::of(0).unwrap()));
    assert!(heap.lend(MIB, &Holds::new()).is_err());
    fill(&lend(&next, MIB), 7);
    drop((region, being_zeroed, next));
    settle();
    assert_eq!((heap.counters().regions, heap.counters().mapped_bytes), (0, 0));
    drop(heap);
    settle();
    assert_eq!(after.free_bytes(), free_bytes);
    fill(&lend(&Heap::of(0).unwrap(), MIB), 8);
    settle();
    // Keeps the reference to a context that no longer exists.
    std::mem::forget(before);
}
