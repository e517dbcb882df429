//! Slices: lent, zeroed, refused at the limit, taken back.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use windlass_engine::arena::{Event, Holds, Member, Refusal};
use windlass_engine::gpu::failure::Code;
use windlass_engine::gpu::stream;

use crate::application::*;
use crate::support::*;

/// Random sizes on real memory: every slice is aligned, holds zeros whatever lay there before, overlaps no other, and
/// the whole stays within its limit; at the end nothing is mapped and nothing alive.
#[test]
fn random_sizes() {
    let application = Application::on(0);
    let seed = std::env::var("SEED").map_or(42, |seed| seed.parse().unwrap());
    println!("SEED={seed}");
    let mut state: u64 = seed;
    let arena = application.arena(64 * MIB);
    let mut lent: Vec<(windlass_engine::arena::Slice, u8)> = Vec::new();
    let mut refused = 0;
    for step in 0..300_u32 {
        match next(&mut state) % 5 {
            0..=2 => {
                let bytes = 1 + next(&mut state) % (1 << (12 + next(&mut state) % 12));
                match arena.lend(bytes, &Holds::new()) {
                    Ok(slice) => {
                        slice.wait_zeroed(soon()).unwrap();
                        assert!(slice.bytes() >= bytes && slice.address().is_multiple_of(64 << 10));
                        assert!(holds(&slice, 0), "step {step}: not zeros");
                        fill(&slice, step as u8 | 1);
                        lent.push((slice, step as u8 | 1));
                    }
                    Err(Refusal::Full { .. }) => refused += 1,
                    Err(other) => panic!("{other}"),
                }
            }
            3 if !lent.is_empty() => {
                let (slice, mark) = lent.swap_remove(next(&mut state) as usize % lent.len());
                assert!(holds(&slice, mark), "step {step}: overwritten");
            }
            _ => arena.settle().unwrap(),
        }
        let counters = arena.counters();
        assert!(counters.mapped_bytes <= 64 * MIB && counters.lent_bytes <= counters.mapped_bytes);
        assert!(counters.lent_bytes >= lent.iter().map(|(slice, _)| slice.bytes()).sum());
    }
    assert!(refused > 0 && arena.counters().refused == refused, "the limit was reached, and counted");
    drop(lent);
    arena.settle().unwrap();
    let counters = arena.counters();
    assert_eq!((counters.mapped_bytes, counters.lent_bytes, counters.slices, counters.chunks), (0, 0, 0, 0));
    assert!(counters.mapped_bytes_highest > 32 * MIB && counters.lent_bytes_highest > 16 * MIB);
}

/// The driver's fill, behind work that does not end until it is told.
mod slow_fill {
    use std::ffi::c_void;
    use std::sync::atomic::AtomicPtr;

    use super::*;

    /// What the next fill waits behind.
    pub static GATE: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

    pub unsafe extern "C" fn fill(at: u64, value: u8, bytes: usize, stream: usize) -> Code {
        let driver = start();
        let gate = GATE.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if !gate.is_null() {
            // SAFETY: of `Gate::closed`, for this one call.
            unsafe { (driver.calls.cuLaunchHostFunc)(stream, wait_at_gate, gate) };
        }
        // SAFETY: passed on.
        unsafe { (driver.calls.cuMemsetD8Async)(at, value, bytes, stream) }
    }
}

/// Memory that need not hold zeros is ready at once, with what the last who had it left there.
#[test]
fn as_it_is() {
    let application = Application::on(0);
    let arena = application.arena(64 * MIB);
    let kept = arena.lend(4096, &Holds::new()).unwrap();
    let first = arena.lend(MIB, &Holds::new()).unwrap();
    first.wait_zeroed(soon()).unwrap();
    fill(&first, 7);
    let address = first.address();
    drop(first);
    arena.settle().unwrap();
    let second = arena.lend_as_it_is(MIB, &Holds::new()).unwrap();
    assert_eq!((second.address(), second.is_zeroed()), (address, Ok(true)));
    assert!(holds(&second, 7));
    assert!(second.announce(&[Member { rank: 1, process: 2 }]).is_ok());
    arena.note(Event::Closed(second.lease(), 1));
    drop((kept, second));
    arena.settle().unwrap();
    assert_eq!(arena.counters().slices, 0);
}

/// Nobody is told of a slice before it holds zeros; meanwhile no other stream waits, a wait gives up in time, and slices
/// can be dropped. What is dropped unzeroed goes back only after its zeroing.
#[test]
fn zeros_come_before_the_announcement() {
    let _application = Application::on(0);
    let arena = {
        let driver = with_calls(|calls| calls.cuMemsetD8Async = slow_fill::fill);
        windlass_engine::arena::Arena::open(driver, 0, 64 * MIB).unwrap()
    };
    let (gate, data) = Gate::closed();
    slow_fill::GATE.store(data, Ordering::Release);
    let slice = arena.lend(MIB, &Holds::new()).unwrap();
    let behind = arena.lend(MIB, &Holds::new()).unwrap();
    gate.wait_until_reached();
    let member = [Member { rank: 1, process: 1 }];
    assert!(!slice.is_zeroed().unwrap());
    assert!(matches!(slice.announce(&member), Err(Refusal::NotZeroed { .. })));
    assert!(matches!(slice.wait_zeroed(Duration::from_millis(3)), Err(Refusal::NotZeroed { .. })));
    // Streams of the application, blocking ones too, run through.
    for stream in [AppStream::new(), AppStream::blocking()] {
        ok(cuMemsetD32Async(slice.address(), 7, 1, stream.0));
        stream.synchronize();
    }
    ok(cuStreamSynchronize(0));
    drop(behind);
    arena.settle().unwrap();
    assert_eq!(arena.counters().slices, 2, "its zeroing is not done");
    gate.open();
    slice.wait_zeroed(soon()).unwrap();
    assert!(holds(&slice, 0));
    assert_eq!(slice.announce(&member).unwrap().place.bytes, MIB);
    arena.note(Event::Closed(slice.lease(), 1));
    drop(slice);
    eventually("all came back", || {
        arena.settle().unwrap();
        arena.counters().mapped_bytes == 0
    });
}

