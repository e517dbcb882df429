//! The site's list of pages has every page, once. `scripts/site` builds it, which CI does not: mdbook takes minutes to install.

use std::collections::BTreeMap;

use super::{pages, read};

const LIST: &str = "docs/SUMMARY.md";

/// Every page of the tree is a chapter of the site. That they lead somewhere is held with all links.
#[test]
fn every_page_is_in_the_list() {
    let mut chapters: BTreeMap<String, usize> = BTreeMap::new();
    for target in read(LIST).split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
        let page = target.strip_prefix("../").map_or_else(|| format!("docs/{target}"), ToOwned::to_owned);
        *chapters.entry(page).or_default() += 1;
    }
    let expected = pages().into_iter().map(|(page, _)| (page, 1)).filter(|(page, _)| page != LIST);
    assert_eq!(chapters, expected.collect(), "{LIST} has each page once");
}
