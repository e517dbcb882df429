//! Reads and writes tuning tables as text: `windlass tune` writes them and `WINDLASS_TUNING` names one. Pure.
//!
//! ```text
//! windlass-tuning 1
//! # anything
//! all_reduce ranks 2 gpu 9.0/132 multicast no native_bytes_max 32M
//! reduce ranks 2 gpu 9.0/132 multicast no native_bytes_max none
//! ```
//!
//! A line is a cell: a collective over so many ranks, on GPUs of one compute capability and number of multiprocessors, where NCCL may or may
//! not use multicast (`NCCL_NVLS_ENABLE`). Cells that a table lacks are built in; that of an uneven collective is at most that of its even form.
//! The order of lines and all comments are for people.

use std::fmt;

use thiserror::Error;

use super::{COLLECTIVES, Collective, RANKS_MAX};

/// The first line of a table, with the version of the format.
pub const HEAD: &str = "windlass-tuning 1";
/// The most bytes of a table.
pub const TEXT_BYTES_MAX: usize = 256 << 10;
/// The largest limit: in 32 bits the kernels count the packets, of 256 bytes and more, that one rank sends another.
pub const NATIVE_BYTES_MAX: u64 = 256 << 30;
/// The most cells of a table.
pub const CELLS_MAX: usize = 1024;

/// Which calls a limit is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub struct Key {
    pub collective: Collective,
    pub ranks: usize,
    /// Compute capability, 90 for 9.0.
    pub capability: u16,
    pub multiprocessors: u16,
    pub multicast: Multicast,
}

/// Whether NCCL may use multicast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Multicast {
    No,
    Yes,
}

/// A key, and the largest size in bytes that native collectives serve. None: they serve no size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub struct Cell {
    pub key: Key,
    pub native_bytes_max: Option<u64>,
}

/// A table. The default one has no cells.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Sorted by key, each key once.
    cells: Vec<Cell>,
}

/// What is wrong with a table's text, and where.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("line {line}: {words}")]
pub struct Complaint {
    /// The line's number, from 1.
    pub line: usize,
    /// What was found, and what was expected.
    pub words: String,
}

impl Table {
    /// Reads a table.
    pub fn parse(text: &str) -> Result<Table, Complaint> {
        let mut lines = (1..).zip(text.lines()).filter(|(_, line)| !is_comment(line));
        let complaint = |line, words| Complaint { line, words };
        match lines.next() {
            Some((_, head)) if head.split_whitespace().eq(HEAD.split_whitespace()) => {}
            Some((line, head)) => return Err(complaint(line, format!("\"{head}\", expected \"{HEAD}\""))),
            None => return Err(complaint(1, format!("the text ends, expected \"{HEAD}\""))),
        }
        let mut cells: Vec<Cell> = Vec::new();
        for (line, text) in lines {
            let cell = cell(text).map_err(|words| complaint(line, words))?;
            if cells.iter().any(|known| known.key == cell.key) {
                return Err(complaint(line, format!("\"{text}\", but a line before says the same cell")));
            }
            if cells.len() == CELLS_MAX {
                return Err(complaint(line, format!("more cells than {CELLS_MAX}")));
            }
            cells.push(cell);
        }
        cells.sort();
        Ok(Table { cells })
    }

    /// The limit of a cell, if the table has that cell.
    pub fn get(&self, key: &Key) -> Option<Option<u64>> {
        let found = self.cells.binary_search_by(|cell| cell.key.cmp(key)).ok()?;
        Some(self.cells[found].native_bytes_max)
    }

    /// How many cells it has.
    pub fn cells(&self) -> usize {
        self.cells.len()
    }
}

fn is_comment(line: &str) -> bool {
    let line = line.trim();
    line.is_empty() || line.starts_with('#')
}

/// Reads a line.
fn cell(text: &str) -> Result<Cell, String> {
    let mut words = text.split_whitespace();
    let mut next = |expected: &str| words.next().ok_or_else(|| format!("the line ends, expected {expected}"));
    let collective = value(next("a collective")?, &named_collectives(), collective_of)?;
    keyword(next("\"ranks\"")?, "ranks")?;
    let ranks =
        value(next("a number of ranks")?, &format!("a number of ranks from 2 to {RANKS_MAX}"), ranks_of)?;
    keyword(next("\"gpu\"")?, "gpu")?;
    let about = "a compute capability and a number of multiprocessors such as 9.0/132";
    let (capability, multiprocessors) = value(next(about)?, about, gpu_of)?;
    keyword(next("\"multicast\"")?, "multicast")?;
    let multicast = value(next("yes or no")?, "yes or no", multicast_of)?;
    let word = next("\"native_bytes_max\"")?;
    // Earlier versions wrote another word.
    keyword(if word == "fast_bytes_max" { "native_bytes_max" } else { word }, "native_bytes_max")?;
    let about = "bytes up to 256G, with K, M or G for powers of 1024, or none";
    let native_bytes_max = value(next(about)?, about, limit_of)?;
    match words.next() {
        Some(more) if !more.starts_with('#') => Err(format!("\"{more}\", expected the end of the line")),
        _ => Ok(Cell {
            key: Key { collective, ranks, capability, multiprocessors, multicast },
            native_bytes_max,
        }),
    }
}

