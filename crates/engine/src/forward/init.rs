//! Makes communicators and ids by the real NCCL, and reads the arguments of such calls.

// The pointers are the application's own arguments: the exported C functions are the unsafe border, and the
// engine behind it hands them on.
#![allow(unsafe_code, clippy::not_unsafe_ptr_arg_deref)]

use std::ffi::c_int;
use std::mem::offset_of;
use std::ptr::null;
use std::sync::atomic::AtomicPtr;

use nccl_sys::{
    NCCL_CONFIG_UNDEF_INT, NCCL_SPLIT_NOCOLOR, NCCL_UNIQUE_ID_BYTES, ncclComm, ncclComm_t, ncclConfig_t,
    ncclResult_t, ncclSuccess, ncclUniqueId, real,
};

use crate::forward::configuration::{Given, Kept};
use windlass_base::gpu;
use windlass_base::gpu::capture::Relaxed;
use windlass_base::stats::count::Identity;
use windlass_bootstrap::facts::Waiting;
use windlass_transport::sequencer::Graphs;

const NCCL_SHRINK_ABORT: c_int = 1;

/// A call that makes communicators, with the application's arguments.
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub enum InitCall {
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

/// The arguments of an init by id.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// The first id.
    pub id: [u8; NCCL_UNIQUE_ID_BYTES],
    /// How many ids there are.
    pub ids: usize,
    /// How many ranks.
    pub ranks: c_int,
    /// This rank.
    pub rank: c_int,
    /// What `blocking` of the configuration says.
    pub waiting: Waiting,
    /// What the configuration says of kernels.
    pub ctas: Ctas,
    /// The application's configuration, or null.
    pub config: *const ncclConfig_t,
}

/// What a configuration says of kernels: their blocks (CTAs), the graphs that hold them, and their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ctas {
    /// `maxCTAs`; 0 for no limit.
    pub max: u32,
    /// `CTAPolicy`.
    pub policy: Policy,
    /// `graphUsageMode`.
    pub graphs: Graphs,
    /// `launchOrderImplicit`.
    pub launches: Launches,
}

/// `CTAPolicy`: NCCL's default, which is speed, or another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Policy {
    Default,
    Own,
}

/// `launchOrderImplicit`: whether NCCL orders launches among those of all communicators of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Launches {
    Unordered,
    Ordered,
}

impl Ctas {
    /// No configuration, or one that says nothing of kernels.
    pub const UNSAID: Ctas =
        Ctas { max: 0, policy: Policy::Default, graphs: Graphs::Mixed, launches: Launches::Unordered };
}

/// The arguments of a split or shrink.
#[derive(Debug)]
pub struct FromParent {
    /// The parent.
    pub parent: ncclComm_t,
    /// The color of a split, if it is one; in a shrink 0.
    pub color: Option<c_int>,
    /// The ranks that a shrink leaves out.
    pub excluded: Vec<c_int>,
    /// Orders the ranks of a split.
    pub key: c_int,
    /// What `blocking` says.
    pub waiting: Waiting,
    /// What is said of kernels, where there is a configuration; else the parent's applies.
    pub ctas: Option<Ctas>,
    /// A copy of the configuration.
    pub given: Given,
}

/// Where NCCL writes the handle of a communicator: at once, or when the group in which it was asked for has run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Handle(pub *mut ncclComm_t);

impl InitCall {
    /// Calls the real library with the application's own arguments.
    pub fn run(&self) -> ncclResult_t {
        // SAFETY: these are the arguments with which the application called this very function, and the library
        // is open, since the ABI layer lets no call past before that.
        unsafe {
            match *self {
                InitCall::InitRank { handle, ranks, id, rank } => {
                    real::ncclCommInitRank(handle, ranks, id, rank)
                }
                InitCall::InitRankConfig { handle, ranks, id, rank, config } => {
                    real::ncclCommInitRankConfig(handle, ranks, id, rank, config)
                }
                InitCall::InitRankScalable { handle, ranks, rank, id_count, ids, config } => {
                    real::ncclCommInitRankScalable(handle, ranks, rank, id_count, ids, config)
                }
                InitCall::InitAll { handles, count, devices } => {
                    real::ncclCommInitAll(handles, count, devices)
                }
                InitCall::Split { parent, color, key, handle, config } => {
                    real::ncclCommSplit(parent, color, key, handle, config)
                }
                InitCall::Shrink { parent, excluded, excluded_count, handle, config, flags } => {
                    real::ncclCommShrink(parent, excluded, excluded_count, handle, config, flags)
                }
                InitCall::Grow { parent, ranks, id, rank, handle, config } => {
                    real::ncclCommGrow(parent, ranks, id, rank, handle, config)
                }
            }
        }
    }

