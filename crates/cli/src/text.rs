//! Text for people: printing, tables, sizes.

use std::io::{ErrorKind, Write};
use std::time::Instant;

/// Writes to standard output, with colors where it is a terminal that has them. A reader that has closed it has enough (`| head`): that is no error.
pub fn print(text: impl AsRef<str>) -> anyhow::Result<()> {
    match anstream::stdout().write_all(text.as_ref().as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(anyhow::anyhow!("cannot write to standard output: {error}"))
        }
        _ => Ok(()),
    }
}

/// Writes to standard error. Where that cannot be written, nothing else is to be done.
pub fn tell(text: std::fmt::Arguments<'_>) {
    let _ = std::io::stderr().write_fmt(text);
}

/// Writes a line to standard error. A reader that has closed it (`2>&1 | head`) does no harm, unlike with `eprintln!`.
macro_rules! say {
    ($($words:tt)*) => {
        $crate::text::tell(format_args!("{}\n", format_args!($($words)*)))
    };
}

/// Rows of cells below their head as aligned text, two spaces between columns; the columns in `right` are aligned to the right. Without a
/// head the rows stand alone.
pub fn table(head: &[&str], rows: impl IntoIterator<Item = Vec<String>>, right: &[usize]) -> String {
    let mut lines = vec![head.iter().map(|cell| (*cell).to_owned()).collect()];
    lines.extend(rows);
    let width = |column: usize| {
        lines.iter().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max()
    };
    let widths: Vec<usize> = (0..).map_while(width).collect();
    let mut text = String::new();
    for line in lines.iter().filter(|line| !line.is_empty()) {
        let cell = |(column, cell): (usize, &String)| {
            let width = widths[column];
            if right.contains(&column) { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        };
        text += line.iter().enumerate().map(cell).collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

/// How long the rest takes if it is like what was done, after a line of progress; empty where nothing is left.
pub fn left(began: Instant, done: usize, all: usize) -> String {
    let left = began.elapsed().mul_f64(all.saturating_sub(done) as f64 / done.max(1) as f64);
    match left.as_secs() {
        _ if done >= all => String::new(),
        seconds @ 0..=99 => format!(", about {} s left", seconds + 1),
        seconds => format!(", about {} min left", seconds.div_ceil(60)),
    }
}

/// A number of bytes, in the largest unit that keeps it whole: 65536 is `64K`.
pub fn size(bytes: u64) -> String {
    for (shift, unit) in [(30, "G"), (20, "M"), (10, "K")] {
        if bytes >= 1 << shift && bytes.is_multiple_of(1 << shift) {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Columns are as wide as their widest cell; short lines are allowed; nothing trails.
    #[test]
    fn aligns() {
        let rows = || [vec!["wider".into(), "1".into()], vec!["x".into()]];
        assert_eq!(table(&["a", "long"], rows(), &[1]), "a      long\nwider     1\nx\n");
        assert_eq!(table(&[], rows(), &[1]), "wider  1\nx\n");
    }

    /// The rest is as long as what was done, in whole units.
    #[test]
    fn times_left() {
        let began = Instant::now() - Duration::from_secs(100);
        assert_eq!(
            [1, 2, 4, 5].map(|done| left(began, done, 5)),
            [", about 7 min left", ", about 3 min left", ", about 26 s left", ""]
        );
    }

    /// Sizes read as they are written on the command line.
    #[test]
    fn sizes() {
        assert_eq!(
            [0, 1000, 1024, 1536, 64 << 20, 3 << 30].map(size),
            ["0", "1000", "1K", "1536", "64M", "3G"]
        );
    }
}
