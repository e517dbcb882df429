//! Copies a communicator's configuration, for communicators that NCCL makes later than the application's call.

// The pointer is the application's own argument, as in `init`.
#![allow(unsafe_code, clippy::not_unsafe_ptr_arg_deref)]

use std::ffi::{CStr, CString, c_char, c_int};
use std::mem::offset_of;
use std::sync::Arc;

use nccl_sys::{NCCL_API_MAGIC, NCCL_CONFIG_UNDEF_INT, ncclConfig_t};

use windlass_base::config::nccl::{self, Effect};

/// A copy of the application's configuration, with a copy of its name. It names no network.
pub struct Configuration {
    config: Box<ncclConfig_t>,
    name: Option<CString>,
}

impl std::fmt::Debug for Configuration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Configuration").field("name", &self.name).finish_non_exhaustive()
    }
}

// SAFETY: its one pointer points to its own name, which is never changed.
unsafe impl Send for Configuration {}
// SAFETY: as above.
unsafe impl Sync for Configuration {}

/// The configuration that a caller gave.
#[derive(Debug)]
pub enum Given {
    /// None.
    Nothing,
    /// A configuration that NCCL accepts for certain.
    Sound(Arc<Configuration>),
    /// A configuration that NCCL may refuse, or with fields unknown here: NCCL must see it at the call.
    Doubtful,
    /// A configuration that NCCL refuses for certain.
    Wrong,
}

/// The accepted values of fields that may be set. All other fields must be undefined.
const SOUND: &[(usize, std::ops::RangeInclusive<c_int>)] = &[
    (offset_of!(ncclConfig_t, blocking), 1..=1),
    (offset_of!(ncclConfig_t, cgaClusterSize), 0..=8),
    (offset_of!(ncclConfig_t, minCTAs), 1..=64),
    (offset_of!(ncclConfig_t, maxCTAs), 1..=64),
    (offset_of!(ncclConfig_t, splitShare), 0..=1),
    (offset_of!(ncclConfig_t, trafficClass), 0..=c_int::MAX),
    (offset_of!(ncclConfig_t, collnetEnable), 0..=1),
    (offset_of!(ncclConfig_t, CTAPolicy), 0..=1),
    (offset_of!(ncclConfig_t, shrinkShare), 0..=1),
    (offset_of!(ncclConfig_t, nvlsCTAs), 1..=32),
    (offset_of!(ncclConfig_t, nChannelsPerNetPeer), 1..=32),
    (offset_of!(ncclConfig_t, nvlinkCentricSched), 0..=1),
    (offset_of!(ncclConfig_t, graphUsageMode), 0..=2),
    (offset_of!(ncclConfig_t, numRmaCtx), 1..=64),
    (offset_of!(ncclConfig_t, maxP2pPeers), 1..=c_int::MAX),
];

const KNOWN_BYTES: usize = size_of::<ncclConfig_t>();
const NAMES: [usize; 2] = [offset_of!(ncclConfig_t, netName), offset_of!(ncclConfig_t, commName)];
const FIRST: usize = offset_of!(ncclConfig_t, blocking);
/// Behind the last field is padding, in which a program may leave any bytes.
const LAST_END: usize = offset_of!(ncclConfig_t, nvlsHostMode) + size_of::<c_int>();

