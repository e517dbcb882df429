//! Holds the layers of ARCHITECTURE.md: a file names only layers below its own, mechanisms never name each other, and some code
//! stays in one place. Cargo holds the layers between crates. Some counts are limits that may only fall: who lowers a count lowers
//! its limit here.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The crates of the product that decide and act, lowest first.
const CRATES: [&str; 4] = ["base", "bootstrap", "transport", "engine"];

/// Layers of crates, highest first. Modules of one layer may name each other only where `Together::Yes`.
const LAYERS: &[(&str, &[Layer])] = &[
    (
        "engine",
        &[
            // Only in tests.
            (Together::No, &["fuzzing"]),
            (Together::No, &["api"]),
            (Together::No, &["dispatch"]),
            (Together::No, &["communicator", "group", "plan"]),
            (Together::No, &["lazy"]),
            (Together::No, &["peers"]),
            (Together::No, &["features"]),
            (Together::No, &["background", "forward"]),
        ],
    ),
    (
        "transport",
        &[
            (Together::No, &["circumstances", "heap", "p2p", "native"]),
            (Together::No, &["sequencer", "tuning"]),
            (Together::No, &["error"]),
        ],
    ),
    (
        "base",
        &[
            (Together::No, &["process"]),
            (Together::No, &["observers"]),
            (Together::No, &["gpu", "range", "shared_page", "stats"]),
            (Together::No, &["log"]),
            (Together::No, &["config", "error", "guard", "descriptor", "gate", "thread"]),
            (Together::No, &["call", "lock", "path", "scoped"]),
        ],
    ),
];

/// Whether modules of a layer may name each other, and which modules these are.
type Layer = (Together, &'static [&'static str]);

#[derive(PartialEq)]
enum Together {
    Yes,
    No,
}

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Source files below a folder: path and text.
fn sources(folder: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut folders = vec![repository().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                found.push((path, text));
            }
        }
    }
    assert!(!found.is_empty(), "{folder} has no sources");
    found.sort();
    found
}

/// Source files of a crate, with paths relative to its `src`.
fn of_crate(name: &str) -> Vec<(String, String)> {
    let folder = format!("crates/{name}/src");
    let strip = |path: PathBuf| path.strip_prefix(repository().join(&folder)).unwrap().display().to_string();
    sources(&folder).into_iter().map(|(path, text)| (strip(path), text)).collect()
}

/// Source files of all these crates, as `engine/dispatch.rs`.
fn of_all() -> Vec<(String, String)> {
    let named = |name: &'static str| {
        of_crate(name).into_iter().map(move |(path, text)| (format!("{name}/{path}"), text))
    };
    CRATES.into_iter().flat_map(named).collect()
}

/// Lines of code without tests and comments.
fn code(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .take_while(|line| !line.starts_with("#[cfg(test)]") && !line.starts_with("#![cfg(test)]"))
        .filter(|line| !line.trim_start().starts_with("//"))
}

/// The paths that follow `start` in code; those in braces one by one.
fn paths_after(text: &str, start: &str) -> Vec<String> {
    let joined: String = code(text).collect::<Vec<_>>().join(" ");
    let mut paths = Vec::new();
    for (at, _) in joined.match_indices(start) {
        let before = joined[..at].chars().next_back();
        if before.is_none_or(|c| !c.is_alphanumeric() && c != '_' && c != ':' && c != '$') {
            expand(&joined[at + start.len()..], String::new(), &mut paths);
        }
    }
    paths
}

/// Reads one path or one list of paths in braces; returns the rest of the text.
fn expand<'a>(text: &'a str, prefix: String, paths: &mut Vec<String>) -> &'a str {
    let text = text.trim_start();
    if let Some(mut rest) = text.strip_prefix('{') {
        loop {
            rest = expand(rest, prefix.clone(), paths).trim_start();
            match rest.strip_prefix(',') {
                Some(more) => rest = more,
                None => return rest.strip_prefix('}').unwrap_or(""),
            }
        }
    }
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    let path = if prefix.is_empty() { text[..end].to_owned() } else { format!("{prefix}::{}", &text[..end]) };
    match text[end..].strip_prefix("::") {
        Some(rest) if end > 0 => expand(rest, path, paths),
        _ => {
            paths.push(path);
            let rest = text[end..].trim_start();
            // `a as b` in a list.
            rest.strip_prefix("as ").map_or(rest, |rest| {
                rest.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_' || c == ' ')
            })
        }
    }
}

