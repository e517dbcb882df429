//! NVTX ranges of calls that Windlass runs, in NCCL's domain and with NCCL's payloads. NCCL makes the ranges of all other calls.
//!
//! A tool names its library in NVTX_INJECTION64_PATH. This file does what NVTX's headers do in a C program: the library gets tables of places
//! for functions, and writes its own into them. Five functions are called here. NVTX's structures are lists of words here.

#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::mem::transmute;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use once_cell::sync::OnceCell;

use super::{Observed, text};
use crate::call::{Call, FUNCTIONS, Function};
use crate::config::nccl;

/// Where a tool writes one of its functions.
type Slot = AtomicPtr<c_void>;
type SlotTable = [&'static Slot; 16];

/// NVTX's number of the module of functions with a domain.
const DOMAINS: c_uint = 5;

/// NVTX's numbers of these functions.
enum InDomain {
    Push = 4,
    Pop = 5,
    Register = 10,
    Create = 12,
}

/// The functions of that module. The first slot is nobody's: functions that are not called here go there.
static SLOTS: [Slot; 16] = [const { Slot::new(null_mut()) }; 16];
/// Functions of payloads. The first one registers a schema.
static PAYLOADS: [Slot; 63] = [const { Slot::new(null_mut()) }; 63];
/// Where the numbers of NCCL's schemas begin.
const SCHEMAS: usize = 1 << 24;

/// NCCL's domain, and the functions' names in it.
static DOMAIN: OnceCell<(usize, [usize; FUNCTIONS])> = OnceCell::new();

thread_local! {
    /// Whether this thread has a range open.
    static IS_OPEN: Cell<bool> = const { Cell::new(false) };
}

/// Loads the tool's library. Whether it takes ranges.
pub(super) fn start() -> bool {
    let disabled = nccl::value("NCCL_NVTX_DISABLE").is_some_and(|value| value.trim() != "0");
    let named = nccl::value("NVTX_INJECTION64_PATH").filter(|_| !disabled);
    let Some(path) = named.and_then(|path| CString::new(path).ok()) else { return false };
    // SAFETY: NCCL's own NVTX loads this very library; its functions have the types that NVTX gives their names.
    unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_LAZY);
        if library.is_null() {
            return false;
        }
        let find = |name: &CStr| libc::dlsym(library, name.as_ptr());
        let (begin, extend) = (find(c"InitializeInjectionNvtx2"), find(c"InitializeInjectionNvtxExtension"));
        let begin: Option<extern "C" fn(extern "C" fn(c_uint) -> *const usize) -> c_int> = transmute(begin);
        let extend: Option<extern "C" fn(*const usize) -> c_int> = transmute(extend);
        if begin.is_none_or(|begin| begin(export) == 0) {
            return false;
        }
        let _ = extend.map(|extend| extend(module()));
    }
    let domain = call(&SLOTS[InDomain::Create as usize], [c"NCCL".as_ptr() as usize, 0]);
    // Other functions have the schemas of these.
    let own = |function: &Function| *function == function.plain() && *function != Function::Bcast;
    Function::ALL.into_iter().filter(own).for_each(|function| register(domain, function));
    let name = |function: Function| text(function.entry().description().name) as usize;
    let names =
        Function::ALL.map(|function| call(&SLOTS[InDomain::Register as usize], [domain, name(function)]));
    DOMAIN.set((domain, names)).is_ok()
}

/// Calls the tool's function, if there is one: none has more arguments.
fn call(slot: &Slot, arguments: [usize; 2]) -> usize {
    let function = slot.load(Ordering::Relaxed);
    // NVTX's headers have marks of their own in such slots.
    if function as usize <= 3 {
        return 0;
    }
    // SAFETY: by its slot the function takes these words, or the first of them.
    let function: extern "C" fn(usize, usize) -> usize = unsafe { transmute(function) };
    function(arguments[0], arguments[1])
}

/// A list of words that stays.
fn words(words: &[usize]) -> *const usize {
    Vec::leak(words.to_vec()).as_ptr()
}

/// A table by NVTX's number: where functions go, or which NVTX this is.
extern "C" fn export(number: c_uint) -> *const usize {
    extern "C" fn ignore(_: c_uint) {}
    match number {
        1 => words(&[16, table as *const () as usize]),
        3 => words(&[24, 3, ignore as *const () as usize]),
        _ => std::ptr::null(),
    }
}

