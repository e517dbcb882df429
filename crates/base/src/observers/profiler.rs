//! Profiler plugins, one or several. Each gets one stream of events of a communicator: NCCL's own, for which Windlass stands between NCCL and
//! the plugins, and those of calls that Windlass runs.
//!
//! A plugin has one context for each communicator and rank, whoever begins it: NCCL, or Windlass where NCCL has no communicator. NCCL names a
//! lazy communicator by an id of its own when NCCL builds it later; the context is the same. Collectives have one numbering.
//!
//! NCCL's context is a token, never an address: a proxy of another process may bring one of there.

// The pointers are NCCL's own arguments: the ABI layer is the unsafe border.
#![allow(unsafe_code, clippy::not_unsafe_ptr_arg_deref)]

mod calls;

mod handles;

mod plugins;

pub mod times;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};

use nccl_sys::open;
use nccl_sys::profiler::{Event, Logger, Record, Stop, kind, newest_version};

use crate::call::{FUNCTIONS, Function};
use crate::config::nccl;
use crate::lock::Mutex;

pub(super) use calls::{after, before};
pub use calls::{ended, expect, made};
pub use plugins::Begun;
use plugins::LoadedPlugin;

/// What the plugins have of a communicator and rank. They are told of its end when nobody has it any more.
#[derive(Debug)]
struct Profiled {
    /// Each plugin's own context, unless the plugin has refused the communicator.
    contexts: Vec<Option<usize>>,
    /// How many collectives there were of a function.
    numbers: [AtomicU64; FUNCTIONS],
}

struct Known {
    /// By the program's handle.
    ours: BTreeMap<usize, Arc<Profiled>>,
    /// By the token, with NCCL's place of the token.
    nccls: BTreeMap<usize, (usize, Arc<Profiled>)>,
    /// By NCCL's name and rank: communicators that NCCL is about to build, with the program's handles.
    expected: BTreeMap<(u64, i32), usize>,
    logger: Option<Logger>,
}

/// Held for a few stores.
static KNOWN: Mutex<Known> = Mutex::new(Known {
    ours: BTreeMap::new(),
    nccls: BTreeMap::new(),
    expected: BTreeMap::new(),
    logger: None,
});
/// Where NCCL reads which events to tell.
static MASK: AtomicPtr<AtomicI32> = AtomicPtr::new(null_mut());

thread_local! {
    /// Whether NCCL's events of this thread are of calls that the program has not made.
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

fn all() -> &'static [LoadedPlugin] {
    plugins::all(newest_version(nccl::version()))
}

/// Opens the plugins, and has NCCL open this library in their place. Whether there are any.
pub(super) fn start() -> bool {
    if all().iter().any(|plugin| plugin.version <= newest_version(nccl::version())) {
        plugins::take_place();
    }
    !all().is_empty()
}

/// Runs calls of NCCL that the program has not made: no plugin hears of them.
pub fn quietly<T>(run: impl FnOnce() -> T) -> T {
    if !super::are_on() {
        return run();
    }
    let before = IS_QUIET.replace(true);
    let result = run();
    IS_QUIET.set(before);
    result
}

impl Profiled {
    fn begin(begun: Begun) -> Arc<Profiled> {
        let contexts = all().iter().map(|plugin| plugin.begin(begun)).collect();
        Arc::new(Profiled { contexts, numbers: [const { AtomicU64::new(0) }; FUNCTIONS] })
    }

    /// The number of a new collective.
    fn number(&self, function: Function) -> u64 {
        self.numbers[function as usize].fetch_add(1, Ordering::Relaxed)
    }
}

impl Drop for Profiled {
    fn drop(&mut self) {
        let each = all().iter().zip(&self.contexts);
        each.for_each(|(plugin, context)| context.iter().for_each(|context| plugin.finalize(*context)));
    }
}

/// Begins an event of a version for the plugins, and gives its handle. An event of another process has no context here.
///
/// # Safety
/// The event has all fields of its kind in its version.
unsafe fn start_each(
    profiled: Option<&Profiled>,
    version: u32,
    event: *mut Event,
    kind: u64,
    parents: [usize; 2],
) -> usize {
    let started = all().iter().enumerate().map(|(index, plugin)| {
        let context = profiled.map_or(Some(0), |profiled| profiled.contexts[index]);
        let parents = parents.map(|handle| handles::of(all().len(), handle, index));
        // SAFETY: by contract.
        context.map_or(0, |context| unsafe { plugin.start(context, version, event, kind, parents) })
    });
    handles::join(all().len(), started)
}

