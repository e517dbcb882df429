use crate::{built, make_nccl, outcome, simulated_nccl, windlass};
use serde_json::Value;
use std::process::Command;

fn with_simulated_cuda(mut command: Command) -> (Command, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        std::os::unix::fs::symlink(built("libsim_cuda.so"), folder.path().join(name)).unwrap();
    }
    command.env("LD_LIBRARY_PATH", folder.path());
    (command, folder)
}

fn json(command: Command) -> (Option<i32>, Value) {
    let (code, printed, told) = outcome(command);
    (code, serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{error}: {printed}{told}")))
}

fn findings(answer: &Value, level: &str) -> Vec<String> {
    let all = answer["findings"].as_array().unwrap().iter();
    all.filter(|finding| finding["level"] == level).map(|finding| finding["what"].to_string()).collect()
}

/// On the simulated machine there are no findings. The facts name devices, versions and the library that was taken.
#[test]
fn all_good() {
    let (command, _folder) =
        with_simulated_cuda(windlass(&["doctor", "--json", "--nccl", &simulated_nccl()]));
    let (code, answer) = json(command);
    assert_eq!(code, Some(0), "{answer:#}");
    let facts = &answer["facts"];
    assert_eq!(facts["nccl"]["version"], 22809, "{answer:#}");
    assert_eq!(facts["nccl"]["version_through_windlass"], 22809, "{answer:#}");
    assert_eq!(facts["gpus"]["devices"].as_array().unwrap().len(), 8, "{answer:#}");
    assert_eq!(facts["gpus"]["pairs"].as_array().unwrap().len(), 56, "{answer:#}");
    assert_eq!(facts["search"][0]["refused"], Value::Null, "{answer:#}");
    let words: Vec<&str> = facts["build"].as_str().unwrap().split(' ').collect();
    let ["windlass", env!("CARGO_PKG_VERSION"), "commit", _, "kernels", kernels] = words[..] else {
        panic!("{words:?}")
    };
    // Library and command of one source tree have the same kernels.
    let (_, version, _) = outcome(windlass(&["--version"]));
    assert!(version.contains(&format!("\nkernels {kernels} (")), "{version}");
}

/// Where nobody has measured up to which sizes Windlass is faster, a note says what measures, and why no run has.
#[test]
fn unmeasured() {
    let place = tempfile::tempdir().unwrap();
    for (name, value, why) in [
        ("WINDLASS_SIM_CALIBRATE", "1", "`windlass run` did not run yet"),
        ("WINDLASS_SIM_CALIBRATE_NOT", "1", "a simulator's times say nothing"),
        ("WINDLASS_CACHE", "off", "an option switches that off"),
    ] {
        let (mut command, _folder) =
            with_simulated_cuda(windlass(&["doctor", "--json", "--nccl", &simulated_nccl()]));
        command.env("WINDLASS_CACHE", place.path()).env(name, value);
        let (_, answer) = json(command);
        let notes = findings(&answer, "note").join("\n");
        assert!(notes.contains("limits not measured here (`windlass tune` measures them"), "{answer:#}");
        assert!(notes.contains(why), "{name}: {answer:#}");
    }
}

/// Prints the version alone, or with what it was built from.
#[test]
fn versions() {
    let short = format!("windlass {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(outcome(windlass(&["-V"])), (Some(0), short.clone(), String::new()));
    let (code, long, _) = outcome(windlass(&["--version"]));
    assert_eq!(code, Some(0));
    let lines: Vec<&str> = long.strip_prefix(&short).unwrap().lines().collect();
    let [commit, kernels] = lines[..] else { panic!("{long}") };
    let commit = commit.strip_prefix("commit  ").unwrap();
    let is_digest = |text: &str, letters: usize| {
        text.len() == letters && text.chars().all(|letter| letter.is_ascii_hexdigit())
    };
    assert!(commit == "unknown" || is_digest(commit, 40), "{long}");
    assert!(is_digest(kernels.split(' ').nth(1).unwrap(), 64), "{long}");
}

/// A finding that limits Windlass gives exit code 3 and is named.
#[test]
fn limited() {
    let (mut command, _folder) =
        with_simulated_cuda(windlass(&["doctor", "--json", "--nccl", &simulated_nccl()]));
    command
        .env("WINDLASS_TUNING", "/etc/passwd")
        .env("WINDLASS_LGO", "info")
        .env("WINDLASS_SIM_DEVICES", "1");
    let (code, answer) = json(command);
    assert_eq!(code, Some(3), "{answer:#}");
    let limited = findings(&answer, "limited").join("\n");
    for what in
        ["WINDLASS_TUNING=/etc/passwd: expected a table", "WINDLASS_LGO", "one GPU", "--gpu-bind=none"]
    {
        assert!(limited.contains(what), "{what}: {answer:#}");
    }
    assert_eq!(answer["verdict"]["exit_code"], 3, "{answer:#}");
}

/// A finding that keeps Windlass from taking effect gives exit code 1: no library, missing exports, a command that cannot be
/// preloaded.
#[test]
fn broken() {
    let folder = tempfile::tempdir().unwrap();
    let newer = make_nccl(folder.path(), 99999, "int ncclTeleport(void) { return 0; }").display().to_string();
    for (arguments, what) in [
        (vec!["--nccl", "/no/such/libnccl.so.2"], "found no real NCCL"),
        (vec!["--nccl", &newer], "lacks (ncclTeleport)"),
        (vec!["--nccl", &newer, "--", "no-such-command"], "command not found"),
    ] {
        let mut command = windlass(&["doctor", "--json"]);
        command.args(&arguments);
        let (code, answer) = json(command);
        assert_eq!(code, Some(1), "{answer:#}");
        assert!(findings(&answer, "broken").join("\n").contains(what), "{what}: {answer:#}");
    }
}

/// The text names the search for the library, and ends with a verdict. Where NCCL would run every call, nothing is called good.
#[test]
fn text() {
    for (name, value, code, verdict) in [
        ("NCCL_P2P_DISABLE", "0", 0, "Windlass works on the simulator"),
        ("NCCL_P2P_DISABLE", "1", 1, "Windlass does nothing here: NCCL would run every call"),
        ("WINDLASS", "0", 1, "Windlass is switched off: NCCL would run every call"),
        ("WINDLASS_PEER_GROUPS", "off", 1, "Windlass does nothing here: NCCL would run every call"),
        ("WINDLASS_HEAP_MAX", "4M", 1, "Windlass does nothing here: NCCL would run every call"),
        ("WINDLASS_TUNING", "/nowhere", 3, "Windlass works here, but lacks what is LIMITED"),
    ] {
        let mut command = windlass(&["doctor", "--sim"]);
        command.env(name, value);
        let (found, printed, _) = outcome(command);
        assert_eq!(found, Some(code), "{printed}");
        assert!(
            printed.contains("/libnccl.so.2 (--nccl): TAKEN")
                && printed.contains(&format!("  {name}={value}\n")),
            "{printed}"
        );
        assert!(printed.contains(&format!("\nverdict: {verdict}\nnext: ")), "{printed}");
        let has_limits =
            printed.contains("all-reduces of 2 to 8 ranks run in Windlass's kernels up to 16 KiB");
        assert_eq!(has_limits, code != 1, "{printed}");
    }
}
