//! Finds and opens the profiler plugins that the program names, by NCCL's rules, and puts Windlass in their place: NCCL then opens this very
//! library as its one plugin.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_int, c_void};
use std::mem::transmute;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, Ordering};

use nccl_sys::profiler::{Event, Init4, Init5, Logger, Plugin, Record, Start, Stop, kind};
use once_cell::sync::OnceCell;

use crate::config::nccl;

/// NCCL's variable.
const VARIABLE: &CStr = c"NCCL_PROFILER_PLUGIN";
/// What the variable said before Windlass took its place. Children of the process inherit both.
const KEPT: &CStr = c"_WINDLASS_PROFILERS";
/// What NCCL looks for where the variable is not set.
const DEFAULT: &str = "libnccl-profiler.so";
/// More plugins than this are not opened.
pub(super) const PLUGINS_MAX: usize = 4;

/// A plugin that is open, until the process ends.
#[derive(Debug)]
pub(super) struct Opened {
    version: u32,
    /// Whether NCCL's own events reach it: this NCCL knows its version.
    pub(super) hears_nccl: bool,
    init: *const c_void,
    start: Start,
    pub(super) stop: Stop,
    pub(super) record: Record,
    finalize: Stop,
    /// The kinds of events that it asks for. It may write them at any time.
    mask: AtomicI32,
}

// SAFETY: functions that any thread may call, as NCCL's threads do.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

/// What NCCL tells a plugin of a communicator.
#[derive(Clone, Copy, Debug)]
pub struct Begun {
    /// What NCCL calls it.
    pub id: u64,
    /// The program's name for it, or null.
    pub name: *const std::ffi::c_char,
    /// Hosts, ranks, this rank.
    pub sizes: [c_int; 3],
    /// Where a plugin's log lines go.
    pub logger: Option<Logger>,
}

/// The plugins. `newest`: the newest version that NCCL knows.
pub(super) fn all(newest: u32) -> &'static [Opened] {
    static ALL: OnceCell<Vec<Opened>> = OnceCell::new();
    ALL.get_or_init(|| {
        let names = names();
        let named = names.split(',').filter(|name| !name.is_empty() && !name.eq_ignore_ascii_case("none"));
        named.filter_map(|name| Opened::open(name, newest)).take(PLUGINS_MAX).collect()
    })
}

/// What the program names, or the default.
fn names() -> String {
    let read = |name: &CStr| nccl::value(&name.to_string_lossy());
    let (own, named) = (file_of(take_place as *const c_void), read(VARIABLE));
    match named {
        Some(named) if own.is_some_and(|own| own.to_bytes() == named.as_bytes()) => read(KEPT),
        named => named,
    }
    .unwrap_or(DEFAULT.into())
}

/// Has NCCL open this library as its plugin. NCCL reads the variable at its first communicator, and again after its last one.
pub(super) fn take_place() {
    let Some(own) = file_of(take_place as *const c_void) else { return };
    let names = CString::new(names()).unwrap_or_default();
    // SAFETY: texts. NCCL sets variables at the same moment, in its first init.
    unsafe {
        libc::setenv(KEPT.as_ptr(), names.as_ptr(), 1);
        libc::setenv(VARIABLE.as_ptr(), own.as_ptr(), 1);
    }
}

/// The file of the library that has an address.
fn file_of(address: *const c_void) -> Option<&'static CStr> {
    // SAFETY: plain data, which `dladdr` fills; a library's name stays as long as the library.
    unsafe {
        let mut found: libc::Dl_info = std::mem::zeroed();
        let is_found = libc::dladdr(address, &mut found) != 0;
        (is_found && !found.dli_fname.is_null()).then(|| CStr::from_ptr(found.dli_fname))
    }
}

