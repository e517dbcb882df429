//! Guards calls in a child that was forked from a process with communicators. They go to the real library unseen, except those
//! with a handle of Windlass's own: several functions of NCCL would read it as a communicator of NCCL.
//!
//! Those calls return `ncclInvalidArgument`, NCCL's own code for a pointer that is no communicator. With NCCL alone, too, a child
//! cannot end its parent's communicators: the call crashes or waits.

use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use once_cell::sync::OnceCell;

use crate::missing::{invalid_argument, without_library};
use crate::slots::{COUNT, Description, ENTRIES, Entry, Role, SLOTS};

/// The first word behind Windlass's own handles. NCCL's communicators begin with another word, which NCCL reads, too.
pub const WORD: u64 = u64::from_le_bytes(*b"windlass");

/// The real library's functions. [`guard`] fills them from [`SLOTS`].
static REAL: [AtomicPtr<()>; COUNT] = [const { AtomicPtr::new(std::ptr::null_mut()) }; COUNT];

/// Puts a guard before every function. Runs in the child before any call; allocates nothing and takes no lock. Only
/// the first run acts, also for the child's own children.
pub fn guard() {
    static GUARDED: AtomicBool = AtomicBool::new(false);
    if GUARDED.swap(true, Ordering::Relaxed) {
        return;
    }
    for ((slot, real), guarded) in SLOTS.iter().zip(&REAL).zip(&guards::GUARDS) {
        real.store(slot.load(Ordering::Acquire), Ordering::Relaxed);
        slot.store(*guarded as *mut (), Ordering::Release);
    }
}

/// Called before each init in the child, before NCCL's function.
static ON_INIT: OnceCell<fn()> = OnceCell::new();

/// Sets the function to call before each init. The first one set stays. It may not panic.
pub fn on_init(hear: fn()) {
    let _ = ON_INIT.set(hear);
}

/// The index of the argument that is a communicator's handle.
fn place_of_handle(entry: &Description) -> Option<usize> {
    let is_handle = |argument: &str| argument.rsplit(':').next().map(str::trim) == Some("ncclComm_t");
    match entry.arguments {
        Some(arguments) => arguments.split(',').position(is_handle),
        None => (entry.role == Role::Handle).then_some(0),
    }
}

fn is_ours(handle: usize) -> bool {
    // SAFETY: the real library reads any handle that is not null, too.
    handle != 0
        && handle.is_multiple_of(align_of::<u64>())
        && unsafe { (handle as *const u64).read_volatile() } == WORD
}

/// The function with which a call goes on. The first six arguments are in registers, the others on the stack.
extern "C" fn checked(index: usize, registers: *const [usize; 6], stack: *const usize) -> *const () {
    let entry = &ENTRIES[index];
    let real = REAL[index].load(Ordering::Relaxed).cast_const();
    if entry.name.starts_with("ncclCommInit") {
        ON_INIT.get().into_iter().for_each(|hear| hear());
    }
    // The text of `ncclGetLastError` belongs to the process, whatever the handle.
    let Some(place) = place_of_handle(entry).filter(|_| index != Entry::ncclGetLastError as usize) else {
        return real;
    };
    // SAFETY: the caller passed as many arguments as the function has, none of which before the handle is a structure.
    let handle = unsafe { if place < 6 { (*registers)[place] } else { stack.add(place - 6).read() } };
    if !is_ours(handle) {
        return real;
    }
    log::warn!("{}: communicator {handle:#x} is of the process that this one was forked from", entry.name);
    if entry.returns == "ncclResult_t" { invalid_argument as *const () } else { without_library(index) }
}

mod guards {
    use super::checked;
    use crate::slots::{COUNT, Entry};
    use crate::{for_each_entry, trampoline};

    trampoline! {
        /// Calls `checked` and jumps to its answer. The entry's number is in `r10`; stack arguments are behind the
        /// return address.
        fn ask calls checked,
        before ["mov [rsp + 128], rdi", "mov edi, r10d", "lea rsi, [rsp + 128]", "lea rdx, [rsp + 208]"],
        after ["mov r11, rax", "mov rdi, [rsp + 128]"]
    }

    macro_rules! guards {
        (calls { $($(#[doc = $doc:literal])* [$since:literal $role:ident] fn $name:ident | $twin:ident
                   $arguments:tt $(-> $result:ty)?;)* }
         opaque { $([$osince:literal $orole:ident] $oname:ident $(| $otwin:ident)? -> $oresult:ty;)* }) => {
            $(guards!(@one $name);)*
            $(guards!(@one $oname);)*
            /// In the order of [`Entry`].
            pub(super) static GUARDS: [unsafe extern "C" fn(); COUNT] = [$($name,)* $($oname,)*];
        };
        (@one $name:ident) => {
            #[unsafe(naked)]
            #[allow(non_snake_case)]
            unsafe extern "C" fn $name() {
                core::arch::naked_asm!(
                    "mov r10d, {index}",
                    "jmp {ask}",
                    index = const Entry::$name as usize,
                    ask = sym ask,
                )
            }
        };
    }
    for_each_entry!(guards);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::*;

    /// The places of handles. No argument before a handle is a structure, which would shift the others.
    #[test]
    fn places() {
        for (entry, place) in [
            (Entry::ncclCommDestroy, Some(0)),
            (Entry::ncclRedOpDestroy, Some(1)),
            (Entry::ncclAllReduce, Some(5)),
            (Entry::ncclReduce, Some(6)),
            (Entry::ncclCommInitRank, None),
            (Entry::ncclGetVersion, None),
            (Entry::ncclTeamWorld, Some(0)),
            (Entry::ncclLLA2ACalcSlots, None),
        ] {
            assert_eq!(place_of_handle(entry.description()), place, "{entry:?}");
        }
        for entry in ENTRIES {
            let before = place_of_handle(entry).unwrap_or(0);
            let mut arguments = entry.arguments.unwrap_or("").split(',').take(before);
            let is_word = |argument: &str| !argument.contains("ncclUniqueId") || argument.contains('*');
            assert!(arguments.all(is_word), "{}", entry.name);
        }
    }

    type Reduce = extern "C" fn(usize, usize, usize, c_int, c_int, c_int, ncclComm_t, usize) -> ncclResult_t;
    use std::ffi::c_int;

    extern "C" fn reduce(
        send: usize,
        receive: usize,
        count: usize,
        datatype: c_int,
        operation: c_int,
        root: c_int,
        _handle: ncclComm_t,
        stream: usize,
    ) -> ncclResult_t {
        assert_eq!([send, receive, count, stream], [1, 2, 3, 8]);
        assert_eq!([datatype, operation, root], [4, 5, 6]);
        ncclInProgress
    }

    /// A call without a handle of Windlass's goes on with all its arguments; one with such a handle is refused, also
    /// for stack arguments.
    #[test]
    fn guarded() {
        let slot = &SLOTS[Entry::ncclReduce as usize];
        slot.store(reduce as *mut (), Ordering::Release);
        guard();
        guard();
        // SAFETY: the cell holds a function with these arguments, behind its guard.
        let call = unsafe { std::mem::transmute::<*mut (), Reduce>(slot.load(Ordering::Acquire)) };
        let (ours, other) = ([WORD, 0], [!WORD, 0]);
        let with = |handle: ncclComm_t| call(1, 2, 3, 4, 5, 6, handle, 8);
        assert_eq!(with(ours.as_ptr() as ncclComm_t), ncclInvalidArgument);
        assert_eq!(with(other.as_ptr() as ncclComm_t), ncclInProgress);
        assert_eq!(with(std::ptr::null_mut()), ncclInProgress);
    }
}
