//! Reads the limits of native collectives that this process brings to a communicator: from the file that `WINDLASS_TUNING` names, and from the
//! cache of limits measured on this machine. Files that cannot be read bring none. The ranks agree on limits in `transport::tuning::agreed`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;
use std::sync::Arc;

use once_cell::sync::OnceCell;

use windlass_base::config::{config, nccl};
use windlass_base::gpu::device::Facts;
use windlass_base::gpu::library::Driver;
use windlass_base::gpu::{self, Ordinal};
use windlass_base::lock::Mutex;
use windlass_bootstrap::negotiated::Device;
use windlass_transport::circumstances::{self, Nccl};
use windlass_transport::tuning::agreed::{Brought, Decided};
use windlass_transport::tuning::cache::{self, CACHE_BYTES_MAX, Circumstances};
use windlass_transport::tuning::file::{Multicast, TEXT_BYTES_MAX, Table};

/// The limits that this process brings for a communicator of so many ranks on this device, encoded. Reads files at the first call, which may
/// wait for the disk, so only inits call it.
pub(in crate::peers) fn brought(ranks: u32, facts: &Facts, device: &Device, multicast: bool) -> Vec<u8> {
    let (ranks, multicast) = (ranks as usize, if multicast { Multicast::Yes } else { Multicast::No });
    let cached = cached(ranks, facts, multicast);
    let cache = cached.as_deref().map(|(circumstances, table)| (circumstances, table));
    Brought::of(ranks, device, multicast, file_table(), cache).encode()
}

/// The table of `WINDLASS_TUNING`'s file, read once.
fn file_table() -> &'static Table {
    static TABLE: OnceCell<Table> = OnceCell::new();
    TABLE.get_or_init(|| {
        let Some(path) = &config().tuning else { return Table::default() };
        let table = read(path, TEXT_BYTES_MAX)
            .and_then(|text| Table::parse(&text).map_err(|complaint| complaint.to_string()));
        match table {
            Ok(table) => {
                log::info!("tuning table {}: {} cells", path.display(), table.cells());
                table
            }
            Err(why) => {
                log::warn!("WINDLASS_TUNING: {} is no tuning table and is left out: {why}", path.display());
                Table::default()
            }
        }
    })
}

type Cells = Option<Arc<(Circumstances, Table)>>;

/// The limits that were measured on this machine under the circumstances of such a communicator; an empty table if none were. Read once
/// per device and number of ranks, so that all communicators of a process have the same.
fn cached(ranks: usize, facts: &Facts, multicast: Multicast) -> Cells {
    static READ: Mutex<BTreeMap<(Ordinal, usize, Multicast), Cells>> = Mutex::new(BTreeMap::new());
    let mut all = READ.lock();
    all.entry((facts.ordinal, ranks, multicast))
        .or_insert_with(|| {
            let (folder, driver) = (config().cache.folder()?, gpu::driver().ok()?);
            let circumstances = observe(driver, ranks, facts, multicast)?;
            let table = read_cached(&folder, &circumstances);
            Some(Arc::new((circumstances, table)))
        })
        .clone()
}

fn observe(driver: &Driver, ranks: usize, facts: &Facts, multicast: Multicast) -> Option<Circumstances> {
    let real = nccl_sys::open::opened()?;
    let version = nccl::version();
    Some(circumstances::observe(driver, facts, ranks, multicast, Nccl { path: &real.path, version }))
}

fn read_cached(folder: &Path, circumstances: &Circumstances) -> Table {
    let path = folder.join(circumstances.file_name());
    let table = match std::fs::metadata(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Table::default(),
        // Opening a pipe would wait for a writer.
        Ok(facts) if !facts.is_file() => Err("it is no regular file".to_owned()),
        _ => read(&path, CACHE_BYTES_MAX).and_then(|text| cache::parse(&text, circumstances)),
    };
    match table {
        Ok(table) => {
            log::info!("limits measured on this machine, {}: {} cells", path.display(), table.cells());
            table
        }
        Err(why) => {
            log::warn!("limits measured on this machine, {}: left out: {why}", path.display());
            Table::default()
        }
    }
}

fn read(path: &Path, bytes_max: usize) -> Result<String, String> {
    let mut text = String::new();
    let file = File::open(path).map_err(|error| error.to_string())?;
    let read = file.take(bytes_max as u64 + 1).read_to_string(&mut text);
    read.map_err(|error| match error.kind() {
        ErrorKind::InvalidData => "it is no text".to_owned(),
        _ => error.to_string(),
    })?;
    if text.len() > bytes_max {
        return Err(format!("it has more than {bytes_max} bytes"));
    }
    Ok(text)
}

/// Warns, once each, of what differs between ranks.
pub(in crate::peers) fn say(decided: &Decided) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    for words in &decided.unlike {
        if SAID.lock().insert(words.clone()) {
            log::warn!("ranks have unlike {words}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file that is missing, too long or not text gives an error that says so.
    #[test]
    fn unreadable() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("table");
        assert!(read(&file, 10).unwrap_err().contains("No such file"));
        std::fs::write(&file, "#".repeat(11)).unwrap();
        assert_eq!(read(&file, 10).unwrap_err(), "it has more than 10 bytes");
        std::fs::write(&file, [0xff, 0xfe]).unwrap();
        assert_eq!(read(&file, 10).unwrap_err(), "it is no text");
        assert!(read(folder.path(), 10).unwrap_err().contains("directory"));
    }

    /// A cache without a file, or with a broken one, brings no limits.
    #[test]
    fn broken_caches() {
        let folder = tempfile::tempdir().unwrap();
        let here = Circumstances::new([("ranks", "2".to_owned())]);
        assert_eq!(read_cached(&folder.path().join("none"), &here), Table::default());
        assert_eq!(read_cached(folder.path(), &here), Table::default());
        let line = "all_reduce ranks 2 gpu 9.0/132 multicast no native_bytes_max 1M";
        let text = cache::text(&here, &format!("windlass-tuning 1\n{line}"));
        let file = folder.path().join(here.file_name());
        std::fs::write(&file, &text).unwrap();
        assert_eq!(read_cached(folder.path(), &here).cells(), 1);
        std::fs::write(&file, &text[..text.len() / 2]).unwrap();
        assert_eq!(read_cached(folder.path(), &here), Table::default());
    }
}
