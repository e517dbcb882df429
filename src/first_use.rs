//! What the very first call does: options, log, taking the real library. Loading this library only opens the real one, and
//! only in a program that links NCCL. Also has what runs at the end of the process.

use std::cell::Cell;
use std::sync::atomic::{AtomicU8, Ordering};

use nccl_sys::{missing, open, trampoline};
use windlass_base::guard;
use windlass_base::process;

/// 1 once the real library is open and every cell can be jumped through.
pub static READY: AtomicU8 = AtomicU8::new(0);

trampoline! {
    /// Prepares, and jumps on: back to the entry, whose address comes in `r11` with the entry's number in `r10`, or to an answer where
    /// there is no real library.
    pub fn first_use calls prepare,
    before ["mov [rsp + 128], rdi", "mov edi, r10d", "mov rsi, r11"],
    after ["mov r11, rax", "mov rdi, [rsp + 128]"]
}

thread_local! {
    /// Whether this thread is opening the real library.
    static OPENING: Cell<bool> = const { Cell::new(false) };
}

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

extern "C" fn at_load() {
    guard::or_else(|| (), process::loaded);
    guard::or_else(|| (), || while_opening(open::open_where_linked));
}

/// Here, since the `windlass` command has the crates below, too, and is not what it runs.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_END: extern "C" fn() = process::at_end;

/// Calls of this thread in the meantime come from the real library's own constructors.
fn while_opening<T>(open: impl FnOnce() -> T) -> T {
    /// Also where opening panics.
    struct Until;
    impl Drop for Until {
        fn drop(&mut self) {
            OPENING.set(false);
        }
    }
    OPENING.set(true);
    let _until = Until;
    open()
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
