//! Profiler plugins, one or several. Each gets one stream of events of a communicator: NCCL's own, for which Windlass stands between NCCL and
//! the plugins, and those of calls that Windlass runs.
//!
//! A plugin has one context for each communicator and rank, whoever begins it: NCCL, or Windlass where NCCL has no communicator. NCCL names a
//! lazy communicator by an id of its own when NCCL builds it later; the context is the same. Collectives have one numbering.
//!
//! NCCL's context is a token, never an address: a proxy of another process may bring one of there. One plugin's handles are NCCL's. Of
//! several plugins an event's handle is a number in [`handles`].

#![allow(unsafe_code)]

mod calls;

mod handles;

mod plugins;

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nccl_sys::profiler::{Event, Logger, Record, Stop, kind, newest_version};

use crate::call::{FUNCTIONS, Function};
use crate::config::nccl;

pub(super) use calls::{after, before};
pub use calls::{ended, expect, made};
pub use plugins::Begun;
use plugins::Opened;

/// What the plugins have of a communicator and rank; they are told of its end when nobody has it any more.
#[derive(Debug)]
struct Context {
    contexts: Vec<Option<usize>>,
    /// How many collectives there were of a function.
    numbers: [AtomicU64; FUNCTIONS],
}

/// A context that NCCL was given.
#[derive(Debug)]
struct Given {
    /// Where NCCL keeps it; 0 once NCCL has ended it.
    place: usize,
    context: Option<Arc<Context>>,
}

#[derive(Default)]
struct Known {
    /// By the program's handle.
    ours: HashMap<usize, Arc<Context>>,
    /// By the token, a number of this process.
    nccls: Vec<Given>,
    /// By NCCL's name and rank: communicators that NCCL is about to build, with the program's handles.
    expected: HashMap<(u64, i32), usize>,
    /// Where NCCL reads which events to tell.
    mask: usize,
    logger: Option<Logger>,
}

/// Held for a few stores, and while plugins begin a communicator.
static KNOWN: Mutex<Option<Known>> = Mutex::new(None);

thread_local! {
    /// Whether NCCL's events of this thread are of calls that the program has not made.
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs calls of NCCL that the program has not made: no plugin hears of them.
pub fn quietly<T>(run: impl FnOnce() -> T) -> T {
    IS_QUIET.set(true);
    let result = run();
    IS_QUIET.set(false);
    result
}

fn known() -> MutexGuard<'static, Option<Known>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with_known<T>(look: impl FnOnce(&mut Known) -> T) -> T {
    look(known().get_or_insert_default())
}

fn all() -> &'static [Opened] {
    plugins::all(newest_version(nccl::version()))
}

/// Opens the plugins, and has NCCL open this library in their place. Whether there are any.
pub(super) fn start() -> bool {
    if all().iter().any(|plugin| plugin.hears_nccl) {
        plugins::take_place();
    }
    !all().is_empty()
}

impl Context {
    /// Begins a communicator.
    fn begin(begun: Begun) -> Arc<Context> {
        let contexts = all().iter().map(|plugin| plugin.begin(begun)).collect();
        Arc::new(Context { contexts, numbers: [const { AtomicU64::new(0) }; FUNCTIONS] })
    }

    /// Begins an event for all plugins that `hear` of it, and gives its handle.
    ///
    /// # Safety
    /// As [`Opened::start`] says.
    unsafe fn start(
        context: Option<&Context>,
        event: *mut Event,
        kind: u64,
        [parent, group]: [usize; 2],
        hears: impl Fn(&Opened) -> bool,
    ) -> usize {
        let started = all().iter().enumerate().map(|(index, plugin)| {
            let own = context.map_or(Some(0), |context| context.contexts[index]);
            match own.filter(|_| hears(plugin)) {
                // SAFETY: by contract.
                Some(own) => unsafe {
                    plugin.start(own, event, kind, [parent, group].map(|handle| handle_of(handle, index)))
                },
                None => 0,
            }
        });
        handles::join(all().len(), started)
    }
}

impl Context {
    /// The number of a new collective, by NCCL's name of its function.
    ///
    /// # Safety
    /// The name is a text.
    unsafe fn number(&self, function: *const c_char) -> u64 {
        // SAFETY: by contract.
        let name = unsafe { CStr::from_ptr(function) };
        let is_named = |known: &Function| {
            known.entry().description().name.as_bytes().strip_prefix(b"nccl") == Some(name.to_bytes())
        };
        let known = Function::ALL.into_iter().find(is_named).unwrap_or(Function::Send);
        self.numbers[known as usize].fetch_add(1, Ordering::Relaxed)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let each = all().iter().zip(&self.contexts);
        each.for_each(|(plugin, context)| context.iter().for_each(|context| plugin.finalize(*context)));
    }
}

