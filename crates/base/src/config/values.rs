//! Parsers of single values. Each gives none if the value cannot be read.

use std::path::PathBuf;
use std::time::Duration;

use super::{Cache, Collectives, Form, Lazy, Order, Register, Report, Switch};

/// Reads as C's `strtoll` with base 0 does: `0x10`, `010` and `1 # why` are numbers, words are 0.
pub(super) fn number_as_in_c(text: &str) -> i64 {
    let text = text.trim_start_matches([' ', '\t', '\n', '\r', '\x0b', '\x0c']);
    let (negative, text) = match text.strip_prefix(['-', '+']) {
        Some(rest) => (text.starts_with('-'), rest),
        None => (false, text),
    };
    let hexadecimal = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
    let (radix, digits) = match hexadecimal.filter(|rest| rest.starts_with(|c: char| c.is_ascii_hexdigit())) {
        Some(rest) => (16, rest),
        None if text.starts_with('0') => (8, text),
        None => (10, text),
    };
    let values = digits.chars().map_while(|digit| digit.to_digit(radix));
    let value = values
        .fold(0_i64, |sum, digit| sum.saturating_mul(i64::from(radix)).saturating_add(i64::from(digit)));
    if negative { -value } else { value }
}

pub(super) fn lazy(text: &str) -> Option<Lazy> {
    match text.to_ascii_lowercase().as_str() {
        "pairs" => Some(Lazy::Pairs),
        "all" => Some(Lazy::All),
        _ => switch(text).filter(|switch| *switch == Switch::Off).map(|_| Lazy::Off),
    }
}

pub(super) fn register(text: &str) -> Option<Register> {
    match text.to_ascii_lowercase().as_str() {
        "auto" => Some(Register::Auto),
        _ => on_or_off(text, Register::On, Register::Off),
    }
}

pub(super) fn collectives(text: &str) -> Option<Collectives> {
    match text.to_ascii_lowercase().as_str() {
        "auto" => Some(Collectives::Auto),
        _ => on_or_off(text, Collectives::Auto, Collectives::Off),
    }
}

pub(super) fn order(text: &str) -> Option<Order> {
    match text.to_ascii_lowercase().as_str() {
        "auto" => Some(Order::Auto),
        "fixed" => Some(Order::Fixed),
        "strict" => Some(Order::Strict),
        _ => None,
    }
}

/// A switch or an absolute path. Anything else counts as a misspelt switch.
pub(super) fn cache(text: &str) -> Option<Cache> {
    match switch(text) {
        Some(Switch::Off) => Some(Cache::Off),
        Some(Switch::On) => Some(Cache::Usual),
        None => text.starts_with('/').then(|| Cache::Folder(text.into())),
    }
}

fn on_or_off<T>(text: &str, on: T, off: T) -> Option<T> {
    switch(text).map(|switch| if switch == Switch::On { on } else { off })
}

pub(super) fn switch(text: &str) -> Option<Switch> {
    match text.to_ascii_lowercase().as_str() {
        "on" | "1" | "yes" | "true" => Some(Switch::On),
        "off" | "0" | "no" | "false" => Some(Switch::Off),
        _ => None,
    }
}

/// Bytes above 0: a whole number with at most one letter, as `512` or `64K`, not `1.5G`.
pub(super) fn bytes(text: &str) -> Option<u64> {
    bytes_or_none(text).filter(|bytes| *bytes > 0)
}

/// As [`bytes`], or 0.
pub(super) fn bytes_or_none(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// As [`bytes_or_none`], or a word for off. `1` is one byte, not "on".
pub(super) fn pool(text: &str) -> Option<u64> {
    bytes_or_none(text).or_else(|| switch(text).filter(|switch| *switch == Switch::Off).map(|_| 0))
}

/// Whether the plugins of vLLM and SGLang take a text: a word, or intervals of bytes with both ends or the lower one.
pub(super) fn is_for_plugin(text: &str) -> bool {
    let bytes = |end: &str| bytes_or_none(end).filter(|_| !end.contains(['+', 'T', 't']));
    let is_interval = |part: &str| {
        let (low, high) = part.trim().split_once('-')?;
        let high = if high.is_empty() { u64::MAX } else { bytes(high)? };
        Some(bytes(low)? <= high)
    };
    ["", "off", "auto"].contains(&text.to_lowercase().as_str())
        || text.split(',').all(|part| is_interval(part) == Some(true))
}

pub(super) fn level(text: &str) -> Option<::log::LevelFilter> {
    text.parse().ok()
}

/// Any text names a file; an empty text names none.
pub(super) fn path(text: &str) -> Option<Option<PathBuf>> {
    Some((!text.is_empty()).then(|| PathBuf::from(text)))
}

pub(super) fn seconds(text: &str) -> Option<Duration> {
    text.parse().ok().map(Duration::from_secs)
}

pub(super) fn report(text: &str) -> Option<Option<Report>> {
    let (form, file) = text.split_once(':').unwrap_or((text, ""));
    let form = match form {
        "" | "none" => return Some(None),
        "text" => Form::Text,
        "json" => Form::Json,
        _ => return None,
    };
    Some(Some(Report { form, file: path(file)? }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Options with words of their own also take the words of a switch.
    #[test]
    fn words_of_laziness() {
        let words = ["pairs", "ALL", "off", "0", "some", ""].map(lazy);
        let (pairs, all, off) = (Some(Lazy::Pairs), Some(Lazy::All), Some(Lazy::Off));
        assert_eq!(words, [pairs, all, off, off, None, None]);
    }

    /// Sizes are whole numbers with at most one letter, and fit.
    #[test]
    fn sizes() {
        let read = ["1", "64K", "4G", "2t", "", "G", "1.5G", "-1", "4GB", "0", "99999999999T"].map(bytes);
        let expected = [Some(1), Some(64 << 10), Some(4 << 30), Some(2 << 40)];
        assert_eq!(read[..4], expected);
        assert_eq!(read[4..11], [None; 7]);
        assert_eq!(["0", "16M", "-1"].map(bytes_or_none), [Some(0), Some(16 << 20), None]);
        assert_eq!(
            ["off", "0", "No", "64M", "on"].map(pool),
            [Some(0), Some(0), Some(0), Some(64 << 20), None]
        );
    }
}
