//! The count of objects that were never released. With `WINDLASS_SIM_STRICT=1` it is printed at exit, and the process fails.

#![allow(non_snake_case)]

use crate::event::Event;
use crate::guard;
use crate::memory::{Kind, Range};
use crate::simulator::{Simulator, started};
use crate::sync::lock;
use crate::table::Handle;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

/// The exit status of a strict process that leaked.
pub const EXIT_STATUS: i32 = 86;

/// Objects that ended with their context and not by the application's own call.
static ABANDONED: Mutex<BTreeMap<&'static str, usize>> = Mutex::new(BTreeMap::new());

fn name(range: &Range) -> &'static str {
    match range.kind {
        Kind::Device => "device allocations",
        Kind::Pool(_) => "stream-ordered allocations",
        Kind::Managed => "managed allocations",
        Kind::PinnedHost => "pinned host allocations",
        Kind::RegisteredHost => "host registrations",
        Kind::Virtual(_) => "virtual memory mappings",
        Kind::Imported(_) => "open IPC memory handles",
    }
}

fn add(counts: &mut BTreeMap<&'static str, usize>, kind: &'static str, count: usize) {
    if count > 0 {
        *counts.entry(kind).or_default() += count;
    }
}

fn add_ranges<'a>(counts: &mut BTreeMap<&'static str, usize>, ranges: impl Iterator<Item = &'a Arc<Range>>) {
    ranges.for_each(|range| add(counts, name(range), 1));
}

/// Counts the objects of a context that is about to end.
pub fn count_abandoned(simulator: &Simulator, context: Handle) {
    let mut counts = lock(&ABANDONED);
    add_ranges(&mut counts, lock(&simulator.ranges).all().filter(|range| range.context == context));
    let streams = simulator.streams.all();
    add(&mut counts, "streams", streams.iter().filter(|stream| stream.context.handle == context).count());
    add(&mut counts, "events", events(simulator, |event| event.context == context));
}

/// Counts events that the application must destroy: not those of [`simKeepEvent`].
fn events(simulator: &Simulator, is_meant: impl Fn(&Event) -> bool) -> usize {
    let kept = lock(&KEPT);
    let counts = |event: &&Arc<Event>| is_meant(event) && !kept.contains(&event.handle);
    simulator.events.all().iter().filter(counts).count()
}

fn live(simulator: &Simulator) -> BTreeMap<&'static str, usize> {
    let mut counts = lock(&ABANDONED).clone();
    add_ranges(&mut counts, lock(&simulator.ranges).all());
    add(&mut counts, "virtual memory handles", simulator.physicals.len());
    add(&mut counts, "address reservations", lock(&simulator.addresses).len());
    add(&mut counts, "streams", simulator.streams.len());
    add(&mut counts, "events", events(simulator, |_| true));
    add(&mut counts, "graphs", simulator.graphs.all().iter().filter(|graph| !graph.is_child).count());
    add(&mut counts, "executable graphs", simulator.executables.len());
    add(&mut counts, "user objects", simulator.user_objects.len());
    add(&mut counts, "memory pools", simulator.pools.all().iter().filter(|pool| !pool.is_default).count());
    counts
}

/// Functions to call before leaks are counted. They release objects that are kept to the process's end and are no leaks.
static BEFORE: Mutex<Vec<extern "C" fn()>> = Mutex::new(Vec::new());

/// Has `act` called by [`run_before`].
pub fn before(act: extern "C" fn()) {
    lock(&BEFORE).push(act);
}

/// Calls the registered functions. It runs as an exit handler, and again after all of them: those that were registered before `cuInit`
/// run in between.
pub fn run_before() {
    if !guard::forked() {
        let before = lock(&BEFORE).clone();
        before.into_iter().for_each(|act| act());
    }
}

/// Counts and prints leaks. Runs after all exit handlers.
pub fn at_exit() {
    let Some(simulator) = started() else { return };
    run_before();
    let strict = std::env::var("WINDLASS_SIM_STRICT").is_ok_and(|value| value == "1");
    if !strict || guard::forked() {
        return;
    }
    let counts = live(simulator);
    if counts.is_empty() {
        return;
    }
    for (kind, count) in &counts {
        crate::report::line(format_args!("leak: {count} {kind}"));
    }
    // SAFETY: `exit` would flush all streams next; leaving at once keeps other handlers from changing the status.
    unsafe {
        libc::fflush(std::ptr::null_mut());
        libc::_exit(EXIT_STATUS);
    }
}

/// Events that are no leaks: those of NCCL's communicators, which an application may leave undestroyed until the process's end.
static KEPT: Mutex<BTreeSet<Handle>> = Mutex::new(BTreeSet::new());

/// For the simulator of NCCL: `event` is no leak if it is never destroyed.
#[unsafe(no_mangle)]
extern "C" fn simKeepEvent(event: Handle) -> i32 {
    lock(&KEPT).insert(event);
    0
}

/// For the simulator of NCCL: has `act` called before leaks are counted.
#[unsafe(no_mangle)]
extern "C" fn simBeforeLeaks(act: extern "C" fn()) -> i32 {
    before(act);
    0
}