/// NCCL begins a communicator. The result is NCCL's code: an error where there is no plugin.
pub fn begin(version: u32, context: *mut *mut c_void, mask: *mut c_int, begun: Begun) -> c_int {
    if plugins::all(version).is_empty() {
        return 1;
    }
    // NCCL closes its plugin after its last communicator, and threads may have come by here.
    open::stay_mapped();
    let mut before = KNOWN.lock();
    let expected = before.expected.remove(&(begun.id, begun.sizes[2]));
    let ours = expected.and_then(|handle| before.ours.get(&handle).cloned());
    // A plugin may take long, and wait for other ranks of this process.
    drop(before);
    let profiled = ours.unwrap_or_else(|| Profiled::begin(begun));
    let mut known = KNOWN.lock();
    // Other processes begin elsewhere.
    let token = known.nccls.keys().next_back().map_or((std::process::id() as usize) << 32, |last| last + 1);
    known.nccls.insert(token, (context as usize, profiled));
    known.logger = begun.logger;
    MASK.store(mask.cast(), Ordering::Release);
    share_masks();
    // SAFETY: NCCL's place.
    unsafe { *context = token as *mut c_void };
    0
}

/// Has NCCL tell all that any plugin asks for. Plugins may change what they ask for at any time.
pub(super) fn share_masks() {
    // SAFETY: a word of NCCL's, which stays while NCCL is loaded, and which plugins write at any time.
    if let Some(shared) = unsafe { MASK.load(Ordering::Acquire).as_ref() } {
        let mask = all().iter().fold(0, |mask, plugin| mask | plugin.mask());
        shared.store(mask as i32, Ordering::Relaxed);
    }
}

/// NCCL begins an event.
///
/// # Safety
/// The arguments are those with which NCCL calls a plugin of this version.
pub unsafe fn start_event(
    version: u32,
    context: *mut c_void,
    handle: *mut *mut c_void,
    event: *mut Event,
) -> c_int {
    share_masks();
    let profiled = KNOWN.lock().nccls.get(&(context as usize)).map(|(_, profiled)| profiled.clone());
    // SAFETY: NCCL's place and event; fields by the event's kind and version.
    unsafe {
        let kind = if version == 4 { (*event).kind & 0xff } else { (*event).kind };
        (*event).kind = kind;
        let is_foreign = kind == kind::PROXY_OP && (*event).of.proxy_process != std::process::id() as c_int;
        let parent = if is_foreign { 0 } else { (*event).parent as usize };
        let group = match kind {
            kind::COLL if version > 4 => (*event).of.coll.group as usize,
            kind::P2P if version > 4 => (*event).of.p2p.group as usize,
            _ => parent,
        };
        if let Some(profiled) = profiled.as_ref().filter(|_| kind == kind::COLL) {
            let name = CStr::from_ptr((*event).of.coll.function).to_bytes();
            let is_named = |function: &Function| function.entry().description().name.as_bytes()[4..] == *name;
            let function = Function::ALL.into_iter().find(is_named).unwrap_or(Function::Send);
            (*event).of.coll.number = profiled.number(function);
        }
        // A proxy's steps follow its operation, which may be of another process. Else the event's communicator has ended.
        let is_of_proxy = is_foreign || parent != 0 && kind & kind::OF_PROXY_OP != 0;
        let is_told = (profiled.is_some() || is_of_proxy) && !IS_QUIET.get();
        let started =
            if is_told { start_each(profiled.as_deref(), version, event, kind, [parent, group]) } else { 0 };
        *handle = started as *mut c_void;
    }
    0
}

/// An event ends.
pub fn stop_event(handle: *mut c_void) -> c_int {
    // SAFETY: the plugin's own handle.
    each_own(handle, |plugin, own| unsafe { (plugin.table.stop)(own) })
}

/// An event gets a state.
pub fn record_state(handle: *mut c_void, state: c_int, arguments: *mut c_void) -> c_int {
    // SAFETY: the plugin's own handle, and the state's arguments.
    each_own(handle, |plugin, own| unsafe { (plugin.table.record)(own, state, arguments) })
}

fn each_own(handle: *mut c_void, tell: impl Fn(&LoadedPlugin, *mut c_void) -> c_int) -> c_int {
    let own = |index| handles::of(all().len(), handle as usize, index) as *mut c_void;
    let each = all().iter().enumerate().map(|(index, plugin)| (plugin, own(index)));
    each.filter(|(_, own)| !own.is_null()).fold(0, |code, (plugin, own)| code | tell(plugin, own))
}

/// A plugin's log line, where NCCL has given no logger yet. What the format stands for is unknown here.
extern "C" fn log(
    _level: c_int,
    _subsystems: u64,
    _file: *const c_char,
    _line: c_int,
    format: *const c_char,
) {
    // SAFETY: the plugin's own text.
    ::log::debug!("profiler plugin: {}", unsafe { CStr::from_ptr(format) }.to_string_lossy());
}

/// NCCL ends a communicator.
pub fn end(context: *mut c_void) -> c_int {
    let ended = KNOWN.lock().nccls.remove(&(context as usize));
    // Plugins may take long.
    drop(ended);
    0
}

/// The one plugin's functions, which NCCL may call without Windlass in between.
pub fn only() -> Option<(Stop, Record)> {
    match all() {
        [only] => Some((only.table.stop, only.table.record)),
        _ => None,
    }
}