impl Given {
    /// Checks and copies the application's configuration.
    pub fn of(config: *const ncclConfig_t) -> Given {
        if config.is_null() {
            return Given::Nothing;
        }
        // SAFETY: the application's own configuration, which begins with its size and a magic.
        let (size, magic) =
            unsafe { ((&raw const (*config).size).read(), (&raw const (*config).magic).read()) };
        if magic != NCCL_API_MAGIC {
            return Given::Wrong;
        }
        if !(FIRST + size_of::<c_int>()..=KNOWN_BYTES).contains(&size) {
            return Given::Doubtful;
        }
        // SAFETY: a structure of integers and pointers is valid when zeroed.
        let mut copy: Box<ncclConfig_t> = Box::new(unsafe { std::mem::zeroed() });
        // SAFETY: as many bytes as the configuration says it has, into one that has room for them.
        unsafe { std::ptr::copy_nonoverlapping(config.cast::<u8>(), (&raw mut *copy).cast::<u8>(), size) };
        // SAFETY: within the copy.
        unsafe { (&raw mut *copy).cast::<u8>().byte_add(LAST_END).write_bytes(0, KNOWN_BYTES - LAST_END) };
        if !is_sound(&copy, size) {
            return Given::Doubtful;
        }
        let has_name = size >= NAMES[1] + size_of::<*const c_char>() && !copy.commName.is_null();
        // SAFETY: NCCL, too, takes it for a string.
        let name = has_name.then(|| unsafe { CStr::from_ptr(copy.commName) }.to_owned());
        if let Some(name) = &name {
            copy.commName = name.as_ptr();
        }
        Given::Sound(Arc::new(Configuration { config: copy, name }))
    }

    /// The configuration of a child: the parent's if none was given, as in NCCL.
    pub fn over(&self, parent: &Kept) -> Kept {
        match self {
            Given::Nothing => parent.clone(),
            Given::Sound(configuration) => Kept::Sound(configuration.clone()),
            Given::Doubtful | Given::Wrong => Kept::Unknown,
        }
    }
}

/// The configuration that a communicator has.
#[derive(Clone, Debug)]
pub enum Kept {
    /// A configuration that only NCCL knows.
    Unknown,
    /// None.
    Nothing,
    /// This one.
    Sound(Arc<Configuration>),
}

impl Kept {
    /// Whether NCCL may let children use the resources of a communicator with this configuration.
    pub fn may_share(&self) -> bool {
        let of_all = nccl::settings().has(Effect::SharedResources);
        match self {
            Kept::Unknown => true,
            Kept::Nothing => of_all,
            Kept::Sound(configuration) => configuration.shares() || of_all,
        }
    }

    /// The contents as bytes for comparison; none where they are unknown.
    pub fn words(&self) -> Option<Vec<u8>> {
        match self {
            Kept::Unknown => None,
            Kept::Nothing => Some(Vec::new()),
            Kept::Sound(configuration) => Some(configuration.words()),
        }
    }
}

fn is_sound(config: &ncclConfig_t, size: usize) -> bool {
    let base = std::ptr::from_ref(config);
    let integers = (FIRST..size).step_by(size_of::<c_int>());
    let is_name = |offset: usize| NAMES.iter().any(|name| (*name..name + 8).contains(&offset));
    let sound =
        integers.filter(|offset| !is_name(*offset) && offset + size_of::<c_int>() <= size).all(|offset| {
            // SAFETY: an integer's place within the structure.
            let value = unsafe { base.byte_add(offset).cast::<c_int>().read() };
            let allowed = SOUND.iter().find(|(field, _)| *field == offset).map(|(_, values)| values);
            // The structure of an older header may end with padding where a newer one has a field.
            let may_be_hole = offset + size_of::<c_int>() == size && allowed.is_none();
            value == NCCL_CONFIG_UNDEF_INT
                || allowed.is_some_and(|values| values.contains(&value))
                || may_be_hole && value == 0
        });
    let says = |value: c_int| value != NCCL_CONFIG_UNDEF_INT;
    let reaches = size >= offset_of!(ncclConfig_t, maxCTAs) + size_of::<c_int>();
    // NCCL compares minCTAs and maxCTAs as they are: an undefined value is the smallest number.
    // NCCL looks for a network of this name only when it makes the communicator.
    sound
        && config.netName.is_null()
        && (!reaches || !says(config.minCTAs) || config.minCTAs <= config.maxCTAs)
}

impl Configuration {
    /// A pointer for NCCL, which must not write to it.
    pub fn as_ptr(&self) -> *mut ncclConfig_t {
        (&raw const *self.config).cast_mut()
    }

    fn shares(&self) -> bool {
        self.config.splitShare == 1 || self.config.shrinkShare == 1
    }

