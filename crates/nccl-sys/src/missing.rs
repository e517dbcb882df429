//! Answers for entry points that the real library lacks, and for all of them where there is no real library.
//!
//! An answer must fit the result type: `ncclInvalidUsage` or `ncclSystemError` for a code, a text for a string, a
//! team of no ranks, a slot count of 0. A missing function is logged once, at its first call. The level is warning,
//! since programs may try newer functions and do without (JAX asks for properties that 2.28 does not have).

use std::sync::atomic::{AtomicBool, Ordering};

use libc::{c_char, c_int};

use crate::slots::{COUNT, Description, ENTRIES, Entry, SLOTS};
use crate::types::*;

static LOGGED: [AtomicBool; COUNT] = [const { AtomicBool::new(false) }; COUNT];

/// The address of a function that logs once that the real library lacks entry `index`, and answers.
pub(crate) fn in_library(index: usize) -> *mut () {
    REPORTERS[index] as *mut ()
}

/// Whether the real library lacks an entry point, so that Windlass answers in its place.
pub fn is_missing(entry: Entry) -> bool {
    is_missing_at(entry as usize)
}

/// As [`is_missing`], by the entry's number.
pub fn is_missing_at(index: usize) -> bool {
    let there = SLOTS[index].load(Ordering::Acquire).cast_const();
    let functions =
        [invalid_usage as *const (), system_error as *const (), nothing as *const (), zero as *const ()];
    there == in_library(index).cast_const() || functions.contains(&there)
}

/// The address of a function that answers for entry `index` where no real library could be opened.
pub fn without_library(index: usize) -> *const () {
    let entry = &ENTRIES[index];
    match entry.name {
        "ncclGetErrorString" => error_string as *const (),
        "ncclGetLastError" => no_library_text as *const (),
        _ => by_result(entry, system_error as *const ()),
    }
}

/// What answers in the place of a function: this one if it returns a code.
fn by_result(entry: &Description, code: *const ()) -> *const () {
    match entry.returns {
        "ncclResult_t" => code,
        "()" => nothing as *const (),
        _ => zero as *const (),
    }
}

/// Logs that entry `index` is missing, makes later calls answer at once, and gives the answer's address.
extern "C" fn report(index: usize) -> *const () {
    let entry = &ENTRIES[index];
    let answer = by_result(entry, invalid_usage as *const ());
    if !LOGGED[index].swap(true, Ordering::Relaxed) {
        log::warn!(
            "{} is not in the real NCCL (it came with {}): answering {}",
            entry.name,
            entry.since,
            if entry.returns == "ncclResult_t" { "ncclInvalidUsage" } else { "nothing" }
        );
    }
    SLOTS[index].store(answer.cast_mut(), Ordering::Release);
    answer
}

extern "C" fn invalid_usage() -> ncclResult_t {
    ncclInvalidUsage
}

pub(crate) extern "C" fn invalid_argument() -> ncclResult_t {
    ncclInvalidArgument
}

extern "C" fn system_error() -> ncclResult_t {
    ncclSystemError
}

extern "C" fn nothing() {}

/// A result that fills both registers of a small structure.
#[repr(C)]
struct TwoWords(u64, u64);

/// An `int` 0, a null pointer, or a team of 0 ranks, as the caller reads it.
extern "C" fn zero() -> TwoWords {
    TwoWords(0, 0)
}

extern "C" fn no_library_text(_comm: ncclComm_t) -> *const c_char {
    c"windlass: no usable NCCL library was found; set WINDLASS_NCCL to the path of libnccl.so.2".as_ptr()
}

/// NCCL's texts (`ncclGetErrorString`, read from 2.28.9), for programs that print an error without a real library.
extern "C" fn error_string(code: c_int) -> *const c_char {
    let text = match ncclResult_t(code) {
        ncclSuccess => c"no error",
        ncclUnhandledCudaError => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        ncclSystemError => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        ncclInternalError => c"internal error - please report this issue to the NCCL developers",
        ncclInvalidArgument => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        ncclInvalidUsage => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        ncclRemoteError => c"remote process exited or there was a network error",
        ncclInProgress => c"NCCL operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

#[cfg(target_arch = "x86_64")]
mod reporters {
    use super::{COUNT, report};
    use crate::for_each_entry;
    use crate::slots::Entry;

    macro_rules! reporters {
        (calls { $($(#[doc = $doc:literal])* [$since:literal $role:ident] fn $name:ident | $twin:ident
                   $arguments:tt $(-> $result:ty)?;)* }
         opaque { $([$osince:literal $orole:ident] $oname:ident $(| $otwin:ident)? -> $oresult:ty;)* }) => {
            $(reporters!(@one $name);)*
            $(reporters!(@one $oname);)*
            /// In the order of [`Entry`].
            pub(super) static REPORTERS: [unsafe extern "C" fn(); COUNT] = [$($name,)* $($oname,)*];
        };
        // The arguments need not be kept: answers only fill result registers.
        (@one $name:ident) => {
            #[unsafe(naked)]
            #[allow(non_snake_case)]
            unsafe extern "C" fn $name() {
                core::arch::naked_asm!(
                    "sub rsp, 8",
                    "mov edi, {index}",
                    "call {report}",
                    "add rsp, 8",
                    "jmp rax",
                    index = const Entry::$name as usize,
                    report = sym report,
                )
            }
        };
    }
    for_each_entry!(reporters);
}
use reporters::REPORTERS;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slots::Entry;

    /// A missing function answers ncclInvalidUsage, also at the second call, when the cell holds the plain answer.
    #[test]
    fn missing_code() {
        let index = Entry::ncclCommSuspend as usize;
        for _ in 0..2 {
            let function = if LOGGED[index].load(Ordering::Relaxed) {
                SLOTS[index].load(Ordering::Acquire)
            } else {
                in_library(index)
            };
            // SAFETY: the answer reads no arguments.
            let code = unsafe { std::mem::transmute::<*mut (), extern "C" fn() -> ncclResult_t>(function)() };
            assert_eq!(code, ncclInvalidUsage);
        }
    }

    /// Without a library every entry has an answer that fits its result type.
    #[test]
    fn answers_without_library() {
        assert_eq!(without_library(Entry::ncclAllReduce as usize), system_error as *const ());
        assert_eq!(without_library(Entry::ncclTeamWorld as usize), zero as *const ());
        assert_eq!(without_library(Entry::ncclParamDumpAll as usize), nothing as *const ());
        assert_eq!(without_library(Entry::ncclGetErrorString as usize), error_string as *const ());
        assert_eq!(without_library(Entry::ncclGetLastError as usize), no_library_text as *const ());
    }
}
