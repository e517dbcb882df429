//! NCCL's own variables, as far as they change what Windlass does.
//!
//! [`VARIABLES`] is the one list of them. Windlass reads each variable when NCCL reads it ([`Moment`]), so a program that sets
//! variables between its calls gets the same from both. A variable has one [`Effect`]. A communicator's [`Settings`] are the
//! effects of all variables that are set.

mod choice;
mod effect;
mod files;
mod plugin;
mod variables;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicI32, Ordering};

use crate::lock::Mutex;

use once_cell::sync::OnceCell;

pub use effect::{Effect, Settings};
pub use variables::{Moment, VARIABLES, Variable};

/// A variable that is set to a value that has an effect.
#[derive(Clone, Debug)]
pub struct Found {
    /// The variable.
    pub variable: &'static Variable,
    /// The value of the variable.
    pub value: String,
    /// What the value does.
    pub effect: Effect,
}

/// The settings of a communicator that is made now.
pub fn settings() -> Settings {
    let once = cached().iter().chain(at_allocation().iter());
    once.chain(read(is_read_anew)).collect()
}

/// The part of [`settings`] that is the same for all communicators of this process.
pub fn cached() -> &'static Settings {
    static CACHED: OnceCell<Settings> = OnceCell::new();
    CACHED.get().unwrap_or_else(|| {
        // Outside of the cell's initialization: a constructor of the plugin may call this function again.
        let plugin = plugin::is_found(value("NCCL_ENV_PLUGIN").as_deref(), version());
        let unseen = plugin.then_some(Effect::UnseenValues);
        let once = |variable: &Variable| variable.read == Moment::FirstInit && !is_read_anew(variable);
        CACHED.get_or_init(|| read(once).chain(unseen).collect())
    })
}

/// The settings of memory that the program allocates now.
pub fn at_allocation() -> &'static Settings {
    static CACHED: OnceCell<Settings> = OnceCell::new();
    CACHED.get_or_init(|| read(|variable| variable.read == Moment::FirstAllocation).collect())
}

/// The first release that allocates by cuMem by default.
const CU_MEM_SINCE: i32 = 21901;

/// Whether NCCL allocates by cudaMalloc unless NCCL_CUMEM_ENABLE asks for more.
pub fn lacks_cu_mem() -> bool {
    (1..CU_MEM_SINCE).contains(&version())
}

/// The values that NCCL reads anew for each communicator, as bytes to compare. A communicator of NCCL's may only be reused for one with
/// equal bytes.
pub fn of_this_init() -> Vec<u8> {
    let anew = VARIABLES.iter().filter(|variable| is_read_anew(variable));
    let set = anew.filter_map(|variable| Some(format!("{}={}\n", variable.name, value(variable.name)?)));
    set.collect::<String>().into_bytes()
}

/// `NAME=value` of all variables that may change NCCL's choice of an algorithm or its speed, sorted by name.
pub fn of_choice() -> Vec<String> {
    let text = |value: std::ffi::OsString| value.to_string_lossy().into_owned();
    let environment = std::env::vars_os().map(|(name, value)| (text(name), text(value)));
    choice::of(environment, file_texts().iter().flat_map(|text| files::variables(text)))
}

/// Whether NCCL_COMM_ID is set, so that every rank makes its own id.
pub fn has_own_ids() -> bool {
    read(|variable| variable.name == "NCCL_COMM_ID").next().is_some()
}

/// All variables that have an effect, from this process's environment and NCCL's files, for one release of NCCL. They come
/// in the table's order.
pub fn found(version: i32) -> Vec<Found> {
    VARIABLES.iter().filter_map(|variable| variable.found(value(variable.name)?, version)).collect()
}

static VERSION: AtomicI32 = AtomicI32::new(0);

/// Notes the real library's version code, before the first init.
pub fn note_version(version: i32) {
    VERSION.store(version, Ordering::Relaxed);
}

/// The real library's version code; 0 before the first init. Decisions read this one: others may write to the counters' page.
pub fn version() -> i32 {
    VERSION.load(Ordering::Relaxed)
}

/// The effects of the variables that `which` picks. Each is logged when it is new.
fn read(which: impl Fn(&Variable) -> bool) -> impl Iterator<Item = Effect> {
    let variables = VARIABLES.iter().filter(move |variable| which(variable));
    let found = variables.filter_map(|variable| variable.found(value(variable.name)?, version()));
    found.inspect(say).map(|found| found.effect)
}

/// The release from which on NCCL reads the variables that NCCL_NO_CACHE names at every use.
const NO_CACHE_SINCE: i32 = 22907;

/// Whether NCCL reads the variable at every init: always, or because NCCL_NO_CACHE names it. NCCL_NO_CACHE itself is
/// read once.
fn is_read_anew(variable: &Variable) -> bool {
    static NAMES: OnceCell<String> = OnceCell::new();
    let is_named = || {
        let names = NAMES.get_or_init(|| value("NCCL_NO_CACHE").unwrap_or_default());
        names.split(',').any(|named| named == variable.name || named == "ALL")
    };
    variable.read == Moment::EveryInit || version() >= NO_CACHE_SINCE && is_named()
}

/// Logs one line for each value, when it first takes effect.
fn say(found: &Found) {
    static SAID: Mutex<BTreeSet<(&str, String)>> = Mutex::new(BTreeSet::new());
    if !log::log_enabled!(log::Level::Info) {
        return;
    }
    let is_new = SAID.lock().insert((found.variable.name, found.value.clone()));
    if is_new {
        log::info!("{found}");
    }
}

impl std::fmt::Display for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}={}: {}", self.variable.name, self.value, self.effect)
    }
}

/// The value of a variable. The environment comes before NCCL's files, even with an empty value.
pub fn value(name: &str) -> Option<String> {
    let value = std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    value.or_else(|| of_files(file_texts(), name))
}

/// The value in the first file that sets the variable.
fn of_files(texts: &[String], name: &str) -> Option<String> {
    let mut all = texts.iter().flat_map(|text| files::variables(text));
    all.find(|(known, _)| *known == name).map(|(_, value)| value.to_owned())
}

/// The variables of a file, for fuzzing.
#[cfg(any(test, feature = "test-support"))]
pub fn variables_of_file(text: &str) -> impl Iterator<Item = (&str, &str)> {
    files::variables(text)
}

/// The texts of NCCL's files. Like NCCL, this reads them once.
fn file_texts() -> &'static [String] {
    static TEXTS: OnceCell<Vec<String>> = OnceCell::new();
    TEXTS.get_or_init(|| {
        let named = std::env::var_os("NCCL_CONF_FILE").map(PathBuf::from);
        files::files(named, files::home, version()).iter().map(|file| files::read(file)).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first file that sets a variable counts.
    #[test]
    fn files_of_nccl() {
        let texts = ["NCCL_MAX_CTAS=3\nNCCL_P2P_LEVEL=NVL".to_owned(), "NCCL_P2P_LEVEL=LOC".to_owned()];
        assert_eq!(of_files(&texts, "NCCL_P2P_LEVEL"), Some("NVL".into()));
        assert_eq!(of_files(&texts, "NCCL_MAX_CTAS"), Some("3".into()));
        assert_eq!(of_files(&texts, "NCCL_PROTO"), None);
    }
}