/// Beside work that does not end until it is told, on a non-blocking, a blocking and the legacy stream, an arena grows,
/// zeroes, announces, takes back and unmaps. (`gpu::beside_a_spinning_kernel` does it beside a kernel.)
#[test]
fn grows_beside_spinning_kernels() {
    let application = Application::on(0);
    let arena = application.arena(256 * MIB);
    let first = lend(&arena, MIB);
    let [free, blocking] = [AppStream::new(), AppStream::blocking()];
    let gate = Gate::on(&free);
    let behind = stream::Event::new(application.driver).unwrap();
    behind.record(free.handle(), stream::Ordering::Inside).unwrap();
    application.driver.wait(blocking.handle(), &behind, stream::Ordering::Inside).unwrap();
    gate.wait_until_reached();
    let legacy = std::mem::ManuallyDrop::new(AppStream(0));
    ok(cuMemsetD32Async(first.address(), 7, 1, legacy.0));
    assert!(legacy.is_busy(), "the legacy stream waits for the blocking one");
    let grown = lend(&arena, 100 * MIB);
    assert_eq!(arena.counters().chunks, 2);
    assert!(holds(&grown, 0));
    let announcement = grown.announce(&[Member { rank: 1, process: 1 }]).unwrap();
    assert_eq!(announcement.place.bytes, 100 * MIB);
    drop(announcement);
    arena.note(Event::Died(1));
    drop(grown);
    arena.settle().unwrap();
    assert_eq!(arena.counters().chunks, 1);
    assert!(free.is_busy() && blocking.is_busy() && legacy.is_busy(), "still waiting");
    gate.open();
    legacy.synchronize();
    drop(first);
    arena.settle().unwrap();
}

/// At the limit the answer has the numbers; what is over is taken back before anybody is refused.
#[test]
fn the_limit() {
    let application = Application::on(0);
    let arena = application.arena(17 * MIB);
    let slices = [lend(&arena, 8 * MIB), lend(&arena, 8 * MIB)];
    let refusal = arena.lend(MIB, &Holds::new()).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "the arena of device 0 cannot lend 1048576 bytes: lent 16777216, mapped 16777216, WINDLASS_HEAP_MAX 16777216"
    );
    assert_eq!(refusal.result(), nccl_sys::ncclUnhandledCudaError);
    drop(slices);
    // Two chunks of 8 MiB would not hold it: they go, and one of 16 comes.
    drop(lend(&arena, 16 * MIB));
    arena.settle().unwrap();
    assert_eq!(arena.counters().mapped_bytes, 0);
}

/// A slice goes back when the last member has closed or died, and not before: its memory is lent to nobody else.
#[test]
fn quarantine() {
    let application = Application::on(0);
    let arena = application.arena(4 * MIB);
    let slice = lend(&arena, 4 * MIB);
    let lease = slice.lease();
    let members = [Member { rank: 1, process: 10 }, Member { rank: 2, process: 20 }];
    drop(slice.announce(&members).unwrap());
    drop(slice);
    let taken = || arena.lend(MIB, &Holds::new()).is_ok();
    assert!(!taken());
    assert_eq!(arena.counters().waiting_bytes, 4 * MIB);
    arena.note(Event::Closed(lease, 1));
    assert!(!taken());
    arena.note(Event::Died(20));
    assert!(taken());
    // Late events of a lease that is over mean nothing.
    arena.note(Event::Closed(lease, 2));
    eventually("all came back", || {
        arena.settle().unwrap();
        arena.counters().mapped_bytes == 0
    });
}

/// Threads that lend, use and drop, beside one that settles all the time: nobody sees another's bytes, nothing is left.
#[test]
fn threads() {
    let application = Application::on(0);
    let arena = application.arena(32 * MIB);
    let working = AtomicUsize::new(4);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while working.load(Ordering::Acquire) > 0 {
                arena.settle().unwrap();
            }
        });
        for thread in 1..5_u8 {
            let (arena, working, context) = (&arena, &working, application.context);
            scope.spawn(move || {
                ok(cuCtxSetCurrent(context));
                let mut state = u64::from(thread);
                for _ in 0..60 {
                    let bytes = 1 + next(&mut state) % MIB;
                    let Ok(slice) = arena.lend(bytes, &Holds::new()) else { continue };
                    slice.wait_zeroed(soon()).unwrap();
                    assert!(holds(&slice, 0));
                    fill(&slice, thread);
                    let lease = slice.lease();
                    drop(slice.announce(&[Member { rank: 1, process: 1 }]).unwrap());
                    assert!(holds(&slice, thread));
                    drop(slice);
                    arena.note(Event::Closed(lease, 1));
                }
                working.fetch_sub(1, Ordering::Release);
            });
        }
    });
    arena.settle().unwrap();
    assert_eq!((arena.counters().mapped_bytes, arena.counters().slices), (0, 0));
    assert!(arena.counters().grown > 0);
}
