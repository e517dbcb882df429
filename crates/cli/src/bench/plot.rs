//! Curves of a run as SVG: time by size, both axes logarithmic, and below them the bandwidth of the bus, and the ratio.

use super::record::Record;
use crate::text;
use anyhow::{Context, Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};

const SIZE: (u32, u32) = (800, 960);
const TIME_HEIGHT: i32 = 420;
const BANDWIDTH_HEIGHT: i32 = 320;
/// The most labels of an axis.
const LABELS: usize = 12;
// Colors that can be told apart without color vision.
const PLAIN: RGBColor = RGBColor(0x99, 0x99, 0x99);
const WINDLASS: RGBColor = RGBColor(0x00, 0x72, 0xb2);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Makes the folder of curves, and tries to write in it.
pub fn make_folder(folder: &Path) -> Result<()> {
    let made = std::fs::create_dir_all(folder).and_then(|()| tempfile::tempfile_in(folder));
    let expected = || {
        format!(
            "--plot {}: expected a folder that can be made or written in; nothing was measured",
            folder.display()
        )
    };
    made.map(drop).with_context(expected)
}

/// Draws one file for each operation, type and mode; returns their paths.
pub fn draw(folder: &Path, records: &[Record]) -> Result<Vec<PathBuf>> {
    make_folder(folder)?;
    let mut curves: BTreeMap<String, Vec<&Record>> = BTreeMap::new();
    for record in records {
        let name = format!("{}-{}-{}", record.op, record.element, record.mode.name());
        curves.entry(name).or_default().push(record);
    }
    let mut files = Vec::new();
    for (name, mut records) in curves {
        records.sort_by_key(|record| record.bytes);
        let file = folder.join(format!("{name}.svg"));
        let mut svg = String::new();
        picture(&mut svg, &records)?;
        std::fs::write(&file, svg).with_context(|| format!("cannot write {}", file.display()))?;
        files.push(file);
    }
    Ok(files)
}

fn picture(svg: &mut String, records: &[&Record]) -> Result<()> {
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&WHITE).map_err(drawing)?;
    let (times, below) = root.split_vertically(TIME_HEIGHT);
    let (bandwidths, ratios) = below.split_vertically(BANDWIDTH_HEIGHT);
    let title = title(records[0]);
    draw_curves(&times, records, (&title, "us a call"), |_, us| us)?;
    // Operations without a bandwidth have none at any size.
    if records.iter().all(|record| record.bandwidths(record.plain_us).is_some()) {
        let bus = |record: &Record, us: f64| record.bandwidths(us).map_or(1.0, |both| both.1);
        draw_curves(&bandwidths, records, ("", "busbw, GB/s"), bus)?;
    }
    draw_ratios(&ratios, records)?;
    root.present().map_err(drawing)
}

fn title(record: &Record) -> String {
    let machine =
        if record.machine.simulated { "simulator: times mean nothing" } else { &record.machine.gpu };
    format!(
        "{} {} {}, {} ranks, memory {}{}, NCCL {}, {machine}",
        record.op,
        record.element,
        record.mode.name(),
        record.ranks,
        record.memory.name(),
        record.company.words(),
        record.versions.nccl
    )
}

/// The font size for a title that must fit the width; a letter is about half as wide as high.
fn caption_size(title: &str) -> u32 {
    (2 * SIZE.0 / title.chars().count().max(1) as u32).clamp(8, 18)
}

