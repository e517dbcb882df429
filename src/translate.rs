//! NCCL's own communicator in place of a promise's, for functions of which we know no more than that it is their first argument.

use std::sync::atomic::Ordering;

use nccl_sys::missing::without_library;
use nccl_sys::ncclComm_t;
use nccl_sys::slots::SLOTS;
use windlass_engine::lifecycle::questions;

/// What comes back in `rax` and `rdx`.
#[repr(C)]
struct Translated {
    handle: ncclComm_t,
    /// Where the call goes on: in the real library.
    function: *mut (),
}

/// Keeps all other argument registers, changes the first, and jumps on to the real library; the entry's number is in `r10`.
#[unsafe(naked)]
pub unsafe extern "C" fn translate() {
    core::arch::naked_asm!(
        ".cfi_startproc",
        // The call pushed 8 bytes; 200 more make the stack aligned for the next.
        "sub rsp, 200",
        ".cfi_adjust_cfa_offset 200",
        "movups [rsp], xmm0",
        "movups [rsp + 16], xmm1",
        "movups [rsp + 32], xmm2",
        "movups [rsp + 48], xmm3",
        "movups [rsp + 64], xmm4",
        "movups [rsp + 80], xmm5",
        "movups [rsp + 96], xmm6",
        "movups [rsp + 112], xmm7",
        "mov [rsp + 136], rsi",
        "mov [rsp + 144], rdx",
        "mov [rsp + 152], rcx",
        "mov [rsp + 160], r8",
        "mov [rsp + 168], r9",
        "mov esi, r10d",
        "call {translated}",
        "mov rdi, rax",
        "mov r11, rdx",
        "movups xmm0, [rsp]",
        "movups xmm1, [rsp + 16]",
        "movups xmm2, [rsp + 32]",
        "movups xmm3, [rsp + 48]",
        "movups xmm4, [rsp + 64]",
        "movups xmm5, [rsp + 80]",
        "movups xmm6, [rsp + 96]",
        "movups xmm7, [rsp + 112]",
        "mov rsi, [rsp + 136]",
        "mov rdx, [rsp + 144]",
        "mov rcx, [rsp + 152]",
        "mov r8, [rsp + 160]",
        "mov r9, [rsp + 168]",
        "add rsp, 200",
        ".cfi_adjust_cfa_offset -200",
        "jmp r11",
        ".cfi_endproc",
        translated = sym translated,
    )
}

extern "C-unwind" fn translated(handle: ncclComm_t, index: usize) -> Translated {
    match questions::real_handle(index, handle) {
        Some(handle) => Translated { handle, function: SLOTS[index].load(Ordering::Acquire) },
        // An error where the result is a code; a team of no ranks.
        None => Translated { handle, function: without_library(index).cast_mut() },
    }
}
