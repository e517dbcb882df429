//! Holds that pages are right: every file that they name exists, no line has a word that was given up, and sentences are short.
//! `scripts/site` holds that links lead somewhere and that every page is in the list.

#[path = "pages/c_interface.rs"]
mod c_interface;
#[path = "pages/compatibility.rs"]
mod compatibility;
#[path = "pages/files.rs"]
mod files_page;
#[path = "pages/troubleshooting.rs"]
mod troubleshooting;

use std::path::Path;

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All files of the tree except build output.
fn files() -> Vec<String> {
    let left_out = ["target", "build", "shared"].map(|name| repository().join(name));
    let mut files = Vec::new();
    let mut folders = vec![repository().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let is_hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
            if path.is_dir() && !path.is_symlink() && !is_hidden && !left_out.contains(&path) {
                folders.push(path);
            } else if path.is_file() {
                files.push(path.strip_prefix(repository()).unwrap().display().to_string());
            }
        }
    }
    let stray = |file: &&String| file.ends_with(".orig") || file.ends_with(".rej");
    assert_eq!(files.iter().find(stray), None, "what a merge leaves");
    assert!(files.len() > 300, "only {} files: this test no longer sees the tree", files.len());
    files
}

fn read(file: &str) -> String {
    std::fs::read(repository().join(file))
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .expect(file)
}

/// Holds that a generated page is up to date, or writes it with WINDLASS_BLESS=1.
fn fresh(page: &str, text: &str) {
    if std::env::var_os("WINDLASS_BLESS").is_some() {
        std::fs::write(repository().join(page), text).unwrap();
    }
    let committed = std::fs::read_to_string(repository().join(page)).unwrap_or_default();
    assert!(committed == text, "{page} is stale: run with WINDLASS_BLESS=1");
}

/// Pages for people, without the committed output of measurements.
fn pages() -> Vec<(String, String)> {
    let is_page = |file: &String| file.ends_with(".md");
    files().into_iter().filter(is_page).map(|file| (file.clone(), read(&file))).collect()
}

/// The texts in backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split("```").step_by(2).flat_map(|prose| prose.split('`').skip(1).step_by(2))
}

/// Every file that a page names exists. A page names it by the end of its path (`reactor/hosting.rs`) or with the crate's name
/// before (`bootstrap/reactor/hosting.rs`).
#[test]
fn named_files_exist() {
    let files = files();
    let endings = [".rs", ".c", ".h", ".cuh", ".cpp", ".cu", ".py", ".cmake", ".md", ".toml"];
    let exists = |name: &str| {
        let inside = name.split_once('/').map(|(name, rest)| format!("crates/{name}/src/{rest}"));
        let ends =
            |file: &String| file == name || file.strip_suffix(name).is_some_and(|rest| rest.ends_with('/'));
        files.iter().any(ends) || inside.is_some_and(|inside| files.contains(&inside))
    };
    let mut missing = Vec::new();
    for (page, text) in
        pages().into_iter().filter(|(page, _)| page != "CHANGELOG.md" && !page.contains("measurements/2"))
    {
        for name in quoted(&text) {
            let is_file = endings.iter().any(|ending| name.ends_with(ending))
                && name.chars().all(|c| c.is_alphanumeric() || "_-./".contains(c))
                && !name.starts_with(['.', '/', '-']);
            // Names of NCCL's files, of generated ones, and of examples.
            let is_others =
                ["nccl.h", "libwindlass.so", "nccl_net.h", "cuda.h", "transport.cc", "enqueue.cc"]
                    .contains(&name);
            if is_file && !is_others && !exists(name) {
                missing.push(format!("{page}: {name}"));
            }
        }
    }
    assert!(missing.is_empty(), "pages name files that are not there: {missing:#?}");
}

/// Words that were given up, each with the word in its place.
const GIVEN_UP: &[(&str, &str)] = &[
    ("fabric", "peer group"),
    ("promise", "lazy communicator"),
    ("promised", "lazy"),
    ("honour", "materialize"),
    ("honoured", "materialized"),
    ("muster", "host-local rendezvous"),
    ("lobby", "process listener"),
    ("birth", "init"),
    ("newborn", "new communicator"),
    ("arena", "symmetric heap"),
    ("mailbox", "p2p transport"),
    ("stranger", "non-Windlass, unknown"),
    ("parked", "cached"),
    ("foretold", "announced"),
    ("wish", "request"),
];

/// Lines that rightly have such a word: the list of changes, NVIDIA's handles, earlier names of options, and bytes that ranks have
/// always sent.
fn is_right(file: &str, line: &str) -> bool {
    let nvidias = ["fabric handle", "fabric_handle", "fabric_alone", "FABRIC"]
        .iter()
        .any(|nvidias| line.contains(nvidias));
    let earlier = file == "crates/base/src/config/removed.rs" || line.contains("communicatorsParked");
    let sent = [
        "b\"windlass birth\"",
        "b\"windlass muster of\"",
        "local_address(\"lobby\"",
        "local_address(\"muster\"",
    ];
    nvidias
        || earlier
        || file == "CHANGELOG.md"
        || file == "tests/docs.rs"
        || file.starts_with("LICENSE")
        || sent.iter().any(|sent| line.contains(sent))
}

