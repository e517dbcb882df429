//! Tests of regions: lent, zeroed, refused at the limit, taken back.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use windlass_base::gpu::failure::Code;
use windlass_base::gpu::stream;
use windlass_transport::heap::{Event, HeapError, Holds, Member, PeerHeap};

use crate::application::*;
use crate::support::*;

/// Regions of random sizes are aligned, hold zeros whatever was there before, do not overlap, and stay within the limit in sum. At
/// the end nothing is mapped and nothing leaks.
#[test]
fn random_sizes() {
    let application = Application::on(0);
    let seed = std::env::var("SEED").map_or(42, |seed| seed.parse().unwrap());
    println!("SEED={seed}");
    let mut state: u64 = seed;
    let heap = application.heap(64 * MIB);
    let mut lent: Vec<(windlass_transport::heap::Region, u8)> = Vec::new();
    let (mut refused, mut mapped_bytes_highest) = (0, 0);
    for step in 0..300_u32 {
        match next(&mut state) % 5 {
            0..=2 => {
                let bytes = 1 + next(&mut state) % (1 << (12 + next(&mut state) % 12));
                match heap.lend(bytes, &Holds::new()) {
                    Ok(region) => {
                        region.wait_zeroed(soon()).unwrap();
                        assert!(region.bytes() >= bytes && region.address().is_multiple_of(2 * MIB));
                        assert!(holds(&region, 0), "step {step}: not zeros");
                        fill(&region, step as u8 | 1);
                        lent.push((region, step as u8 | 1));
                    }
                    Err(HeapError::Full { .. }) => refused += 1,
                    Err(other) => panic!("{other}"),
                }
            }
            3 if !lent.is_empty() => {
                let (region, mark) = lent.swap_remove(next(&mut state) as usize % lent.len());
                assert!(holds(&region, mark), "step {step}: overwritten");
            }
            _ => heap.settle().unwrap(),
        }
        let counters = heap.counters();
        assert!(counters.mapped_bytes <= 64 * MIB);
        mapped_bytes_highest = mapped_bytes_highest.max(counters.mapped_bytes);
        assert!(counters.mapped_bytes >= lent.iter().map(|(region, _)| region.bytes()).sum());
    }
    assert!(refused > 0, "the limit was reached");
    drop(lent);
    heap.settle().unwrap();
    let counters = heap.counters();
    assert_eq!((counters.mapped_bytes, counters.regions), (0, 0));
    assert!(mapped_bytes_highest > 32 * MIB);
}

/// The driver's fill, which waits behind a closed gate.
mod slow_fill {
    use std::ffi::c_void;
    use std::sync::atomic::AtomicPtr;

    use super::*;

    /// The gate that the next fill waits for.
    pub static GATE: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

    pub unsafe extern "C" fn fill(at: u64, value: u8, bytes: usize, stream: usize) -> Code {
        let driver = start();
        let gate = GATE.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if !gate.is_null() {
            ok(cuLaunchHostFunc(stream, wait_at_gate, gate));
        }
        // SAFETY: passed on.
        unsafe { (driver.calls.cuMemsetD8Async)(at, value, bytes, stream) }
    }
}

/// A region lent without zeroing is ready at once, while fills wait.
#[test]
fn as_it_is() {
    let _application = Application::on(0);
    let driver = with_calls(|calls| calls.cuMemsetD8Async = slow_fill::fill);
    let heap = windlass_transport::heap::Heap::open(driver, 0, 64 * MIB).unwrap();
    let (gate, data) = Gate::closed();
    slow_fill::GATE.store(data, Ordering::Release);
    let kept = heap.lend(4096, &Holds::new()).unwrap();
    gate.wait_until_reached();
    let second = heap.lend_as_it_is(MIB, &Holds::new()).unwrap();
    assert_eq!((kept.is_zeroed(), second.is_zeroed()), (Ok(false), Ok(true)));
    assert!(second.announce(&[Member { rank: 1, process: 2 }]).is_ok());
    heap.note(Event::Closed(second.lease, 1));
    gate.open();
    kept.wait_zeroed(soon()).unwrap();
    drop((kept, second));
    heap.settle().unwrap();
    assert_eq!(heap.counters().regions, 0);
}

