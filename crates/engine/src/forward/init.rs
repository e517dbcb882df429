//! Makes communicators and ids by the real NCCL, and reads the arguments of such calls.

// The pointers are the application's own arguments: the exported C functions are the unsafe border, and the
// engine behind it hands them on.
#![allow(unsafe_code, clippy::not_unsafe_ptr_arg_deref)]

use std::ffi::c_int;
use std::mem::offset_of;
use std::ptr::{null, null_mut};
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
use windlass_bootstrap::id_tag::Id;
use windlass_transport::sequencer::Graphs;

const NCCL_SHRINK_ABORT: c_int = 1;

/// A call that makes communicators, with the application's arguments.
#[derive(Clone, Copy)]
pub struct InitCall {
    /// Where NCCL writes the handle, or the first of several.
    pub place: *mut ncclComm_t,
    /// The configuration, or null.
    pub config: *mut ncclConfig_t,
    /// The parent of a split, shrink or grow.
    pub parent: Option<ncclComm_t>,
    /// The function, and its other arguments.
    pub function: InitFunction,
}

/// A function that makes communicators, with the arguments that not all of them have.
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub enum InitFunction {
    Rank { ranks: c_int, id: ncclUniqueId, rank: c_int },
    RankConfig { ranks: c_int, id: ncclUniqueId, rank: c_int },
    RankScalable { ranks: c_int, rank: c_int, id_count: c_int, ids: *mut ncclUniqueId },
    All { count: c_int, devices: *const c_int },
    Split { color: c_int, key: c_int },
    Shrink { excluded: *mut c_int, excluded_count: c_int, flags: c_int },
    Grow { ranks: c_int, id: *const ncclUniqueId, rank: c_int },
}

/// The arguments of an init by id.
#[derive(Clone, Debug)]
pub struct Asked {
    /// The first id.
    pub id: Id,
    /// The other ids of an init that has several.
    pub more_ids: Vec<Id>,
    /// How many ranks.
    pub ranks: c_int,
    /// This rank.
    pub rank: c_int,
    /// What `blocking` of the configuration says.
    pub waiting: Waiting,
    /// What the configuration says of kernels.
    pub ctas: Ctas,
}

/// What a configuration says of kernels: their blocks (CTAs), the graphs that hold them, and their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ctas {
    /// `maxCTAs`; 0 for no limit.
    pub max: u32,
    /// Whether `CTAPolicy` is another than NCCL's default, which is speed.
    pub has_policy: bool,
    /// `graphUsageMode`.
    pub graphs: Graphs,
    /// `launchOrderImplicit`: whether NCCL orders launches among those of all communicators of the device.
    pub are_ordered: bool,
}

impl Ctas {
    /// No configuration, or one that says nothing of kernels.
    pub const UNSAID: Ctas = Ctas { max: 0, has_policy: false, graphs: Graphs::Mixed, are_ordered: false };
}

/// The arguments of a split or shrink.
#[derive(Debug)]
pub struct FromParent {
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
}

/// Where NCCL writes the handle of a communicator: at once, or when the group in which it was asked for has run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Handle(pub *mut ncclComm_t);

impl InitCall {
    /// Calls the real library with the application's own arguments.
    pub fn run(&self) -> ncclResult_t {
        let InitCall { place, config, parent, function } = *self;
        let parent = parent.unwrap_or(null_mut());
        // SAFETY: these are the arguments with which the application called this very function, and the library
        // is open, since the ABI layer lets no call past before that.
        unsafe {
            match function {
                InitFunction::Rank { ranks, id, rank } => real::ncclCommInitRank(place, ranks, id, rank),
                InitFunction::RankConfig { ranks, id, rank } => {
                    real::ncclCommInitRankConfig(place, ranks, id, rank, config)
                }
                InitFunction::RankScalable { ranks, rank, id_count, ids } => {
                    real::ncclCommInitRankScalable(place, ranks, rank, id_count, ids, config)
                }
                InitFunction::All { count, devices } => real::ncclCommInitAll(place, count, devices),
                InitFunction::Split { color, key } => real::ncclCommSplit(parent, color, key, place, config),
                InitFunction::Shrink { excluded, excluded_count, flags } => {
                    real::ncclCommShrink(parent, excluded, excluded_count, place, config, flags)
                }
                InitFunction::Grow { ranks, id, rank } => {
                    real::ncclCommGrow(parent, ranks, id, rank, place, config)
                }
            }
        }
    }

