//! The tuning table of this process: read once, from the file that `WINDLASS_TUNING` names. One that cannot be read is none, as is
//! one that not all ranks of a communicator have: each rank tells the others the hash of its own.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Once;

use once_cell::sync::OnceCell;

use windlass_base::config::config;
use windlass_bootstrap::negotiated::NegotiatedConfig;
use windlass_transport::tuning::file::{TEXT_BYTES_MAX, Table};

/// The table. Reads the file at the first call, which may wait for the disk: at inits only.
pub(in crate::peers) fn table() -> &'static Table {
    static TABLE: OnceCell<Table> = OnceCell::new();
    TABLE.get_or_init(|| {
        let Some(path) = &config().tuning else { return Table::default() };
        read(path).unwrap_or_else(|why| {
            let path = path.display();
            log::warn!("WINDLASS_TUNING: {path} is no tuning table, the built-in one holds: {why}");
            Table::default()
        })
    })
}

fn read(path: &Path) -> Result<Table, String> {
    let mut text = String::new();
    let file = File::open(path).map_err(|error| error.to_string())?;
    let most = TEXT_BYTES_MAX as u64;
    file.take(most + 1).read_to_string(&mut text).map_err(|error| error.to_string())?;
    if text.len() > TEXT_BYTES_MAX {
        return Err(format!("it has more than {TEXT_BYTES_MAX} bytes"));
    }
    let table = Table::parse(&text).map_err(|complaint| complaint.to_string())?;
    log::info!("tuning table {}: {} cells, hash {:016x}", path.display(), table.cells(), table.hash());
    Ok(table)
}

/// Says once that ranks have not the same table.
pub(in crate::peers) fn say(negotiated: &NegotiatedConfig) {
    static SAID: Once = Once::new();
    if let Some(words) = difference(negotiated) {
        SAID.call_once(|| log::warn!("{words}"));
    }
}

/// What there is to say of ranks with other tables.
fn difference(negotiated: &NegotiatedConfig) -> Option<String> {
    let first = negotiated.members.first()?.tuning;
    if negotiated.members.iter().all(|member| member.tuning == first) {
        return None;
    }
    let name = |hash| if hash == 0 { "none".to_owned() } else { format!("{hash:016x}") };
    let hashes: Vec<String> = negotiated
        .members
        .iter()
        .map(|member| format!("rank {} {}", member.rank, name(member.tuning)))
        .collect();
    Some(format!(
        "ranks of a communicator have different tuning tables (WINDLASS_TUNING), so the built-in one holds on all of them: {}",
        hashes.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use windlass_bootstrap::negotiated::{Device, Member, Token, Version};

    fn negotiated(hashes: &[u64]) -> NegotiatedConfig {
        let token = Token([0; 16]);
        let device = Device { uuid: [0; 16], pci: (0, 0, 0), capability: 90, multiprocessors: 132 };
        let member = |(rank, tuning): (u32, &u64)| Member {
            rank,
            process: token,
            process_id: 0,
            device,
            descriptor_socket: token,
            process_listener: token,
            tuning: *tuning,
            checks: false,
            attachment: Vec::new(),
        };
        let members = (0..).zip(hashes).map(member).collect();
        let version = Version::THIS;
        NegotiatedConfig {
            comm: token,
            version,
            host: token,
            capabilities: 0,
            options: 0,
            ctas_max: 0,
            members,
        }
    }

    /// Only where they differ is there anything to say, and then of every rank.
    #[test]
    fn differences() {
        assert_eq!(difference(&negotiated(&[])), None);
        assert_eq!(difference(&negotiated(&[7, 7, 7])), None);
        assert_eq!(difference(&negotiated(&[0, 0])), None);
        let words = difference(&negotiated(&[0xabc, 0])).unwrap();
        assert!(words.ends_with("rank 0 0000000000000abc, rank 1 none"), "{words}");
    }

    /// A file that is not there, is too long or is no table says so.
    #[test]
    fn unreadable() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("table");
        assert!(read(&file).unwrap_err().contains("No such file"));
        std::fs::write(&file, "#".repeat(TEXT_BYTES_MAX + 1)).unwrap();
        assert!(read(&file).unwrap_err().contains("more than"));
        std::fs::write(&file, "windlass-tuning 1\nnonsense\n").unwrap();
        assert!(read(&file).unwrap_err().starts_with("line 2: \"nonsense\", expected one of"));
        std::fs::write(&file, "windlass-tuning 1\n").unwrap();
        assert_eq!(read(&file), Ok(Table::default()));
    }
}
