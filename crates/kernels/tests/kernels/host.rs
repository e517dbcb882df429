//! Compiles the C++ programs of `host/` once for each change of a source, by the first test that needs one, and runs their
//! scenarios.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};

/// The folder of this crate.
pub fn crate_folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Digest of all sources in a folder, in order of their names.
fn digest(folders: &[&str], flags: &[&str]) -> String {
    let mut digest = Sha256::new();
    for folder in folders {
        let entries = fs::read_dir(crate_folder().join(folder)).unwrap();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        for path in paths {
            digest.update(path.file_name().unwrap().as_encoded_bytes());
            digest.update(fs::read(&path).unwrap());
        }
    }
    digest.update(flags.join(" "));
    hex(&digest.finalize())
}

/// The digest as `sha256sum` prints it.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Compiles a C++ source into a program with these flags.
pub fn compile(source: &Path, program: &Path, flags: &[&str]) {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let status = Command::new(&compiler)
        .args(["-std=c++17", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-maybe-uninitialized", "-pthread"])
        .arg("-o")
        .args([program, source])
        .args(flags)
        .status()
        .unwrap_or_else(|error| panic!("a C++ compiler ({compiler}) is needed: {error}"));
    assert!(status.success(), "{} does not compile", source.display());
}

/// The folder of `libhost_arrange.so`, which cargo builds before these tests.
fn library_folder() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folder = test.parent().unwrap().to_owned();
    let library = folder.join("libhost_arrange.so");
    assert!(library.exists(), "{} is missing: cargo builds it with these tests", library.display());
    folder
}

/// The program `host/SOURCE.cpp` compiled with these flags. It loads the library of `host-arrange` when it runs, so a change of the Rust
/// code compiles no C++.
pub fn compiled(source: &str, name: &str, flags: &[&str]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels-host");
    fs::create_dir_all(&folder).unwrap();
    let library_folder = library_folder().into_os_string().into_string().unwrap();
    // Before LD_LIBRARY_PATH, in which cargo has a folder where an older build of the library may lie.
    let search_path = format!("-Wl,--disable-new-dtags,-rpath,{library_folder}");
    let flags = [flags, &["-L", &library_folder, "-lhost_arrange", &search_path]].concat();
    let program = folder.join(format!("{name}-{}", &digest(&["device", "host"], &flags)[..16]));
    // Tests run as processes side by side: one compiles, the others wait.
    let lock = File::create(folder.join(format!("{name}.lock"))).unwrap();
    lock.lock().unwrap();
    if program.exists() {
        return program;
    }
    for old in fs::read_dir(&folder).unwrap() {
        let old = old.unwrap().path();
        if old.file_name().unwrap().to_string_lossy().starts_with(&format!("{name}-")) {
            fs::remove_file(old).unwrap();
        }
    }
    let unfinished = program.with_extension("part");
    compile(&crate_folder().join("host").join(source), &unfinished, &flags);
    fs::rename(unfinished, &program).unwrap();
    program
}

/// The result of a scenario of the program.
pub fn output(program: &Path, scenario: &str) -> Output {
    let seed = std::env::var("WINDLASS_SEED")
        .unwrap_or_else(|_| SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos().to_string());
    let run = |command: &mut Command| {
        command.arg(scenario).arg(&seed).env("TSAN_OPTIONS", "halt_on_error=1").output().unwrap()
    };
    let output = run(&mut Command::new(program));
    // Older sanitizers fail with some address layouts of a process, so randomisation is switched off.
    if String::from_utf8_lossy(&output.stderr).contains("unexpected memory mapping") {
        return run(Command::new("setarch").arg("-R").arg(program));
    }
    output
}

/// Holds that the scenario passes.
pub fn passes(program: &Path, scenario: &str) {
    // A seed may need more threads than the sanitizer supports, which is no fault of the kernels: then another seed runs.
    let is_too_many = |output: &Output| String::from_utf8_lossy(&output.stderr).contains("Thread limit");
    let mut output = output(program, scenario);
    for _ in 0..2 {
        if is_too_many(&output) {
            output = self::output(program, scenario);
        }
    }
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    print!("{out}");
    assert!(output.status.success(), "{scenario}: {}\n{out}\n{err}", output.status);
}

/// Holds that the program's list of scenarios is this one.
pub fn are_all(program: &Path, names: &[&str]) {
    let listed = String::from_utf8(output(program, "list").stdout).unwrap();
    assert_eq!(listed.split_whitespace().collect::<Vec<_>>(), names);
}

/// Makes a test for each scenario of a program, which the function `$build` beside it compiles.
macro_rules! scenarios {
    ($build:ident: $($name:ident)*) => {
        mod $build {
            $(
                #[test]
                fn $name() {
                    crate::host::passes(&super::$build(), stringify!($name));
                }
            )*
            pub const NAMES: &[&str] = &[$(stringify!($name)),*];
        }
    };
}
pub(crate) use scenarios;