    /// The arguments of an init by id, if it is one that NCCL would not refuse at once.
    pub fn by_id(&self) -> Option<Asked> {
        let (ranks, rank, ids) = match self.function {
            InitFunction::Rank { ranks, id, rank } | InitFunction::RankConfig { ranks, id, rank } => {
                (ranks, rank, vec![id])
            }
            InitFunction::RankScalable { ranks, rank, id_count, ids } if !ids.is_null() && id_count > 0 => {
                // SAFETY: by this function's contract there are as many ids as the application said.
                (ranks, rank, unsafe { std::slice::from_raw_parts(ids, id_count as usize) }.to_vec())
            }
            _ => return None,
        };
        if self.place.is_null() || rank < 0 || rank >= ranks {
            return None;
        }
        let mut more_ids = ids.into_iter().map(bytes);
        let id = more_ids.next()?;
        let (waiting, ctas) = configured(self.config);
        Some(Asked { id, more_ids: more_ids.collect(), ranks, rank, waiting, ctas })
    }

    /// The arguments of a split or shrink, if it is one that NCCL would not refuse at once.
    pub fn from_parent(&self) -> Option<FromParent> {
        let (color, excluded, key) = match self.function {
            InitFunction::Split { color, key } => {
                ((color != NCCL_SPLIT_NOCOLOR).then_some(color), Vec::new(), key)
            }
            _ => (Some(0), self.excluded()?.to_vec(), 0),
        };
        let (waiting, ctas) = configured(self.config);
        let ctas = (!self.config.is_null()).then_some(ctas);
        (!self.place.is_null()).then_some(FromParent { color, excluded, key, waiting, ctas })
    }

    /// The ranks that a shrink leaves out. None if NCCL refuses them.
    fn excluded(&self) -> Option<&[c_int]> {
        match self.function {
            InitFunction::Shrink { excluded, excluded_count: count, .. }
                if !excluded.is_null() && count > 0 =>
            {
                // SAFETY: by this function's contract there are as many ranks as the application said.
                Some(unsafe { std::slice::from_raw_parts(excluded, count as usize) })
            }
            _ => None,
        }
    }

    /// The parent of a shrink that aborts the parent's work (`NCCL_SHRINK_ABORT`).
    pub fn aborted_parent(&self) -> Option<ncclComm_t> {
        let aborts = |flags| flags & NCCL_SHRINK_ABORT != 0;
        let aborts = matches!(self.function, InitFunction::Shrink { flags, .. } if aborts(flags));
        self.parent.filter(|_| aborts)
    }

    /// The devices of `ncclCommInitAll`; none if this is not one, or NCCL refuses its arguments.
    pub fn devices(&self) -> Option<Vec<c_int>> {
        match self.function {
            InitFunction::All { count, .. } if self.place.is_null() || count < 1 => None,
            InitFunction::All { count, devices } if devices.is_null() => Some((0..count).collect()),
            InitFunction::All { count, devices } => {
                // SAFETY: by this call's contract the array has `count` places.
                Some(unsafe { std::slice::from_raw_parts(devices, count as usize) }.to_vec())
            }
            _ => None,
        }
    }

