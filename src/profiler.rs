//! The symbols by which NCCL loads a profiler plugin: NCCL opens Windlass in the place of the plugins that the program names
//! ([`windlass_base::observers::profiler`]).

#![allow(non_upper_case_globals, clippy::too_many_arguments)]

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use nccl_sys::profiler::{Event, Init4, Init5, Logger, Record, Start, Stop};
use windlass_base::guard;
use windlass_base::observers::profiler::{self, Begun};

/// A plugin, as NCCL takes it. NCCL reads the functions that are pointers here after `init`.
#[repr(C)]
pub struct Facade<Init> {
    name: AtomicPtr<c_char>,
    init: Init,
    start: Start,
    stop: AtomicPtr<c_void>,
    record: AtomicPtr<c_void>,
    finalize: Stop,
}

impl<Init> Facade<Init> {
    const fn new(init: Init, start: Start) -> Facade<Init> {
        let (stop, record): (Stop, Record) = (self::stop, self::record);
        Facade {
            name: AtomicPtr::new(c"Windlass".as_ptr().cast_mut()),
            init,
            start,
            stop: AtomicPtr::new(stop as *mut c_void),
            record: AtomicPtr::new(record as *mut c_void),
            finalize,
        }
    }

    fn begin(&self, version: u32, context: *mut *mut c_void, mask: *mut c_int, begun: Begun) -> c_int {
        guard::or_else(
            || 1,
            || {
                let code = profiler::begin(version, context, mask, begun);
                if let Some((stop, record)) = profiler::only() {
                    self.stop.store(stop as *mut c_void, Ordering::Relaxed);
                    self.record.store(record as *mut c_void, Ordering::Relaxed);
                }
                code
            },
        )
    }
}

unsafe extern "C" fn start<const VERSION: u32>(
    context: *mut c_void,
    handle: *mut *mut c_void,
    event: *mut Event,
) -> c_int {
    // SAFETY: NCCL's arguments, of this version.
    guard::or_else(|| 1, || unsafe { profiler::start_event(VERSION, context, handle, event) })
}

unsafe extern "C" fn stop(handle: *mut c_void) -> c_int {
    guard::or_else(|| 1, || profiler::stop_event(handle))
}

unsafe extern "C" fn record(handle: *mut c_void, state: c_int, arguments: *mut c_void) -> c_int {
    guard::or_else(|| 1, || profiler::record_state(handle, state, arguments))
}

unsafe extern "C" fn finalize(context: *mut c_void) -> c_int {
    guard::or_else(|| 1, || profiler::end(context))
}

unsafe extern "C" fn init_4(
    context: *mut *mut c_void,
    mask: *mut c_int,
    name: *const c_char,
    id: u64,
    hosts: c_int,
    ranks: c_int,
    rank: c_int,
    logger: Option<Logger>,
) -> c_int {
    ncclProfiler_v4.begin(4, context, mask, Begun { id, name, sizes: [hosts, ranks, rank], logger })
}

#[unsafe(no_mangle)]
pub static ncclProfiler_v4: Facade<Init4> = Facade::new(init_4, start::<4>);

/// A row for each later version.
macro_rules! versions {
    ($($symbol:ident $init:ident $version:literal;)*) => {$(
        unsafe extern "C" fn $init(
            context: *mut *mut c_void, id: u64, mask: *mut c_int, name: *const c_char, hosts: c_int, ranks: c_int, rank: c_int,
            logger: Option<Logger>,
        ) -> c_int {
            $symbol.begin($version, context, mask, Begun { id, name, sizes: [hosts, ranks, rank], logger })
        }

        #[unsafe(no_mangle)]
        pub static $symbol: Facade<Init5> = Facade::new($init, start::<$version>);
    )*};
}
versions! {
    ncclProfiler_v5 init_5 5;
    ncclProfiler_v6 init_6 6;
    ncclProfiler_v7 init_7 7;
}
