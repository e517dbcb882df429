//! Writes the comparison as one HTML page that needs no other file.

use super::comparison::{Comparison, Run};
use super::plot::{self, Point};
use super::row::Row;
use super::schedule::{Purpose, Side};
use super::{counters_table, table};
use anyhow::Result;
use std::fmt::Write;

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}\
table{border-collapse:collapse;margin:1rem 0}th,td{text-align:left;padding:.2rem .9rem .2rem 0;border-bottom:1px solid #ddd}\
code{background:#f3f3f3;padding:.1rem .3rem;overflow-wrap:anywhere}svg{max-width:100%;height:auto;display:block;margin:.5rem 0}";

/// The whole page.
pub fn page(comparison: &Comparison) -> Result<String> {
    let request = &comparison.request;
    let command = escape(&request.command.join(" "));
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>windlass compare</title>\
         <style>{STYLE}</style></head><body>\n<h1>With Windlass and without</h1>\n<p><code>{command}</code></p>\n\
         <p>{}, {}. {} runs of each side in turns; medians (lowest to highest).</p>\n",
        escape(&request.date),
        escape(&request.windlass),
        request.pairs
    );
    let head = ["", "without", "with", "ratio of pairs", "with Windlass"].map(str::to_owned);
    let lines = comparison.rows.iter().map(|row| table::cells(row).to_vec());
    write_table(&mut out, &head, lines)?;
    writeln!(out, "<p>{}</p>", escape(&comparison.rule))?;
    if !comparison.notes.is_empty() {
        writeln!(out, "<ul>")?;
        for note in &comparison.notes {
            writeln!(out, "<li>{}</li>", escape(note))?;
        }
        writeln!(out, "</ul>")?;
    }
    for row in &comparison.rows {
        writeln!(out, "<h2>{}</h2>\n{}", escape(&row.name), plot::picture(row, &points(comparison, row))?)?;
    }
    writeln!(
        out,
        "<h2>What Windlass saw</h2>\n<p>{}</p>",
        escape(&counters_table::heading(&comparison.counters))
    )?;
    let lines = counters_table::lines(&comparison.counters);
    if let Some((head, lines)) = lines.split_first() {
        write_table(&mut out, head, lines.iter().cloned())?;
    }
    writeln!(out, "<h2>Runs</h2>")?;
    let head = ["run", "", "seconds", "output"].map(str::to_owned);
    write_table(&mut out, &head, comparison.runs.iter().map(run))?;
    out.push_str("</body></html>\n");
    Ok(out)
}

fn run(run: &Run) -> Vec<String> {
    let warmup = if run.turn.purpose == Purpose::Warmup { ", not counted" } else { "" };
    vec![
        run.turn.number.to_string(),
        format!("{}{warmup}", run.turn.side.words()),
        table::figure(run.seconds),
        run.log.display().to_string(),
    ]
}

/// A quantity's figures with the numbers of their runs.
fn points(comparison: &Comparison, row: &Row) -> [(Side, Vec<Point>); 2] {
    [(Side::Without, &row.values_without), (Side::With, &row.values_with)].map(|(side, values)| {
        let is_of = |run: &&Run| run.turn.side == side && run.turn.purpose == Purpose::Measured;
        let numbers = comparison.runs.iter().filter(is_of).map(|run| run.turn.number);
        (side, numbers.zip(values.iter().copied()).collect())
    })
}

fn write_table(
    out: &mut String,
    head: &[String],
    lines: impl Iterator<Item = Vec<String>>,
) -> std::fmt::Result {
    let cells = |tag: &str, cells: &[String]| -> String {
        cells.iter().map(|cell| format!("<{tag}>{}</{tag}>", escape(cell))).collect()
    };
    writeln!(out, "<table><tr>{}</tr>", cells("th", head))?;
    for line in lines {
        writeln!(out, "<tr>{}</tr>", cells("td", &line))?;
    }
    writeln!(out, "</table>")
}

/// Escapes text for HTML.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::comparison::tests::comparison;

    /// The page has the table, a plot for each quantity, the counters and the runs. It loads nothing, and escapes text.
    #[test]
    fn pages() {
        let page = page(&comparison(|run| run.nccl.clear())).unwrap();
        for part in [
            "<code>train a &lt;b&gt;</code>",
            "<td>wall time, s</td>",
            "<td>lower</td>",
            r"step (\S+) ms",
            "<td>ncclAllReduce</td><td>native</td><td>8</td><td>4.0 KiB</td>",
            "<td>1</td><td>without Windlass, not counted</td>",
            "/logs/8-without.log",
            "shorter peaks are missed",
        ] {
            assert!(page.contains(part), "no {part:?} in {page}");
        }
        assert_eq!(page.matches("<svg").count(), 3);
        assert!(!page.contains("a <b>"));
        for load in ["src=", "href=", "@import", "url("] {
            assert!(!page.contains(load), "{load}");
        }
    }
}
