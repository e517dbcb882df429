//! Links between pages lead somewhere: to a file of the tree, and to a heading that it has.

use std::collections::BTreeSet;

use super::{pages, read, repository};

/// The text without code, in which brackets are no links.
fn prose(text: &str) -> String {
    let outside: String = text.split("```").step_by(2).collect();
    outside.split('`').step_by(2).collect()
}

/// Where the links of a page lead, also those of pictures.
fn targets(text: &str) -> Vec<String> {
    let prose = prose(text);
    let after = prose.split("](").skip(1);
    after.filter_map(|rest| Some(rest.split_once(')')?.0.to_owned())).collect()
}

/// What GitHub makes of headings: small letters, digits, hyphens for spaces.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let outside: String = text.split("```").step_by(2).collect();
    for heading in outside.lines().filter(|line| line.starts_with('#')) {
        let heading = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = |c: &char| c.is_alphanumeric() || " -_".contains(*c);
        let anchor: String = heading.chars().filter(kept).map(|c| if c == ' ' { '-' } else { c }).collect();
        let again = (1..).map(|number| format!("{anchor}-{number}"));
        let free = std::iter::once(anchor.clone()).chain(again).find(|anchor| !found.contains(anchor));
        found.extend(free);
    }
    found
}

/// Every link of a page leads to what is there. Addresses of the web are not asked.
#[test]
fn links_lead_somewhere() {
    let mut broken = Vec::new();
    for (page, text) in pages() {
        let folder = repository().join(&page).parent().map(ToOwned::to_owned).unwrap_or_default();
        for target in targets(&text) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (path, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let file = if path.is_empty() { repository().join(&page) } else { folder.join(path) };
            let is_there = file.exists();
            let has_anchor =
                anchor.is_empty() || is_there && anchors(&read(&file.display().to_string())).contains(anchor);
            if !is_there || !has_anchor {
                broken.push(format!("{page}: {target}"));
            }
        }
    }
    assert!(broken.is_empty(), "links that lead nowhere: {broken:#?}");
}

/// Links and headings are found as GitHub finds them.
#[test]
fn reading() {
    let text =
        "# What *it* is: 2-way?\n[a](b.md#c) ![d](e.svg) `[f](g)`\n```\n# no\n[h](i)\n```\n## A\n## A\n";
    assert_eq!(targets(text), ["b.md#c", "e.svg"]);
    assert_eq!(anchors(text), ["what-it-is-2-way", "a", "a-1"].map(String::from).into());
}
