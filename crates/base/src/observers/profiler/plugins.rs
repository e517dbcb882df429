//! Finds and opens the profiler plugins that the program names, by NCCL's rules, and puts Windlass in their place: NCCL then opens this very
//! library as its one plugin.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::transmute;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicI32, Ordering};

use nccl_sys::profiler::{Event, Init4, Init5, Logger, Plugin, kind};
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
pub(super) struct LoadedPlugin {
    /// NCCL's own events reach it if NCCL knows this version.
    pub(super) version: u32,
    pub(super) table: &'static Plugin<*const c_void>,
    /// The kinds of events that it asks for. It may write them at any time.
    mask: AtomicI32,
}

/// What NCCL tells a plugin of a communicator.
#[derive(Clone, Copy, Debug)]
pub struct Begun {
    /// What NCCL calls it.
    pub id: u64,
    /// The program's name for it, or null.
    pub name: *const c_char,
    /// Hosts, ranks, this rank.
    pub sizes: [c_int; 3],
    /// Where a plugin's log lines go.
    pub logger: Option<Logger>,
}

/// The plugins. `newest`: the newest version that NCCL knows.
pub(super) fn all(newest: u32) -> &'static [LoadedPlugin] {
    static ALL: OnceCell<Vec<LoadedPlugin>> = OnceCell::new();
    ALL.get_or_init(|| {
        let names = names();
        let named = names.split(',').filter(|name| !name.is_empty() && !name.eq_ignore_ascii_case("none"));
        named.filter_map(|name| LoadedPlugin::open(name, newest)).take(PLUGINS_MAX).collect()
    })
}

/// What the program names, or the default.
fn names() -> String {
    let read = |name: &CStr| nccl::value(&name.to_string_lossy());
    let named = read(VARIABLE);
    // A parent has put this library there.
    let is_own = named.is_some() && named == own_file().map(|own| own.to_string_lossy().into_owned());
    if is_own { read(KEPT) } else { named }.unwrap_or(DEFAULT.into())
}

/// Has NCCL open this library as its plugin. NCCL reads the variable at its first communicator, and again after its last one.
pub(super) fn take_place() {
    let Some(own) = own_file() else { return };
    let names = CString::new(names()).unwrap_or_default();
    // SAFETY: texts. NCCL sets variables at the same moment, in its first init.
    unsafe {
        libc::setenv(KEPT.as_ptr(), names.as_ptr(), 1);
        libc::setenv(VARIABLE.as_ptr(), own.as_ptr(), 1);
    }
}

fn own_file() -> Option<&'static CStr> {
    file_of(take_place as *const c_void)
}

/// The file of the library that has an address.
fn file_of(address: *const c_void) -> Option<&'static CStr> {
    // SAFETY: plain data, which `dladdr` fills; a library's name stays as long as the library.
    unsafe {
        let mut found: libc::Dl_info = std::mem::zeroed();
        libc::dladdr(address, &mut found);
        (!found.dli_fname.is_null()).then(|| CStr::from_ptr(found.dli_fname))
    }
}

/// Opens the library of a name, or says why not.
fn open(name: &str) -> Result<*mut c_void, String> {
    let file = CString::new(name).unwrap_or_default();
    let file = if name.eq_ignore_ascii_case("STATIC_PLUGIN") { null() } else { file.as_ptr() };
    // SAFETY: NCCL would open this very library, with whatever its constructors do. After a failure there is a text.
    unsafe {
        let library = libc::dlopen(file, libc::RTLD_NOW | libc::RTLD_LOCAL);
        let why = || CStr::from_ptr(libc::dlerror()).to_string_lossy().into_owned();
        if library.is_null() { Err(why()) } else { Ok(library) }
    }
}