/// Modules of a crate name only modules of lower layers.
#[test]
fn arrows_point_down() {
    for (name, layers) in LAYERS {
        let layer_of = |module: &str| {
            let layer = layers.iter().position(|(_, modules)| modules.contains(&module));
            layer.unwrap_or_else(|| {
                panic!("module {module} of {name} has no layer: give it one here and in ARCHITECTURE.md")
            })
        };
        let mut arrows = 0;
        for (path, text) in of_crate(name) {
            let module = path.split('/').next().unwrap().trim_end_matches(".rs");
            if module == "lib" {
                continue;
            }
            let own = layer_of(module);
            let named: BTreeSet<String> = paths_after(&text, "crate::")
                .into_iter()
                .map(|path| path.split("::").next().unwrap().to_owned())
                .collect();
            for named in named.iter().filter(|named| *named != module) {
                let there = layer_of(named);
                let allowed = there > own || there == own && layers[own].0 == Together::Yes;
                assert!(
                    allowed,
                    "{name}/{path}: an arrow from {module} (layer {own}) to {named} (layer {there})"
                );
                arrows += 1;
            }
        }
        assert!(arrows > 1, "{name}: only {arrows} arrows seen: this test no longer reads the sources");
    }
}

/// The size of the largest circle of files that name each other, in each crate. To be lowered only; the aim is three.
const LARGEST_CIRCLE: [(&str, usize); 4] = [("base", 3), ("bootstrap", 0), ("transport", 2), ("engine", 2)];

/// No circle of files grows.
#[test]
fn circles_only_shrink() {
    for (name, most) in LARGEST_CIRCLE {
        let circle = largest_circle(&of_crate(name));
        assert!(
            circle.len() <= most,
            "{name}: a circle of {} files, {most} are allowed: {circle:?}",
            circle.len()
        );
        assert!(
            circle.len() == most,
            "{name}: the largest circle has {} files: lower LARGEST_CIRCLE",
            circle.len()
        );
    }
}

/// Re-exports, by module and name: `pub use child::Name`.
fn given_on(
    files: &[(String, String)],
    modules: &BTreeMap<Vec<String>, usize>,
) -> BTreeMap<(Vec<String>, String), Vec<String>> {
    let mut given_on = BTreeMap::new();
    for (own, index) in modules {
        let joined: String = code(&files[*index].1).collect::<Vec<_>>().join(" ");
        for statement in joined.split(';') {
            let Some((before, tree)) = statement.split_once(" use ") else { continue };
            if !before.trim_start().rsplit(']').next().unwrap_or_default().trim_start().starts_with("pub") {
                continue;
            }
            let mut paths = Vec::new();
            expand(tree, String::new(), &mut paths);
            for path in paths {
                let names: Vec<String> = path.split("::").map(str::to_owned).collect();
                let ups = names.iter().take_while(|name| *name == "super").count();
                let whole = match names[0].as_str() {
                    "crate" => names[1..].to_vec(),
                    "super" => [&own[..own.len().saturating_sub(ups)], &names[ups..]].concat(),
                    "self" => [&own[..], &names[1..]].concat(),
                    _ => [&own[..], &names[..]].concat(),
                };
                let name = whole.last().cloned().unwrap_or_default();
                if whole[..] != [&own[..], std::slice::from_ref(&name)].concat()[..] {
                    given_on.insert((own.clone(), name), whole);
                }
            }
        }
    }
    given_on
}

