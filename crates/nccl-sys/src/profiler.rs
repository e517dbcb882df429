//! The interface between NCCL and profiler plugins, versions 4 to 7, which differ only in what is named here. Later versions append
//! fields to events and move none.

use std::ffi::{c_char, c_int, c_void};

use crate::NCCL_UNIQUE_ID_BYTES;

/// Kinds of events: bits of an activation mask.
pub mod kind {
    /// A group, as version 4 has it.
    pub const GROUP: u64 = 1 << 0;
    /// A collective.
    pub const COLL: u64 = 1 << 1;
    /// A send or receive.
    pub const P2P: u64 = 1 << 2;
    /// An operation of a proxy.
    pub const PROXY_OP: u64 = 1 << 3;
    /// A proxy operation's steps, and what a network plugin tells of them.
    pub const OF_PROXY_OP: u64 = 1 << 4 | 1 << 7;
    /// A channel of a kernel.
    pub const KERNEL_CH: u64 = 1 << 6;
    /// The outermost group of a thread.
    pub const GROUP_API: u64 = 1 << 8;
    /// The program's call of a collective.
    pub const COLL_API: u64 = 1 << 9;
    /// The program's call of a send or receive.
    pub const P2P_API: u64 = 1 << 10;
    /// The launch of a kernel.
    pub const KERNEL_LAUNCH: u64 = 1 << 11;

    /// The kinds that a version knows.
    pub const fn known(version: u32) -> u64 {
        match version {
            4 => 0xff,
            5 => 0xfff,
            6 => 0x7fff,
            _ => 0xffff,
        }
    }

    /// The kinds because of which NCCL starts events of a kind: itself and those below it.
    pub const fn asked_by(kind: u64) -> u64 {
        const COLLS: u64 = COLL | BELOW | 7 << 12;
        const BELOW: u64 = PROXY_OP | OF_PROXY_OP | KERNEL_CH | 1 << 15;
        match kind {
            GROUP => GROUP | P2P | COLLS,
            COLL => COLLS,
            P2P => P2P | BELOW,
            GROUP_API => GROUP_API | COLL_API | P2P_API | KERNEL_LAUNCH | GROUP | P2P | COLLS,
            COLL_API => COLL_API | COLLS,
            P2P_API => P2P_API | P2P | BELOW,
            other => other,
        }
    }
}

/// States of the outermost group's event: the end of its `ncclGroupStart`, the beginning of its `ncclGroupEnd`.
pub const GROUP_STATES: [c_int; 2] = [23, 24];
/// The state of a kernel's channel that has ended.
pub const KERNEL_CH_STOP: c_int = 22;

/// An event that begins. In version 4 the kind is one byte, and the seven behind it are undefined.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Event {
    /// A bit of [`kind`].
    pub kind: u64,
    /// The handle of the event that it belongs to.
    pub parent: *mut c_void,
    /// The rank.
    pub rank: c_int,
    /// What its kind has.
    pub of: Details,
}

/// What an event has by its kind. Larger than any version's, so that a plugin may read all fields that its version has.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub union Details {
    pub coll: Coll,
    pub p2p: P2p,
    pub coll_api: CollApi,
    pub p2p_api: P2pApi,
    pub group_api: GroupApi,
    pub proxy_process: c_int,
    pub kernel_ch: KernelCh,
    pub stream: *mut c_void,
    pub nothing: [u64; 24],
}

/// A collective.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct Coll {
    pub number: u64,
    pub function: *const c_char,
    pub send: *const c_void,
    pub receive: *mut c_void,
    pub count: usize,
    pub root: c_int,
    pub datatype: *const c_char,
    pub channels: u8,
    pub warps: u8,
    pub algorithm: *const c_char,
    pub protocol: *const c_char,
    /// Not in version 4, whose `parent` is the group.
    pub group: *mut c_void,
}

/// A send or receive.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct P2p {
    pub function: *const c_char,
    pub buffer: *mut c_void,
    pub datatype: *const c_char,
    pub count: usize,
    pub peer: c_int,
    pub channels: u8,
    pub group: *mut c_void,
}

/// The program's call of a collective.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct CollApi {
    pub function: *const c_char,
    pub count: usize,
    pub datatype: *const c_char,
    pub root: c_int,
    pub stream: *mut c_void,
    pub is_captured: bool,
}

/// The program's call of a send or receive.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct P2pApi {
    pub function: *const c_char,
    pub count: usize,
    pub datatype: *const c_char,
    pub stream: *mut c_void,
    pub is_captured: bool,
}