fn keyword(word: &str, expected: &str) -> Result<(), String> {
    if word == expected { Ok(()) } else { Err(format!("\"{word}\", expected \"{expected}\"")) }
}

fn value<T>(word: &str, expected: &str, read: impl FnOnce(&str) -> Option<T>) -> Result<T, String> {
    read(word).ok_or_else(|| format!("\"{word}\", expected {expected}"))
}

fn named_collectives() -> String {
    let names: Vec<&str> = Collective::ALL.iter().map(|one| one.name()).collect();
    format!("one of {}", names.join(", "))
}

fn collective_of(word: &str) -> Option<Collective> {
    Collective::ALL.into_iter().find(|one| one.name() == word)
}

fn ranks_of(word: &str) -> Option<usize> {
    word.parse().ok().filter(|ranks| (2..=RANKS_MAX).contains(ranks))
}

/// `9.0/132`; the minor version is one digit.
fn gpu_of(word: &str) -> Option<(u16, u16)> {
    let (capability, multiprocessors) = word.split_once('/')?;
    let (major, minor) = capability.split_once('.')?;
    let (major, minor): (u16, u16) = (major.parse().ok()?, minor.parse().ok()?);
    let capability = major.checked_mul(10)?.checked_add(minor)?;
    (minor < 10).then_some((capability, multiprocessors.parse().ok()?))
}

fn multicast_of(word: &str) -> Option<Multicast> {
    [(Multicast::No, "no"), (Multicast::Yes, "yes")]
        .into_iter()
        .find_map(|(value, name)| (name == word).then_some(value))
}

fn limit_of(word: &str) -> Option<Option<u64>> {
    if word == "none" {
        return Some(None);
    }
    let digits = word.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match &word[digits.len()..] {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return None,
    };
    let bytes = digits.parse::<u64>().ok()?.checked_mul(1 << shift)?;
    (bytes <= NATIVE_BYTES_MAX).then_some(Some(bytes))
}

impl Cell {
    /// Reads a line of a table, or says what is wrong with it.
    pub fn parse(line: &str) -> Result<Cell, String> {
        cell(line)
    }
}

/// In the form that [`Cell::parse`] reads.
impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Key { collective, ranks, capability, multiprocessors, multicast } = self.key;
        let (major, minor) = (capability / 10, capability % 10);
        let multicast = if multicast == Multicast::Yes { "yes" } else { "no" };
        write!(
            f,
            "{} ranks {ranks} gpu {major}.{minor}/{multiprocessors} multicast {multicast} native_bytes_max ",
            collective.name()
        )?;
        f.write_str(&limit_text(self.native_bytes_max))
    }
}

/// A limit in the form of tables.
pub(super) fn limit_text(limit: Option<u64>) -> String {
    let Some(bytes) = limit else { return "none".into() };
    let units = [(30, "G"), (20, "M"), (10, "K")];
    let (shift, letter) =
        units.into_iter().find(|(shift, _)| bytes != 0 && bytes % (1 << shift) == 0).unwrap_or((0, ""));
    format!("{}{letter}", bytes >> shift)
}

impl Collective {
    /// All collectives that have cells.
    pub const ALL: [Collective; COLLECTIVES] = [
        Collective::AllReduce,
        Collective::Broadcast,
        Collective::Reduce,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::UnevenAllGather,
        Collective::UnevenReduceScatter,
        Collective::OtherAllReduce,
        Collective::OtherReduce,
        Collective::OtherReduceScatter,
        Collective::RegisteredAllGather,
    ];

    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Collective::AllReduce => "all_reduce",
            Collective::Broadcast => "broadcast",
            Collective::Reduce => "reduce",
            Collective::AllGather => "all_gather",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::UnevenAllGather => "uneven_all_gather",
            Collective::UnevenReduceScatter => "uneven_reduce_scatter",
            Collective::OtherAllReduce => "other_all_reduce",
            Collective::OtherReduce => "other_reduce",
            Collective::OtherReduceScatter => "other_reduce_scatter",
            Collective::RegisteredAllGather => "registered_all_gather",
        }
    }

    /// Whether it reduces with other types or operations than sums and averages of short floats.
    pub fn is_other(self) -> bool {
        matches!(self, Collective::OtherAllReduce | Collective::OtherReduce | Collective::OtherReduceScatter)
    }
}

#[cfg(any(test, feature = "test-support"))]
mod test_support {
    use super::*;

