//! Finds figures that the command prints, by a pattern.

use regex::Regex;

/// A pattern whose first group is a figure.
#[derive(Clone, Debug)]
pub struct Metric {
    /// The name of the first group, else the pattern.
    pub name: String,
    pattern: Regex,
}

/// Reads `--metric`.
pub fn parse(text: &str) -> Result<Metric, String> {
    // The error has several lines, of which the last gives the reason.
    let pattern = Regex::new(text).map_err(|error| {
        let told = error.to_string();
        let why = told.lines().last().unwrap_or_default().trim_start_matches("error: ");
        format!(
            r"{why}: expected a regular expression whose first group is the figure, as in 'step (\S+) ms'"
        )
    })?;
    let names: Vec<Option<&str>> = pattern.capture_names().collect();
    match names.get(1) {
        None => Err(r"the pattern has no group: put the figure in parentheses, as in 'step (\S+) ms'".into()),
        Some(name) => Ok(Metric { name: name.unwrap_or(text).to_owned(), pattern }),
    }
}

/// The figures of one pattern in the output of a run.
#[derive(Debug, Default, PartialEq)]
pub struct Found {
    /// Figures in the order of printing, without the first ones that are skipped.
    pub values: Vec<f64>,
    /// The number of matches, with the skipped ones.
    pub matches: usize,
    /// The first match that is not a number.
    pub unreadable: Option<String>,
}

impl Metric {
    /// Searches each line of an output. A line also ends at a carriage return, as progress bars print.
    pub fn find(&self, output: &str, skipped: usize) -> Found {
        let mut found = Found::default();
        let lines = output.split(['\n', '\r']);
        for groups in lines.flat_map(|line| self.pattern.captures_iter(line)) {
            let Some(text) = groups.get(1).map(|group| group.as_str()) else { continue };
            let Some(value) = number(text) else {
                found.unreadable.get_or_insert_with(|| text.to_owned());
                continue;
            };
            found.matches += 1;
            if found.matches > skipped {
                found.values.push(value);
            }
        }
        found
    }
}

/// Reads `1234.5`, also as `1,234.5`.
fn number(text: &str) -> Option<f64> {
    text.trim().replace(',', "").parse().ok().filter(|value: &f64| value.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str =
        "loading\nstep 91.5 ms\r50%\rstep 41.25 ms\nstep fast ms\nstep 1,040 ms, step 40 ms\n";

    /// All matches of all lines count after the skipped ones; a match that is not a number is reported.
    #[test]
    fn finds() {
        let metric = parse(r"step (\S+) ms").unwrap();
        assert_eq!(metric.name, r"step (\S+) ms");
        let found = metric.find(OUTPUT, 1);
        assert_eq!(found.values, [41.25, 1040.0, 40.0]);
        assert_eq!((found.matches, found.unreadable.as_deref()), (4, Some("fast")));
        assert_eq!(
            metric.find(OUTPUT, 9),
            Found { matches: 4, unreadable: Some("fast".into()), values: vec![] }
        );
        assert_eq!(metric.find("nothing", 0), Found::default());
    }

    /// The group's name becomes the metric's.
    #[test]
    fn names() {
        assert_eq!(parse(r"(?<step_ms>\d+)").unwrap().name, "step_ms");
    }

    /// Broken patterns, and patterns without a group, are refused with the reason.
    #[test]
    fn refuses() {
        assert!(parse("step").unwrap_err().contains("has no group"));
        assert!(parse("step (").unwrap_err().starts_with("unclosed group: expected a regular expression"));
    }

    /// Numbers are read as programs print them.
    #[test]
    fn numbers() {
        assert_eq!([number("12"), number("1,234.5"), number("1e-3")], [Some(12.0), Some(1234.5), Some(1e-3)]);
        assert_eq!([number("nan"), number("inf"), number("3ms"), number("")], [None; 4]);
    }
}
