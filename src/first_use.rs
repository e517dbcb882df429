//! What the very first call does: options, log, taking the real library. Loading this library only opens the real one, and
//! only in a program that links NCCL.

use std::cell::Cell;
use std::sync::atomic::{AtomicU8, Ordering};

use nccl_sys::{missing, open};
use windlass_engine::{guard, process};

/// 1 once the real library is open and every cell can be jumped through.
pub static READY: AtomicU8 = AtomicU8::new(0);

/// Keeps all argument registers, prepares, and jumps on: back to the entry, whose address comes in `r11` with the
/// entry's number in `r10`, or to an answer where there is no real library.
#[unsafe(naked)]
pub unsafe extern "C" fn first_use() {
    core::arch::naked_asm!(
        // With a described frame, what unwinds or prints a stack inside `prepare` sees the caller.
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
        "mov [rsp + 128], rdi",
        "mov [rsp + 136], rsi",
        "mov [rsp + 144], rdx",
        "mov [rsp + 152], rcx",
        "mov [rsp + 160], r8",
        "mov [rsp + 168], r9",
        "mov edi, r10d",
        "mov rsi, r11",
        "call {prepare}",
        "movups xmm0, [rsp]",
        "movups xmm1, [rsp + 16]",
        "movups xmm2, [rsp + 32]",
        "movups xmm3, [rsp + 48]",
        "movups xmm4, [rsp + 64]",
        "movups xmm5, [rsp + 80]",
        "movups xmm6, [rsp + 96]",
        "movups xmm7, [rsp + 112]",
        "mov rdi, [rsp + 128]",
        "mov rsi, [rsp + 136]",
        "mov rdx, [rsp + 144]",
        "mov rcx, [rsp + 152]",
        "mov r8, [rsp + 160]",
        "mov r9, [rsp + 168]",
        "add rsp, 200",
        ".cfi_adjust_cfa_offset -200",
        "jmp rax",
        ".cfi_endproc",
        prepare = sym prepare,
    )
}

thread_local! {
    /// Whether this thread is opening the real library.
    static OPENING: Cell<bool> = const { Cell::new(false) };
}

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

extern "C" fn at_load() {
    guard::or_else(|| (), || while_opening(open::open_where_linked));
}

/// Calls of this thread in the meantime come from the real library's own constructors.
fn while_opening<T>(open: impl FnOnce() -> T) -> T {
    OPENING.set(true);
    let opened = open();
    OPENING.set(false);
    opened
}

/// Gives the address at which the call goes on.
extern "C" fn prepare(index: usize, entry: *const ()) -> *const () {
    guard::or_else(
        || missing::without_library(index),
        || {
            if OPENING.get() {
                return open::address_while_opening(index).unwrap_or_else(|| missing::without_library(index));
            }
            process::first_call();
            match while_opening(open::open) {
                Ok(library) => {
                    process::library_opened(library);
                    READY.store(1, Ordering::Release);
                    entry
                }
                Err(refused) => {
                    process::library_missing(&refused);
                    missing::without_library(index)
                }
            }
        },
    )
}