/// A region can be announced only once it holds zeros. Meanwhile no other stream waits, a wait for it times out, and regions can be
/// dropped. A region dropped earlier is taken back only after its zeroing.
#[test]
fn zeros_come_before_the_announcement() {
    let _application = Application::on(0);
    let heap = {
        let driver = with_calls(|calls| calls.cuMemsetD8Async = slow_fill::fill);
        windlass_transport::heap::Heap::open(driver, 0, 64 * MIB).unwrap()
    };
    let (gate, data) = Gate::closed();
    slow_fill::GATE.store(data, Ordering::Release);
    let region = heap.lend(MIB, &Holds::new()).unwrap();
    let behind = heap.lend(MIB, &Holds::new()).unwrap();
    gate.wait_until_reached();
    let member = [Member { rank: 1, process: 1 }];
    assert!(!region.is_zeroed().unwrap());
    assert!(matches!(region.announce(&member), Err(HeapError::NotZeroed { .. })));
    assert!(matches!(region.wait_zeroed(Duration::from_millis(3)), Err(HeapError::NotZeroed { .. })));
    // Streams of the application, blocking ones too, do not wait.
    for stream in [AppStream::new(), AppStream::blocking()] {
        ok(cuMemsetD32Async(region.address(), 7, 1, stream.0));
        stream.synchronize();
    }
    ok(cuStreamSynchronize(0));
    drop(behind);
    heap.settle().unwrap();
    assert_eq!(heap.counters().regions, 2, "its zeroing is not done");
    gate.open();
    region.wait_zeroed(soon()).unwrap();
    assert!(holds(&region, 0));
    assert_eq!(region.announce(&member).unwrap().place.bytes, 2 * MIB);
    heap.note(Event::Closed(region.lease, 1));
    drop(region);
    eventually("all came back", || {
        heap.settle().unwrap();
        heap.counters().mapped_bytes == 0
    });
}

/// Beside work that waits for a gate on a non-blocking, a blocking and the legacy stream, a symmetric heap grows, zeroes,
/// announces, takes back and unmaps. (`gpu::beside_a_spinning_kernel` does so beside a kernel.)
#[test]
fn grows_beside_spinning_kernels() {
    let application = Application::on(0);
    let heap = application.heap(256 * MIB);
    let first = lend(&heap, MIB);
    let [free, blocking] = [AppStream::new(), AppStream::blocking()];
    let gate = Gate::on(&free);
    let behind = stream::Event::new(application.driver).unwrap();
    behind.record(free.handle(), stream::Ordering::Inside).unwrap();
    application.driver.wait(blocking.handle(), &behind, stream::Ordering::Inside).unwrap();
    gate.wait_until_reached();
    let legacy = std::mem::ManuallyDrop::new(AppStream(0));
    ok(cuMemsetD32Async(first.address(), 7, 1, legacy.0));
    assert!(legacy.is_busy(), "the legacy stream waits for the blocking one");
    let grown = lend(&heap, 100 * MIB);
    assert_eq!(heap.counters().regions, 2);
    assert!(holds(&grown, 0));
    let announcement = grown.announce(&[Member { rank: 1, process: 1 }]).unwrap();
    assert_eq!(announcement.place.bytes, 100 * MIB);
    drop(announcement);
    heap.note(Event::Died(1));
    drop(grown);
    heap.settle().unwrap();
    assert_eq!(heap.counters().regions, 1);
    assert!(free.is_busy() && blocking.is_busy() && legacy.is_busy(), "still waiting");
    gate.open();
    legacy.synchronize();
    drop(first);
    heap.settle().unwrap();
}

