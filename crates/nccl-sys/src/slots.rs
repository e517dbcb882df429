//! One cell for each entry point: the address that a call to the real library jumps to.
//!
//! The cells are empty until [`crate::open`] has opened the real library; the ABI layer lets no call past before. For
//! a function that the real library lacks, the cell holds an answer of [`crate::missing`]. So a cell can then be
//! called without a check.

use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use crate::for_each_entry;

/// How an entry point is answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// The ABI layer has Rust code for it.
    Seen,
    /// Jumps to the real library with NCCL's own handle as first argument.
    Handle,
    /// Always jumps to the real library.
    Pass,
}

/// One row of the list of entry points.
#[derive(Debug)]
pub struct Description {
    /// The public name.
    pub name: &'static str,
    /// The `pnccl` name of the same function; one internal function has none.
    pub twin: Option<&'static str>,
    /// Version code of the first release that exports it.
    pub since: u32,
    /// How it is answered.
    pub role: Role,
    /// What the function does; empty for an opaque entry.
    pub about: &'static [&'static str],
    /// Arguments as Rust source, `name: type` separated by commas; `None` where the signature is not known.
    pub arguments: Option<&'static str>,
    /// The result type as Rust source; `()` for none.
    pub returns: &'static str,
}

macro_rules! role {
    (seen) => {
        Role::Seen
    };
    (handle) => {
        Role::Handle
    };
    (pass) => {
        Role::Pass
    };
}

macro_rules! optional {
    () => {
        None
    };
    ($value:ident) => {
        Some(stringify!($value))
    };
}

macro_rules! returned {
    () => {
        "()"
    };
    ($type:ty) => {
        stringify!($type)
    };
}

macro_rules! describe {
    (calls { $($(#[doc = $doc:literal])* [$since:literal $role:ident] fn $name:ident | $twin:ident
               ($($arg:ident: $type:ty),*) $(-> $result:ty)?;)* }
     opaque { $([$osince:literal $orole:ident] $oname:ident $(| $otwin:ident)? -> $oresult:ty;)* }) => {
        /// An entry point of NCCL, by name.
        #[allow(non_camel_case_types, missing_docs)]
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(usize)]
        pub enum Entry { $($name,)* $($oname,)* }

        /// Every entry point, in the order of [`Entry`].
        pub static ENTRIES: &[Description] = &[
            $(Description {
                name: stringify!($name), twin: Some(stringify!($twin)), since: $since, role: role!($role),
                about: &[$($doc),*], arguments: Some(stringify!($($arg: $type),*)),
                returns: returned!($($result)?),
            },)*
            $(Description {
                name: stringify!($oname), twin: optional!($($otwin)?), since: $osince, role: role!($orole),
                about: &[], arguments: None, returns: stringify!($oresult),
            },)*
        ];

        /// How many entry points there are.
        pub const COUNT: usize = [$(Entry::$name,)* $(Entry::$oname,)*].len();
    };
}
for_each_entry!(describe);

/// The cells, in the order of [`Entry`].
pub static SLOTS: [AtomicPtr<()>; COUNT] = [const { AtomicPtr::new(std::ptr::null_mut()) }; COUNT];

/// The counters of calls that the ABI layer passes without Rust code: [`COUNT`] of them, in the order of [`Entry`].
/// Set before the ABI layer lets a first call past.
pub static PASSED: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());

/// Return addresses from which a call is forwarded unseen, as two ranges of (first address, length). They are the
/// text of the real library and of this one, which NCCL can reach through Windlass by a tail call. Empty until the
/// library is open. [`forward_everything`] makes the first range cover every address.
pub static INSIDE: [AtomicUsize; 4] = [const { AtomicUsize::new(0) }; 4];

/// Makes every later call go to the real library unseen and uncounted (kill switch; children after a fork).
pub fn forward_everything() {
    INSIDE[0].store(0, Ordering::Relaxed);
    INSIDE[1].store(usize::MAX, Ordering::Relaxed);
}

/// Whether every call is forwarded.
pub fn forwards_everything() -> bool {
    INSIDE[1].load(Ordering::Relaxed) == usize::MAX
}

/// Sets the two ranges, unless every call is forwarded already: that stays.
pub(crate) fn note_inside(ranges: [(usize, usize); 2]) {
    let [real, own] = ranges;
    INSIDE[2].store(own.0, Ordering::Relaxed);
    INSIDE[3].store(own.1, Ordering::Relaxed);
    // The length comes last and only into an empty range: a range that covers everything may begin anywhere.
    INSIDE[0].store(real.0, Ordering::Relaxed);
    let _ = INSIDE[1].compare_exchange(0, real.1, Ordering::Relaxed, Ordering::Relaxed);
}

impl Entry {
    /// The row of this entry point.
    pub fn description(self) -> &'static Description {
        &ENTRIES[self as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Names are unique, a twin is `p` + name, and versions are NCCL's codes.
    #[test]
    fn rows_are_well_formed() {
        let mut names = HashSet::new();
        for entry in ENTRIES {
            assert!(names.insert(entry.name), "{} twice", entry.name);
            assert!((21800..24000).contains(&entry.since), "{}", entry.name);
            if let Some(twin) = entry.twin {
                assert_eq!(twin, format!("p{}", entry.name));
            }
            assert_eq!(entry.arguments.is_some(), !entry.about.is_empty(), "{}", entry.name);
        }
        assert_eq!(ENTRIES.len(), COUNT);
        assert_eq!(Entry::ncclAllReduce.description().name, "ncclAllReduce");
    }
}