    /// The arguments of an init by id, if it is one that NCCL would not refuse at once.
    pub fn by_id(&self) -> Option<Asked> {
        let (handle, ranks, rank, id, ids, config) = match *self {
            InitCall::InitRank { handle, ranks, id, rank } => (handle, ranks, rank, id, 1, null()),
            InitCall::InitRankConfig { handle, ranks, id, rank, config } => {
                (handle, ranks, rank, id, 1, config.cast_const())
            }
            InitCall::InitRankScalable { handle, ranks, rank, id_count, ids, config } => {
                if ids.is_null() || id_count < 1 {
                    return None;
                }
                // SAFETY: by this function's contract there are as many ids as the application said.
                (handle, ranks, rank, unsafe { ids.read() }, id_count as usize, config.cast_const())
            }
            _ => return None,
        };
        if handle.is_null() || rank < 0 || rank >= ranks {
            return None;
        }
        let id = id.internal.map(|byte| byte as u8);
        let (waiting, ctas) = configured(config);
        Some(Asked { id, ids, ranks, rank, waiting, ctas, config })
    }

    /// The arguments of a split or shrink, if it is one that NCCL would not refuse at once.
    pub fn from_parent(&self) -> Option<FromParent> {
        let (parent, color, excluded, key, handle, config) = match *self {
            InitCall::Split { parent, color, key, handle, config } => {
                let color = (color != NCCL_SPLIT_NOCOLOR).then_some(color);
                (parent, color, Vec::new(), key, handle, config)
            }
            InitCall::Shrink { parent, excluded, excluded_count, handle, config, .. } => {
                if excluded.is_null() || excluded_count < 1 {
                    return None;
                }
                // SAFETY: by this function's contract there are as many ranks as the application said.
                let excluded = unsafe { std::slice::from_raw_parts(excluded, excluded_count as usize) };
                (parent, Some(0), excluded.to_vec(), 0, handle, config)
            }
            _ => return None,
        };
        let (waiting, ctas) = configured(config);
        let ctas = (!config.is_null()).then_some(ctas);
        let given = Given::of(config);
        (!handle.is_null()).then_some(FromParent { parent, color, excluded, key, waiting, ctas, given })
    }

    /// The parent of a shrink that aborts the parent's work (`NCCL_SHRINK_ABORT`).
    pub fn aborted_parent(&self) -> Option<ncclComm_t> {
        match *self {
            InitCall::Shrink { parent, flags, .. } if flags & NCCL_SHRINK_ABORT != 0 => Some(parent),
            _ => None,
        }
    }

    /// The devices of `ncclCommInitAll`, if this is one.
    pub fn devices(&self) -> Option<Vec<c_int>> {
        let InitCall::InitAll { count, devices, .. } = *self else { return None };
        if devices.is_null() {
            return Some((0..count).collect());
        }
        // SAFETY: NCCL took the array, so it has `count` places.
        Some((0..count.max(0) as usize).map(|index| unsafe { devices.add(index).read() }).collect())
    }

    /// The devices of `ncclCommInitAll` before NCCL has checked the arguments; none if NCCL will refuse them.
    pub fn devices_asked(&self) -> Option<Vec<c_int>> {
        match self {
            InitCall::InitAll { handles, count, .. } if !handles.is_null() && *count > 0 => self.devices(),
            _ => None,
        }
    }

