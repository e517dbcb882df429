//! Making communicators by the real NCCL.

// The pointers are the application's own arguments: the exported C functions are the unsafe border, and the
// engine behind it hands them on.
#![allow(unsafe_code, clippy::not_unsafe_ptr_arg_deref)]

use std::ffi::c_int;

use nccl_sys::{ncclComm_t, ncclConfig_t, ncclResult_t, ncclUniqueId, real};

use crate::stats::count::Identity;

/// A wish for communicators, with the application's arguments.
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub enum Birth {
    InitRank {
        handle: *mut ncclComm_t,
        ranks: c_int,
        id: ncclUniqueId,
        rank: c_int,
    },
    InitRankConfig {
        handle: *mut ncclComm_t,
        ranks: c_int,
        id: ncclUniqueId,
        rank: c_int,
        config: *mut ncclConfig_t,
    },
    InitRankScalable {
        handle: *mut ncclComm_t,
        ranks: c_int,
        rank: c_int,
        id_count: c_int,
        ids: *mut ncclUniqueId,
        config: *mut ncclConfig_t,
    },
    InitAll {
        handles: *mut ncclComm_t,
        count: c_int,
        devices: *const c_int,
    },
    Split {
        parent: ncclComm_t,
        color: c_int,
        key: c_int,
        handle: *mut ncclComm_t,
        config: *mut ncclConfig_t,
    },
    Shrink {
        parent: ncclComm_t,
        excluded: *mut c_int,
        excluded_count: c_int,
        handle: *mut ncclComm_t,
        config: *mut ncclConfig_t,
        flags: c_int,
    },
    Grow {
        parent: ncclComm_t,
        ranks: c_int,
        id: *const ncclUniqueId,
        rank: c_int,
        handle: *mut ncclComm_t,
        config: *mut ncclConfig_t,
    },
}

/// Where NCCL writes the handle of a communicator: at once, or when the group in which it was asked for has run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Handle(pub *mut ncclComm_t);

impl Birth {
    /// Calls the real library with the application's own arguments.
    pub fn run(&self) -> ncclResult_t {
        // SAFETY: these are the arguments with which the application called this very function, and the library
        // is open, since the face lets no call past before that.
        unsafe {
            match *self {
                Birth::InitRank { handle, ranks, id, rank } => {
                    real::ncclCommInitRank(handle, ranks, id, rank)
                }
                Birth::InitRankConfig { handle, ranks, id, rank, config } => {
                    real::ncclCommInitRankConfig(handle, ranks, id, rank, config)
                }
                Birth::InitRankScalable { handle, ranks, rank, id_count, ids, config } => {
                    real::ncclCommInitRankScalable(handle, ranks, rank, id_count, ids, config)
                }
                Birth::InitAll { handles, count, devices } => real::ncclCommInitAll(handles, count, devices),
                Birth::Split { parent, color, key, handle, config } => {
                    real::ncclCommSplit(parent, color, key, handle, config)
                }
                Birth::Shrink { parent, excluded, excluded_count, handle, config, flags } => {
                    real::ncclCommShrink(parent, excluded, excluded_count, handle, config, flags)
                }
                Birth::Grow { parent, ranks, id, rank, handle, config } => {
                    real::ncclCommGrow(parent, ranks, id, rank, handle, config)
                }
            }
        }
    }

    /// After NCCL took the wish: where each handle is or will be, and what its arguments say of the communicator.
    pub fn newborns(&self) -> impl Iterator<Item = (Handle, Identity)> {
        let unknown = Identity { rank: -1, ranks: 0, device: -1 };
        let (first, count, identity) = match *self {
            Birth::InitRank { handle, ranks, rank, .. }
            | Birth::InitRankConfig { handle, ranks, rank, .. }
            | Birth::InitRankScalable { handle, ranks, rank, .. } => {
                (handle, 1, Identity { rank, ranks, ..unknown })
            }
            Birth::InitAll { handles, count, .. } => (handles, count, Identity { ranks: count, ..unknown }),
            Birth::Split { handle, .. } | Birth::Shrink { handle, .. } | Birth::Grow { handle, .. } => {
                (handle, 1, unknown)
            }
        };
        // NCCL took the array, so it has `count` places.
        (0..count).map(move |index| (Handle(first.wrapping_add(index as usize)), identity))
    }
}