/// Draws both sides, by what `value` makes of a time.
fn draw_curves(
    area: &Area,
    records: &[&Record],
    (title, unit): (&str, &str),
    value: impl Fn(&Record, f64) -> f64,
) -> Result<()> {
    let sides = [
        ("NCCL alone", PLAIN, (|record: &Record| record.plain_us) as fn(&Record) -> f64),
        ("through Windlass", WINDLASS, |record| record.windlass_us),
    ];
    let values = |time: fn(&Record) -> f64| records.iter().map(move |record| (record, time(record)));
    let (low, high) =
        range(sides.iter().flat_map(|side| values(side.2)).map(|(record, us)| value(record, us)));
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", caption_size(title)))
        .margin(12)
        .x_label_area_size(32)
        .y_label_area_size(64)
        .build_cartesian_2d(size_range(records).log_scale().base(2.0), (low / 1.5..high * 1.5).log_scale())
        .map_err(drawing)?;
    chart
        .configure_mesh()
        .max_light_lines(0)
        .y_desc(unit)
        .x_labels(LABELS)
        .y_labels(LABELS)
        .x_label_formatter(&size_label)
        .y_label_formatter(&|value| {
            format!("{value:.3}").trim_end_matches('0').trim_end_matches('.').to_owned()
        })
        .draw()
        .map_err(drawing)?;
    for (name, color, time) in sides {
        let points: Vec<(f64, f64)> =
            values(time).map(|(record, us)| (place(record), value(record, us))).collect();
        let style = color.stroke_width(2);
        chart
            .draw_series(LineSeries::new(points, style).point_size(3))
            .map_err(drawing)?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], style));
    }
    let mut labels = chart.configure_series_labels();
    labels.position(SeriesLabelPosition::UpperLeft).border_style(BLACK).background_style(WHITE);
    labels.draw().map_err(drawing)
}

fn draw_ratios(area: &Area, records: &[&Record]) -> Result<()> {
    let (low, high) = range(records.iter().map(|record| record.ratio).chain([1.0]));
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(32)
        .y_label_area_size(64)
        .build_cartesian_2d(size_range(records).log_scale().base(2.0), (low - 0.05)..(high + 0.05))
        .map_err(drawing)?;
    chart
        .configure_mesh()
        .max_light_lines(0)
        .x_desc("bytes")
        .y_desc("ratio")
        .x_labels(LABELS)
        .y_labels(LABELS)
        .x_label_formatter(&size_label)
        .draw()
        .map_err(drawing)?;
    let ends = [records[0], records[records.len() - 1]].map(|record| (place(record), 1.0));
    chart.draw_series(LineSeries::new(ends, PLAIN)).map_err(drawing)?;
    let points: Vec<(f64, f64)> = records.iter().map(|record| (place(record), record.ratio)).collect();
    chart.draw_series(LineSeries::new(points, WINDLASS.stroke_width(2)).point_size(3)).map_err(drawing)?;
    Ok(())
}

/// The size on the axis: at least one byte, for the logarithm.
fn place(record: &Record) -> f64 {
    record.bytes.max(1) as f64
}

fn size_range(records: &[&Record]) -> std::ops::Range<f64> {
    let (low, high) = range(records.iter().map(|record| place(record)));
    low / 1.2..high * 1.2
}

fn size_label(bytes: &f64) -> String {
    text::size(bytes.round() as u64)
}

fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)))
}

fn drawing(error: impl Display) -> anyhow::Error {
    anyhow!("cannot draw: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::record::tests::record;

    /// Each operation has one picture with both curves, a legend and the sizes, also for a single point.
    #[test]
    fn draws() {
        let folder = tempfile::tempdir().unwrap();
        let records = [
            record("all_reduce", 1 << 20, 20.0, 21.0),
            record("all_reduce", 1024, 10.0, 5.0),
            record("reduce", 1024, 10.0, 10.0),
        ];
        let files = draw(folder.path(), &records).unwrap();
        let names: Vec<_> = files.iter().filter_map(|file| file.file_name()?.to_str()).collect();
        assert_eq!(names, ["all_reduce-float-eager.svg", "reduce-float-eager.svg"]);
        let svg = std::fs::read_to_string(&files[0]).unwrap();
        for part in [
            "<svg",
            "through Windlass",
            "NCCL alone",
            "us a call",
            "busbw, GB/s",
            "all_reduce float eager, 2 ranks, memory nccl, NCCL",
        ] {
            assert!(svg.contains(part), "no {part:?} in {svg}");
        }
        let mut beside = records[0].clone();
        beside.company.beside = 3;
        let svg = std::fs::read_to_string(&draw(folder.path(), &[beside]).unwrap()[0]).unwrap();
        assert!(svg.contains("memory nccl, beside 3 idle, NCCL"), "{svg}");
    }
}