impl LoadedPlugin {
    fn open(name: &str, newest: u32) -> Option<LoadedPlugin> {
        let is_whole = name.contains('/') || name.starts_with("lib") && name.ends_with(".so");
        let prefixed = |why| match is_whole {
            true => Err(why),
            false => open(&format!("libnccl-profiler-{name}.so")).map_err(|other| format!("{why}; {other}")),
        };
        let library = open(name).or_else(prefixed);
        // As NCCL, the newest that both know; else calls of Windlass can still be told.
        let mut versions = (4..=newest).rev().chain(newest.max(3) + 1..=7);
        let found = library.as_ref().ok().and_then(|library| {
            versions.find_map(|version| {
                let symbol = CString::new(format!("ncclProfiler_v{version}")).ok()?;
                // SAFETY: the library stays open, and what it exports by this name is a plugin.
                let table: &Plugin<_> =
                    unsafe { libc::dlsym(*library, symbol.as_ptr()).cast::<Plugin<_>>().as_ref() }?;
                let is_own = file_of((&raw const *table).cast()) == own_file();
                (!is_own).then_some(LoadedPlugin { version, table, mask: AtomicI32::new(0) })
            })
        });
        match (&found, library) {
            (Some(LoadedPlugin { version, .. }), _) if *version <= newest => {
                log::info!("profiler plugin {name}, version {version}");
            }
            (Some(LoadedPlugin { version, .. }), _) => log::info!(
                "profiler plugin {name} hears only calls that Windlass runs: it has version {version}, this NCCL knows {newest}"
            ),
            (None, Err(_)) if name == DEFAULT => {}
            (None, Err(why)) => log::warn!("profiler plugin {name} cannot be opened: {why}"),
            (None, Ok(_)) => {
                log::warn!("profiler plugin {name} hears nothing: it has no version from 4 to 7")
            }
        }
        found
    }

    /// Begins a communicator. None if the plugin refuses it.
    pub(super) fn begin(
        &self,
        Begun { id, name, sizes: [hosts, ranks, rank], logger }: Begun,
    ) -> Option<usize> {
        let (mut context, mask, init) = (null_mut(), self.mask.as_ptr(), self.table.init);
        // SAFETY: by the version; the mask lives as long as the process.
        let code = unsafe {
            if self.version == 4 {
                let init: Init4 = transmute(init);
                init(&mut context, mask, name, id, hosts, ranks, rank, logger)
            } else {
                let init: Init5 = transmute(init);
                init(&mut context, id, mask, name, hosts, ranks, rank, logger)
            }
        };
        (code == 0).then_some(context as usize)
    }

    /// Ends a communicator.
    pub(super) fn finalize(&self, context: usize) {
        // SAFETY: the plugin's own context, for the last time.
        unsafe { (self.table.finalize)(context as *mut c_void) };
    }

    /// The kinds of events that it asks for, as far as its version knows them.
    pub(super) fn mask(&self) -> u64 {
        u64::from(self.mask.load(Ordering::Relaxed) as u32) & kind::known(self.version)
    }

    /// Begins an event of a version. `parent` and `group` are the plugin's own handles. Zero if the plugin has no use for the event.
    ///
    /// # Safety
    /// The event has all fields of its kind in its version.
    pub(super) unsafe fn start(
        &self,
        context: usize,
        version: u32,
        event: *mut Event,
        kind: u64,
        [parent, group]: [usize; 2],
    ) -> usize {
        let is_known = self.version <= version && kind & kind::known(self.version) != 0;
        // A plugin may have no use for the call of a channel.
        let is_of_nothing = kind == kind::KERNEL_CH && parent == 0;
        if !is_known || is_of_nothing || self.mask() & kind::asked_by(kind) == 0 {
            return 0;
        }
        let (group, mut handle) = (group as *mut c_void, null_mut());
        // SAFETY: by contract, and the context is the plugin's own. The group is a field from version 5 on.
        unsafe {
            (*event).parent = parent as *mut c_void;
            match kind {
                kind::COLL | kind::P2P if self.version == 4 => (*event).parent = group,
                kind::COLL => (*event).of.coll.group = group,
                kind::P2P => (*event).of.p2p.group = group,
                _ => {}
            }
            (self.table.start)(context as *mut c_void, &mut handle, event);
        }
        handle as usize
    }
}
