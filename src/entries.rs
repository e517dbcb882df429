//! Every public name of NCCL, and its `pnccl` twin: a few instructions each, from the one list.
//!
//! The stack and all argument registers arrive untouched wherever an entry jumps, so functions whose signature we
//! do not know, and results in any registers, pass exactly. Only `rax`, `r10` and `r11` are used, which hold no
//! argument of a C function without variable arguments.
//!
//! An entry asks, in this order:
//! 1. Is the real library open? If not, [`crate::first_use`] sees to it and comes back here.
//! 2. Does the call come from inside: from the text of the real library, which calls some of its own public names,
//!    or from our own, which it reaches by a tail call of a function that we called? Then it is part of a call
//!    that we have seen and goes on to the real library, unseen. (The kill switch makes every address inside.)
//! 3. Otherwise an entry that the engine looks at jumps to its Rust code, and any other is counted and goes on.

use nccl_sys::for_each_entry;
use nccl_sys::slots::{Entry, INSIDE, PASSED, SLOTS};

use crate::first_use::{READY, first_use};
use crate::translate::translate;

macro_rules! entries {
    (calls { $($(#[doc = $doc:literal])* [$since:literal $role:ident] fn $name:ident | $twin:ident
               $arguments:tt $(-> $result:ty)?;)* }
     opaque { $([$osince:literal $orole:ident] $oname:ident $(| $otwin:ident)? -> $oresult:ty;)* }) => {
        $(entries!(@$role $name $name);)*
        $(entries!(@$role $twin $name);)*
        $(entries!(@$orole $oname $oname);)*
        $($(entries!(@$orole $otwin $oname);)?)*
    };

    (@seen $export:ident $entry:ident) => {
        entries!(@code $export $entry ["jmp {rust}"] [rust = sym crate::seen::$entry,]);
    };
    (@handle $export:ident $entry:ident) => {
        entries!(@code $export $entry
            ["mov r11, [rip + {passed}]", "lock inc qword ptr [r11 + {offset}]", "mov r10d, {index}", "jmp {translate}"]
            [passed = sym PASSED, translate = sym translate,]);
    };
    (@pass $export:ident $entry:ident) => {
        entries!(@code $export $entry
            ["mov r11, [rip + {passed}]", "lock inc qword ptr [r11 + {offset}]"] [passed = sym PASSED,]);
    };

    // What a call from outside does, between the questions and the jump into the real library.
    (@code $export:ident $entry:ident [$($code:literal),*] [$($operand:tt)*]) => {
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)]
        unsafe extern "C" fn $export() {
            core::arch::naked_asm!(
                "2:",
                "cmp byte ptr [rip + {ready}], 0",
                "je 4f",
                "mov rax, [rsp]",
                "mov r11, rax",
                "sub rax, [rip + {inside}]",
                "cmp rax, [rip + {inside} + 8]",
                "jb 3f",
                "sub r11, [rip + {inside} + 16]",
                "cmp r11, [rip + {inside} + 24]",
                "jb 3f",
                $($code,)*
                "3:",
                "jmp qword ptr [rip + {slots} + {offset}]",
                "4:",
                "lea r11, [rip + 2b]",
                "mov r10d, {index}",
                "jmp {first_use}",
                $($operand)*
                ready = sym READY,
                inside = sym INSIDE,
                slots = sym SLOTS,
                offset = const Entry::$entry as usize * 8,
                index = const Entry::$entry as usize,
                first_use = sym first_use,
            )
        }
    };
}
for_each_entry!(entries);
