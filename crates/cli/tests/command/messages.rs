//! Bad input: each answer names the value, what was expected, and what holds or what to do.

use crate::{outcome, simulated_nccl, windlass};

/// Options before the command that are not known are refused, not taken for the command.
#[test]
fn unknown_options() {
    for (arguments, refused, tip) in [
        (&["doctor", "--format", "json"][..], 2, "windlass doctor has the options --json, --nccl, --sim"),
        (&["doctor", "--format", "json"], 2, "unexpected argument '--format' found"),
        (&["run", "--nocalibrate", "true"], 125, "a similar argument exists: '--no-calibrate'"),
        (&["run", "-n", "4", "true"], 125, "A launcher's options come behind it"),
        (&["run"], 125, "<COMMAND>"),
        (&["compare", "--run", "4", "true"], 2, "a similar argument exists: '--runs'"),
        (&["demo", "--ranks", "x"], 2, "expected a whole number"),
    ] {
        let (code, _, told) = outcome(windlass(arguments));
        assert_eq!(code, Some(refused), "{arguments:?}: {told}");
        assert!(told.contains(tip) && !told.contains("'-- "), "{arguments:?}: {told}");
        assert!(told.contains("nothing was started"), "{arguments:?}: {told}");
    }
    // The command's own options are its own.
    let mut command = windlass(&["run", "--check", "--sim", "--", "ls", "-l", "--nocalibrate"]);
    let folder = tempfile::tempdir().unwrap();
    command.env("WINDLASS_CACHE", folder.path());
    assert_eq!(outcome(command).0, Some(0));
}

/// Values of options, on the command line and in the environment.
#[test]
fn values() {
    let (sim, nccl): (&[&str], _) = (&["demo", "--sim", "--ranks", "1"], simulated_nccl());
    for (variable, arguments, code, words) in [
        ("A=b", &["stats", "one"][..], 2, "'one' for '[PROCESS]': expected the number of a process"),
        ("A=b", &["stats", "999999999"], 1, "there is no process 999999999"),
        ("A=b", &["demo", "--sim", "--ranks", "99"], 2, "--ranks 99: expected 1 to 8"),
        ("A=b", &["demo", "--sim", "--ranks", "99"], 2, "nothing was started"),
        ("A=b", &["compare", "--runs", "0", "--", "true"], 2, "'--runs <N>': 0, expected 1 to 30"),
        ("A=b", &["hang", "--after", "soon"], 2, "'--after <SECONDS>': expected a number"),
        (
            "A=b",
            &["explain", "--op", "all_reduce", "--ranks", "2", "--bytes", "-5"],
            2,
            "'-5' for '--bytes <BYTES>': \"-5\" is no size",
        ),
        ("A=b", &["bogus"], 2, "windlass has the commands run, "),
        ("A=b", &["options", "WINDLASS_NO"], 2, "WINDLASS_NO: expected one of the names"),
        ("WINDLASS_HEAP_MAX=1.5G", sim, 0, "WINDLASS_HEAP_MAX is \"1.5G\", expected: whole bytes, as 512M; "),
        ("WINDLASS_HEAP_MAX=1.5G", sim, 0, "its default holds: 8G"),
        ("WINDLASS_HANG_TIMEOUT=1m", sim, 0, "\"1m\", expected: whole seconds, as 60; its default holds: 60"),
        (
            "WINDLASS_CACHE=relative",
            sim,
            0,
            "\"relative\", expected: absolute path, off; its default holds: ",
        ),
        (
            "NCCL_P2P_DISABLE=1",
            sim,
            0,
            "warning: NCCL_P2P_DISABLE=1: peer groups are off, so NCCL runs every call",
        ),
        (
            "WINDLASS=false",
            &["run", "--", "true"],
            0,
            "warning: WINDLASS=off: every call goes straight to the real NCCL",
        ),
        (
            "WINDLASS_ODER=fixed",
            sim,
            0,
            "WINDLASS_ODER=\"fixed\" has no effect: it is no option; the nearest is WINDLASS_ORDER",
        ),
        (
            "WINDLASS_POOLS=1G",
            sim,
            0,
            "it is no option; the nearest is WINDLASS_POOL, which is 2G unless it is set",
        ),
        (
            "WINDLASS_VLLM=atuo",
            sim,
            0,
            "WINDLASS_VLLM is \"atuo\", expected: off, auto, intervals of bytes, as 4K-64K,8M-; ",
        ),
        ("WINDLASS_SGLANG=8M-4M", sim, 0, "WINDLASS_SGLANG is \"8M-4M\", expected: off, auto, intervals"),
        ("WINDLASS_PYTHON=1", sim, 0, "WINDLASS_PYTHON is \"1\", expected: off, on; its default holds: off"),
        ("WINDLASS_PYTHON=on", &["doctor", "--sim"], 3, "does not open Windlass (ended with exit status: 1"),
        (
            "A=b",
            &["tune", "--ranks", "2-4"],
            2,
            "expected whole numbers of ranks, separated by commas, as 2,4",
        ),
        (
            "WINDLAS_ORDER=fixed",
            sim,
            0,
            "no option; the nearest is WINDLASS_ORDER, which is auto unless it is set",
        ),
        ("WINDLAS=off", sim, 0, "no option; the nearest is WINDLASS, which is on unless it is set"),
        ("A=b", &["run", "--", "no-such-command"], 127, "nothing was started"),
        (
            "A=b",
            &["doctor", "--nccl", "/wrong"],
            1,
            "--nccl is /wrong: no such file; expected a libnccl.so.2 or its folder",
        ),
        (
            "A=b",
            &["compare", "--metric", "(", "true"],
            2,
            "unclosed group: expected a regular expression whose first",
        ),
        ("WINDLASS_CACHE=/proc/none", &["doctor", "--sim"], 3, "LIMITED /proc/none cannot be written: "),
        (
            "TORCH_NCCL_USE_COMM_NONBLOCKING=1",
            &["run", "--no-calibrate", "--nccl", &nccl, "true"],
            0,
            "TORCH_NCCL_USE_COMM_NONBLOCKING is set: PyTorch's inits do not wait",
        ),
        ("WINDLASS_TUNING=/nowhere", sim, 0, "WINDLASS_TUNING=/nowhere: expected a table"),
        ("WINDLASS_TUNING=/nowhere", &["tune", "--show", "--sim"], 0, "it is left out: No such file"),
    ] {
        let mut command = windlass(arguments);
        let (name, value) = variable.split_once('=').unwrap();
        command.env(name, value);
        let (found, printed, told) = outcome(command);
        assert_eq!(found, Some(code), "{variable} {arguments:?}: {told}");
        assert!((printed + &told).contains(words), "{variable} {arguments:?}: {told}");
    }
}

