//! Holds that the page for troubleshooting has every reason that reports and logs give, in the same words.

use windlass_base::stats::features::{Feature, Lacks};
use windlass_base::stats::peer_group;

use super::read;

const PAGE: &str = "docs/troubleshooting.md";

/// The cells of each row of the page's tables.
fn rows() -> Vec<Vec<String>> {
    let cells = |line: &str| line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect();
    read(PAGE).lines().filter(|line| line.starts_with('|')).map(cells).collect()
}

/// The reasons why a communicator is on NCCL, each with what changes it.
fn fallback_reasons() -> Vec<(&'static str, &'static str)> {
    let numbers = peer_group::ON_NCCL + 1..;
    let known = numbers.map(|number| (peer_group::text(number), peer_group::change(number)));
    known.take_while(|(text, _)| !text.starts_with("a reason that this reader")).collect()
}

/// Every fallback reason has a row, with the change that the report names.
#[test]
fn every_fallback_reason_is_told() {
    let (rows, reasons) = (rows(), fallback_reasons());
    assert!(reasons.len() > 20, "only {} reasons: this test no longer sees them", reasons.len());
    for (text, change) in reasons {
        let row = rows.iter().find(|row| row[0] == text);
        let row = row.unwrap_or_else(|| panic!("{PAGE} has no row for {text:?}"));
        assert_eq!(row[1], change, "{PAGE}: what changes {text:?}");
        assert!(!row[2].is_empty(), "{PAGE}: what {text:?} means");
    }
}

/// Every feature that a peer group may lack has a row for each reason.
#[test]
fn every_lack_is_told() {
    let rows = rows();
    for feature in Feature::ALL {
        for lack in 1..=9 {
            let words = Lacks(lack << (8 * feature as u32)).words();
            let why = &words[feature.name()];
            let told = rows
                .iter()
                .any(|row| row[1] == *why && (row[0].contains(feature.name()) || row[0].starts_with("all")));
            // These words never apply to this feature.
            let happens = why != "not for this communicator"
                && !(feature == Feature::Native
                    && (why.contains("CUMEM") || why.contains("multicast") || why.contains("lazy")));
            assert!(told || !happens, "{PAGE} has no row for {:?}: {why:?}", feature.name());
        }
    }
}

/// Every failure of an init has a row. They are read from the source, as the workspace's root does not link that crate.
#[test]
fn every_failure_of_an_init_is_told() {
    let (rows, source) = (rows(), read("crates/bootstrap/src/outcome.rs"));
    let failures = source.split("    Failure {\n").nth(1).expect("the list of failures");
    let list = failures.split("\n    }").next().unwrap_or_default();
    let texts: Vec<&str> = list.lines().filter_map(|line| line.split('"').nth(1)).collect();
    assert!(texts.len() > 5, "only {} failures: this test no longer sees them", texts.len());
    for text in texts {
        assert!(rows.iter().any(|row| row[0] == text), "{PAGE} has no row for {text:?}");
    }
}
