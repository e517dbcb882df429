//! The page of `windlass.h`, made from the header that cbindgen has made from `src/extra.rs`.

use std::fmt::Write;

use super::{fresh, read};

const PAGE: &str = "docs/c-interface.md";
const HEADER: &str = "include/windlass.h";

const TOP: &str = "\
# C interface

`windlass.h` has the functions that Windlass has besides NCCL's. This page is made from `include/windlass.h`. A program needs none of them.

- Include `windlass.h` and link with `-lnccl`, where `libnccl.so.2` is Windlass. `find_package(Windlass)` of CMake does both.
- A program that must also run on NCCL alone looks the functions up with `dlsym(RTLD_DEFAULT, \"windlassGetStats\")`. NCCL has no such functions.
- All functions answer NCCL's result codes.
";

/// A comment and the declaration after it.
#[derive(Default)]
struct Item {
    about: Vec<String>,
    declaration: Vec<String>,
}

impl Item {
    /// `windlassGetStats` of its declaration.
    fn name(&self) -> String {
        let whole = self.declaration.join(" ");
        let before = whole.split(['(', '{']).next().unwrap_or_default();
        before.split_whitespace().last().unwrap_or_default().to_owned()
    }

    fn is_whole(&self) -> bool {
        let (first, last) = (self.declaration.first(), self.declaration.last());
        let is_structure = first.is_some_and(|line| line.starts_with("typedef struct"));
        last.is_some_and(|line| if is_structure { line.starts_with('}') } else { line.ends_with(");") })
    }
}

/// The declarations of the header, in its order.
fn items(header: &str) -> Vec<Item> {
    let mut items = Vec::new();
    let mut item = Item::default();
    for line in header.lines() {
        let is_inside = !item.declaration.is_empty();
        if is_inside || line.starts_with("typedef struct") || line.starts_with("ncclResult_t windlass") {
            item.declaration.push(line.to_owned());
            if item.is_whole() {
                items.push(std::mem::take(&mut item));
            }
        } else if let Some(about) = line.strip_prefix("//") {
            item.about.push(about.strip_prefix(' ').unwrap_or(about).to_owned());
        } else if line.is_empty() || line.starts_with(['#', 'e', '}']) {
            item.about.clear();
        }
    }
    items
}

/// The paragraphs of a comment, without the heading over what callers must guarantee.
fn prose(about: &[String]) -> String {
    let lines =
        about.iter().map(|line| if line == "# Safety" { "**What the caller guarantees.**" } else { line });
    let text = lines.collect::<Vec<_>>().join("\n").replace("guarantees.**\n\n", "guarantees.** ");
    text.replace("docs/collectives.md", "[collectives](collectives.md)")
}

fn page() -> String {
    let mut page = TOP.to_owned();
    for item in items(&read(HEADER)) {
        let (name, declaration) = (item.name(), item.declaration.join("\n"));
        write!(page, "\n## {name}\n\n```c\n{declaration}\n```\n\n{}\n", prose(&item.about)).unwrap();
    }
    page
}

/// The page is up to date with the header.
#[test]
fn c_interface_is_fresh() {
    let names: Vec<String> = items(&read(HEADER)).iter().map(Item::name).collect();
    let declared = read(HEADER).matches("ncclResult_t windlass").count();
    assert_eq!(names.len(), declared + 1, "functions and one structure: {names:?}");
    fresh(PAGE, &page());
}