    impl Table {
        /// The table as text, for fuzzing.
        pub fn text(&self) -> String {
            let rows = self.cells.iter().map(Cell::to_string);
            [HEAD.to_owned()].into_iter().chain(rows).collect::<Vec<_>>().join("\n")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LINE: &str = "all_reduce ranks 2 gpu 9.0/132 multicast no native_bytes_max 32M";

    #[test]
    fn earlier_word_is_read() {
        let earlier = LINE.replace("native_bytes_max", "fast_bytes_max");
        assert_eq!(table(&earlier).unwrap(), table(LINE).unwrap());
    }

    fn table(lines: &str) -> Result<Table, Complaint> {
        Table::parse(&format!("{HEAD}\n{lines}\n"))
    }

    fn key(collective: Collective) -> Key {
        Key { collective, ranks: 2, capability: 90, multiprocessors: 132, multicast: Multicast::No }
    }

    /// A cell is found by its whole key; cells that a table does not have are not found.
    #[test]
    fn read() {
        let text = format!(
            "# when\n\n  windlass-tuning  1 \n# why\n{LINE} # how\nreduce ranks 2 gpu 9.0/132 multicast no native_bytes_max none\n"
        );
        let table = Table::parse(&text).unwrap();
        assert_eq!(table.cells(), 2);
        assert_eq!(table.get(&key(Collective::AllReduce)), Some(Some(32 << 20)));
        assert_eq!(table.get(&key(Collective::Reduce)), Some(None));
        let all_reduce = key(Collective::AllReduce);
        for unknown in [
            key(Collective::Broadcast),
            Key { ranks: 3, ..all_reduce },
            Key { capability: 100, ..all_reduce },
            Key { multiprocessors: 114, ..all_reduce },
            Key { multicast: Multicast::Yes, ..all_reduce },
        ] {
            assert_eq!(table.get(&unknown), None, "{unknown:?}");
        }
    }

    /// What is wrong is named, with its line and what was expected.
    #[test]
    fn refused() {
        let head = Table::parse("# nothing\nwindlass-tuning 2\n").unwrap_err();
        assert_eq!(head.to_string(), "line 2: \"windlass-tuning 2\", expected \"windlass-tuning 1\"");
        assert_eq!(Table::parse("").unwrap_err().line, 1);
        for (wrong, right, expected) in [
            (
                "all_reduce",
                "allreduce",
                "\"allreduce\", expected one of all_reduce, broadcast, reduce, all_gather, reduce_scatter, uneven_all_gather, \
                 uneven_reduce_scatter",
            ),
            ("ranks", "rank", "\"rank\", expected \"ranks\""),
            ("ranks 2", "ranks 9", "\"9\", expected a number of ranks from 2 to 8"),
            ("9.0/132", "H200", "\"H200\", expected a compute capability"),
            ("9.0/132", "9.10/132", "\"9.10/132\", expected a compute capability"),
            ("multicast no", "multicast off", "\"off\", expected yes or no"),
            ("32M", "32X", "\"32X\", expected bytes"),
            ("32M", "18446744073709551615G", "expected bytes"),
            ("32M", "257G", "\"257G\", expected bytes up to 256G"),
            ("32M", "", "the line ends, expected bytes"),
            ("32M", "32M more", "\"more\", expected the end of the line"),
        ] {
            let complaint = table(&LINE.replace(wrong, right)).unwrap_err();
            assert_eq!(complaint.line, 2);
            assert!(complaint.words.contains(expected), "{complaint}");
        }
        let twice = table(&format!("{LINE}\n{}", LINE.replace("32M", "1K"))).unwrap_err();
        assert_eq!(twice.line, 3);
        assert!(twice.words.contains("the same cell"), "{twice}");
    }

    /// A table has no more cells than it may have.
    #[test]
    fn bounded() {
        let lines = |count: usize| {
            (0..count).map(|number| LINE.replace("132", &number.to_string())).collect::<Vec<_>>().join("\n")
        };
        assert_eq!(table(&lines(CELLS_MAX)).unwrap().cells(), CELLS_MAX);
        assert!(table(&lines(CELLS_MAX + 1)).unwrap_err().words.contains("more cells"));
    }

    proptest! {
        /// What is written is read.
        #[test]
        fn written(
            collective in 0..COLLECTIVES,
            ranks in 2..=RANKS_MAX,
            (capability, multiprocessors) in (0..200_u16, any::<u16>()),
            multicast in any::<bool>(),
            native_bytes_max in proptest::option::of(prop_oneof![0..=NATIVE_BYTES_MAX, (0..=38_u32).prop_map(|shift| 1 << shift)]),
        ) {
            let multicast = if multicast { Multicast::Yes } else { Multicast::No };
            let collective = Collective::ALL[collective];
            let key = Key { collective, ranks, capability, multiprocessors, multicast };
            let text = Cell { key, native_bytes_max }.to_string();
            prop_assert_eq!(table(&text).unwrap().get(&key), Some(native_bytes_max), "{}", text);
        }

        /// No text makes it panic.
        #[test]
        fn any_text(text in "\\PC{0,200}") {
            let _ = Table::parse(&text);
            let _ = table(&text);
        }
    }
}
