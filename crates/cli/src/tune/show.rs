//! The limits that hold on this machine, decided as a communicator's ranks decide them; `windlass tune --show` prints them, and
//! `windlass doctor` judges by them.

use crate::asking;
use crate::bench::adaptive::Place;
use crate::limits::store::Folder;
use crate::machine::Machine;
use crate::nccl::version_text;
use crate::text;
use anyhow::{Context, Result};
use serde::Serialize;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use windlass_base::config::Config;
use windlass_base::config::nccl;
use windlass_base::stats::limits::Source;
use windlass_bootstrap::negotiated::{
    Device, GRID_MAX, Member, NegotiatedConfig, Token, Version, capability,
};
use windlass_transport::tuning::agreed::{Brought, decide};
use windlass_transport::tuning::file::{Cell, Key, Multicast, Table};
use windlass_transport::tuning::{Collective, RINGS_IN_FOURS};

/// The limits of communicators of all numbers of ranks that were asked for.
#[derive(Debug, Default, Serialize)]
pub struct Held {
    /// The folder of the cache, if there is one.
    cache: Option<PathBuf>,
    /// Why a table that is there does not count.
    pub problems: Vec<String>,
    pub limits: Vec<Limit>,
}

/// Below which size Windlass runs a collective of a communicator of so many ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Limit {
    pub ranks: usize,
    pub collective: &'static str,
    /// The largest size of the larger buffer, in bytes; none if NCCL runs all.
    pub bytes_max: Option<u64>,
    #[serde(serialize_with = "name_of")]
    pub source: Source,
    /// When and by what the cache's limit was measured.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub measured: String,
}

fn name_of<S: serde::Serializer>(source: &Source, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(source.name())
}

/// Prints the limits: a row for each collective, a column for each number of ranks.
pub fn run(machine: &Machine, config: &Config, numbers: &[usize], json: bool) -> Result<()> {
    let version = asking::nccl_version(&machine.nccl)?;
    let held = held(&machine.nccl, version, config, numbers, machine.library_path().as_deref())?;
    let (gpus, gpu) = (machine.gpus.devices.len(), machine.device_name());
    if json {
        let object =
            serde_json::json!({"gpus": gpus, "gpu": gpu, "nccl": version_text(version), "held": held});
        return text::print(serde_json::to_string_pretty(&object)? + "\n");
    }
    // The file's was told as the command began.
    let of_cache = held.problems.iter().filter(|problem| !problem.starts_with("WINDLASS_TUNING"));
    of_cache.for_each(|problem| text::tell(format_args!("windlass: warning: {problem}\n")));
    let cache = held.cache.as_ref().map_or("none".into(), |folder| folder.display().to_string());
    text::print(format!(
        "{gpus} × {gpu}, NCCL {}; cache: {cache}\nthe largest size that Windlass runs, of the larger buffer, and where it comes from\n\n",
        version_text(version)
    ))?;
    text::print(table(numbers, &held.limits))
}

fn table(numbers: &[usize], limits: &[Limit]) -> String {
    let head: Vec<String> = numbers.iter().map(|ranks| format!("{ranks} ranks")).collect();
    let head: Vec<&str> = std::iter::once("collective").chain(head.iter().map(String::as_str)).collect();
    let row = |collective: Collective| {
        let row = limits.iter().filter(|limit| limit.collective == collective.name());
        let cell = |limit: &Limit| {
            let size = limit.bytes_max.map_or_else(|| "none".to_owned(), text::size);
            format!("{size} {}", limit.source.name())
        };
        std::iter::once(collective.name().to_owned()).chain(row.map(cell)).collect()
    };
    let measured: BTreeSet<&str> =
        limits.iter().map(|limit| &*limit.measured).filter(|when| !when.is_empty()).collect();
    let when = measured.iter().map(|when| format!("cache: measured here {when}\n"));
    text::table(&head, Collective::ALL.into_iter().map(row), &[]) + &when.collect::<String>()
}

/// The limits of communicators of equal ranks on this machine.
pub fn held(
    nccl: &Path,
    version: i32,
    config: &Config,
    numbers: &[usize],
    library_path: Option<&OsStr>,
) -> Result<Held> {
    let most = numbers.iter().copied().max().unwrap_or(0);
    let places = asking::places(most, nccl, library_path)?;
    nccl::note_version(version);
    let folder = Folder::of(config).unwrap_or_default();
    let (file, problem) = file_of(config);
    let mut held = Held { problems: problem.into_iter().collect(), ..Held::default() };
    for ranks in numbers {
        let place = places.get(ranks - 2).context("an answer for each number of ranks")?;
        let kept = match folder.as_ref().map(|folder| folder.read(&place.circumstances())) {
            Some(Err(problem)) => {
                held.problems.push(problem);
                None
            }
            kept => kept.and_then(|kept| kept.ok().flatten()),
        };
        held.limits.extend(limits_of(*ranks, place, version, &file, kept.as_deref()));
    }
    held.cache = folder.map(|folder| folder.path().to_owned());
    Ok(held)
}

/// The table that `WINDLASS_TUNING` names; where it is none, an empty one, and why.
pub fn file_of(config: &Config) -> (Table, Option<String>) {
    let Some(path) = &config.tuning else { return <_>::default() };
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string());
    match text.and_then(|text| Table::parse(&text).map_err(|complaint| complaint.to_string())) {
        Ok(table) => (table, None),
        Err(why) => {
            let path = path.display();
            let problem = format!(
                "WINDLASS_TUNING={path}: expected a table of `windlass tune --out`, and it is left out: {why}; limits measured on this machine hold, else the built-in ones"
            );
            (Table::default(), Some(problem))
        }
    }
}