/// NCCL begins a communicator. The result is NCCL's code: an error where there is no plugin.
pub fn begin(version: u32, context: *mut *mut c_void, mask: *mut c_int, begun: Begun) -> c_int {
    if plugins::all(version).is_empty() {
        return 1;
    }
    let token = with_known(|known| {
        let expected = known.expected.remove(&(begun.id, begun.sizes[2]));
        let ours = expected.and_then(|handle| known.ours.get(&handle).cloned());
        let given =
            Given { place: context as usize, context: Some(ours.unwrap_or_else(|| Context::begin(begun))) };
        known.logger = begun.logger;
        known.mask = mask as usize;
        let free = known.nccls.iter().position(|given| given.place == 0);
        let index = free.unwrap_or(known.nccls.len());
        match free {
            Some(index) => known.nccls[index] = given,
            None => known.nccls.push(given),
        }
        token(index)
    });
    // SAFETY: NCCL's place.
    unsafe { *context = token as *mut c_void };
    share_masks();
    0
}

/// The context of a number. Contexts of another process have other tokens.
fn token(index: usize) -> usize {
    (std::process::id() as usize) << 32 | (index + 1)
}

/// Has NCCL tell all that any plugin asks for. Plugins may change what they ask for at any time.
pub(super) fn share_masks() {
    let mask = all().iter().filter(|plugin| plugin.hears_nccl).fold(0, |mask, plugin| mask | plugin.mask());
    with_known(|known| {
        if known.mask != 0 {
            // SAFETY: a word of NCCL's, which stays while NCCL is loaded, and which NCCL's plugins write at any time.
            unsafe { (known.mask as *mut c_int).write_volatile(mask as c_int) };
        }
    });
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
    if IS_QUIET.get() {
        // SAFETY: NCCL's place.
        unsafe { *handle = std::ptr::null_mut() };
        return 0;
    }
    share_masks();
    let context = with_known(|known| {
        let index = (context as usize).wrapping_sub(token(0));
        known.nccls.get(index).and_then(|given| given.context.clone())
    });
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
        if let Some(context) = context.as_ref().filter(|_| kind == kind::COLL) {
            (*event).of.coll.number = context.number((*event).of.coll.function);
        }
        // Without a context here the event is of another process, or of a communicator that has ended.
        let is_lost = context.is_none() && parent == 0 && !is_foreign;
        let started = match is_lost {
            true => 0,
            false => {
                Context::start(context.as_deref(), event, kind, [parent, group], |plugin| plugin.hears_nccl)
            }
        };
        *handle = started as *mut c_void;
    }
    0
}

/// NCCL ends an event.
pub fn stop_event(handle: *mut c_void) -> c_int {
    stop(handle as usize);
    0
}

/// NCCL tells an event's state.
pub fn record_state(handle: *mut c_void, state: c_int, arguments: *mut c_void) -> c_int {
    for (index, plugin) in all().iter().enumerate() {
        let own = handle_of(handle as usize, index);
        if own != 0 {
            // SAFETY: the plugin's own handle, and NCCL's arguments.
            unsafe { (plugin.record)(own as *mut c_void, state, arguments) };
        }
    }
    0
}

/// NCCL ends a communicator.
pub fn end(context: *mut c_void) -> c_int {
    let ended = with_known(|known| {
        let given = known.nccls.get_mut((context as usize).wrapping_sub(token(0)))?;
        given.place = 0;
        given.context.take()
    });
    drop(ended);
    0
}

/// The one plugin's functions, which NCCL may call without Windlass in between.
pub fn only() -> Option<(Stop, Record)> {
    match all() {
        [only] => Some((only.stop, only.record)),
        _ => None,
    }
}

/// One plugin's own handle of an event.
fn handle_of(handle: usize, index: usize) -> usize {
    handles::of(all().len(), handle, index)
}

fn stop(handle: usize) {
    for (index, plugin) in all().iter().enumerate() {
        let own = handle_of(handle, index);
        if own != 0 {
            // SAFETY: the plugin's own handle.
            unsafe { (plugin.stop)(own as *mut c_void) };
        }
    }
}