fn largest_circle(files: &[(String, String)]) -> Vec<String> {
    let modules: BTreeMap<Vec<String>, usize> = files
        .iter()
        .enumerate()
        .map(|(index, (path, _))| {
            (path.trim_end_matches(".rs").split('/').map(str::to_owned).collect(), index)
        })
        .collect();
    let given_on = given_on(files, &modules);
    // The file of the longest prefix of a path that is a module, following re-exports.
    let find = |path: &[String]| {
        let mut path = path.to_vec();
        for _ in 0..5 {
            let len = (1..=path.len()).rev().find(|len| modules.contains_key(&path[..*len]))?;
            let Some(there) =
                path.get(len).and_then(|name| given_on.get(&(path[..len].to_vec(), name.clone())))
            else {
                return modules.get(&path[..len]).copied();
            };
            path = [&there[..], &path[len + 1..]].concat();
        }
        None
    };
    let mut arrows = vec![BTreeSet::new(); files.len()];
    for (own, index) in &modules {
        let text = &files[*index].1;
        let split = |path: String| path.split("::").map(str::to_owned).collect::<Vec<_>>();
        let whole = paths_after(text, "crate::").into_iter().map(split);
        let above = paths_after(text, "super::").into_iter().map(|path| {
            let mut names = split(path);
            let ups = 1 + names.iter().take_while(|name| *name == "super").count();
            names.drain(..ups - 1);
            [&own[..own.len().saturating_sub(ups)], &names[..]].concat()
        });
        let below = paths_after(text, "self::").into_iter().map(|path| [&own[..], &split(path)[..]].concat());
        let children = code(text).filter_map(|line| {
            let line = line.strip_prefix("use ")?;
            let first: String = line.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            Some([&own[..], &[first]].concat())
        });
        let named = whole.chain(above).chain(below).chain(children).filter_map(|path| find(&path));
        arrows[*index].extend(named.filter(|there| there != index));
    }
    let reach: Vec<BTreeSet<usize>> = (0..files.len())
        .map(|from| {
            let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
            while let Some(at) = next.pop() {
                next.extend(arrows[at].iter().copied().filter(|there| seen.insert(*there)));
            }
            seen
        })
        .collect();
    let circle = |from: usize| -> Vec<String> {
        let both = |there: &usize| reach[from].contains(there) && reach[*there].contains(&from);
        (0..files.len()).filter(both).map(|there| files[there].0.clone()).collect()
    };
    (0..files.len()).map(circle).max_by_key(Vec::len).unwrap_or_default()
}

/// How many types of a crate share their name with another type of it. To be lowered only.
const SHARED_TYPE_NAMES: [(&str, usize); 4] =
    [("base", 1), ("bootstrap", 0), ("transport", 0), ("engine", 28)];

/// Type names are unique in a crate, up to the limit.
#[test]
fn type_names_become_unique() {
    for (name, most) in SHARED_TYPE_NAMES {
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for (_, text) in of_crate(name) {
            for line in code(&text) {
                let line = line
                    .trim_start()
                    .trim_start_matches("pub ")
                    .trim_start_matches("pub(super) ")
                    .trim_start_matches("pub(crate) ");
                let Some(rest) =
                    ["struct ", "enum ", "trait ", "union "].iter().find_map(|kind| line.strip_prefix(kind))
                else {
                    continue;
                };
                *counts
                    .entry(rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect())
                    .or_default() += 1;
            }
        }
        counts.remove("");
        let shared: Vec<String> = counts
            .into_iter()
            .filter(|(_, count)| *count > 1)
            .map(|(name, count)| format!("{name} {count}"))
            .collect();
        assert!(
            shared.len() <= most,
            "{name}: {} names have several types, {most} may: {shared:?}",
            shared.len()
        );
        assert!(
            shared.len() == most,
            "{name}: {} names have several types: lower SHARED_TYPE_NAMES",
            shared.len()
        );
    }
}

/// How many files and functions are longer than this, without their tests. To be lowered only.
const FILE_LINES_MAX: usize = 450;
const FUNCTION_LINES_MAX: usize = 60;
const LONG: (usize, usize) = (1, 3);

/// Files and functions stay short.
#[test]
fn files_and_functions_stay_short() {
    let (mut files, mut functions) = (Vec::new(), Vec::new());
    for (path, text) in of_all() {
        let lines: Vec<&str> = text
            .lines()
            .take_while(|line| !line.starts_with("#[cfg(test)]") && !line.starts_with("#![cfg(test)]"))
            .collect();
        if lines.len() > FILE_LINES_MAX {
            files.push(format!("{path} {}", lines.len()));
        }
        for (start, line) in lines.iter().enumerate() {
            let bare = line.trim_start();
            let words: Vec<&str> =
                bare.split(' ').take_while(|word| !word.contains('(') || word.starts_with("pub(")).collect();
            let has_body = line.ends_with(['{', '(']);
            if !words.contains(&"fn") || !has_body || bare.starts_with("//") {
                continue;
            }
            let end = format!("{}}}", &line[..line.len() - bare.len()]);
            let count = lines[start..].iter().position(|line| *line == end).unwrap_or(0);
            if count > FUNCTION_LINES_MAX {
                functions.push(format!("{path}:{} {count}", start + 1));
            }
        }
    }
    let found = (files.len(), functions.len());
    assert!(
        found.0 <= LONG.0 && found.1 <= LONG.1,
        "longer than allowed: {found:?}, {LONG:?} may be: {files:?} {functions:?}"
    );
    assert!(found == LONG, "{found:?} are too long: lower LONG");
}

