//! Draws a quantity's figures as SVG: each run in the order of time, and the medians of both sides.

use super::row::Row;
use super::schedule::Side;
use super::table;
use anyhow::{Result, anyhow};
use plotters::prelude::*;
use std::fmt::Display;

const SIZE: (u32, u32) = (760, 300);
const LEGEND_HEIGHT: i32 = 30;
/// The most labels of an axis.
const LABELS: usize = 8;
// Colors that can be told apart without color vision.
const WITHOUT: RGBColor = RGBColor(0x77, 0x77, 0x77);
const WITH: RGBColor = RGBColor(0x00, 0x72, 0xb2);

/// A run's number and figure.
pub type Point = (usize, f64);

/// Draws one picture.
pub fn picture(row: &Row, points: &[(Side, Vec<Point>)]) -> Result<String> {
    let mut svg = String::new();
    draw(&mut svg, row, points).map_err(|error| anyhow!("cannot draw: {error}"))?;
    Ok(svg)
}

fn draw(svg: &mut String, row: &Row, sides: &[(Side, Vec<Point>)]) -> Result<(), String> {
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&WHITE).map_err(words)?;
    let (legend, root) = root.split_vertically(LEGEND_HEIGHT);
    for (place, (side, _)) in sides.iter().enumerate() {
        // Above the figures, where there are no runs.
        let left = 90 + 180 * place as i32;
        legend.draw(&Circle::new((left, 18), 5, color(*side).filled())).map_err(words)?;
        legend.draw(&Text::new(side.words(), (left + 12, 12), ("sans-serif", 14))).map_err(words)?;
    }
    let numbers = || sides.iter().flat_map(|(_, points)| points.iter().map(|(number, _)| *number as f64));
    let (first, last) = (numbers().fold(f64::INFINITY, f64::min), numbers().fold(0.0, f64::max));
    let low = row.without.min.min(row.with.min);
    let high = row.without.max.max(row.with.max);
    // Equal figures need some height, too.
    let margin = ((high - low) * 0.15).max(high.abs() * 0.01).max(1e-9);
    let mut chart = ChartBuilder::on(&root)
        .margin(12)
        .x_label_area_size(34)
        .y_label_area_size(70)
        .build_cartesian_2d(first - 0.5..last + 0.5, low - margin..high + margin)
        .map_err(words)?;
    let name = if row.unit.is_empty() { row.name.clone() } else { format!("{}, {}", row.name, row.unit) };
    chart
        .configure_mesh()
        .max_light_lines(0)
        .x_desc("run")
        .y_desc(name)
        .x_labels(LABELS)
        .y_labels(LABELS)
        .x_label_formatter(&|number| format!("{number:.0}"))
        .y_label_formatter(&|value| table::figure(*value))
        .draw()
        .map_err(words)?;
    for (side, points) in sides {
        let color = color(*side);
        let median = match side {
            Side::Without => row.without.median,
            Side::With => row.with.median,
        };
        let line = LineSeries::new([(first - 0.5, median), (last + 0.5, median)], color.stroke_width(1));
        chart.draw_series(line).map_err(words)?;
        let circles =
            points.iter().map(|(number, value)| Circle::new((*number as f64, *value), 5, color.filled()));
        chart.draw_series(circles).map_err(words)?;
    }
    root.present().map_err(words)
}

fn color(side: Side) -> RGBColor {
    match side {
        Side::Without => WITHOUT,
        Side::With => WITH,
    }
}

fn words(error: impl Display) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// There is a circle for each run, one in the legend, and a line for each median, also if all figures are equal.
    #[test]
    fn draws() {
        for with in [vec![8.0, 9.0, 9.9], vec![10.0; 3]] {
            let row = Row::of("wall time", "s", vec![10.0; 3], with.clone());
            let points = [
                (Side::Without, vec![(1, 10.0), (4, 10.0), (5, 10.0)]),
                (Side::With, vec![(2, with[0]), (3, with[1]), (6, with[2])]),
            ];
            let svg = picture(&row, &points).unwrap();
            assert_eq!(svg.matches("<circle").count(), 8, "{svg}");
            for part in ["<svg", "wall time, s", "with Windlass", "without Windlass"] {
                assert!(svg.contains(part), "no {part:?} in {svg}");
            }
        }
    }
}
