//! Makes the runs of a comparison, one after the other.

use super::Options;
use super::comparison::{Comparison, Request, Run};
use super::counting::Counting;
use super::family;
use super::memory::Meter;
use super::metric::Metric;
use super::process::{self, Outcome, tail};
use super::schedule::{Side, Turn, turns};
use crate::bench::record::date;
use crate::installation::SimulatorLibraries;
use crate::run::{self, Decision};
use crate::{built, elf, interruption, text};
use anyhow::{Context, Result, bail};
use nccl_sys::exported::Exports;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// The result of all runs.
pub enum Made {
    /// Of the pairs that were finished, if there are any: all, unless somebody has interrupted it.
    Finished(Option<Box<Comparison>>),
    /// The command cannot be run, or Windlass would not take effect, and the reason was printed. With the exit code.
    Refused(u8),
}

/// What all runs share.
struct Session<'a> {
    options: &'a Options,
    decision: Decision,
    /// The simulator of both sides.
    simulator: Option<SimulatorLibraries>,
    meter: Option<Meter>,
    folder: PathBuf,
}

/// Makes all runs, or tells why not.
pub fn make_runs(options: &Options) -> Result<Made> {
    if std::env::var_os("WINDLASS").is_some_and(|value| value == "off") {
        bail!("WINDLASS=off is set: both sides would run without Windlass; unset it");
    }
    let simulator = options.simulator.then(SimulatorLibraries::lay_out).transpose()?;
    let nccl = simulator.as_ref().map(SimulatorLibraries::nccl).or_else(|| options.nccl.clone());
    let mut decision = match run::decide(&options.command, nccl.as_deref()) {
        Ok(decision) => decision,
        Err(code) => return Ok(Made::Refused(code)),
    };
    // Runs with Windlass use the limits that the user's own runs will use.
    if run::calibrate(&mut decision.set).is_some() {
        return Ok(Made::Finished(None));
    }
    if std::env::var_os("WINDLASS_REPORT").is_some() {
        say!(
            "windlass: warning: WINDLASS_REPORT is ignored: the counters of each run go into the folder of the logs"
        );
    }
    family::keep_orphans();
    interruption::note()?;
    let session = Session {
        options,
        decision,
        simulator,
        meter: Meter::open(),
        folder: folder(options.logs.as_deref())?,
    };
    let turns = turns(options.pairs as usize, usize::from(options.warmup));
    say!(
        "compare: {} runs in turns, with Windlass and without: output in {}",
        turns.len(),
        session.folder.display()
    );
    let mut runs = Vec::new();
    let began = Instant::now();
    for turn in &turns {
        let Some(run) = session.run(*turn, turns.len())? else { break };
        let (of, seconds) = (format!("{} of {}", turn.number, turns.len()), run.seconds);
        runs.push(run);
        let left = text::left(began, runs.len(), turns.len());
        say!("compare: run {of}, {}: {seconds:.3} s{left}", turn.side.words());
    }
    // The first run of a pair alone says nothing.
    let finished = runs.len() / 2;
    runs.truncate(2 * finished);
    let pairs = finished.saturating_sub(usize::from(options.warmup));
    Ok(Made::Finished((pairs > 0).then(|| Box::new(Comparison::of(session.request(pairs), runs)))))
}

fn folder(named: Option<&Path>) -> Result<PathBuf> {
    match named {
        Some(folder) => {
            std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
            // An absolute path, since processes of the command may run in other folders.
            Ok(std::path::absolute(folder)?)
        }
        None => {
            let made = tempfile::Builder::new().prefix("windlass-compare-").tempdir();
            Ok(made.context("cannot make a folder")?.keep())
        }
    }
}

