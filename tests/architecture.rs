//! Holds the arrows of ARCHITECTURE.md: a file of the engine names only layers below its own, mechanisms never name
//! each other, and what must stay in one place stays there.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The engine's layers, from the call downwards. Modules of one layer may name each other only where `together`.
const LAYERS: &[(Together, &[&str])] = &[
    // Only in tests.
    (Together::No, &["fuzzing"]),
    (Together::Yes, &["dispatch", "lifecycle"]),
    (Together::No, &["communicator", "group", "plan"]),
    (Together::No, &["lazy"]),
    (Together::No, &["peers"]),
    (
        Together::No,
        &[
            "forward",
            "heap",
            "rendezvous",
            "p2p",
            "native",
            "registration",
            "allocation",
            "agreed",
            "pool",
            "windows",
            "checking",
        ],
    ),
    (Together::No, &["sequencer"]),
    (Together::No, &["process"]),
    (Together::No, &["gpu", "range", "shared_page", "stats"]),
    (Together::No, &["annotate", "log"]),
    (Together::No, &["config", "error", "guard", "descriptor", "gate", "thread"]),
    (Together::No, &["tuning"]),
    (Together::No, &["call", "negotiated", "path"]),
];

#[derive(PartialEq)]
enum Together {
    Yes,
    No,
}

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

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
    found
}

/// Code lines outside tests and comments.
fn code(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .take_while(|line| !line.starts_with("#[cfg(test)]") && !line.starts_with("#![cfg(test)]"))
        .filter(|line| !line.trim_start().starts_with("//"))
}

/// The modules that a source file names by `crate::`, also inside braces.
fn named_modules(text: &str) -> BTreeSet<String> {
    let joined: String = code(text).collect::<Vec<_>>().join(" ");
    let mut names = BTreeSet::new();
    for rest in joined.split("crate::").skip(1) {
        let list = rest.strip_prefix('{').map_or(rest, |list| list.split('}').next().unwrap_or_default());
        let items: Vec<&str> = if rest.starts_with('{') { list.split(',').collect() } else { vec![list] };
        for item in items {
            let name: String = item
                .trim()
                .chars()
                .take_while(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || *c == '_')
                .collect();
            names.insert(name);
        }
    }
    names
}

fn layer_of(module: &str) -> usize {
    let layer = LAYERS.iter().position(|(_, modules)| modules.contains(&module));
    layer.unwrap_or_else(|| {
        panic!("module {module} of the engine has no layer: give it one here and in ARCHITECTURE.md")
    })
}

/// Every arrow inside the engine points down.
#[test]
fn engine_arrows_point_down() {
    let mut arrows = 0;
    for (path, text) in sources("crates/engine/src") {
        let inner = path.strip_prefix(repository().join("crates/engine/src")).unwrap();
        let module = inner.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs");
        if module == "lib" {
            continue;
        }
        let own = layer_of(module);
        for named in named_modules(&text).iter().filter(|named| *named != module) {
            let there = layer_of(named);
            let allowed = there > own || there == own && LAYERS[own].0 == Together::Yes;
            assert!(
                allowed,
                "{}: an arrow from {module} (layer {own}) to {named} (layer {there})",
                path.display()
            );
            arrows += 1;
        }
    }
    assert!(arrows > 15, "only {arrows} arrows seen: this test no longer reads the sources");
}

/// The ABI layer names the engine and nccl-sys; neither names the ABI layer, and nccl-sys names no one.
#[test]
fn crates_point_down() {
    let forbidden = [("crates/nccl-sys/src", "windlass_engine"), ("crates/engine/src", "windlass::")];
    for (folder, name) in forbidden {
        for (path, text) in sources(folder) {
            assert!(!code(&text).any(|line| line.contains(name)), "{} names {name}", path.display());
        }
    }
}

/// The engine reads the environment in its table of options and its list of NCCL's variables alone, opens no library but the driver,
/// NVML and, to see whether it is there, NCCL's plugin of variables, each in one file, and exports nothing.
#[test]
fn what_stays_in_one_module() {
    let rules = [
        ("std::env::", &["config.rs", "config/nccl.rs", "config/nccl/files.rs"][..]),
        ("no_mangle", &[]),
        ("dlopen", &["gpu/library.rs", "config/nccl/plugin.rs"]),
        ("libloading", &["gpu/library.rs", "gpu/nvlink.rs"]),
        // A thread that took the program's signals would run its handlers.
        ("thread::Builder", &["thread.rs"]),
        ("std::thread::spawn", &[]),
    ];
    for (path, text) in sources("crates/engine/src") {
        for (what, files) in rules {
            let allowed = files.iter().any(|file| path.ends_with(file));
            assert!(allowed || !code(&text).any(|line| line.contains(what)), "{} has {what}", path.display());
        }
    }
}

/// In the engine `unsafe` stands only where it is allowed by name, and ARCHITECTURE.md tells these files.
#[test]
fn unsafe_stays_at_the_border() {
    let files: BTreeSet<String> = sources("crates/engine/src")
        .into_iter()
        .filter(|(_, text)| code(text).any(|line| line.contains("unsafe {") || line.contains("unsafe fn")))
        .map(|(path, _)| {
            path.strip_prefix(repository().join("crates/engine/src")).unwrap().display().to_string()
        })
        .collect();
    // The module that calls CUDA, whole; single files elsewhere.
    let outside_gpu: Vec<&str> =
        files.iter().map(String::as_str).filter(|path| !path.starts_with("gpu/")).collect();
    let known = [
        "communicator/table.rs",
        "config/nccl/plugin.rs",
        "descriptor.rs",
        "forward.rs",
        "forward/configuration.rs",
        "forward/init.rs",
        "forward/known.rs",
        "forward/of_call.rs",
        "forward/operators.rs",
        "forward/questions.rs",
        "forward/registration.rs",
        "log.rs",
        "native/calls.rs",
        "p2p/calls.rs",
        "process.rs",
        "sequencer/host.rs",
        "shared_page.rs",
        "stats/segment.rs",
        "thread.rs",
    ];
    assert_eq!(outside_gpu, known, "unsafe moved: is ARCHITECTURE.md still true?");
}

/// Library code does not panic on purpose, print, or end the process.
#[test]
fn library_code_neither_prints_nor_exits() {
    let words =
        [".unwrap()", ".expect(", "panic!(", "println!(", "eprintln!(", "process::exit", "process::abort"];
    for (path, text) in ["src", "crates/engine/src", "crates/nccl-sys/src"].into_iter().flat_map(sources) {
        for line in code(&text) {
            let found = words.iter().find(|word| line.contains(**word));
            assert!(found.is_none(), "{}: {}: {line}", path.display(), found.unwrap());
        }
    }
}