/// The ABI layer names the crates below, none of which names it, and nccl-sys names no crate.
#[test]
fn crates_point_down() {
    for (path, text) in of_all() {
        assert!(!code(&text).any(|line| line.contains("windlass::")), "{path} names the ABI layer");
    }
    for (path, text) in sources("crates/nccl-sys/src") {
        assert!(!code(&text).any(|line| line.contains("windlass_")), "{} names windlass", path.display());
    }
}

/// The product reads the environment only in its table of options and its list of NCCL's variables. It opens no library but the
/// driver, NVML, what profilers bring and, to see whether it exists, NCCL's plugin of variables, each in one file, and exports nothing.
#[test]
fn what_stays_in_one_module() {
    let rules = [
        ("std::env::", &["base/config.rs", "base/config/nccl.rs", "base/config/nccl/files.rs"][..]),
        ("no_mangle", &[]),
        (
            "dlopen",
            &[
                "base/gpu/library.rs",
                "base/config/nccl/plugin.rs",
                "base/observers/nvtx.rs",
                "base/observers/profiler/plugins.rs",
            ],
        ),
        ("libloading", &["base/gpu/library.rs", "base/gpu/nvml.rs"]),
        // A thread that took the program's signals would run its handlers.
        ("thread::Builder", &["base/thread.rs"]),
        ("std::thread::spawn", &[]),
    ];
    for (path, text) in of_all() {
        for (what, files) in rules {
            let allowed = files.contains(&path.as_str());
            assert!(allowed || !code(&text).any(|line| line.contains(what)), "{path} has {what}");
        }
    }
}

/// `unsafe` is used only in the listed files, which ARCHITECTURE.md names.
#[test]
fn unsafe_stays_at_the_border() {
    let files: BTreeSet<String> = of_all()
        .into_iter()
        .filter(|(_, text)| code(text).any(|line| line.contains("unsafe {") || line.contains("unsafe fn")))
        .map(|(path, _)| path)
        .collect();
    // The whole module that calls CUDA; elsewhere single files.
    let outside_gpu: Vec<&str> =
        files.iter().map(String::as_str).filter(|path| !path.starts_with("base/gpu/")).collect();
    let known = [
        "base/config/nccl/plugin.rs",
        "base/descriptor.rs",
        "base/log.rs",
        "base/observers/nvtx.rs",
        "base/observers/profiler.rs",
        "base/observers/profiler/calls.rs",
        "base/observers/profiler/plugins.rs",
        "base/process.rs",
        "base/shared_page.rs",
        "base/stats/segment.rs",
        "base/thread.rs",
        "engine/communicator/table.rs",
        "engine/forward.rs",
        "engine/forward/configuration.rs",
        "engine/forward/init.rs",
        "engine/forward/known.rs",
        "engine/forward/of_call.rs",
        "engine/forward/operators.rs",
        "engine/forward/queries.rs",
        "engine/forward/registration.rs",
        "transport/native/calls.rs",
        "transport/p2p/calls.rs",
        "transport/sequencer/host.rs",
    ];
    assert_eq!(outside_gpu, known, "unsafe moved: is ARCHITECTURE.md still true?");
}

/// Library code does not panic on purpose, print, or end the process.
#[test]
fn library_code_neither_prints_nor_exits() {
    let words =
        [".unwrap()", ".expect(", "panic!(", "println!(", "eprintln!(", "process::exit", "process::abort"];
    let named = |(path, text): (PathBuf, String)| (path.display().to_string(), text);
    for (path, text) in
        ["src", "crates/nccl-sys/src"].into_iter().flat_map(sources).map(named).chain(of_all())
    {
        for line in code(&text) {
            let found = words.iter().find(|word| line.contains(**word));
            assert!(found.is_none(), "{path}: {}: {line}", found.unwrap());
        }
    }
}
