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
/// The value of what could not be observed.
pub const UNKNOWN: &str = "unknown";
/// The name of a device's power limit.
pub const WATTS: &str = "watts";
/// The most bytes of a [shortened](Circumstances::shortened) line.
const LINE_BYTES_MAX: usize = 64;
/// The most bytes of a file.
pub const CACHE_BYTES_MAX: usize = TEXT_BYTES_MAX + (64 << 10);

/// What measurements depend on beside the cell. Cells of one set of circumstances never count under another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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

    /// The same in so few bytes that a message holds it: of a long line the beginning and a digest.
    pub fn shortened(&self) -> Circumstances {
        let short = |line: &String| match line.len() {
            0..=LINE_BYTES_MAX => line.clone(),
            length => {
                let head = &line[..line.floor_char_boundary(LINE_BYTES_MAX - 24)];
                format!("{head}... {:08x} {length}", checksum(line.as_bytes()) as u32)
            }
        };
        Circumstances { lines: self.lines.iter().map(short).collect() }
    }

    /// The first line in which this differs from another, and the other's.
    pub fn unlike<'a>(&'a self, other: &'a Circumstances) -> Option<(&'a str, &'a str)> {
        let line = |lines: &'a [String], at: usize| lines.get(at).map_or("nothing", String::as_str);
        let both = (0..self.lines.len().max(other.lines.len()))
            .map(|at| (line(&self.lines, at), line(&other.lines, at)));
        both.into_iter().find(|(one, other)| !are_alike(one, other))
    }
}

/// Whether two lines say as good as the same. What could not be observed contradicts nothing, and the power limits of a machine's GPUs
/// often differ by some watts.
fn are_alike(one: &str, other: &str) -> bool {
    let (Some((name, value)), Some((other_name, other_value))) = (one.split_once(' '), other.split_once(' '))
    else {
        return one == other;
    };
    let is_unknown = value == UNKNOWN || other_value == UNKNOWN;
    let is_near = || match (value.parse::<u32>(), other_value.parse::<u32>()) {
        (Ok(one), Ok(other)) => name == WATTS && one.abs_diff(other) <= one.max(other) / 20,
        _ => false,
    };
    name == other_name && (is_unknown || value == other_value || is_near())
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

    /// Power limits within a twentieth are alike, and so is what one side could not observe. All else is named.
    #[test]
    fn alike() {
        let of = |watts: &str, driver: &str| {
            Circumstances::new([(WATTS, watts.to_owned()), ("driver", driver.to_owned())])
        };
        let here = of("700", "580");
        for other in [of("700", "580"), of("665", "580"), of("735", UNKNOWN), of(UNKNOWN, "580")] {
            assert_eq!((here.unlike(&other), other.unlike(&here)), (None, None), "{other:?}");
        }
        assert_eq!(here.unlike(&of("664", "580")), Some(("watts 700", "watts 664")));
        assert_eq!(here.unlike(&of("664", "570")), Some(("driver 580", "driver 570")));
        assert_eq!(here.unlike(&Circumstances::new([])), Some(("driver 580", "nothing")));
        assert_eq!(Circumstances::new([]).unlike(&here), Some(("nothing", "driver 580")));
        let swapped = Circumstances::of_lines(vec!["driver 580".into(), "nvlinks 18".into()]);
        assert_eq!(here.unlike(&swapped), Some(("watts 700", "nvlinks 18")));
    }

    /// A long line is cut within its limit, and differs wherever the whole line does.
    #[test]
    fn shortened() {
        let of = |text: &str| Circumstances::new([("variables", text.to_owned()), (WATTS, "700".to_owned())]);
        let (one, other) = ("é".repeat(200), "é".repeat(201));
        let (short, unlike) = (of(&one).shortened(), of(&other).shortened());
        assert!(short.lines.iter().all(|line| line.len() <= LINE_BYTES_MAX), "{short:?}");
        assert!(short.lines[0].starts_with("variables é") && short.lines[1] == "watts 700");
        assert!(short.unlike(&unlike).is_some() && short.unlike(&of(&one).shortened()).is_none());
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