/// The outermost group.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct GroupApi {
    pub is_captured: bool,
    pub depth: c_int,
}

/// A channel of a kernel, and the GPU's time.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct KernelCh {
    pub channel: u8,
    pub time: u64,
}

/// NCCL's logger: level, subsystems, file, line, format. NCCL's takes more arguments, by the format.
pub type Logger = extern "C" fn(c_int, u64, *const c_char, c_int, *const c_char);
/// `init` of version 4.
pub type Init4 = unsafe extern "C" fn(
    *mut *mut c_void,
    *mut c_int,
    *const c_char,
    u64,
    c_int,
    c_int,
    c_int,
    Option<Logger>,
) -> c_int;
/// `init` of later versions.
pub type Init5 = unsafe extern "C" fn(
    *mut *mut c_void,
    u64,
    *mut c_int,
    *const c_char,
    c_int,
    c_int,
    c_int,
    Option<Logger>,
) -> c_int;
/// `startEvent`.
pub type Start = unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut Event) -> c_int;
/// `stopEvent`, `finalize`.
pub type Stop = unsafe extern "C" fn(*mut c_void) -> c_int;
/// `recordEventState`.
pub type Record = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> c_int;

/// What a plugin exports: `ncclProfiler_v4` to `ncclProfiler_v7`.
#[repr(C)]
pub struct Plugin<Init> {
    /// Its name.
    pub name: *const c_char,
    /// Begins a communicator.
    pub init: Init,
    /// Begins an event.
    pub start: Start,
    /// Ends an event.
    pub stop: Stop,
    /// Notes an event's state.
    pub record: Record,
    /// Ends a communicator.
    pub finalize: Stop,
}

// SAFETY: the name is a literal; functions may be called by any thread.
unsafe impl<Init> Sync for Plugin<Init> {}

/// The newest version of the interface that a release of NCCL knows, by its version code.
pub fn newest_version(nccl: c_int) -> u32 {
    // The releases with which versions 4 to 7 came.
    let since = [22700, 22800, 22902, 23100];
    3 + since.iter().filter(|since| nccl >= **since).count() as u32
}

/// What NCCL calls the communicator of an id, from release 2.26 on.
pub fn hash(id: &[u8; NCCL_UNIQUE_ID_BYTES]) -> u64 {
    let words = id.as_chunks::<8>().0;
    let [mut low, mut high] = [1 ^ size_of_val(id) as u64, 1u64];
    for word in words {
        low = low.wrapping_add(high);
        high ^= low;
        low = (low ^ low >> 31).wrapping_mul(0x9de6_2bbc_8cef_3ce3);
        high = (high ^ high >> 32).wrapping_mul(0x485c_d631_1b59_9e79);
        low = low.wrapping_add(u64::from_le_bytes(*word));
    }
    let mixed = (low ^ low >> 31).wrapping_mul(0xbac3_bd56_2846_de6b).wrapping_add(high);
    (mixed ^ mixed >> 32).wrapping_mul(0x995a_187a_14e7_b445)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// Fields lie where plugins of NVIDIA's read them.
    #[test]
    fn layout() {
        let event = [offset_of!(Event, parent), offset_of!(Event, rank), offset_of!(Event, of)];
        assert_eq!(event, [8, 16, 24]);
        let coll = [offset_of!(Coll, datatype), offset_of!(Coll, algorithm), offset_of!(Coll, group)];
        assert_eq!(coll, [48, 64, 80]);
        assert_eq!([offset_of!(P2p, peer), offset_of!(P2p, group)], [32, 40]);
        assert_eq!([offset_of!(CollApi, stream), offset_of!(P2pApi, stream)], [32, 24]);
    }

    /// NCCL's own code gave this value.
    #[test]
    fn names_of_communicators() {
        assert_eq!(hash(&std::array::from_fn(|index| index as u8)), 0x6afe_1cc1_7717_e1f4);
    }

    /// Who asks for a channel gets its collective, and the group around it.
    #[test]
    fn parents_begin_too() {
        for parent in [kind::COLL, kind::COLL_API, kind::GROUP, kind::GROUP_API, kind::P2P, kind::P2P_API] {
            assert_ne!(kind::asked_by(parent) & kind::KERNEL_CH, 0);
        }
        assert_eq!(kind::asked_by(kind::COLL) & kind::P2P, 0);
    }
}
