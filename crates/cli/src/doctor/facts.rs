//! What `doctor` looks at.

use super::running::{self, Running};
use crate::asking::{self, Gpus};
use crate::elf::Elf;
use crate::search::{Looked, search};
use crate::tune::{Limit, file_of, held};
use crate::{calibrate, program, run};
use serde::Serialize;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use windlass_base::config::nccl::{self, Effect, Found};
use windlass_base::config::{Collectives, Config, Parsed, Switch};
use windlass_base::stats::limits::{Source, not_measured_because};
use windlass_base::stats::order;
use windlass_transport::native;
use windlass_transport::tuning::Collective;

/// NCCL runs every call.
pub const PEER_GROUPS_OFF: &str = "WINDLASS_PEER_GROUPS=off";

/// Variables that decide what is loaded.
const OF_LOADERS: [&str; 3] = ["CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "LD_LIBRARY_PATH"];

/// Everything found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Facts {
    /// The library, or why there is none.
    pub windlass: Option<PathBuf>,
    pub windlass_problem: Option<String>,
    /// Of what the library was built: version, commit, kernels.
    pub build: Option<String>,
    /// Every file that was looked at for the real library.
    pub search: Vec<Looked>,
    pub nccl: Option<NcclFacts>,
    /// Whether the simulator was looked at, not this machine.
    pub is_simulated: bool,
    /// What the server that the command starts lacks to leave its all-reduces to NCCL.
    pub framework: Option<String>,
    /// Why the command that was named would not run over Windlass.
    pub refusals: Vec<String>,
    pub warnings: Vec<String>,
    pub gpus: Option<Gpus>,
    pub gpus_problem: Option<String>,
    /// The libraries that are preloaded already, in front of Windlass and behind it.
    pub preloads: Option<String>,
    /// `/dev/shm`.
    pub shared_memory: Option<SharedMemory>,
    /// Variables that are set and decide what is loaded, and all of NCCL's and Windlass's.
    pub variables: BTreeMap<String, String>,
    /// NCCL's variables that change what Windlass does, in the environment or NCCL's files.
    pub nccl_variables: Vec<NcclVariable>,
    /// What Windlass's own reading of its variables complains about.
    pub option_complaints: Vec<String>,
    /// Options that are set by their earlier names.
    pub removed_options: Vec<String>,
    /// Up to which sizes Windlass runs all-reduces, for each number of ranks.
    pub limits: Vec<Limit>,
    /// That nobody has measured up to which sizes Windlass is faster here, and why.
    pub unmeasured: Option<String>,
    /// Why a table of limits that is there does not count.
    pub table_problems: Vec<String>,
    /// The folder of limits, if it ends with this container.
    pub passing_cache: Option<PathBuf>,
    /// Why `python3` does not open Windlass where `WINDLASS_PYTHON=on` asks for it.
    pub autoload_problem: Option<String>,
    /// Why the folder of limits cannot be written.
    pub cache_problem: Option<String>,
    /// Options that leave calls to NCCL: all of them, or collectives.
    pub off: Vec<&'static str>,
    /// `WINDLASS_HEAP_MAX`.
    pub heap_bytes_max: u64,
    /// `WINDLASS_ORDER`, where it asks for fixed order, and what is set that is in its way.
    pub order: Option<&'static str>,
    pub against_order: Option<String>,
    /// Programs of this user that run over Windlass.
    pub processes: Vec<Running>,
}

/// A variable of NCCL's that is set.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NcclVariable {
    pub name: &'static str,
    pub value: String,
    /// What changes.
    pub effect: String,
    /// Whether something is off that would be on.
    pub loses: bool,
    /// Whether NCCL runs every call.
    pub all: bool,
}

/// The real library.
#[derive(Clone, Debug, Default, Serialize)]
pub struct NcclFacts {
    pub path: PathBuf,
    /// Its version code, or why it does not load.
    pub version: Option<i32>,
    pub load_problem: Option<String>,
    /// The version code that comes through Windlass.
    pub version_through_windlass: Option<i32>,
    pub through_problem: Option<String>,
    /// How many functions it exports.
    pub functions: usize,
    /// Functions that it has and Windlass lacks.
    pub lacking_in_windlass: Vec<String>,
    /// How many functions Windlass has and it lacks: those answer `ncclInvalidUsage`.
    pub lacking_in_nccl: usize,
}

/// Room in `/dev/shm`, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct SharedMemory {
    pub total_bytes: u64,
    pub free_bytes: u64,
}

