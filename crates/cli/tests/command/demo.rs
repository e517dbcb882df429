use crate::{outcome, windlass};

fn last_line(text: &str) -> &str {
    text.lines().last().unwrap_or_default()
}

/// Every kind of call runs on four ranks: all data is right, all counters are equal, and the table has every function.
#[test]
fn passes() {
    let (code, printed, told) = outcome(windlass(&["demo", "--sim", "--ranks", "4"]));
    assert_eq!(code, Some(0), "{printed}{told}");
    let words: Vec<&str> = last_line(&printed).split_whitespace().collect();
    let ["demo:", passed, "checks", "passed,", "0", "failed"] = words[..] else { panic!("{printed}") };
    // The counts when this test was written, less some slack for changes of the demo's steps.
    assert!(passed.parse::<usize>().unwrap() > 1200, "{printed}");
    for function in [
        "ncclAllReduce",
        "ncclBroadcast",
        "ncclBcast",
        "ncclReduce",
        "ncclAllGather",
        "ncclReduceScatter",
        "ncclAlltoAll",
        "ncclGather",
        "ncclScatter",
        "ncclSend",
        "ncclRecv",
        "ncclCommSplit",
        "ncclGroupEnd",
    ] {
        assert!(printed.lines().any(|line| line.starts_with(function)), "no {function} in\n{printed}");
    }
    assert!(told.contains("on the simulator (--sim asks for it)"), "{told}");
    assert!(
        printed.contains("\ndemo: 4 processes, ") && printed.contains(" % of bytes in Windlass's kernels"),
        "{printed}"
    );
}

/// An odd number of ranks works, which does not divide into halves and pairs.
#[test]
fn three_ranks() {
    let (code, printed, told) = outcome(windlass(&["demo", "--sim", "--ranks", "3"]));
    assert_eq!(code, Some(0), "{printed}{told}");
    assert!(last_line(&printed).ends_with(", 0 failed"), "{printed}");
}

/// A reader of standard error who has enough (`2>&1 | head`) does not end the demo.
#[test]
fn nobody_reads() {
    let mut command = windlass(&["demo", "--sim", "--ranks", "2"]);
    let mut demo =
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    drop(demo.stderr.take());
    assert_eq!(demo.wait().unwrap().code(), Some(0));
}

/// With Windlass off data alone are checked, and a line says that nothing is counted.
#[test]
fn without_windlass() {
    let mut command = windlass(&["demo", "--sim", "--ranks", "2"]);
    command.env("WINDLASS", "off");
    let (code, printed, told) = outcome(command);
    assert_eq!(code, Some(0), "{printed}{told}");
    assert!(printed.contains("WINDLASS=off is set: NCCL ran all calls, and none is counted"), "{printed}");
    assert!(!printed.contains("ncclAllReduce") && last_line(&printed).ends_with(", 0 failed"), "{printed}");
}

/// More ranks than devices are refused with the numbers.
#[test]
fn too_many_ranks() {
    let (code, _, told) = outcome(windlass(&["demo", "--sim", "--ranks", "9"]));
    assert_eq!(code, Some(2));
    assert!(told.contains("--ranks 9: expected 1 to 8, because the simulator has 8 devices"), "{told}");
}

/// A rank that dies ends the run at once. The error names it, and no rank stays behind.
#[test]
fn dying_ranks() {
    let mut command = windlass(&["demo", "--sim", "--ranks", "2"]);
    // The simulated device has too little memory for the larger buffers.
    command.env("WINDLASS_SIM_DEVICE_MEMORY", "1");
    let (code, _, told) = outcome(command);
    assert_eq!(code, Some(1), "{told}");
    assert!(told.contains("windlass: rank ") && told.contains("bytes of device memory"), "{told}");
}
