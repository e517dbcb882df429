//! NVTX ranges of calls that Windlass runs, in NCCL's domain and with NCCL's payloads. NCCL makes the ranges of all other calls.
//!
//! A tool names its library in NVTX_INJECTION64_PATH. This file does what NVTX's headers do in a C program: the library gets tables of places
//! for functions, and writes its own into them. Five functions are called here. NVTX's structures are lists of words here.

#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::mem::transmute;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use super::{Observed, function_name};
use crate::call::{Call, FUNCTIONS, Function};
use crate::config::nccl;

type Place = AtomicPtr<c_void>;
type Table = [&'static Place; 16];

/// NVTX's number of the module of functions with a domain, and of these functions.
const DOMAINS: c_uint = 5;
const PUSH: usize = 4;
const POP: usize = 5;
const REGISTER: usize = 10;
const CREATE: usize = 12;
/// The functions of that module. The first place is nobody's: functions that are not called here go there.
static PLACES: [Place; 16] = [const { Place::new(null_mut()) }; 16];
/// Functions of payloads. The first one registers a schema.
static PAYLOADS: [Place; 63] = [const { Place::new(null_mut()) }; 63];
/// Where the numbers of NCCL's schemas begin, and that of the schema of operations, which NCCL registers.
const SCHEMAS: usize = 1 << 24;
const OPERATIONS: usize = SCHEMAS + 24;

/// NCCL's domain, and the functions' names in it.
static DOMAIN: AtomicUsize = AtomicUsize::new(0);
static NAMES: [AtomicUsize; FUNCTIONS] = [const { AtomicUsize::new(0) }; FUNCTIONS];

thread_local! {
    /// Whether this thread has a range open.
    static IS_OPEN: Cell<bool> = const { Cell::new(false) };
}

/// Loads the tool's library. Whether it takes ranges.
pub(super) fn start() -> bool {
    let disabled = nccl::value("NCCL_NVTX_DISABLE").is_some_and(|value| value.trim() != "0");
    let named = nccl::value("NVTX_INJECTION64_PATH").filter(|_| !disabled);
    let Some(library) = named.and_then(|path| CString::new(path).ok()) else { return false };
    // SAFETY: NCCL's own NVTX loads this very library likewise; functions have NVTX's types by their names.
    unsafe {
        let library = libc::dlopen(library.as_ptr(), libc::RTLD_LAZY);
        let find = |name: &CStr| match library.is_null() {
            true => null_mut(),
            false => libc::dlsym(library, name.as_ptr()),
        };
        let (begin, extend) = (find(c"InitializeInjectionNvtx2"), find(c"InitializeInjectionNvtxExtension"));
        if begin.is_null() {
            return false;
        }
        let begin: extern "C" fn(extern "C" fn(c_uint) -> *const usize) -> c_int = transmute(begin);
        if begin(export) == 0 || function(&PLACES[PUSH]).is_none() || function(&PLACES[POP]).is_none() {
            return false;
        }
        if !extend.is_null() {
            let extend: extern "C" fn(*const usize) -> c_int = transmute(extend);
            let segment: &[usize] = Vec::leak(vec![0, PAYLOADS.len(), PAYLOADS.as_ptr() as usize]);
            // Sizes of C's types, by NVTX's numbers of types.
            let sizes = [
                27 | 4 << 16,
                1,
                1,
                2,
                2,
                4,
                4,
                8,
                8,
                8,
                8,
                1,
                1,
                2,
                2,
                4,
                4,
                8,
                8,
                4,
                8,
                16,
                8,
                8,
                4,
                1,
                2,
                4,
            ];
            let sizes = sizes.map(|size: u32| if size > 16 { size } else { size | size << 16 });
            let head = 3 | 40 << 16 | 2 << 32 | 0x103 << 48;
            extend(
                Vec::leak(vec![
                    head,
                    1,
                    segment.as_ptr() as usize,
                    0,
                    Vec::leak(sizes.into()).as_ptr() as usize,
                ])
                .as_ptr(),
            );
        }
        if let Some(create) = function(&PLACES[CREATE]) {
            let create: extern "C" fn(*const c_char) -> usize = transmute(create);
            DOMAIN.store(create(c"NCCL".as_ptr()), Ordering::Relaxed);
        }
    }
    Function::ALL.into_iter().for_each(register);
    true
}

/// What a tool has written to a place, unless that is a word of NVTX's headers.
fn function(place: &Place) -> Option<*mut c_void> {
    Some(place.load(Ordering::Relaxed)).filter(|function| *function as usize > 3)
}

/// A table by NVTX's number: where functions go, or which NVTX this is.
extern "C" fn export(number: c_uint) -> *const usize {
    extern "C" fn ignore(_: c_uint) {}
    match number {
        1 => Vec::leak(vec![16, table as *const () as usize]).as_ptr(),
        3 => Vec::leak(vec![24, 3, ignore as *const () as usize]).as_ptr(),
        _ => std::ptr::null(),
    }
}

extern "C" fn table(module: c_uint, table: *mut *const Table, count: *mut c_uint) -> c_int {
    let place = |index| if module == DOMAINS { &PLACES[index] } else { &PLACES[0] };
    let places: &'static Table = Box::leak(Box::new(std::array::from_fn(place)));
    // SAFETY: the tool's places, if it gives any.
    unsafe {
        table.as_mut().into_iter().for_each(|table| *table = places);
        count.as_mut().into_iter().for_each(|count| *count = places.len() as c_uint);
    }
    1
}

/// A function's schema by NCCL's number, with what its calls have besides communicator and bytes.
fn schema(function: Function) -> (usize, &'static [(&'static CStr, usize)]) {
    const INT: usize = 5;
    const ROOT: (&CStr, usize) = (c"Root", INT);
    const OPERATION: (&CStr, usize) = (c"Reduction operation", OPERATIONS);
    let (number, more): (usize, &[_]) = match function.plain() {
        Function::AllGather => (4, &[]),
        Function::AllReduce => (5, &[OPERATION]),
        Function::ReduceScatter => (7, &[OPERATION]),
        Function::Reduce => (8, &[ROOT, OPERATION]),
        Function::Send => (9, &[(c"Peer rank", INT)]),
        Function::Recv => (10, &[(c"Peer rank", INT)]),
        Function::AlltoAll => (16, &[]),
        Function::Gather => (17, &[ROOT]),
        Function::Scatter => (18, &[ROOT]),
        _ => (6, &[ROOT]),
    };
    (SCHEMAS + number, more)
}

