//! Text for people: printing, tables, sizes.

use std::io::{ErrorKind, Write};

/// Writes to standard output. A reader that has closed it has enough (`| head`): that is no error.
pub fn print(text: impl AsRef<str>) -> anyhow::Result<()> {
    match std::io::stdout().write_all(text.as_ref().as_bytes()) {
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

/// Lines of cells as aligned text, two spaces between columns; the columns in `right` are aligned to the right.
pub fn table(lines: &[Vec<String>], right: &[usize]) -> String {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        lines.iter().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for line in lines {
        let mut row = String::new();
        for (column, cell) in line.iter().enumerate() {
            let gap = if column == 0 { "" } else { "  " };
            let width = widths[column];
            if right.contains(&column) {
                row += &format!("{gap}{cell:>width$}");
            } else {
                row += &format!("{gap}{cell:<width$}");
            }
        }
        text += row.trim_end();
        text.push('\n');
    }
    text
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

    /// Columns are as wide as their widest cell; short lines are allowed; nothing trails.
    #[test]
    fn aligns() {
        let lines = [vec!["a".into(), "long".into()], vec!["wider".into(), "1".into()], vec!["x".into()]];
        assert_eq!(table(&lines, &[1]), "a      long\nwider     1\nx\n");
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
