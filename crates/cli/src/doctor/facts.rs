//! What `doctor` looks at.

use super::running::{self, Running};
use crate::asking::{self, Gpus};
use crate::calibrate;
use crate::elf;
use crate::installation;
use crate::program;
use crate::run;
use crate::search::{Looked, Request, search};
use crate::tune::{Limit, file_of, held};
use serde::Serialize;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
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

impl From<Found> for NcclVariable {
    fn from(found: Found) -> NcclVariable {
        let (loses, all) = (found.effect.loses(), found.effect.leaves_all_to_nccl());
        NcclVariable {
            name: found.variable.name,
            value: found.value,
            effect: found.effect.to_string(),
            loses,
            all,
        }
    }
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
    let framework = run::hint(command, |name| std::env::var(name).ok());
    let mut facts = Facts { is_simulated: library_path.is_some(), framework, ..Facts::default() };
    let program = (!command.is_empty()).then(|| program::look_up(command));
    let looked_up = program.as_ref().and_then(|program| program.as_ref().ok());
    let search = search(&Request { named, program: looked_up });
    let windlass =
        installation::windlass_library().and_then(|path| Ok(run::Library { elf: elf::read(&path)?, path }));
    if let Some((path, elf)) = &search.chosen {
        let mut nccl =
            NcclFacts { path: path.clone(), functions: elf.functions.len(), ..NcclFacts::default() };
        (nccl.version, nccl.load_problem) = split(asking::nccl_version(path));
        if let Ok(windlass) = &windlass {
            nccl.lacking_in_windlass = elf.functions_missing_in(&windlass.elf);
            nccl.lacking_in_nccl = windlass.elf.functions_missing_in(elf).len();
            (nccl.version_through_windlass, nccl.through_problem) =
                split(asking::version_through(&windlass.path, path));
        }
        facts.nccl = Some(nccl);
    }
    facts.search = search.looked;
    let environment: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
    if let Ok(windlass) = &windlass {
        facts.warnings = run::environment_warnings(&environment, &windlass.path);
        facts.preloads = run::preloads(&environment, windlass);
    }
    match &program {
        Some(Ok(program)) => facts.refusals.extend(run::refuse(program, windlass.as_ref().ok())),
        Some(Err(error)) => facts.refusals.push(format!("{error:#}")),
        None => {}
    }
    facts.build = windlass.as_ref().ok().and_then(|windlass| asking::build(&windlass.path).ok());
    let (windlass, problem) = split(windlass.map(|windlass| windlass.path));
    (facts.windlass, facts.windlass_problem) = (windlass, problem);
    (facts.gpus, facts.gpus_problem) = split(asking::gpus(library_path, asking::TIME_LIMIT));
    facts.shared_memory = rustix::fs::statvfs("/dev/shm").ok().map(|room| SharedMemory {
        total_bytes: room.f_blocks * room.f_frsize,
        free_bytes: room.f_bavail * room.f_frsize,
    });
    let text =
        |(name, value): (&OsString, &OsString)| (name.display().to_string(), value.display().to_string());
    let is_told = |name: &String| {
        OF_LOADERS.contains(&name.as_str()) || name.starts_with("WINDLASS") || name.starts_with("NCCL_")
    };
    facts.variables = environment.iter().map(text).filter(|(name, _)| is_told(name)).collect();
    let version = facts.nccl.as_ref().and_then(|nccl| nccl.version).unwrap_or_default();
    nccl::note_version(version);
    let found = nccl::found(version);
    let parsed = windlass_base::config::parse(environment.into_iter());
    if limits(&mut facts, library_path, &parsed.config).is_none() {
        facts.table_problems.extend(file_of(&parsed.config).1);
    }
    facts.off = off(&parsed);
    facts.passing_cache = passing_cache(&parsed.config);
    facts.order = Some(order::name(order::number(parsed.config.order))).filter(|name| !name.is_empty());
    (facts.heap_bytes_max, facts.option_complaints) = (parsed.config.heap_bytes_max, parsed.complaints);
    facts.nccl_variables = found.into_iter().map(NcclVariable::from).collect();
    facts.against_order = against_order(&facts.off, &facts.nccl_variables);
    if facts.order.is_some() {
        // What was chosen for the order of NCCL's sums concerns native collectives no more.
        let chosen = facts.nccl_variables.iter_mut();
        let chosen = chosen.filter(|variable| variable.effect == Effect::Algorithms.to_string());
        chosen.for_each(|variable| variable.effect = Effect::NoWindows.to_string());
    }
    facts.removed_options = parsed.removed;
    facts.processes = running::look();
    facts
}

/// The limits of communicators of these GPUs, and if some are guesses, why.
fn limits(facts: &mut Facts, library_path: Option<&OsStr>, config: &Config) -> Option<()> {
    let (nccl, windlass) = (facts.nccl.as_ref()?, facts.windlass.as_ref()?);
    let numbers: Vec<usize> = (2..=facts.gpus.as_ref()?.devices.len().min(native::RANKS_MAX)).collect();
    let held = held(&nccl.path, nccl.version?, config, &numbers, library_path).ok()?;
    let why = calibrate::due(&nccl.path, windlass, |_| ()).err();
    let why = why.as_deref().unwrap_or("`windlass run` did not run yet");
    facts.limits =
        held.limits.into_iter().filter(|limit| limit.collective == Collective::AllReduce.name()).collect();
    let is_guess = facts.limits.iter().any(|limit| limit.source < Source::BuiltIn);
    facts.unmeasured = is_guess.then(|| not_measured_because(why));
    facts.table_problems = held.problems;
    Some(())
}

/// The folder of limits, if it is on the own layer of a container.
fn passing_cache(config: &Config) -> Option<PathBuf> {
    let is_container = ["/.dockerenv", "/run/.containerenv"].iter().any(|mark| Path::new(mark).exists());
    let folder = config.cache.folder().filter(|_| is_container)?;
    let device = |path: &Path| std::fs::metadata(path).ok().map(|facts| facts.dev());
    let made = folder.ancestors().find_map(device);
    (made == device(Path::new("/"))).then_some(folder)
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
    let variable = || {
        let found = variables.iter().find(|found| found.all)?;
        Some(format!("{}={}", found.name, found.value))
    };
    off.first().map(|option| (*option).to_owned()).or_else(variable)
}

fn split<T>(result: anyhow::Result<T>) -> (Option<T>, Option<String>) {
    match result {
        Ok(value) => (Some(value), None),
        Err(error) => (None, Some(format!("{error:#}"))),
    }
}
