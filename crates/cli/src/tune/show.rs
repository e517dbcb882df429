//! `windlass tune --show`: prints the limits that hold here, decided as a communicator's ranks decide them.

use crate::asking;
use crate::bench::adaptive::Place;
use crate::limits::store::Folder;
use crate::machine::Machine;
use crate::text;
use anyhow::{Context, Result};
use std::ffi::OsString;
use std::path::Path;
use windlass_base::config::Config;
use windlass_base::config::nccl;
use windlass_base::stats::limits::{GUESSED, Source};
use windlass_bootstrap::negotiated::{
    Device, GRID_MAX, Member, NegotiatedConfig, Token, Version, capability,
};
use windlass_transport::tuning::agreed::{Brought, decide};
use windlass_transport::tuning::cache::Circumstances;
use windlass_transport::tuning::file::{Cell, Key, Multicast, Table};
use windlass_transport::tuning::{Collective, RINGS_IN_FOURS};

/// Prints a line for each limit, or why there is none.
pub fn run(machine: &Machine, config: &Config, numbers: &[usize]) -> Result<()> {
    let most = numbers.iter().copied().max().unwrap_or(0);
    let library_path = machine.is_simulated().then(|| library_path(machine)).flatten();
    let places = asking::places(most, &machine.nccl, library_path.as_deref())?;
    let version = asking::nccl_version(&machine.nccl)?;
    nccl::note_version(version);
    let folder = Folder::of(config).unwrap_or_default();
    let file = file_of(config)?;
    let mut lines = vec![["ranks", "collective", "up to", "from"].map(str::to_owned).to_vec()];
    for ranks in numbers {
        let place = places.get(ranks - 2).context("an answer for each number of ranks")?;
        let kept = folder.as_ref().and_then(|folder| folder.read(&place.circumstances()));
        let view = View { ranks: *ranks, place, version, file: &file, kept: kept.as_deref() };
        lines.extend(view.lines());
    }
    text::print(text::table(&lines, &[0, 2]))?;
    match folder {
        Some(folder) => text::print(format!("cache: {}\n", folder.path().display())),
        None => text::print("cache: none\n"),
    }
}

/// Whether the limits of communicators of so many ranks are guesses.
pub fn are_guessed(nccl: &Path, version: i32, config: &Config, ranks: usize) -> Result<bool> {
    let places = asking::places(ranks, nccl, None)?;
    let place = places.last().context("an answer for each number of ranks")?;
    let kept = Folder::of(config)?.and_then(|folder| folder.read(&place.circumstances()));
    let view = View { ranks, place, version, file: &file_of(config)?, kept: kept.as_deref() };
    Ok(decide(&view.negotiated()).source_bits() & GUESSED != 0)
}

/// The table that `WINDLASS_TUNING` names.
fn file_of(config: &Config) -> Result<Table> {
    let file = config.tuning.as_deref().map(std::fs::read_to_string).transpose();
    match file.context("WINDLASS_TUNING cannot be read")?.unwrap_or_default().as_str() {
        "" => Ok(Table::default()),
        text => Table::parse(text).context("WINDLASS_TUNING"),
    }
}

fn library_path(machine: &Machine) -> Option<OsString> {
    let variables = machine.environment();
    variables.into_iter().find_map(|(name, value)| (name == "LD_LIBRARY_PATH").then_some(value))
}

/// A communicator of `ranks` equal ranks on this machine.
struct View<'a> {
    ranks: usize,
    place: &'a Place,
    version: i32,
    file: &'a Table,
    /// The text of the table in the cache.
    kept: Option<&'a str>,
}

impl View<'_> {
    fn device(&self) -> Device {
        let Place { capability, multiprocessors, .. } = *self.place;
        Device { uuid: [0; 16], pci: (0, 0, 0), capability, multiprocessors }
    }

    fn negotiated(&self) -> NegotiatedConfig {
        let settings = nccl::settings();
        let multicast = self.place.multicast();
        let bits = [
            (true, capability::NATIVE | capability::UNBOUND),
            (multicast == Multicast::Yes, capability::MULTICAST),
            (RINGS_IN_FOURS.contains(&self.version), capability::RINGS_IN_FOURS),
        ];
        let device = self.device();
        let circumstances = self.place.circumstances();
        let table = self.table();
        let cache: Option<(&Circumstances, &Table)> = Some((&circumstances, &table));
        let cells = Brought::of(self.ranks, &device, multicast, self.file, cache).encode();
        let token = Token([0; 16]);
        let member = |rank: usize| Member {
            rank: rank as u32,
            process: token,
            process_id: 0,
            device,
            descriptor_socket: token,
            process_listener: token,
            cells: cells.clone(),
            checks: false,
            attachment: Vec::new(),
        };
        NegotiatedConfig {
            comm: token,
            version: Version::THIS,
            host: token,
            capabilities: bits.into_iter().filter(|(has, _)| *has).fold(0, |all, (_, bit)| all | bit),
            options: 0,
            ctas_max: if settings.ctas_max() > 0 { settings.ctas_max().min(GRID_MAX) } else { GRID_MAX },
            members: (0..self.ranks).map(member).collect(),
        }
    }

    fn table(&self) -> Table {
        self.kept.and_then(|text| Table::parse(text).ok()).unwrap_or_default()
    }

    fn lines(&self) -> Vec<Vec<String>> {
        let decided = decide(&self.negotiated());
        let line = |collective: Collective| {
            let limit = decided.limits.0[collective as usize].checked_sub(1);
            let source = decided.sources[collective as usize];
            vec![
                self.ranks.to_string(),
                collective.name().to_owned(),
                limit.map_or_else(|| "none".to_owned(), text::size),
                self.words(collective, source),
            ]
        };
        Collective::ALL.map(line).to_vec()
    }

    /// The name of a source; for the cache with the date and kind of the measurement.
    fn words(&self, collective: Collective, source: Source) -> String {
        let Place { capability, multiprocessors, .. } = *self.place;
        let key = Key {
            collective,
            ranks: self.ranks,
            capability,
            multiprocessors,
            multicast: self.place.multicast(),
        };
        let is_cell = |line: &&str| Cell::parse(line).is_ok_and(|cell| cell.key == key);
        match source {
            Source::Cache => {
                let line = self.kept.and_then(|text| text.lines().find(is_cell)).unwrap_or_default();
                let when = line.split_once('#').map_or("", |(_, when)| when.trim());
                format!("cache: measured here {when}")
            }
            source => source.name().to_owned(),
        }
    }
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
        let view = View { ranks: 2, place: &place, version: 22809, file: &file, kept: Some(&kept) };
        let lines = view.lines();
        assert_eq!(
            lines[0],
            ["2", "all_reduce", "1M", "cache: measured here 1970-01-01T00:00:00Z, tune of 0.2.0"]
        );
        assert_eq!(lines[1], ["2", "broadcast", "32M", "built in"]);
        assert_eq!(lines[2], ["2", "reduce", "none", "file"]);
        assert_eq!(lines[7], ["2", "other_all_reduce", "8M", "built in"]);
        let without = View { kept: None, ..view };
        assert_eq!(without.lines()[0], ["2", "all_reduce", "256M", "built in"]);
    }
}
