//! Runs the target that FUZZ_TARGET names (`windlass_engine::fuzzing::TARGETS`). FUZZ_SEEDS, a folder: writes its seeds there first.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use windlass_engine::fuzzing::{TARGETS, Target};

static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
    let found = TARGETS.iter().find(|target| target.name == name);
    found.unwrap_or_else(|| panic!("FUZZ_TARGET is \"{name}\", expected one of {names:?}"))
});

fuzz_target!(
    init: {
        if let Some(folder) = std::env::var_os("FUZZ_SEEDS") {
            for (index, seed) in (TARGET.seeds)().iter().enumerate() {
                let file = std::path::Path::new(&folder).join(format!("seed-{index}"));
                std::fs::write(&file, seed).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            }
        }
    },
    |data: &[u8]| (TARGET.run)(data)
);