    /// Why NCCL refuses a split, shrink or grow by the arguments of the calling rank alone.
    pub fn refusal(&self, rank: u32) -> Option<&'static str> {
        if self.place.is_null() {
            return Some("no place for the new communicator");
        }
        match (self.function, self.excluded()) {
            (InitFunction::Shrink { .. }, None) => Some("no ranks to exclude, expected one or more"),
            (_, Some(excluded)) if excluded.contains(&(rank as c_int)) => Some("an excluded rank calls"),
            _ => matches!(Given::of(self.config), Given::Wrong)
                .then_some("a configuration that was not initialized"),
        }
    }

    /// The same call with a copy of its configuration, where there is one: the application may free its own before a group ends.
    pub fn with(self, given: &Given) -> InitCall {
        match given {
            Given::Sound(copy) => InitCall { config: copy.as_ptr(), ..self },
            _ => self,
        }
    }

    /// The same split for a rank that gets no communicator from NCCL.
    pub fn without_color(self) -> InitCall {
        let function = InitFunction::Split { color: NCCL_SPLIT_NOCOLOR, key: 0 };
        InitCall { function, config: null_mut(), ..self }
    }

    /// An init by this id in its place.
    pub fn instead(self, ranks: u32, id: &[u8; NCCL_UNIQUE_ID_BYTES], rank: u32) -> InitCall {
        let (ranks, id, rank) = (ranks as c_int, of_bytes(id), rank as c_int);
        let function = match self.config.is_null() {
            true => InitFunction::Rank { ranks, id, rank },
            false => InitFunction::RankConfig { ranks, id, rank },
        };
        InitCall { parent: None, function, ..self }
    }

    /// After NCCL took the call: the place of each handle, and what the arguments say of its communicator.
    pub fn new_communicators(&self) -> impl Iterator<Item = (Handle, Identity)> {
        let (count, rank, ranks) = match self.function {
            InitFunction::Rank { ranks, rank, .. }
            | InitFunction::RankConfig { ranks, rank, .. }
            | InitFunction::RankScalable { ranks, rank, .. } => (1, rank, ranks),
            InitFunction::All { count, .. } => (count, -1, count),
            _ => (1, -1, 0),
        };
        let first = self.place;
        // NCCL took the array, so it has `count` places.
        let place = move |index| Handle(first.wrapping_add(index as usize));
        (0..count).map(move |index| (place(index), Identity { rank, ranks, device: -1 }))
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
        let has_policy = read(offset_of!(ncclConfig_t, CTAPolicy)).is_some_and(|policy| policy != 0);
        // 0: no graph, 1: one at a time; others: any mix.
        let graphs = match read(offset_of!(ncclConfig_t, graphUsageMode)) {
            Some(0 | 1) => Graphs::Apart,
            _ => Graphs::Mixed,
        };
        let are_ordered = read(offset_of!(ncclConfig_t, launchOrderImplicit)).is_some_and(|order| order != 0);
        let waiting = match read(offset_of!(ncclConfig_t, blocking)) {
            Some(0) => Waiting::NonBlocking,
            _ => Waiting::Blocking,
        };
        (waiting, Ctas { max, has_policy, graphs, are_ordered })
    }
}

fn bytes(id: ncclUniqueId) -> [u8; NCCL_UNIQUE_ID_BYTES] {
    id.internal.map(|byte| byte as u8)
}

fn of_bytes(id: &[u8; NCCL_UNIQUE_ID_BYTES]) -> ncclUniqueId {
    ncclUniqueId { internal: id.map(|byte| byte as std::ffi::c_char) }
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
    let config = match configuration {
        Kept::Nothing | Kept::Unknown => null_mut(),
        Kept::Sound(configuration) => configuration.as_ptr(),
    };
    let anything = InitFunction::All { count: 0, devices: null() };
    let call = InitCall { place: place.as_ptr(), config, parent: None, function: anything };
    in_group(|| call.instead(ranks, id, rank).run())
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
    code.ok().map(|()| bytes(id))
}

/// Writes an id that NCCL made before, where NCCL would write a new one.
pub fn give_id(place: *mut ncclUniqueId, id: &[u8; NCCL_UNIQUE_ID_BYTES]) -> ncclResult_t {
    // SAFETY: the application's own argument, not null: NCCL would write there.
    unsafe { place.write(of_bytes(id)) };
    ncclSuccess
}

/// Changes the id that NCCL has just written.
pub fn change_id(
    place: *mut ncclUniqueId,
    change: impl FnOnce([u8; NCCL_UNIQUE_ID_BYTES]) -> [u8; NCCL_UNIQUE_ID_BYTES],
) {
    // SAFETY: NCCL took this place and wrote an id there.
    let id = bytes(unsafe { place.read() });
    give_id(place, &change(id));
}

/// Runs this in a group of NCCL's. Returns the first failure.
pub fn in_group(act: impl FnOnce() -> ncclResult_t) -> ncclResult_t {
    // SAFETY: the library is open.
    let opened = unsafe { real::ncclGroupStart() };
    if opened != ncclSuccess {
        return opened;
    }
    let acted = act();
    // SAFETY: as above.
    acted.and(unsafe { real::ncclGroupEnd() })
}

/// Makes the open group fail, so that its end runs nothing of it: NCCL remembers the error of any call in a group.
pub fn spoil_group() {
    let nobody = ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] };
    // NCCL frees a null pointer first, to make a context: in a capture of this thread that would spoil the capture (901 with 2.28.9).
    let _relaxed = gpu::opened().and_then(|driver| Relaxed::enter(driver).ok());
    // SAFETY: NCCL refuses a null place for the handle before it touches more.
    unsafe { real::ncclCommInitRank(null_mut(), 1, nobody, 0) };
}