/// Looks at everything. What can hang or crash is asked in child processes, with this `LD_LIBRARY_PATH` if there is one.
pub fn gather(named: Option<&Path>, library_path: Option<&OsStr>, command: &[OsString]) -> Facts {
    let program = (!command.is_empty()).then(|| program::look_up(command));
    let search = search(named, program.as_ref().and_then(|program| program.as_ref().ok()));
    let python = program.as_ref().and_then(|program| program.as_ref().ok()?.python.clone());
    let windlass = run::Library::installed();
    let library = windlass.as_ref().ok();
    let nccl = search.chosen.as_ref().map(|(path, elf)| nccl_facts(path, elf, library));
    let refusal = match &program {
        Some(Ok(program)) => run::refuse(program, library),
        Some(Err(error)) => Some(format!("{error:#}")),
        None => None,
    };
    let (gpus, gpus_problem) = split(asking::gpus(library_path, asking::TIME_LIMIT));
    let environment: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
    let version = nccl.as_ref().and_then(|nccl| nccl.version).unwrap_or_default();
    nccl::note_version(version);
    let parsed = windlass_base::config::parse(environment.clone().into_iter());
    let devices = gpus.as_ref().map(|gpus| gpus.devices.len());
    let limits = limits(nccl.as_ref(), library, devices, library_path, &parsed.config);
    let (limits, unmeasured, table_problems) =
        limits.unwrap_or_else(|| (Vec::new(), None, file_of(&parsed.config).1.into_iter().collect()));
    let off = off(&parsed);
    let order = Some(order::name(parsed.config.order as u64)).filter(|name| !name.is_empty());
    let nccl_variables: Vec<_> =
        nccl::found(version).into_iter().map(|found| nccl_variable(found, order.is_some())).collect();
    Facts {
        is_simulated: library_path.is_some(),
        framework: run::hint(command, |name| std::env::var(name).ok()),
        build: library.and_then(|library| asking::build(&library.path).ok()),
        warnings: library
            .map_or_else(Vec::new, |library| run::environment_warnings(&environment, &library.path)),
        preloads: library.and_then(|library| run::preloads(&environment, library)),
        windlass: library.map(|library| library.path.clone()),
        windlass_problem: windlass.as_ref().err().map(|error| format!("{error:#}")),
        search: search.looked,
        nccl,
        refusals: refusal.into_iter().collect(),
        gpus,
        gpus_problem,
        shared_memory: rustix::fs::statvfs("/dev/shm").ok().map(|room| SharedMemory {
            total_bytes: room.f_blocks * room.f_frsize,
            free_bytes: room.f_bavail * room.f_frsize,
        }),
        variables: told_variables(&environment),
        against_order: against_order(&off, &nccl_variables),
        nccl_variables,
        passing_cache: passing_cache(&parsed.config),
        cache_problem: cache_problem(&parsed.config),
        autoload_problem: autoload_problem(python),
        heap_bytes_max: parsed.config.heap_bytes_max,
        option_complaints: parsed.complaints,
        removed_options: parsed.removed,
        limits,
        unmeasured,
        table_problems,
        off,
        order,
        processes: running::look(),
    }
}

fn nccl_facts(path: &Path, elf: &Elf, windlass: Option<&run::Library>) -> NcclFacts {
    let (version, load_problem) = split(asking::nccl_version(path));
    let through = windlass.map(|windlass| split(asking::version_through(&windlass.path, path)));
    let (version_through_windlass, through_problem) = through.unwrap_or_default();
    NcclFacts {
        path: path.to_owned(),
        version,
        load_problem,
        version_through_windlass,
        through_problem,
        functions: elf.functions.len(),
        lacking_in_windlass: windlass.map_or_else(Vec::new, |own| elf.functions_missing_in(&own.elf)),
        lacking_in_nccl: windlass.map_or(0, |own| own.elf.functions_missing_in(elf).len()),
    }
}

/// What was chosen for the order of NCCL's sums concerns native collectives no more where Windlass's order is fixed.
pub fn nccl_variable(Found { variable, value, effect }: Found, is_ordered: bool) -> NcclVariable {
    let is_moot = is_ordered && effect == Effect::Algorithms;
    NcclVariable {
        name: variable.name,
        value,
        effect: if is_moot { Effect::NoWindows } else { effect }.to_string(),
        loses: effect.loses(),
        all: effect.leaves_all_to_nccl(),
    }
}

