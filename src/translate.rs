//! NCCL's own communicator in place of a lazy one's, for functions of which we know no more than that it is their first argument.

use std::sync::atomic::Ordering;

use nccl_sys::missing::without_library;
use nccl_sys::slots::SLOTS;
use nccl_sys::{ncclComm_t, trampoline};
use windlass_engine::api::queries;

/// What comes back in `rax` and `rdx`.
#[repr(C)]
struct Translated {
    handle: ncclComm_t,
    /// Where the call goes on: in the real library.
    function: *mut (),
}

trampoline! {
    /// Changes the first argument, and jumps on to the real library; the entry's number is in `r10`.
    pub fn translate calls translated,
    before ["mov esi, r10d"],
    after ["mov rdi, rax", "mov r11, rdx"]
}

extern "C-unwind" fn translated(handle: ncclComm_t, index: usize) -> Translated {
    match queries::real_handle(index, handle) {
        Some(handle) => Translated { handle, function: SLOTS[index].load(Ordering::Acquire) },
        // An error where the result is a code; a team of no ranks.
        None => Translated { handle, function: without_library(index).cast_mut() },
    }
}