extern "C" fn table(module: c_uint, table: *mut *const SlotTable, count: *mut c_uint) -> c_int {
    let slots =
        Box::leak(Box::new(std::array::from_fn(|index| &SLOTS[if module == DOMAINS { index } else { 0 }])));
    // SAFETY: the tool's places, if it gives any.
    unsafe {
        table.as_mut().into_iter().for_each(|table| *table = slots);
        count.as_mut().into_iter().for_each(|count| *count = slots.len() as c_uint);
    }
    1
}

/// What a tool hears of the module of payloads: version, size, number; its slots; the sizes of C's types, by NVTX's numbers of types.
fn module() -> *const usize {
    let sizes = [1, 1, 2, 2, 4, 4, 8, 8, 8, 8, 1, 1, 2, 2, 4, 4, 8, 8, 4, 8, 16, 8, 8, 4, 1, 2, 4];
    let sizes: Vec<u32> = [27 | 4 << 16].into_iter().chain(sizes.map(|size| size | size << 16)).collect();
    let slots = words(&[0, PAYLOADS.len(), PAYLOADS.as_ptr() as usize]);
    words(&[3 | 40 << 16 | 2 << 32 | 0x103 << 48, 1, slots as usize, 0, Vec::leak(sizes).as_ptr() as usize])
}

/// A function's schema by NCCL's number, and its entries behind communicator and bytes, each with its type.
fn schema(function: Function) -> (usize, &'static [(&'static CStr, usize)]) {
    const ROOT: (&CStr, usize) = (c"Root", 5);
    const PEER: (&CStr, usize) = (c"Peer rank", 5);
    // The type is a list of operations that NCCL registers.
    const OPERATION: (&CStr, usize) = (c"Reduction operation", SCHEMAS + 24);
    let (number, more): (usize, &[_]) = match function.plain() {
        Function::AllGather => (4, &[]),
        Function::AllReduce => (5, &[OPERATION]),
        Function::ReduceScatter => (7, &[OPERATION]),
        Function::Reduce => (8, &[ROOT, OPERATION]),
        Function::Send => (9, &[PEER]),
        Function::Recv => (10, &[PEER]),
        Function::AlltoAll => (16, &[]),
        Function::Gather => (17, &[ROOT]),
        Function::Scatter => (18, &[ROOT]),
        _ => (6, &[ROOT]),
    };
    (SCHEMAS + number, more)
}

fn payload_bytes(function: Function) -> usize {
    if schema(function).1.is_empty() { 16 } else { 24 }
}

/// Tells the tool a function's schema.
fn register(domain: usize, function: Function) {
    let (number, more) = schema(function);
    let first = [(c"NCCL communicator ID", 18), (c"Message size [bytes]", 22)];
    let entries = first.iter().chain(more).zip([0, 8, 16, 20]);
    let entries: Vec<usize> = entries
        .flat_map(|((name, kind), offset)| [0, *kind, name.as_ptr() as usize, 0, 0, offset, 0, 0])
        .collect();
    let count = entries.len() / 8;
    // Which fields are set, a fixed layout, the entries, the payload's bytes, the number.
    let schema = [0x174, 0, 1, 0, words(&entries) as usize, count, payload_bytes(function), 0, number, 0];
    call(&PAYLOADS[0], [domain, words(&schema) as usize]);
}

/// Begins the range of a call, behind that of the call before.
pub(super) fn push(what: &Call, communicator: &Observed) {
    pop();
    let Some((domain, names)) = DOMAIN.get() else { return };
    let (shared, called) = (&what.shared, what.local.called);
    let bytes = shared.count * shared.datatype.size_bytes().unwrap_or(0);
    let operation = shared.operation.map(|operation| operation.0);
    let mut more = shared.root.into_iter().chain(what.local.peer).chain(operation);
    let mut next = || more.next().unwrap_or(0) as u32 as usize;
    let data = [communicator.name as usize, bytes, next() | next() << 32];
    let payload = [schema(called).0, payload_bytes(called), data.as_ptr() as usize];
    // Version and size; one payload of the extension's kind; a registered name.
    let attributes =
        [3 | 48 << 16, 0, 0xdfbd_0009 | 1 << 32, payload.as_ptr() as usize, 3, names[called as usize]];
    call(&SLOTS[InDomain::Push as usize], [*domain, attributes.as_ptr() as usize]);
    IS_OPEN.set(true);
}

/// Ends this thread's range, if there is one.
pub(super) fn pop() {
    if let Some((domain, _)) = DOMAIN.get().filter(|_| IS_OPEN.take()) {
        call(&SLOTS[InDomain::Pop as usize], [*domain, 0]);
    }
}