    /// The contents as bytes for comparison: equal bytes make equal communicators.
    pub fn words(&self) -> Vec<u8> {
        let mut config = *self.config;
        (config.netName, config.commName) = (std::ptr::null(), std::ptr::null());
        // SAFETY: the structure has no padding between integers that we set; bytes beyond `size` are zeros, as are holes.
        let bytes = unsafe {
            std::slice::from_raw_parts((&raw const config).cast::<u8>(), size_of::<ncclConfig_t>())
        };
        let mut words = bytes.to_vec();
        self.name.iter().for_each(|name| words.extend(name.as_bytes_with_nul()));
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn silent() -> ncclConfig_t {
        // SAFETY: a structure of integers and pointers is valid when zeroed.
        let mut config: ncclConfig_t = unsafe { std::mem::zeroed() };
        let base = &raw mut config;
        for offset in (FIRST..offset_of!(ncclConfig_t, nvlsHostMode) + 4).step_by(4) {
            if !NAMES.iter().any(|name| (*name..name + 8).contains(&offset)) {
                // SAFETY: an integer's place within the structure.
                unsafe { base.byte_add(offset).cast::<c_int>().write(NCCL_CONFIG_UNDEF_INT) };
            }
        }
        ncclConfig_t { size: KNOWN_BYTES, magic: NCCL_API_MAGIC, version: 22809, ..config }
    }

    fn is_doubtful(config: ncclConfig_t) -> bool {
        matches!(Given::of(&config), Given::Doubtful)
    }

    /// A configuration that NCCL accepts for certain is copied, with its names; one that NCCL may refuse is doubtful.
    #[test]
    fn sound_and_doubtful() {
        assert!(matches!(Given::of(std::ptr::null()), Given::Nothing));
        let name = CString::new("pair").unwrap();
        let given = Given::of(&ncclConfig_t { blocking: 1, maxCTAs: 4, commName: name.as_ptr(), ..silent() });
        drop(name);
        let Given::Sound(kept) = given else { panic!("{given:?}") };
        // SAFETY: our own copy.
        let seen = unsafe { CStr::from_ptr((*kept.as_ptr()).commName) };
        assert_eq!(seen.to_bytes(), b"pair");
        assert!(kept.words().ends_with(b"pair\0"));
        for doubtful in [
            ncclConfig_t { blocking: 0, ..silent() },
            ncclConfig_t { blocking: 2, ..silent() },
            ncclConfig_t { size: KNOWN_BYTES + 8, ..silent() },
            ncclConfig_t { size: 8, ..silent() },
            ncclConfig_t { minCTAs: 8, maxCTAs: 4, ..silent() },
            ncclConfig_t { minCTAs: 8, ..silent() },
            ncclConfig_t { maxCTAs: 0, ..silent() },
            ncclConfig_t { graphUsageMode: 3, ..silent() },
            ncclConfig_t { numRmaCtx: 0, ..silent() },
            ncclConfig_t { maxP2pPeers: 0, ..silent() },
            ncclConfig_t { hostCftMode: nccl_sys::ncclHostCftEnable.0, ..silent() },
        ] {
            assert!(is_doubtful(doubtful));
        }
        assert!(matches!(Given::of(&ncclConfig_t { magic: 1, ..silent() }), Given::Wrong));
        // The padding at the end may hold any bytes.
        let mut hole = silent();
        // SAFETY: within the structure.
        unsafe { (&raw mut hole).cast::<u8>().byte_add(LAST_END).write_bytes(0x55, KNOWN_BYTES - LAST_END) };
        let (Given::Sound(one), Given::Sound(other)) = (Given::of(&hole), Given::of(&silent())) else {
            panic!()
        };
        assert_eq!(one.words(), other.words());
        // The structure of an older header ends earlier.
        let older = ncclConfig_t { size: offset_of!(ncclConfig_t, minCTAs), minCTAs: 99, ..silent() };
        assert!(!is_doubtful(older));
    }
}