/// Tells the tool a function's name and the schema of its payload.
fn register(called: Function) {
    let domain = DOMAIN.load(Ordering::Relaxed);
    // SAFETY: NVTX's types, by the places.
    unsafe {
        if let Some(register) = function(&PLACES[REGISTER]) {
            let register: extern "C" fn(usize, *const c_char) -> usize = transmute(register);
            NAMES[called as usize].store(register(domain, function_name(called)), Ordering::Relaxed);
        }
        // Other functions have the schemas of these.
        let has_own = called == called.plain() && called != Function::Bcast;
        if let Some(register) = function(&PAYLOADS[0]).filter(|_| has_own) {
            let register: extern "C" fn(usize, *const usize) -> u64 = transmute(register);
            let (number, more) = schema(called);
            let entries = [(c"NCCL communicator ID", 18), (c"Message size [bytes]", 22)]
                .into_iter()
                .chain(more.iter().copied());
            let offsets = [0, 8, 16, 20].into_iter();
            let entries: Vec<[usize; 8]> = entries
                .zip(offsets)
                .map(|((name, kind), offset)| [0, kind, name.as_ptr() as usize, 0, 0, offset, 0, 0])
                .collect();
            let (count, entries) = (entries.len(), Vec::leak(entries).as_ptr() as usize);
            register(
                domain,
                Vec::leak(vec![0x174, 0, 1, 0, entries, count, size_of_payload(called), 0, number, 0])
                    .as_ptr(),
            );
        }
    }
}

fn size_of_payload(function: Function) -> usize {
    if schema(function).1.is_empty() { 16 } else { 24 }
}

/// Begins the range of a call, behind that of the call before.
pub(super) fn push(call: &Call, communicator: &Observed) {
    pop();
    let Some(push) = function(&PLACES[PUSH]) else { return };
    let (shared, called) = (&call.shared, call.local.called);
    let bytes = shared.count * shared.datatype.size_bytes().unwrap_or(0);
    let operation = shared.operation.map(|operation| operation.0);
    let mut more =
        shared.root.into_iter().chain(call.local.peer).chain(operation).map(|number| number as u32 as usize);
    let more = more.next().unwrap_or(0) | more.next().unwrap_or(0) << 32;
    let data = [communicator.name as usize, bytes, more];
    let payload = [schema(called).0, size_of_payload(called), data.as_ptr() as usize];
    let name = NAMES[called as usize].load(Ordering::Relaxed);
    // Version, size; a payload of the extension's kind, one of them; a registered name.
    let attributes = [3 | 48 << 16, 0, 0xdfbd_0009 | 1 << 32, payload.as_ptr() as usize, 3, name];
    // SAFETY: NVTX's type, by the place.
    let push: extern "C" fn(usize, *const usize) -> c_int = unsafe { transmute(push) };
    push(DOMAIN.load(Ordering::Relaxed), attributes.as_ptr());
    IS_OPEN.set(true);
}

/// Ends this thread's range, if there is one.
pub(super) fn pop() {
    if IS_OPEN.take()
        && let Some(pop) = function(&PLACES[POP])
    {
        // SAFETY: NVTX's type, by the place.
        let pop: extern "C" fn(usize) -> c_int = unsafe { transmute(pop) };
        pop(DOMAIN.load(Ordering::Relaxed));
    }
}