    /// Why NCCL refuses a split, shrink or grow by the arguments of the calling rank alone.
    pub fn refusal(&self, rank: u32) -> Option<&'static str> {
        let (handle, config) = match *self {
            InitCall::Split { handle, config, .. }
            | InitCall::Shrink { handle, config, .. }
            | InitCall::Grow { handle, config, .. } => (handle, config),
            _ => return None,
        };
        if handle.is_null() {
            return Some("no place for the new communicator");
        }
        if let InitCall::Shrink { excluded, excluded_count, .. } = *self {
            if excluded.is_null() || excluded_count <= 0 {
                return Some("no ranks to exclude, expected one or more");
            }
            // SAFETY: by this function's contract there are as many ranks as the application said.
            let read = |index| unsafe { excluded.add(index).read() };
            if (0..excluded_count as usize).map(read).any(|excluded| excluded == rank as c_int) {
                return Some("an excluded rank calls");
            }
        }
        matches!(Given::of(config), Given::Wrong).then_some("a configuration that was not initialized")
    }

    /// The parent of a split, shrink or grow.
    pub fn parent(&self) -> Option<ncclComm_t> {
        match *self {
            InitCall::Split { parent, .. }
            | InitCall::Shrink { parent, .. }
            | InitCall::Grow { parent, .. } => Some(parent),
            _ => None,
        }
    }

    /// The configuration of a split or shrink.
    pub fn config_of_child(&self) -> *mut ncclConfig_t {
        match *self {
            InitCall::Split { config, .. } | InitCall::Shrink { config, .. } => config,
            _ => std::ptr::null_mut(),
        }
    }

    /// A copy of the configuration of a split, shrink or grow.
    pub fn given(&self) -> Given {
        match *self {
            InitCall::Split { config, .. }
            | InitCall::Shrink { config, .. }
            | InitCall::Grow { config, .. } => Given::of(config),
            _ => Given::Nothing,
        }
    }

    /// The same call with a copy of its configuration, where there is one: the application may free its own before a group ends.
    pub fn with(mut self, given: &Given) -> InitCall {
        if let (
            InitCall::Split { config, .. } | InitCall::Shrink { config, .. } | InitCall::Grow { config, .. },
            Given::Sound(copy),
        ) = (&mut self, given)
        {
            *config = copy.as_ptr();
        }
        self
    }

    /// The same split for a rank that gets no communicator from NCCL.
    pub fn without_color(self) -> InitCall {
        match self {
            InitCall::Split { parent, key, handle, .. } => InitCall::Split {
                parent,
                color: NCCL_SPLIT_NOCOLOR,
                key,
                handle,
                config: std::ptr::null_mut(),
            },
            other => other,
        }
    }

    /// The same call with NCCL's own handle of the parent.
    pub fn of_parent(self, real: ncclComm_t) -> InitCall {
        match self {
            InitCall::Split { color, key, handle, config, .. } => {
                InitCall::Split { parent: real, color, key, handle, config }
            }
            InitCall::Shrink { excluded, excluded_count, handle, config, flags, .. } => {
                InitCall::Shrink { parent: real, excluded, excluded_count, handle, config, flags }
            }
            InitCall::Grow { ranks, id, rank, handle, config, .. } => {
                InitCall::Grow { parent: real, ranks, id, rank, handle, config }
            }
            other => other,
        }
    }

    /// After NCCL took the call: the place of each handle, and what the arguments say of its communicator.
    pub fn new_communicators(&self) -> impl Iterator<Item = (Handle, Identity)> {
        let unknown = Identity { rank: -1, ranks: 0, device: -1 };
        let (first, count, identity) = match *self {
            InitCall::InitRank { handle, ranks, rank, .. }
            | InitCall::InitRankConfig { handle, ranks, rank, .. }
            | InitCall::InitRankScalable { handle, ranks, rank, .. } => {
                (handle, 1, Identity { rank, ranks, ..unknown })
            }
            InitCall::InitAll { handles, count, .. } => {
                (handles, count, Identity { ranks: count, ..unknown })
            }
            InitCall::Split { handle, .. }
            | InitCall::Shrink { handle, .. }
            | InitCall::Grow { handle, .. } => (handle, 1, unknown),
        };
        // NCCL took the array, so it has `count` places.
        (0..count).map(move |index| (Handle(first.wrapping_add(index as usize)), identity))
    }
}

/// Reads `blocking` and what a configuration says of kernels. Every version of NCCL has the first fields, and `maxCTAs`, at the same
/// place; a field counts if the size that the configuration says of itself includes it.
fn configured(config: *const ncclConfig_t) -> (Waiting, Ctas) {
    if config.is_null() {
        return (Waiting::Blocking, Ctas::UNSAID);
    }
    // SAFETY: the application's own configuration, which begins with its size; no more of it is read than that says.
    unsafe {
        let size = (&raw const (*config).size).read();
        let read = |offset: usize| {
            let fits = offset + size_of::<c_int>() <= size;
            fits.then(|| config.byte_add(offset).cast::<c_int>().read())
                .filter(|value| *value != NCCL_CONFIG_UNDEF_INT)
        };
        let max = read(offset_of!(ncclConfig_t, maxCTAs)).unwrap_or(0).max(0) as u32;
        let policy = match read(offset_of!(ncclConfig_t, CTAPolicy)) {
            None | Some(0) => Policy::Default,
            Some(_) => Policy::Own,
        };
        // 0: no graph, 1: one at a time; others: any mix.
        let graphs = match read(offset_of!(ncclConfig_t, graphUsageMode)) {
            Some(0 | 1) => Graphs::Apart,
            _ => Graphs::Mixed,
        };
        let launches = match read(offset_of!(ncclConfig_t, launchOrderImplicit)) {
            None | Some(0) => Launches::Unordered,
            Some(_) => Launches::Ordered,
        };
        let waiting = match read(offset_of!(ncclConfig_t, blocking)) {
            Some(0) => Waiting::NonBlocking,
            _ => Waiting::Blocking,
        };
        (waiting, Ctas { max, policy, graphs, launches })
    }
}

