use crate::driver::*;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

#[test]
fn the_host_goes_on_while_a_stream_is_held_and_order_within_it_is_kept() {
    start();
    let stream = stream();
    let list = Arc::new(Mutex::new(Vec::new()));
    let gate = Gate::in_stream(stream);
    (0..10).for_each(|entry| note(stream, &list, entry));
    gate.wait_until_reached();
    assert_eq!(cuStreamQuery(stream), NOT_READY);
    assert!(list.lock().unwrap().is_empty());
    gate.open();
    ok(cuStreamSynchronize(stream));
    ok(cuStreamQuery(stream));
    assert_eq!(*list.lock().unwrap(), (0..10).collect::<Vec<_>>());
    ok(cuStreamDestroy_v2(stream));
    assert_eq!(cuStreamSynchronize(stream), 400);
}

#[test]
fn streams_are_independent_and_events_order_them() {
    start();
    let (held, free, late) = (stream(), stream(), stream());
    let list = Arc::new(Mutex::new(Vec::new()));
    let gate = Gate::in_stream(held);
    let event = event();
    note(held, &list, 1);
    ok(cuEventRecord(event, held));
    ok(cuStreamWaitEvent(late, event, 0));
    note(late, &list, 2);
    note(free, &list, 0);
    ok(cuStreamSynchronize(free));
    assert_eq!(cuEventQuery(event), NOT_READY);
    assert_eq!(*list.lock().unwrap(), [0]);
    // Destroying while pending lets the work and the recording finish.
    ok(cuEventDestroy_v2(event));
    ok(cuStreamDestroy_v2(held));
    gate.open();
    ok(cuStreamSynchronize(late));
    assert_eq!(*list.lock().unwrap(), [0, 1, 2]);
    [free, late].into_iter().for_each(|stream| ok(cuStreamDestroy_v2(stream)));
}

#[test]
fn the_legacy_stream_is_a_barrier_for_blocking_streams_only() {
    start();
    let blocking = made(|out| cuStreamCreate(out, 0));
    let other = made(|out| cuStreamCreate(out, 0));
    let non_blocking = stream();
    let list = Arc::new(Mutex::new(Vec::new()));
    let gate = Gate::in_stream(blocking);
    note(0, &list, 1);
    note(other, &list, 2);
    note(non_blocking, &list, 0);
    ok(cuStreamSynchronize(non_blocking));
    assert_eq!(cuStreamQuery(0), NOT_READY);
    assert_eq!(cuStreamQuery(other), NOT_READY);
    assert_eq!(*list.lock().unwrap(), [0]);
    gate.open();
    ok(cuCtxSynchronize());
    assert_eq!(*list.lock().unwrap(), [0, 1, 2]);
    [blocking, other, non_blocking].into_iter().for_each(|stream| ok(cuStreamDestroy_v2(stream)));
}

#[test]
fn the_per_thread_stream_differs_between_threads() {
    let context = start();
    let id = |stream| {
        let mut id = 0;
        ok(cuStreamGetId(stream, &mut id));
        id
    };
    let here = id(2);
    let there = std::thread::spawn(move || {
        ok(cuCtxSetCurrent(context));
        id(2)
    });
    assert_ne!(there.join().unwrap(), here);
    assert_eq!(id(2), here);
    assert_eq!(id(0), id(1));
    assert_ne!(id(0), here);
}

#[test]
fn a_new_stream_may_have_an_old_handle_but_never_an_old_id() {
    start();
    let first = stream();
    let mut ids = [0; 2];
    ok(cuStreamGetId(first, &mut ids[0]));
    ok(cuStreamDestroy_v2(first));
    let second = stream();
    ok(cuStreamGetId(second, &mut ids[1]));
    assert_eq!(first, second);
    assert_ne!(ids[0], ids[1]);
    ok(cuStreamDestroy_v2(second));
}

#[test]
fn events_measure_time_only_when_complete_and_allowed_to() {
    start();
    let stream = stream();
    let (begin, end) = (event(), event());
    let untimed = made(|out| cuEventCreate(out, 2));
    let mut milliseconds = -1.0;
    assert_eq!(cuEventElapsedTime(&mut milliseconds, begin, end), 400);
    ok(cuEventRecord(begin, stream));
    let gate = Gate::in_stream(stream);
    ok(cuEventRecord(end, stream));
    gate.wait_until_reached();
    assert_eq!(cuEventElapsedTime(&mut milliseconds, begin, end), NOT_READY);
    gate.open();
    ok(cuEventSynchronize(end));
    ok(cuEventElapsedTime(&mut milliseconds, begin, end));
    assert!(milliseconds >= 0.0);
    ok(cuEventRecord(untimed, stream));
    assert_eq!(cuEventElapsedTime(&mut milliseconds, begin, untimed), 400);
    [begin, end, untimed].into_iter().for_each(|event| ok(cuEventDestroy_v2(event)));
    assert_eq!(cuEventDestroy_v2(end), 400);
    ok(cuStreamDestroy_v2(stream));
}

#[test]
fn a_stream_waits_for_a_word_that_another_stream_writes() {
    start();
    let (waiter, writer) = (stream(), stream());
    let word = buffer(4);
    ok(cuMemsetD32Async(word, 0, 1, writer));
    ok(cuStreamSynchronize(writer));
    let list = Arc::new(Mutex::new(Vec::new()));
    ok(cuStreamWaitValue32_v2(waiter, word, 5, 0));
    note(waiter, &list, 1);
    assert_eq!(cuStreamQuery(waiter), NOT_READY);
    ok(cuStreamWriteValue32_v2(writer, word, 6, 0));
    ok(cuStreamSynchronize(waiter));
    assert_eq!(*list.lock().unwrap(), [1]);
    assert_eq!(cuStreamWaitValue32_v2(waiter, 0x10, 1, 0), 1);
    ok(cuMemFree_v2(word));
    [waiter, writer].into_iter().for_each(|stream| ok(cuStreamDestroy_v2(stream)));
}

/// `simHold` holds one call of a function, until the test lets it go on.
#[test]
fn a_named_call_is_held_once() {
    static STATE: AtomicU32 = AtomicU32::new(0);
    start();
    ok(simHold(c"simInitJoined".as_ptr(), &STATE));
    let held = std::thread::spawn(|| ok(simInitJoined()));
    while STATE.load(Ordering::SeqCst) != 1 {
        std::thread::yield_now();
    }
    ok(simInitJoined());
    assert!(!held.is_finished());
    STATE.store(2, Ordering::SeqCst);
    held.join().unwrap();
}
