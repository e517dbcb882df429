//! Reads and writes what was measured on this machine, as text: a file for each set of circumstances. Pure.
//!
//! ```text
//! windlass-cache 1
//! circumstance driver 580
//! circumstance gpu 9.0/132 79GiB
//! windlass-tuning 1
//! all_reduce ranks 2 gpu 9.0/132 multicast no native_bytes_max 32M
//! end 0123456789abcdef
//! ```
//!
//! All circumstances must be the reader's own. A [table](super::file) follows them, which can be used as a file by itself. The last line is a
//! checksum of all before it: a file that was cut off or changed is refused.

use super::file::{Cell, HEAD as HEAD_OF_TABLE, Key, TEXT_BYTES_MAX, Table};
use windlass_bootstrap::negotiated::bytes::checksum;

/// The first line, with the version of the format.
const HEAD: &str = "windlass-cache 1";
const CIRCUMSTANCE: &str = "circumstance ";
const END: &str = "end ";
/// The most bytes of a file.
pub const CACHE_BYTES_MAX: usize = TEXT_BYTES_MAX + (64 << 10);

/// What measurements depend on beside the cell. Cells of one set of circumstances never count under another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Circumstances {
    /// Name and value, sorted by name.
    lines: Vec<String>,
}

impl Circumstances {
    /// From names without blanks, and values; line ends in values become blanks.
    pub fn new(facts: impl IntoIterator<Item = (&'static str, String)>) -> Circumstances {
        let line = |(name, value): (&str, String)| format!("{name} {}", value.replace(['\n', '\r'], " "));
        let mut lines: Vec<String> = facts.into_iter().map(line).collect();
        lines.sort();
        Circumstances { lines }
    }

    /// From the [`lines`](Self::lines) of another process.
    pub fn of_lines(mut lines: Vec<String>) -> Circumstances {
        lines.sort();
        Circumstances { lines }
    }

    /// A digest of the circumstances, never 0.
    pub fn digest(&self) -> u64 {
        checksum(self.lines.join("\n").as_bytes()).max(1)
    }

    /// The name of the cache file of these circumstances.
    pub fn file_name(&self) -> String {
        format!("cells-{:016x}.txt", self.digest())
    }

    /// A line for each circumstance, for people.
    pub fn lines(&self) -> &[String] {
        &self.lines
    }
}

/// The text of a cache file, made from the text of a [table](super::file).
pub fn text(circumstances: &Circumstances, table: &str) -> String {
    let lines: String = circumstances.lines.iter().map(|line| format!("{CIRCUMSTANCE}{line}\n")).collect();
    let body = format!("{HEAD}\n{lines}{}\n", table.trim_end());
    format!("{body}{END}{:016x}\n", checksum(body.as_bytes()))
}

/// The text of `table`, with `cells` in the place of its own cells of the same keys. A new cell is its line, with comments above it and
/// behind it. Comments above a cell of `table` stay or go with the cell. A text that gets too long loses its comments.
pub fn merge(table: &str, cells: &[(Key, String)]) -> String {
    let mut text = format!("{HEAD_OF_TABLE}\n");
    let mut comments = String::new();
    for line in table.lines().filter(|line| !line.trim().is_empty()) {
        match Cell::parse(line) {
            Ok(cell) if cells.iter().any(|(key, _)| *key == cell.key) => comments.clear(),
            Ok(_) => text += &format!("{}{line}\n", std::mem::take(&mut comments)),
            Err(_) if line.starts_with('#') => comments += &format!("{line}\n"),
            Err(_) => {}
        }
    }
    cells.iter().for_each(|(_, lines)| text += &format!("{}\n", lines.trim_end()));
    if text.len() <= TEXT_BYTES_MAX {
        return text;
    }
    let bare = text.lines().filter(|line| !line.starts_with('#'));
    bare.map(|line| format!("{line}\n")).collect()
}

/// Reads a cache file of these circumstances: its table, or what is wrong.
pub fn parse(text: &str, circumstances: &Circumstances) -> Result<Table, String> {
    let (own, table) = split(text)?;
    if own != circumstances.lines {
        let differs = own.iter().find(|line| !circumstances.lines.iter().any(|own| own == *line));
        return Err(format!("it was measured under other circumstances: {}", differs.unwrap_or(&"fewer")));
    }
    Table::parse(table).map_err(|complaint| format!("in its table, {complaint}"))
}

/// The circumstances that a cache file names, and the text of its table, whatever the reader's circumstances are.
pub fn split(text: &str) -> Result<(Vec<&str>, &str), String> {
    let is_head = text.lines().next() == Some(HEAD);
    if !is_head {
        let found = text.lines().next().unwrap_or_default();
        return Err(format!("it begins with \"{found}\", expected \"{HEAD}\""));
    }
    let without_end = text.strip_suffix('\n').unwrap_or(text);
    let (body, end) = without_end.rsplit_once('\n').unwrap_or(("", without_end));
    let body = &text[..body.len() + 1];
    let expected = format!("{END}{:016x}", checksum(body.as_bytes()));
    if end != expected {
        return Err(format!("it ends with \"{end}\", expected \"{expected}\""));
    }
    let mut rest = &body[HEAD.len() + 1..];
    let mut lines = Vec::new();
    while let Some(after) = rest.strip_prefix(CIRCUMSTANCE) {
        let (line, next) = after.split_once('\n').unwrap_or((after, ""));
        lines.push(line);
        rest = next;
    }
    Ok((lines, rest))
}

#[cfg(test)]
mod tests {
    use super::super::Collective;
    use super::super::file::Multicast;
    use super::*;
    use proptest::prelude::*;