impl Opened {
    fn open(name: &str, newest: u32) -> Option<Opened> {
        let is_whole = name.contains('/') || name.starts_with("lib") && name.ends_with(".so");
        let other = (!is_whole).then(|| format!("libnccl-profiler-{name}.so"));
        let library = [Some(name.to_owned()), other].into_iter().flatten().find_map(|file| {
            // NCCL takes a part of the word, too.
            let is_program = file.eq_ignore_ascii_case("STATIC_PLUGIN");
            let file = CString::new(file).ok()?;
            let file = if is_program { std::ptr::null() } else { file.as_ptr() };
            // SAFETY: NCCL would open this very library, with whatever its constructors do.
            let library = unsafe { libc::dlopen(file, libc::RTLD_NOW | libc::RTLD_LOCAL) };
            (!library.is_null()).then_some(library)
        });
        let Some(library) = library else {
            if name != DEFAULT {
                log::warn!(
                    "NCCL_PROFILER_PLUGIN: no library {name} can be opened; expected a name or path of one"
                );
            }
            return None;
        };
        // As NCCL, the newest that both know; else calls of Windlass can still be told.
        let versions = (4..=newest).rev().chain(newest.max(3) + 1..=7);
        let found = versions.into_iter().find_map(|version| {
            let symbol = CString::new(format!("ncclProfiler_v{version}")).ok()?;
            // SAFETY: the library stays open.
            let plugin = unsafe { libc::dlsym(library, symbol.as_ptr()) }.cast::<Plugin<*const c_void>>();
            // SAFETY: what a library exports by this name is a plugin.
            let Plugin { init, start, stop, record, finalize, .. } = unsafe { plugin.as_ref() }?;
            let is_own = file_of(plugin.cast()) == file_of(take_place as *const c_void);
            let mask = AtomicI32::new(0);
            let hears_nccl = version <= newest;
            (!is_own).then_some(Opened {
                version,
                hears_nccl,
                init: *init,
                start: *start,
                stop: *stop,
                record: *record,
                finalize: *finalize,
                mask,
            })
        });
        match &found {
            Some(Opened { version, hears_nccl: true, .. }) => {
                log::info!("profiler plugin {name}, version {version}")
            }
            Some(Opened { version, .. }) => log::info!(
                "profiler plugin {name} hears only calls that Windlass runs: it has version {version}, this NCCL knows {newest}"
            ),
            None => log::info!(
                "profiler plugin {name} hears nothing from Windlass: it has no version from 4 to 7"
            ),
        }
        found
    }

    /// Begins a communicator. None if the plugin refuses it.
    pub(super) fn begin(
        &self,
        Begun { id, name, sizes: [hosts, ranks, rank], logger }: Begun,
    ) -> Option<usize> {
        let (mut context, mask) = (null_mut(), self.mask.as_ptr());
        // SAFETY: by the version; the mask lives as long as the process.
        let code = unsafe {
            match self.version {
                4 => {
                    let init: Init4 = transmute(self.init);
                    init(&mut context, mask, name, id, hosts, ranks, rank, logger)
                }
                _ => {
                    let init: Init5 = transmute(self.init);
                    init(&mut context, id, mask, name, hosts, ranks, rank, logger)
                }
            }
        };
        (code == 0).then_some(context as usize)
    }

    /// Ends a communicator.
    pub(super) fn finalize(&self, context: usize) {
        // SAFETY: the plugin's own context, for the last time.
        unsafe { (self.finalize)(context as *mut c_void) };
    }

    /// The kinds of events that it asks for, as far as its version knows them.
    pub(super) fn mask(&self) -> u64 {
        self.mask.load(Ordering::Relaxed) as u32 as u64 & kind::known(self.version)
    }

    /// Begins an event. `parent` and `group` are the plugin's own handles. Zero if the plugin has no use for the event.
    ///
    /// # Safety
    /// The event has all fields of its kind in the plugin's version.
    pub(super) unsafe fn start(
        &self,
        context: usize,
        event: *mut Event,
        kind: u64,
        [parent, group]: [usize; 2],
    ) -> usize {
        if kind & kind::known(self.version) == 0 || self.mask() & kind::asked_by(kind) == 0 {
            return 0;
        }
        let mut handle = null_mut();
        // SAFETY: by contract, and the context is the plugin's own. The group is a field from version 5 on.
        unsafe {
            (*event).parent = parent as *mut c_void;
            match kind {
                kind::COLL | kind::P2P if self.version == 4 => (*event).parent = group as *mut c_void,
                kind::COLL => (*event).of.coll.group = group as *mut c_void,
                kind::P2P => (*event).of.p2p.group = group as *mut c_void,
                _ => {}
            }
            (self.start)(context as *mut c_void, &mut handle, event);
        }
        handle as usize
    }
}