/// At the limit the error has the numbers. Regions that have ended are taken back before a request is refused.
#[test]
fn the_limit() {
    let application = Application::on(0);
    let heap = application.heap(17 * MIB);
    let regions = [lend(&heap, 8 * MIB), lend(&heap, 8 * MIB)];
    let refusal = heap.lend(MIB, &Holds::new()).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "the symmetric heap of device 0 cannot lend 1048576 bytes: mapped 16777216, WINDLASS_HEAP_MAX 16777216"
    );
    assert_eq!(refusal.result(), nccl_sys::ncclUnhandledCudaError);
    drop(regions);
    // Two regions of 8 MiB are freed, and one of 16 MiB is made.
    drop(lend(&heap, 16 * MIB));
    heap.settle().unwrap();
    assert_eq!(heap.counters().mapped_bytes, 0);
}

/// A region goes back once the last member has closed or died, and is not lent to others before.
#[test]
fn quarantine() {
    let application = Application::on(0);
    let heap = application.heap(4 * MIB);
    let region = lend(&heap, 4 * MIB);
    let lease = region.lease;
    let members = [Member { rank: 1, process: 10 }, Member { rank: 2, process: 20 }];
    drop(region.announce(&members).unwrap());
    drop(region);
    let taken = || heap.lend(MIB, &Holds::new()).is_ok();
    assert!(!taken());
    assert_eq!(heap.counters().waiting_bytes, 4 * MIB);
    heap.note(Event::Closed(lease, 1));
    assert!(!taken());
    heap.note(Event::Died(20));
    assert!(taken());
    // Late events of a lease that is over have no effect.
    heap.note(Event::Closed(lease, 2));
    eventually("all came back", || {
        heap.settle().unwrap();
        heap.counters().mapped_bytes == 0
    });
}

/// What a dead process had mapped is never lent again, as its kernels may still write there.
#[test]
fn not_lent_after_a_death() {
    let application = Application::on(0);
    let heap = application.heap(64 * MIB);
    let kept = lend(&heap, MIB);
    let region = lend(&heap, MIB);
    let announcement = region.announce(&[Member { rank: 1, process: 1 }]).unwrap();
    let zombie = PeerHeap::new(application.driver);
    let mapped =
        zombie.map(announcement.place, announcement.descriptor.as_fd(), &heap, &Holds::new()).unwrap();
    drop((region, announcement.descriptor));
    heap.note(Event::Died(1));
    for _ in 0..20 {
        heap.settle().unwrap();
        let next = lend(&heap, MIB);
        fill(&next, 1);
        let stream = AppStream::new();
        ok(cuMemsetD8Async(mapped.address, 7, MIB as usize, stream.0));
        stream.synchronize();
        assert!(holds(&next, 1));
        assert!(heap.counters().mapped_bytes <= 8 * MIB);
    }
    assert!(holds(&kept, 0));
    drop((kept, mapped));
    zombie.settle();
    heap.settle().unwrap();
    assert_eq!(heap.counters().mapped_bytes, 0);
}

/// Threads lend, use and drop regions beside one that calls `settle`: none sees another's bytes, and nothing is left.
#[test]
fn threads() {
    let application = Application::on(0);
    let heap = application.heap(32 * MIB);
    let working = AtomicUsize::new(4);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while working.load(Ordering::Acquire) > 0 {
                heap.settle().unwrap();
            }
        });
        for thread in 1..5_u8 {
            let (heap, working, context) = (&heap, &working, application.context);
            scope.spawn(move || {
                ok(cuCtxSetCurrent(context));
                let mut state = u64::from(thread);
                for _ in 0..60 {
                    let bytes = 1 + next(&mut state) % MIB;
                    let Ok(region) = heap.lend(bytes, &Holds::new()) else { continue };
                    region.wait_zeroed(soon()).unwrap();
                    assert!(holds(&region, 0));
                    fill(&region, thread);
                    let lease = region.lease;
                    drop(region.announce(&[Member { rank: 1, process: 1 }]).unwrap());
                    assert!(holds(&region, thread));
                    drop(region);
                    heap.note(Event::Closed(lease, 1));
                }
                working.fetch_sub(1, Ordering::Release);
            });
        }
    });
    heap.settle().unwrap();
    assert_eq!((heap.counters().mapped_bytes, heap.counters().regions), (0, 0));
}