/// The words of a line, also those inside of names.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut was_lower = false;
    for c in line.chars() {
        if !c.is_alphabetic() || c.is_uppercase() && was_lower {
            words.push(String::new());
        }
        was_lower = c.is_lowercase();
        if c.is_alphabetic() {
            words.last_mut().unwrap().extend(c.to_lowercase());
        }
    }
    words
}

fn given_up(line: &str) -> Option<&'static (&'static str, &'static str)> {
    let lower = line.to_lowercase();
    // Nearly no line has the letters of such a word, so check these first.
    if !GIVEN_UP.iter().any(|(old, _)| old.split('-').all(|part| lower.contains(part))) {
        return None;
    }
    let words = words(line);
    let has = |old: &str| {
        let parts: Vec<&str> = old.split('-').collect();
        let plural = format!("{}s", parts[parts.len() - 1]);
        words.windows(parts.len()).any(|some| {
            let (last, first) = (some.len() - 1, &some[..some.len() - 1]);
            first.iter().zip(&parts).all(|(one, other)| one == other)
                && (some[last] == parts[last] || some[last] == plural)
        })
    };
    GIVEN_UP.iter().find(|(old, _)| has(old))
}

/// No page, path or line of the product has a word that was given up.
#[test]
fn words_given_up_stay_away() {
    let mut found = Vec::new();
    for file in files() {
        let is_read = file.ends_with(".md") && !file.contains("measurements/")
            || [
                "src/",
                "crates/base/src",
                "crates/bootstrap/src",
                "crates/transport/src",
                "crates/engine/src",
                "crates/cli/src",
                "crates/nccl-sys/src",
                "ctests/",
            ]
            .iter()
            .any(|folder| file.starts_with(folder));
        if let Some((old, new)) = given_up(&file).filter(|_| !file.contains("corpus")) {
            found.push(format!("{file}: a path with {old:?}, say {new:?}"));
        }
        if is_read {
            for (number, line) in read(&file).lines().enumerate().filter(|(_, line)| !is_right(&file, line)) {
                if let Some((old, new)) = given_up(line) {
                    found.push(format!("{file}:{}: {old:?}, say {new:?}", number + 1));
                }
            }
        }
    }
    assert!(found.is_empty(), "{} lines: {found:#?}", found.len());
}

/// The longest sentence allowed, in words, on pages that have been reviewed.
const SENTENCE_WORDS_MAX: usize = 35;
const SHORT: &[&str] = &[
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "GLOSSARY.md",
    "SECURITY.md",
    "docs/c-interface.md",
    "docs/collectives.md",
    "docs/compatibility.md",
    "docs/environments.md",
    "docs/installing.md",
    "docs/launchers.md",
    "docs/nccl-variables.md",
    "docs/operating.md",
    "docs/options.md",
    "docs/peer-groups.md",
    "docs/performance.md",
    "docs/registration.md",
    "docs/reproducible-results.md",
    "docs/symmetric-memory.md",
    "docs/troubleshooting.md",
];
/// A cell with more words is a paragraph that nobody can read on a phone.
const CELL_WORDS_MAX: usize = 45;
/// To be lowered only; the aim is 120.
const README_LINES_MAX: usize = 120;

/// The paragraphs, list items and table cells of a page, each on one line, without code and headings.
fn paragraphs(text: &str) -> Vec<String> {
    let mut paragraphs = vec![String::new()];
    for line in text.split("```").step_by(2).flat_map(|prose| prose.lines().chain([""])) {
        let line = line.trim();
        if line.starts_with('|') {
            paragraphs.extend(line.split('|').map(str::to_owned));
        }
        let is_left_out = line.is_empty() || line.starts_with(['|', '#']);
        let number = line.trim_start_matches(|c: char| c.is_ascii_digit());
        let is_item = line.starts_with("- ") || number.len() < line.len() && number.starts_with(". ");
        if is_left_out || is_item {
            paragraphs.push(String::new());
        }
        if !is_left_out {
            *paragraphs.last_mut().unwrap() += &format!("{line} ");
        }
    }
    paragraphs
}

/// No sentence of these pages is longer than the limit, also one that goes on in the next line.
#[test]
fn sentences_are_short() {
    let mut long = Vec::new();
    for page in SHORT {
        for paragraph in paragraphs(&read(page)) {
            for sentence in paragraph.replace(['?', ';', ':'], ".").split(". ") {
                let count = sentence.split_whitespace().count();
                if count > SENTENCE_WORDS_MAX {
                    long.push(format!("{page}: {count} words: {sentence}"));
                }
            }
        }
    }
    assert!(long.is_empty(), "{long:#?}");
    let lines = read("README.md").lines().count();
    assert!(lines <= README_LINES_MAX, "README.md has {lines} lines, {README_LINES_MAX} at most");
}

/// No cell of a table is longer than the limit.
#[test]
fn cells_are_short() {
    let mut long = Vec::new();
    for (page, text) in pages().into_iter().filter(|(page, _)| !page.contains("measurements/2")) {
        for line in text.split("```").step_by(2).flat_map(str::lines).filter(|line| line.starts_with('|')) {
            for cell in line.split('|') {
                let count = cell.split_whitespace().count();
                if count > CELL_WORDS_MAX {
                    long.push(format!("{page}: {count} words: {cell}"));
                }
            }
        }
    }
    assert!(long.is_empty(), "{long:#?}");
}