/// A call that flags describe has a path, a limit, and where that comes from; a variable that leaves all to NCCL is named.
#[test]
fn explains() {
    let of = |bytes: &str, variable: &str| {
        let mut command =
            windlass(&["explain", "--sim", "--op", "all_reduce", "--ranks", "4", "--bytes", bytes]);
        let (name, value) = variable.split_once('=').unwrap();
        command.env(name, value);
        outcome(command).1
    };
    assert_eq!(
        of("16K", "A=b"),
        "all_reduce of 16K over 4 ranks: a kernel of Windlass; the limit is 16K (unmeasured)\n"
    );
    assert_eq!(of("1M", "A=b"), "all_reduce of 1M over 4 ranks: NCCL; the limit is 16K (unmeasured)\n");
    let off = of("16K", "NCCL_P2P_DISABLE=1");
    assert!(off.contains(": NCCL, because NCCL_P2P_DISABLE=1: peer groups are off"), "{off}");
    let (code, _, told) =
        outcome(windlass(&["explain", "--sim", "--op", "x", "--ranks", "2", "--bytes", "1"]));
    assert!(code == Some(2) && told.contains("'x' for '--op <OP>': expected one of all_reduce, "), "{told}");
}

/// Without an NCCL each command says how to get one.
#[test]
fn no_nccl() {
    for arguments in [&["run", "true"][..], &["compare", "true"], &["doctor"]] {
        let (code, printed, told) = outcome(windlass(arguments));
        // A machine may have one.
        if matches!(code, Some(125 | 1)) {
            let all = printed + &told;
            assert!(
                all.contains(
                    "install one (pip install nvidia-nccl-cu12, of CUDA 13 nvidia-nccl-cu13) or name an existing one with --nccl"
                ),
                "{all}"
            );
        }
    }
}

/// All options are listed with their values here, and one with all that is known of it.
#[test]
fn options() {
    let mut command = windlass(&["options"]);
    command.env("WINDLASS_ORDER", "fixed");
    let (_, printed, _) = outcome(command);
    let line = printed.lines().find(|line| line.starts_with("WINDLASS_ORDER")).unwrap();
    assert_eq!(
        line.split_whitespace().collect::<Vec<_>>()[1..],
        ["fixed", "auto", "auto,", "fixed,", "strict"]
    );
    let (code, printed, _) = outcome(windlass(&["options", "windlass_pool"]));
    assert_eq!(code, Some(0));
    assert!(
        printed.contains("WINDLASS_POOL\n") && printed.contains("freed ncclMemAlloc memory"),
        "{printed}"
    );
}

/// Man pages and completions come from the same description as the help.
#[test]
fn manual() {
    let folder = tempfile::tempdir().unwrap();
    let (code, _, told) = outcome(windlass(&["manual", &folder.path().display().to_string()]));
    assert_eq!(code, Some(0), "{told}");
    for (file, text) in [
        ("man/man1/windlass.1", "windlass"),
        ("man/man1/windlass-doctor.1", "Exit code"),
        ("bash-completion/completions/windlass", "--no-calibrate"),
        ("zsh/site-functions/_windlass", "#compdef windlass"),
        ("fish/vendor_completions.d/windlass.fish", "complete -c windlass"),
    ] {
        let written = std::fs::read_to_string(folder.path().join(file)).unwrap();
        assert!(written.contains(text), "{file}: {written}");
    }
    let (_, printed, _) = outcome(windlass(&["completions", "bash"]));
    let written =
        std::fs::read_to_string(folder.path().join("bash-completion/completions/windlass")).unwrap();
    assert_eq!(printed, written);
}