fn told_variables(environment: &BTreeMap<OsString, OsString>) -> BTreeMap<String, String> {
    let text =
        |(name, value): (&OsString, &OsString)| (name.display().to_string(), value.display().to_string());
    let is_told = |name: &String| {
        OF_LOADERS.contains(&name.as_str()) || name.starts_with("WINDLASS") || name.starts_with("NCCL_")
    };
    environment.iter().map(text).filter(|(name, _)| is_told(name)).collect()
}

/// The limits of communicators of these GPUs; if some are guesses, why; and why tables do not count.
fn limits(
    nccl: Option<&NcclFacts>,
    windlass: Option<&run::Library>,
    devices: Option<usize>,
    library_path: Option<&OsStr>,
    config: &Config,
) -> Option<(Vec<Limit>, Option<String>, Vec<String>)> {
    let (nccl, windlass) = (nccl?, windlass?);
    let numbers: Vec<usize> = (2..=devices?.min(native::RANKS_MAX)).collect();
    let held = held(&nccl.path, nccl.version?, config, &numbers, library_path).ok()?;
    let why = calibrate::due(&nccl.path, &windlass.path, |_| ()).err();
    let why = why.as_deref().unwrap_or("`windlass run` did not run yet");
    let is_told = |limit: &Limit| limit.collective == Collective::AllReduce.name();
    let limits: Vec<Limit> = held.limits.into_iter().filter(is_told).collect();
    let is_guess = limits.iter().any(|limit| limit.source < Source::BuiltIn);
    Some((limits, is_guess.then(|| not_measured_because(why)), held.problems))
}

/// The folder of limits, if it is on the own layer of a container.
fn passing_cache(config: &Config) -> Option<PathBuf> {
    let is_container = ["/.dockerenv", "/run/.containerenv"].iter().any(|mark| Path::new(mark).exists());
    let folder = config.cache.folder().filter(|_| is_container)?;
    let device = |path: &Path| std::fs::metadata(path).ok().map(|facts| facts.dev());
    let made = folder.ancestors().find_map(device);
    (made == device(Path::new("/"))).then_some(folder)
}

/// Starts the command's Python, else `python3`, and looks whether the package windlass-autoload has opened Windlass there.
fn autoload_problem(python: Option<PathBuf>) -> Option<String> {
    std::env::var_os("WINDLASS_PYTHON").filter(|asked| asked == "on")?;
    let python = python.or_else(|| program::find_in_path(OsStr::new("python3")).ok())?;
    let mut command = Command::new(&python);
    command.args(["-c", "import sys; sys.exit('libwindlass.so' not in open('/proc/self/maps').read())"]);
    let error = asking::output_within(command, asking::TIME_LIMIT).err()?;
    Some(format!(
        "WINDLASS_PYTHON=on, but {} does not open Windlass ({error:#}): expected the packages windlass and windlass-autoload in that Python",
        python.display()
    ))
}

/// Why the folder of limits cannot be written. Asked by a file without a name in the deepest folder of its path that is there.
fn cache_problem(config: &Config) -> Option<String> {
    let folder = config.cache.folder()?;
    let there = folder.ancestors().find(|path| path.exists())?;
    let error = tempfile::tempfile_in(there).err()?;
    Some(format!(
        "{} cannot be written: {error}; limits that are measured here are lost; expected in WINDLASS_CACHE a folder that this user can make and write",
        folder.display()
    ))
}

/// Options that leave calls to NCCL, the one that leaves most first.
fn off(Parsed { startup, config, .. }: &Parsed) -> Vec<&'static str> {
    let options = [
        (startup.windlass == Switch::Off, "WINDLASS=off"),
        (config.peer_groups == Switch::Off, PEER_GROUPS_OFF),
        (config.collectives == Collectives::Off, "WINDLASS_COLLECTIVES=off"),
    ];
    options.into_iter().filter(|(is_set, _)| *is_set).map(|(_, option)| option).collect()
}

/// What is set that leaves no communicator to native collectives.
fn against_order(off: &[&str], variables: &[NcclVariable]) -> Option<String> {
    let variable = variables.iter().find(|found| found.all);
    let variable = variable.map(|found| format!("{}={}", found.name, found.value));
    off.first().map(|option| (*option).to_owned()).or(variable)
}

fn split<T>(result: anyhow::Result<T>) -> (Option<T>, Option<String>) {
    match result {
        Ok(value) => (Some(value), None),
        Err(error) => (None, Some(format!("{error:#}"))),
    }
}