impl Asked {
    /// A copy of the configuration.
    pub fn given(&self) -> Given {
        Given::of(self.config)
    }
}

/// Asks NCCL for an id.
pub fn unique_id(place: *mut ncclUniqueId) -> ncclResult_t {
    // SAFETY: the application's own argument; the library is open.
    unsafe { real::ncclGetUniqueId(place) }
}

/// Has NCCL build the communicator of a lazy one. Waits for the other ranks; NCCL writes the handle to `place` before that. This thread
/// must have no group open. The init is in a group of its own: there the owner of the handle frees a communicator whose init fails.
/// Outside groups NCCL frees it at once (2.28.9, ncclCommInitRank), even under an abort of another thread.
pub fn build(
    place: &AtomicPtr<ncclComm>,
    ranks: u32,
    id: &[u8; NCCL_UNIQUE_ID_BYTES],
    rank: u32,
    configuration: &Kept,
) -> ncclResult_t {
    let id = ncclUniqueId { internal: id.map(|byte| byte as std::ffi::c_char) };
    let (ranks, rank) = (ranks as c_int, rank as c_int);
    // SAFETY: the place is ours, as is the configuration; the library is open.
    unsafe {
        let opened = real::ncclGroupStart();
        if opened != ncclSuccess {
            return opened;
        }
        let asked = match configuration {
            Kept::Nothing | Kept::Unknown => real::ncclCommInitRank(place.as_ptr(), ranks, id, rank),
            Kept::Sound(configuration) => {
                real::ncclCommInitRankConfig(place.as_ptr(), ranks, id, rank, configuration.as_ptr())
            }
        };
        let built = real::ncclGroupEnd();
        if asked == ncclSuccess { built } else { asked }
    }
}

/// Has NCCL make a communicator by an id that Windlass chose, with the application's place and configuration.
pub fn make(
    place: Handle,
    ranks: u32,
    id: &[u8; NCCL_UNIQUE_ID_BYTES],
    rank: u32,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    let id = ncclUniqueId { internal: id.map(|byte| byte as std::ffi::c_char) };
    let (ranks, rank) = (ranks as c_int, rank as c_int);
    // SAFETY: these are the application's own arguments but for the id; the library is open.
    unsafe {
        if config.is_null() {
            real::ncclCommInitRank(place.0, ranks, id, rank)
        } else {
            real::ncclCommInitRankConfig(place.0, ranks, id, rank, config)
        }
    }
}

/// Writes a handle of Windlass where NCCL would have written its own.
pub fn hand_out(place: Handle, handle: ncclComm_t) {
    // SAFETY: by the called function's contract the application's place for a handle.
    unsafe { place.0.write_volatile(handle) };
}

/// Has NCCL make a new id.
pub fn make_id() -> Result<[u8; NCCL_UNIQUE_ID_BYTES], ncclResult_t> {
    let mut id = ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] };
    let code = unique_id(&mut id);
    if code == ncclSuccess { Ok(id.internal.map(|byte| byte as u8)) } else { Err(code) }
}

/// Writes an id that NCCL made before, where NCCL would write a new one.
pub fn give_id(place: *mut ncclUniqueId, id: &[u8; NCCL_UNIQUE_ID_BYTES]) -> ncclResult_t {
    // SAFETY: the application's own argument, not null: NCCL would write there.
    unsafe { place.write(ncclUniqueId { internal: id.map(|byte| byte as std::ffi::c_char) }) };
    ncclSuccess
}

/// Changes the id that NCCL has just written.
pub fn change_id(
    place: *mut ncclUniqueId,
    change: impl FnOnce([u8; NCCL_UNIQUE_ID_BYTES]) -> [u8; NCCL_UNIQUE_ID_BYTES],
) {
    // SAFETY: NCCL took this place and wrote an id there.
    let id = unsafe { place.read() }.internal.map(|byte| byte as u8);
    let changed = change(id).map(|byte| byte as std::ffi::c_char);
    // SAFETY: as before.
    unsafe { place.write(ncclUniqueId { internal: changed }) };
}

/// Makes the open group fail, so that its end runs nothing of it: NCCL remembers the error of any call in a group.
pub fn spoil_group() {
    let nobody = ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] };
    // NCCL frees a null pointer first, to make a context: in a capture of this thread that would spoil the capture (901 with 2.28.9).
    let _relaxed = gpu::opened().and_then(|driver| Relaxed::enter(driver).ok());
    // SAFETY: NCCL refuses a null place for the handle before it touches more.
    unsafe { real::ncclCommInitRank(std::ptr::null_mut(), 1, nobody, 0) };
}
