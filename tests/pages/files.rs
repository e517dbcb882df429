//! The page that says what each file of code holds, made from the first sentence of the file.

use std::fmt::Write;

use super::{files, fresh, read};

const PAGE: &str = "docs/files.md";

const TOP: &str = "\
# Files

What each file of code holds: its own first sentence. The lines below that sentence, in the file, lead further. This page is made from the files.
[Where to look](../ARCHITECTURE.md#where-to-look) goes the other way, from a behaviour to its files.
";

/// `crates/engine/src` and `plan.rs` for a file of code.
fn parts(file: &str) -> Option<(&str, &str)> {
    let is_test = file.contains("/tests/") || file.ends_with("tests.rs");
    if is_test || !file.ends_with(".rs") {
        return None;
    }
    match file.strip_prefix("src/") {
        Some(name) => Some(("src", name)),
        None if file.starts_with("crates/") => {
            file.find("/src/").map(|at| (&file[..at + 4], &file[at + 5..]))
        }
        None => None,
    }
}

/// The first sentence of a file's head, without the links of rustdoc.
fn sentence(text: &str) -> String {
    let head = text.lines().map_while(|line| line.strip_prefix("//! "));
    let text = head.collect::<Vec<_>>().join(" ");
    let end = text.find(". ").map_or(text.len(), |at| at + 1);
    let mut text = text[..end].replace('|', "\\|");
    while let Some(at) = text.find("](") {
        let end = text[at..].find(')').map_or(text.len(), |length| at + length + 1);
        text.replace_range(at..end, "");
        if let Some(start) = text[..at].rfind('[') {
            text.remove(start);
        }
    }
    text.replace("[`", "`").replace("`]", "`")
}

/// The page is up to date with the files.
#[test]
fn files_are_fresh() {
    let mut files = files();
    files.sort();
    let (mut page, mut last) = (TOP.to_owned(), "");
    for (file, (folder, name)) in files.iter().filter_map(|file| Some((file, parts(file)?))) {
        if folder != last {
            write!(page, "\n## {folder}\n\n| file | what it holds |\n|---|---|\n").unwrap();
            last = folder;
        }
        let sentence = sentence(&read(file));
        assert!(!sentence.is_empty(), "{file} does not begin with a sentence that says what it holds");
        writeln!(page, "| `{name}` | {sentence} |").unwrap();
    }
    fresh(PAGE, &page);
}