/// The limits of a communicator of `ranks` equal ranks on this machine; `kept` is the text of the table in the cache.
fn limits_of(ranks: usize, place: &Place, version: i32, file: &Table, kept: Option<&str>) -> Vec<Limit> {
    let Place { capability, multiprocessors, .. } = *place;
    let (multicast, circumstances) = (place.multicast(), place.circumstances());
    let device = Device { uuid: [0; 16], pci: (0, 0, 0), capability, multiprocessors };
    let table = kept.and_then(|text| Table::parse(text).ok()).unwrap_or_default();
    let cells = Brought::of(ranks, &device, multicast, file, Some((&circumstances, &table))).encode();
    let token = Token([0; 16]);
    let member = |rank: usize| Member {
        rank: rank as u32,
        process: token,
        process_id: 0,
        device,
        descriptor_socket: token,
        process_listener: token,
        cells: cells.clone(),
        attachment: Vec::new(),
    };
    let bits = [
        (true, capability::NATIVE | capability::UNBOUND),
        (multicast == Multicast::Yes, capability::MULTICAST),
        (RINGS_IN_FOURS.contains(&version), capability::RINGS_IN_FOURS),
    ];
    let ctas_max = nccl::settings().ctas_max();
    let decided = decide(&NegotiatedConfig {
        comm: token,
        version: Version::THIS,
        host: token,
        capabilities: bits.into_iter().filter(|(has, _)| *has).fold(0, |all, (_, bit)| all | bit),
        options: 0,
        ctas_max: if ctas_max > 0 { ctas_max.min(GRID_MAX) } else { GRID_MAX },
        members: (0..ranks).map(member).collect(),
    });
    let limit = |collective: Collective| {
        let source = decided.sources[collective as usize];
        let key = Key { collective, ranks, capability, multiprocessors, multicast };
        Limit {
            ranks,
            collective: collective.name(),
            bytes_max: decided.limits.0[collective as usize].checked_sub(1),
            source,
            measured: if source == Source::Cache { measured(kept, key) } else { String::new() },
        }
    };
    Collective::ALL.map(limit).to_vec()
}

/// The date and kind of a cell's measurement in the cache.
fn measured(kept: Option<&str>, key: Key) -> String {
    let is_cell = |line: &&str| Cell::parse(line).is_ok_and(|cell| cell.key == key);
    let line = kept.and_then(|text| text.lines().find(is_cell)).unwrap_or_default();
    line.split_once('#').map_or_else(String::new, |(_, when)| when.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::record::date;

    /// Limits of the cache hold before those built in, with their date; a file's hold before both.
    #[test]
    fn sources() {
        let place: Place = serde_json::from_value(serde_json::json!({
            "circumstances": ["ranks 2"], "capability": 90, "multiprocessors": 132, "multicast": false,
        }))
        .unwrap();
        let line = |name: &str, limit: &str| {
            format!("{name} ranks 2 gpu 9.0/132 multicast no native_bytes_max {limit}")
        };
        let kept = format!(
            "windlass-tuning 1\n{} # {}, tune of 0.2.0\n",
            line("all_reduce", "1M"),
            date(std::time::UNIX_EPOCH)
        );
        let file = Table::parse(&format!("windlass-tuning 1\n{}\n", line("reduce", "none"))).unwrap();
        let limits = limits_of(2, &place, 22809, &file, Some(&kept));
        let of =
            |at: usize, limits: &[Limit]| (limits[at].collective, limits[at].bytes_max, limits[at].source);
        assert_eq!(of(0, &limits), ("all_reduce", Some(1 << 20), Source::Cache));
        assert_eq!(limits[0].measured, "1970-01-01T00:00:00Z, tune of 0.2.0");
        assert_eq!(of(1, &limits), ("broadcast", Some(32 << 20), Source::BuiltIn));
        assert_eq!(of(2, &limits), ("reduce", None, Source::File));
        assert_eq!(of(7, &limits), ("other_all_reduce", Some(8 << 20), Source::BuiltIn));
        let told = table(&[2], &limits);
        assert!(
            told.starts_with("collective             2 ranks\nall_reduce             1M cache\n"),
            "{told}"
        );
        assert!(told.ends_with("\ncache: measured here 1970-01-01T00:00:00Z, tune of 0.2.0\n"), "{told}");
        let without = limits_of(2, &place, 22809, &file, None);
        assert_eq!(of(0, &without), ("all_reduce", Some(256 << 20), Source::BuiltIn));
    }

    /// What is no table is named, with what was expected and what holds.
    #[test]
    fn no_table() {
        let of = |path: &str| file_of(&Config { tuning: Some(path.into()), ..Config::default() });
        assert_eq!(file_of(&Config::default()).1, None);
        for (path, why) in [("/nowhere", "No such file"), ("/etc/passwd", "line 1: "), ("/", "directory")] {
            let (table, problem) = of(path);
            let problem = problem.unwrap();
            assert_eq!(table, Table::default());
            for part in [&format!("WINDLASS_TUNING={path}: expected a table"), why, "else the built-in ones"]
            {
                assert!(problem.contains(part), "{part}: {problem}");
            }
        }
    }
}
