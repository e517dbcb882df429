//! Profiler plugins, as NCCL loads and calls them: `NCCL_PROFILER_PLUGIN` names one, the newest version that the simulated release knows
//! is taken, and events come in NCCL's order. Releases before 2.27 load none here.
//!
//! The program's thread begins the group and the calls; the launch begins and ends collectives and messages. Each has one channel, whose
//! event comes from the thread that runs the operation, after the end of its parent.

use crate::communicator::Communicator;
use crate::operation::Call;
use crate::refusal::lock;
use crate::settings::settings;
use crate::strict;
use nccl_sys::profiler::{
    Coll, CollApi, Details, Event, GROUP_STATES, GroupApi, Init4, Init5, KERNEL_CH_STOP, KernelCh, P2p,
    P2pApi, Plugin, kind, newest_version,
};
use nccl_sys::*;
use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Mutex;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{SystemTime, UNIX_EPOCH};

/// The plugin while there are communicators. As in NCCL, one that could not be loaded is not looked for again.
static LOADED: Mutex<(Option<Loaded>, u64, bool)> = Mutex::new((None, 0, false));
/// Written by the plugin at any time.
static MASK: AtomicI32 = AtomicI32::new(0);

#[derive(Clone, Copy)]
struct Loaded {
    library: usize,
    version: u32,
    plugin: &'static Plugin<*const c_void>,
}

