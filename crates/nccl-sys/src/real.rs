//! Typed calls of the real library: one function for each entry point whose signature is known.
//!
//! # Safety
//!
//! Each function has NCCL's own requirements for its arguments. Besides, the real library must be open
//! ([`crate::open::open`]): before that the cell is null.

#![allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]

use libc::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::Ordering;

use crate::for_each_entry;
use crate::slots::{Entry, SLOTS};
use crate::types::*;

macro_rules! typed {
    (calls { $($(#[doc = $doc:literal])* [$since:literal $role:ident] fn $name:ident | $twin:ident
               ($($arg:ident: $type:ty),*) $(-> $result:ty)?;)* }
     opaque { $($opaque:tt)* }) => {
        $(
            $(#[doc = $doc])*
            #[inline]
            pub unsafe fn $name($($arg: $type),*) $(-> $result)? {
                let address = SLOTS[Entry::$name as usize].load(Ordering::Acquire);
                debug_assert!(!address.is_null(), concat!(stringify!($name), " called before the library is open"));
                // SAFETY: a filled cell holds the address of a function with this row's signature, in the real
                // library or among the answers of `missing`; the caller vouches for the rest.
                unsafe {
                    let function: unsafe extern "C-unwind" fn($($type),*) $(-> $result)? = std::mem::transmute(address);
                    function($($arg),*)
                }
            }
        )*
    };
}
for_each_entry!(typed);
