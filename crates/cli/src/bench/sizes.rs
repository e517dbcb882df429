//! Reads sizes from the command line: `1K:64M:4`, `4K,1M`, `0,1K:16K:2`.

use std::str::FromStr;

/// The most sizes; more would take too long.
const SIZES_MAX: usize = 1000;

/// Numbers of bytes, in the order given.
#[derive(Clone, Debug, PartialEq)]
pub struct Sizes(pub Vec<u64>);

impl FromStr for Sizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut sizes = Vec::new();
        for part in text.split(',') {
            let numbers: Vec<&str> = part.split(':').collect();
            match numbers[..] {
                [one] => sizes.push(bytes(one)?),
                [first, last] => sizes.extend(series(bytes(first)?, bytes(last)?, 2)?),
                [first, last, factor] => {
                    let factor =
                        factor.parse().map_err(|_| format!("factor {factor:?} is no whole number"))?;
                    sizes.extend(series(bytes(first)?, bytes(last)?, factor)?);
                }
                _ => return Err(format!("{part:?}: expected FIRST:LAST:FACTOR, such as 1K:64M:4")),
            }
        }
        if sizes.len() > SIZES_MAX {
            return Err(format!("{} sizes, at most {SIZES_MAX}", sizes.len()));
        }
        Ok(Self(sizes))
    }
}

fn series(first: u64, last: u64, factor: u64) -> Result<Vec<u64>, String> {
    if first == 0 || factor < 2 {
        return Err(format!("a series begins above 0 and grows by at least 2, got {first} and {factor}"));
    }
    if first > last {
        return Err(format!("the first size, {first}, is above the last, {last}"));
    }
    let next = |size: &u64| size.checked_mul(factor);
    Ok(std::iter::successors(Some(first), next).take_while(|size| *size <= last).collect())
}

/// A number with an optional unit K, M or G (powers of 1024).
pub fn bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let unit = text.trim_start_matches(|letter: char| letter.is_ascii_digit());
    let shift = match unit {
        "" | "B" => 0,
        "K" | "k" | "KiB" => 10,
        "M" | "m" | "MiB" => 20,
        "G" | "g" | "GiB" => 30,
        _ => return Err(format!("{text:?} is no size: expected a number and perhaps K, M or G")),
    };
    let number = &text[..text.len() - unit.len()];
    let number: u64 = number.parse().map_err(|_| format!("{text:?} is no size: expected a number first"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text:?} is too large"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Vec<u64> {
        text.parse::<Sizes>().unwrap().0
    }

    /// Series include both ends if the factor meets them; lists may mix series and numbers.
    #[test]
    fn reads() {
        assert_eq!(parse("1K:64K:4"), [1024, 4096, 16384, 65536]);
        assert_eq!(parse("1K:5K"), [1024, 2048, 4096]);
        assert_eq!(parse("0,1M,3"), [0, 1 << 20, 3]);
        assert_eq!(parse("64M:64M:4"), [64 << 20]);
    }

    /// Other texts are refused with a reason.
    #[test]
    fn refuses() {
        for (text, reason) in [
            ("1X", "is no size"),
            ("", "is no size"),
            ("K", "number first"),
            ("4K:1K:2", "above the last"),
            ("0:1K:2", "begins above 0"),
            ("1K:1M:1", "at least 2"),
            ("1:2:3:4", "FIRST:LAST:FACTOR"),
            ("1K:1M:x", "no whole number"),
            ("99999999999G", "too large"),
        ] {
            let error = text.parse::<Sizes>().unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