thread_local! {
    /// The event of this thread's outermost group, and how many of its states are noted.
    static GROUP: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// Begins a communicator that is made.
pub fn init(communicator: &Communicator, hash: u64) {
    let mut loaded = lock(&LOADED);
    if loaded.0.is_none() && !loaded.2 {
        loaded.0 = load();
        loaded.2 = loaded.0.is_none();
    }
    let Some(Loaded { version, plugin, .. }) = loaded.0 else { return };
    loaded.1 += 1;
    drop(loaded);
    let (place, mask) = (communicator.profiler.as_ptr().cast::<*mut c_void>(), MASK.as_ptr());
    let (ranks, rank) = (communicator.ranks as c_int, communicator.rank as c_int);
    // SAFETY: by the plugin's version; the place lives as long as the communicator.
    let code = unsafe {
        match version {
            4 => std::mem::transmute::<*const c_void, Init4>(plugin.init)(
                place,
                mask,
                std::ptr::null(),
                hash,
                1,
                ranks,
                rank,
                Some(log),
            ),
            _ => std::mem::transmute::<*const c_void, Init5>(plugin.init)(
                place,
                hash,
                mask,
                std::ptr::null(),
                1,
                ranks,
                rank,
                Some(log),
            ),
        }
    };
    if code != 0 {
        unload();
    }
}

/// Ends a communicator.
pub fn finalize(communicator: &Communicator) {
    let context = communicator.profiler.swap(0, SeqCst);
    let loaded = lock(&LOADED).0;
    if let Some(Loaded { plugin, .. }) = loaded.filter(|_| context != 0) {
        // SAFETY: the context is the plugin's.
        unsafe { (plugin.finalize)(context as *mut c_void) };
        unload();
    }
}

fn unload() {
    let mut loaded = lock(&LOADED);
    loaded.1 = loaded.1.saturating_sub(1);
    if loaded.1 == 0
        && let Some(Loaded { library, .. }) = loaded.0.take()
    {
        MASK.store(0, SeqCst);
        // SAFETY: opened by `load`.
        unsafe { libc::dlclose(library as *mut c_void) };
    }
}

fn load() -> Option<Loaded> {
    let named = std::env::var("NCCL_PROFILER_PLUGIN").ok();
    if named.as_ref().is_some_and(|named| named.eq_ignore_ascii_case("none")) {
        return None;
    }
    let name = named.clone().unwrap_or("libnccl-profiler.so".into());
    let open = |name: &str| {
        let name = CString::new(name).ok()?;
        // SAFETY: the plugin's constructors may do anything, as in NCCL.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        (!library.is_null()).then_some(library)
    };
    let is_whole = name.contains('/') || name.starts_with("lib") && name.ends_with(".so");
    let library = open(&name).or_else(|| {
        named.filter(|_| !is_whole).and_then(|named| open(&format!("libnccl-profiler-{named}.so")))
    })?;
    let newest = newest_version(settings().version);
    let find = |version: u32| {
        let symbol = CString::new(format!("ncclProfiler_v{version}")).ok()?;
        // SAFETY: the library is open.
        let plugin = unsafe { libc::dlsym(library, symbol.as_ptr()) };
        // SAFETY: by the symbol's name a plugin, which stays while the library is open.
        let plugin = unsafe { plugin.cast::<Plugin<*const c_void>>().as_ref() }?;
        Some(Loaded { library: library as usize, version, plugin })
    };
    let found = (4..=newest).rev().find_map(find);
    if settings().log {
        strict::say(&format!("profiler plugin {name}: version {:?}", found.map(|found| found.version)));
    }
    found
}

extern "C" fn log(level: c_int, _: u64, _: *const c_char, line: c_int, format: *const c_char) {
    if settings().log {
        // SAFETY: a text of the plugin's.
        let format = unsafe { CStr::from_ptr(format) }.to_string_lossy();
        strict::say(&format!("profiler plugin: level {level}, line {line}: {format}"));
    }
}

/// Begins an event, if somebody asks for its kind.
fn begin(communicator: &Communicator, kind: u64, parent: usize, of: Details) -> usize {
    let context = communicator.profiler.load(SeqCst);
    let Some(Loaded { plugin, version, .. }) = lock(&LOADED).0.filter(|_| context != 0) else { return 0 };
    if MASK.load(SeqCst) as u64 & kind::asked_by(kind) == 0 || kind & kind::known(version) == 0 {
        return 0;
    }
    let mut event = Event { kind, parent: parent as *mut c_void, rank: communicator.rank as c_int, of };
    if version == 4 {
        // Behind the one byte of the kind lies anything.
        event.kind |= 0xabcd << 8;
        // SAFETY: plain data, by the event's kind.
        let (coll, p2p) = unsafe { (of.coll.group, of.p2p.group) };
        match kind {
            kind::COLL => event.parent = coll,
            kind::P2P => event.parent = p2p,
            _ => {}
        }
    }
    let mut handle = null_mut();
    // SAFETY: the plugin's own context, and places of this function.
    unsafe { (plugin.start)(context as *mut c_void, &mut handle, &mut event) };
    handle as usize
}

fn end(handle: usize) {
    if let Some(Loaded { plugin, .. }) = lock(&LOADED).0.filter(|_| handle != 0) {
        // SAFETY: a handle of the plugin's.
        unsafe { (plugin.stop)(handle as *mut c_void) };
    }
}

fn state(handle: usize, state: c_int, arguments: *mut c_void) {
    if let Some(Loaded { plugin, .. }) = lock(&LOADED).0.filter(|_| handle != 0) {
        // SAFETY: a handle of the plugin's, with the state's arguments.
        unsafe { (plugin.record)(handle as *mut c_void, state, arguments) };
    }
}

/// Whether no plugin is loaded.
pub fn is_off() -> bool {
    lock(&LOADED).0.is_none()
}

/// The program's call, at the call: begins the group where it is the first, and begins and ends the call's event, whose handle it gives.
pub fn called(communicator: &Communicator, call: &Call, depth: u32, is_captured: bool) -> usize {
    if GROUP.get().0 == 0 {
        let group_api = GroupApi { is_captured, depth: depth as c_int };
        let group = begin(communicator, kind::GROUP_API, 0, Details { group_api });
        state(group, GROUP_STATES[0], null_mut());
        GROUP.set((group, 1));
    }
    let (function, datatype, stream) = (function(call), datatype(call), call.stream as *mut c_void);
    let (count, root) = (call.count, call.root);
    let (kind, of) = match call.kind.is_message() {
        true => {
            (kind::P2P_API, Details { p2p_api: P2pApi { function, count, datatype, stream, is_captured } })
        }
        false => {
            let coll_api = CollApi { function, count, datatype, root, stream, is_captured };
            (kind::COLL_API, Details { coll_api })
        }
    };
    let handle = begin(communicator, kind, GROUP.get().0, of);
    end(handle);
    handle
}

/// The outermost group begins to end.
pub fn ends() {
    let (group, states) = GROUP.get();
    if states == 1 {
        state(group, GROUP_STATES[1], null_mut());
        GROUP.set((group, 2));
    }
}

/// The outermost group has ended.
pub fn ended() {
    end(GROUP.replace((0, 0)).0);
}

/// Runs the launch of a communicator's calls, each with the handle of the program's call, and gives the handles of their events.
pub fn launch<T>(
    communicator: &Communicator,
    calls: &[(Call, usize)],
    is_captured: bool,
    launch: impl FnOnce(Vec<usize>) -> T,
) -> T {
    if is_off() {
        return launch(Vec::new());
    }
    let group = begin(communicator, kind::GROUP, 0, Details { nothing: [0; 24] });
    let one = |(call, api): &(Call, usize)| match call.kind.is_message() {
        true => {
            let p2p = P2p {
                function: function(call),
                buffer: call.send.max(call.receive) as *mut c_void,
                datatype: datatype(call),
                count: call.count,
                peer: call.root,
                channels: 1,
                group: group as *mut c_void,
            };
            begin(communicator, kind::P2P, *api, Details { p2p })
        }
        false => {
            let mut numbers = lock(&communicator.numbers);
            let number = numbers.entry(call.kind.name()).or_default();
            let coll = Coll {
                number: *number,
                function: function(call),
                send: call.send as *const c_void,
                receive: call.receive as *mut c_void,
                count: call.count,
                root: call.root,
                datatype: datatype(call),
                channels: 1,
                warps: 16,
                algorithm: c"RING".as_ptr(),
                protocol: c"SIMPLE".as_ptr(),
                group: group as *mut c_void,
            };
            *number += 1;
            drop(numbers);
            begin(communicator, kind::COLL, *api, Details { coll })
        }
    };
    // NCCL begins captured ones at each replay, where channels are asked for; here a replay has no events.
    let handles: Vec<usize> = if is_captured { Vec::new() } else { calls.iter().map(one).collect() };
    let stream = calls.first().map_or(0, |(call, _)| call.stream) as *mut c_void;
    let kernel = begin(communicator, kind::KERNEL_LAUNCH, GROUP.get().0, Details { stream });
    let result = launch(handles.clone());
    [kernel].into_iter().chain(handles).chain([group]).for_each(end);
    result
}

/// Runs an operation, with an event for each call's channel.
pub fn run(communicator: &Communicator, handles: &[usize], run: impl FnOnce()) {
    let channel = |parent: &usize| match *parent {
        0 => 0,
        parent => {
            let kernel_ch = KernelCh { channel: 0, time: now() };
            begin(communicator, kind::KERNEL_CH, parent, Details { kernel_ch })
        }
    };
    let channels: Vec<usize> = handles.iter().map(channel).collect();
    run();
    for channel in channels {
        let mut time = now();
        state(channel, KERNEL_CH_STOP, (&raw mut time).cast());
        end(channel);
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as u64)
}

/// NCCL's name of a function: a text for ever.
fn function(call: &Call) -> *const c_char {
    forever(call.kind.name())
}

fn datatype(call: &Call) -> *const c_char {
    let name = CODES[2].values.iter().find(|(_, value)| *value == call.datatype.0);
    forever(name.map_or("Unknown", |(name, _)| name))
}

fn forever(text: &'static str) -> *const c_char {
    static TEXTS: Mutex<Option<HashMap<&str, CString>>> = Mutex::new(None);
    let mut texts = lock(&TEXTS);
    let texts = texts.get_or_insert_default();
    texts.entry(text).or_insert_with(|| CString::new(text).unwrap_or_default()).as_ptr()
}