impl Session<'_> {
    fn request(&self, pairs: usize) -> Request {
        Request {
            date: date(SystemTime::now()),
            windlass: built::line(),
            command: self.options.command.iter().map(|word| word.display().to_string()).collect(),
            simulated: self.simulator.is_some(),
            pairs,
            metrics: self.options.metrics.iter().map(|metric| metric.name.clone()).collect(),
            has_nvml: self.meter.is_some(),
        }
    }

    /// Makes one run; none if it was interrupted.
    fn run(&self, turn: Turn, turns: usize) -> Result<Option<Run>> {
        let log = self.folder.join(format!("{}.log", turn.name()));
        let mut counting = match turn.side {
            Side::Without => None,
            Side::With => Some(Counting::begin(self.folder.join(format!("{}.counters", turn.name())))?),
        };
        let mut libraries = Libraries::default();
        let mut memory = self.meter.as_ref().map(Meter::watch);
        let variables = self.variables(counting.as_ref());
        let outcome = process::run(&self.options.command, variables, &log, |family| {
            libraries.look(family);
            if let Some(counting) = &mut counting {
                counting.look(family);
            }
            if let (Some(meter), Some(watch)) = (&self.meter, &mut memory) {
                meter.look(watch, family);
            }
        })?;
        let Outcome::Ended { status, seconds, left_behind } = outcome else { return Ok(None) };
        let which = format!("run {} of {turns} ({})", turn.number, turn.side.words());
        if !status.success() {
            bail!(
                "{which} ended with {status}; its output is in {}, of which this is the end:\n{}",
                log.display(),
                tail(&log)
            );
        }
        Ok(Some(Run {
            turn,
            seconds,
            metrics: self.figures(&which, &log)?,
            memory: memory.unwrap_or_default().peaks,
            counters: counting.map(Counting::end),
            nccl: libraries.found,
            left_behind,
            log,
        }))
    }

    /// The variables of a side; those without a value are unset.
    fn variables(&self, counting: Option<&Counting>) -> Vec<(OsString, Option<OsString>)> {
        let simulator = self.simulator.as_ref();
        let simulator = simulator.map(|simulator| ("LD_LIBRARY_PATH".into(), Some(simulator.library_path())));
        let of_side = match counting {
            Some(counting) => {
                let set = self.decision.set.iter().map(|(name, value)| ((*name).into(), Some(value.clone())));
                set.chain([("WINDLASS_REPORT".into(), Some(counting.variable()))]).collect()
            }
            None => vec![
                ("LD_PRELOAD".into(), self.decision.preload_without.clone()),
                // For a Windlass that is loaded otherwise than by a preload.
                ("WINDLASS".into(), Some("off".into())),
                ("WINDLASS_REPORT".into(), None),
            ],
        };
        simulator.into_iter().chain(of_side).collect()
    }

    /// The command's figures for each metric. A pattern without a match ends the comparison, since it would match nothing in other
    /// runs.
    fn figures(&self, which: &str, log: &Path) -> Result<BTreeMap<String, Vec<f64>>> {
        let output = std::fs::read(log).with_context(|| format!("cannot read {}", log.display()))?;
        let output = String::from_utf8_lossy(&output);
        let figures =
            |metric: &Metric| Ok((metric.name.clone(), self.figures_of(metric, &output, which, log)?));
        self.options.metrics.iter().map(figures).collect()
    }

    fn figures_of(&self, metric: &Metric, output: &str, which: &str, log: &Path) -> Result<Vec<f64>> {
        let skipped = self.options.metric_warmup;
        let found = metric.find(output, skipped);
        if !found.values.is_empty() {
            return Ok(found.values);
        }
        let why = match found.unreadable {
            Some(text) => format!("; {text:?} is no number"),
            None if found.matches > 0 => format!(", of which --metric-warmup skips {skipped}"),
            None => String::new(),
        };
        bail!("{which}: --metric '{}' found {} figures in {}{why}", metric.name, found.matches, log.display())
    }
}

/// After this time a process without an NCCL is read again; not earlier, since its list of mappings is long.
const AGAIN: Duration = Duration::from_secs(1);

/// What is known of the mappings of a run's processes.
#[derive(Default)]
pub struct Libraries {
    /// The real NCCLs that were found.
    pub found: BTreeSet<PathBuf>,
    /// When a process was read that had none; none for processes that have one.
    asked: BTreeMap<u32, Option<Instant>>,
    judged: BTreeMap<PathBuf, bool>,
}

impl Libraries {
    /// Reads the mappings of each process that is not known to have an NCCL.
    pub fn look(&mut self, family: &BTreeSet<u32>) {
        for process in family {
            let asked = self.asked.get(process);
            if asked.is_some_and(|when| when.is_none_or(|when| when.elapsed() < AGAIN)) {
                continue;
            }
            let maps = std::fs::read(format!("/proc/{process}/maps")).unwrap_or_default();
            let real: Vec<PathBuf> = named(&String::from_utf8_lossy(&maps))
                .into_iter()
                .filter(|path| self.is_real(path))
                .collect();
            self.asked.insert(*process, real.is_empty().then(Instant::now));
            self.found.extend(real);
        }
    }

    /// Whether the file is a real NCCL, since Windlass may have the same name.
    fn is_real(&mut self, path: &Path) -> bool {
        let judge = || elf::exports(path).is_ok_and(|exports| exports == Exports::Nccl);
        *self.judged.entry(path.to_owned()).or_insert_with(judge)
    }
}

/// The mapped files with NCCL's name.
fn named(maps: &str) -> BTreeSet<PathBuf> {
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    let is_named = |path: &&Path| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"libnccl.so"))
    };
    paths.filter(is_named).map(Path::to_owned).collect()
}

#[cfg(test)]
mod libraries_tests {
    use super::*;

    /// Files are found by their names, each once.
    #[test]
    fn names() {
        let maps = "7f10-7f20 r-xp 0 08:02 7  /a b/libnccl.so.2\n7f20-7f30 r--p 0 08:02 7  /a b/libnccl.so.2\n\
                    7f30-7f40 r-xp 0 08:02 8  /c/libnccl-net.so\n7f40-7f50 rw-p 0 00:00 0\n";
        assert_eq!(named(maps), BTreeSet::from([PathBuf::from("/a b/libnccl.so.2")]));
    }

    /// This process has no NCCL; it is not read twice in a moment.
    #[test]
    fn own() {
        let mut libraries = Libraries::default();
        let family = BTreeSet::from([std::process::id()]);
        libraries.look(&family);
        libraries.look(&family);
        assert!(libraries.found.is_empty());
    }
}