    const TABLE: &str =
        "windlass-tuning 1\nall_reduce ranks 2 gpu 9.0/132 multicast no native_bytes_max 1M\n";

    fn here() -> Circumstances {
        Circumstances::new([("power", "700 W".to_owned()), ("driver", "580\n".to_owned())])
    }

    /// What is written is read by whoever has the same circumstances, in whatever order they were told.
    #[test]
    fn read_again() {
        let text = text(&here(), TABLE);
        let table =
            parse(&text, &Circumstances::new([("driver", "580\n".into()), ("power", "700 W".into())]));
        let (collective, multicast) = (Collective::AllReduce, Multicast::No);
        let key = Key { collective, ranks: 2, capability: 90, multiprocessors: 132, multicast };
        assert_eq!(table.unwrap().get(&key), Some(Some(1 << 20)));
        assert_eq!(text.lines().nth(1), Some("circumstance driver 580 "));
        assert_eq!(split(&text).unwrap().1, TABLE);
        assert_eq!(here().file_name().len(), "cells-0123456789abcdef.txt".len());
    }

    /// Other circumstances, another version, a file cut off or changed: each is refused, and the error says why.
    #[test]
    fn refused() {
        let good = text(&here(), TABLE);
        let of = |text: &str| parse(text, &here()).unwrap_err();
        let colder = Circumstances::new([("power", "500 W".to_owned()), ("driver", "580 ".to_owned())]);
        assert!(parse(&good, &colder).unwrap_err().ends_with("other circumstances: power 700 W"));
        assert!(of(&good.replace("cache 1", "cache 2")).starts_with("it begins with \"windlass-cache 2\""));
        assert!(of(&good.replace("1M", "2M")).starts_with("it ends with \"end "));
        assert!(of("").starts_with("it begins with \"\""));
        for length in 0..good.len() - 1 {
            assert!(parse(&good[..length], &here()).is_err(), "{length}");
        }
        let broken = text(&here(), "windlass-tuning 1\nnonsense");
        assert!(of(&broken).starts_with("in its table, line 2"));
    }

    /// New cells replace old ones of their key, with the comments above them; other cells stay as they are.
    #[test]
    fn merged() {
        let line = |name: &str, limit: &str| {
            format!("{name} ranks 2 gpu 9.0/132 multicast no native_bytes_max {limit}")
        };
        let key = |collective| Key {
            collective,
            ranks: 2,
            capability: 90,
            multiprocessors: 132,
            multicast: Multicast::No,
        };
        let new = |collective: Collective, limit: &str| {
            (key(collective), format!("# new\n{} # today", line(collective.name(), limit)))
        };
        let first = merge("", &[new(Collective::AllReduce, "1M"), new(Collective::Reduce, "none")]);
        let second = merge(
            &first.replace("new", "old"),
            &[new(Collective::Reduce, "2M"), new(Collective::Broadcast, "4M")],
        );
        let expected = [
            HEAD_OF_TABLE.to_owned(),
            "# old".to_owned(),
            format!("{} # today", line("all_reduce", "1M")),
            "# new".to_owned(),
            format!("{} # today", line("reduce", "2M")),
            "# new".to_owned(),
            format!("{} # today", line("broadcast", "4M")),
        ];
        assert_eq!(second.lines().collect::<Vec<_>>(), expected);
        assert_eq!(Table::parse(&second).unwrap().cells(), 3);
        let long = (
            key(Collective::AllReduce),
            format!("#{}\n{}", "x".repeat(TEXT_BYTES_MAX), line("all_reduce", "1K")),
        );
        assert_eq!(merge(&second, &[long]).lines().count(), 4);
        assert_eq!(Circumstances::of_lines(vec!["b 1".into(), "a 2".into()]).lines(), ["a 2", "b 1"]);
    }

    proptest! {
        /// No text makes a reader panic.
        #[test]
        fn any_text(text in "\\PC{0,200}", cut in 0..300_usize) {
            let _ = parse(&text, &here());
            let good = super::text(&here(), TABLE);
            let cut = good.chars().take(cut).collect::<String>() + &text;
            prop_assert!(parse(&cut, &here()).is_err() || cut == good);
        }
    }
}
