//! Holds that `windlass bench` measures, and prints what it measured.

use crate::{outcome, windlass};
use serde_json::Value;

/// Runs all modes and kinds of operation, with JSON lines of the documented schema and pictures.
#[test]
fn measures() {
    let folder = tempfile::tempdir().unwrap();
    let (json, plot) = (folder.path().join("lines.json"), folder.path().join("plots"));
    let mut command =
        windlass(&["bench", "--sim", "--ranks", "2", "--op", "all_reduce,all_gather,send_ring"]);
    command.args([
        "--sizes",
        "1K:64K:64",
        "--mode",
        "eager,graph,host",
        "--repeat",
        "3",
        "--seconds",
        "0.02",
    ]);
    command.args(["--type", "bf16,int8", "--reduction", "max", "--again", "2"]);
    command.arg("--json").arg(&json).arg("--plot").arg(&plot);
    let (code, printed, told) = outcome(command);
    assert_eq!(code, Some(0), "{printed}{told}");
    assert!(told.contains("say nothing about GPUs"), "{told}");

    let text = std::fs::read_to_string(&json).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 3 * 2 * 2 * 3, "{text}");
    for line in &lines {
        let time = |name: &str| {
            line[name].as_f64().filter(|us| *us > 0.0).unwrap_or_else(|| panic!("{name}: {line}"))
        };
        let (plain, through) = (time("plain_us"), time("windlass_us"));
        assert!((line["ratio"].as_f64().unwrap() - through / plain).abs() < 1e-9, "{line}");
        assert!(time("plain_min_us") <= plain && plain <= time("plain_max_us"), "{line}");
        // No limits were measured for the simulated GPUs.
        let is_small = line["bytes"].as_u64().unwrap() <= 16 << 10;
        let path = match (line["op"] == "send_ring", is_small) {
            (true, _) => "p2p",
            (false, true) => "native",
            (false, false) => "forward",
        };
        assert_eq!(line["path"], path, "{line}");
        assert_eq!(line["ranks"], 2, "{line}");
        assert_eq!(line["memory"], "device", "{line}");
        assert_eq!(line["machine"]["simulated"], true, "{line}");
        assert_eq!(line["versions"]["nccl"], "2.28.9", "{line}");
        assert_eq!(line["date"].as_str().unwrap().len(), "2026-01-01T00:00:00Z".len(), "{line}");
        assert!([1024, 65536].contains(&line["bytes"].as_u64().unwrap()), "{line}");
        // The calls of all ranks in three batches.
        let host = |side: &str| line.get(side).map(|times| times["p99"].as_f64() >= times["median"].as_f64());
        let wanted = (line["mode"] == "host").then_some(true);
        assert_eq!([host("plain_host_ns"), host("windlass_host_ns")], [wanted; 2], "{line}");
        // Only cases that looked slower were measured again.
        assert!([0, 2].contains(&line["again"].as_u64().unwrap()), "{line}");
        let reduction = (line["op"] == "all_reduce").then_some("max");
        assert_eq!(line.get("reduction").and_then(Value::as_str), reduction, "{line}");
        assert_eq!((&line["beside"], &line["busy"]), (&0.into(), &0.into()), "{line}");
        assert!(line.get("plain_busy_part").is_none(), "{line}");
        // The host's name is not in the output.
        assert!(!line.to_string().contains("host\":\"") || line["mode"] == "host", "{line}");
    }
    let modes = |mode: &str| lines.iter().filter(|line| line["mode"] == mode).count();
    assert_eq!([modes("eager"), modes("graph"), modes("host")], [12, 12, 12]);
    let types = |name: &str| lines.iter().filter(|line| line["type"] == name).count();
    assert_eq!([types("bfloat16"), types("int8")], [18, 18]);
    assert_eq!(std::fs::read_dir(&plot).unwrap().count(), 18);
    assert_eq!(printed.lines().next(), Some("bench: 2 ranks, memory device"), "{printed}");
    // The header common to all lines, a heading, a line each; a heading and the host's calls; the mean; the names of slower cases.
    let comparison =
        printed.lines().position(|line| line.starts_with("bench: slower than NCCL by more than 2 %: "));
    assert_eq!(comparison, Some(2 + 36 + 1 + 12 + 1), "{printed}");
    let slow =
        lines.iter().filter(|line| line["mode"] != "host" && line["ratio"].as_f64().unwrap() > 1.02).count();
    assert_eq!(printed.lines().count(), comparison.unwrap() + 1 + slow, "{printed}");
}

/// Every operation runs, also with an odd number of ranks.
#[test]
fn every_operation() {
    let mut command = windlass(&["bench", "--sim", "--ranks", "3", "--sizes", "0,1000", "--repeat", "1"]);
    command.args(["--seconds", "0.01", "--mode", "eager"]);
    let (code, printed, told) = outcome(command);
    assert_eq!(code, Some(0), "{printed}{told}");
    for operation in [
        "reduce_scatter",
        "broadcast",
        "reduce",
        "alltoall",
        "uneven_all_gather",
        "uneven_reduce_scatter",
        "send_one_way",
        "send_both_ways",
        "send_alltoall",
        "send_two_communicators",
        "product",
        "send_beside_product",
        "all_gather_beside_product",
        "reduce_scatter_beside_product",
    ] {
        assert_eq!(
            printed.lines().filter(|line| line.split(' ').next() == Some(operation)).count(),
            2,
            "{operation}: {printed}"
        );
    }
}

/// Messages run eager and in graphs, beside a product and on two communicators, over the p2p transport where ranks meet. The cost
/// of the communicators' first messages is printed.
#[test]
fn messages() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("lines.json");
    let mut command = windlass(&["bench", "--sim", "--ranks", "4", "--first-use", "--mode", "eager,graph"]);
    command.args(["--op", "send_one_way,send_alltoall,send_two_communicators,product,send_beside_product"]);
    command.args(["--sizes", "8,64K", "--repeat", "1", "--seconds", "0.01"]).arg("--json").arg(&json);
    command.env("WINDLASS_PEER_GROUPS", "on");
    let (code, printed, told) = outcome(command);
    assert_eq!(code, Some(0), "{printed}{told}");
    assert!(told.contains("64 x 64 elements, float by a plain kernel"), "{told}");
    let text = std::fs::read_to_string(&json).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (first_uses, measured): (Vec<&Value>, Vec<&Value>) =
        lines.iter().partition(|line| line.get("what").is_some());
    assert_eq!(measured.len(), 5 * 2 * 2, "{text}");
    for line in measured {
        let path = if line["op"] == "product" { "" } else { "p2p" };
        assert_eq!(line["path"], path, "{line}");
    }
    assert_eq!(first_uses.len(), 7 * 3, "{text}");
    for line in first_uses {
        let (what, plain) = (line["what"].as_str().unwrap(), line["plain"].as_f64().unwrap());
        assert!(!what.ends_with("_ms") || plain > 0.0, "{line}");
        assert!(line["windlass"].is_f64() && line["init"].as_u64().unwrap() < 3, "{line}");
    }
    assert!(printed.contains("first message to a peer, ms"), "{printed}");
}

/// Windlass registers NCCL's memory, and large all-gathers are timed only once they are registered. Memory of cudaMalloc is never
/// registered.
#[test]
fn memories() {
    // Windlass does not register memory that is a window.
    for (memory, eager) in [("nccl", "registered"), ("window", "forward"), ("device", "forward")] {
        let folder = tempfile::tempdir().unwrap();
        let json = folder.path().join("lines.json");
        let mut command = windlass(&["bench", "--sim", "--ranks", "2", "--memory", memory]);
        command.args(["--op", "all_gather,all_reduce", "--sizes", "4M,8M,32M", "--mode", "eager,graph"]);
        command.args(["--repeat", "1", "--seconds", "0.01"]).arg("--json").arg(&json);
        command.env("WINDLASS_PEER_GROUPS", "on").env("WINDLASS_REGISTER", "on");
        let (code, printed, told) = outcome(command);
        assert_eq!(code, Some(0), "{printed}{told}");
        assert!(printed.starts_with(&format!("bench: 2 ranks, memory {memory}\n")), "{printed}");
        let text = std::fs::read_to_string(&json).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2 * 3 * 2, "{text}");
        for line in &lines {
            let is_large = line["bytes"].as_u64().unwrap() >= 8 << 20;
            let may = line["op"] == "all_gather" && line["mode"] == "eager" && is_large;
            assert_eq!(line["path"], if may { eager } else { "forward" }, "{line}");
            assert_eq!(line["memory"], memory, "{line}");
        }
    }
}

/// All modes run beside idle and busy communicators, also with an odd number of ranks, and the output counts these. Calls of the
/// busy ones are not counted as measured ones.
#[test]
fn company() {
    for ranks in ["2", "3"] {
        let folder = tempfile::tempdir().unwrap();
        let (json, plot) = (folder.path().join("lines.json"), folder.path().join("plots"));
        let mut command = windlass(&["bench", "--sim", "--ranks", ranks, "--beside", "2", "--busy", "2"]);
        command.args(["--op", "all_reduce", "--sizes", "1K,64K", "--mode", "eager,graph,host"]);
        command
            .args(["--repeat", "2", "--seconds", "0.01"])
            .arg("--json")
            .arg(&json)
            .arg("--plot")
            .arg(&plot);
        command.env("WINDLASS_PEER_GROUPS", "on");
        let (code, printed, told) = outcome(command);
        assert_eq!(code, Some(0), "{printed}{told}");
        let heading = format!("bench: {ranks} ranks, memory device, beside 2 idle and 2 busy\n");
        assert!(printed.starts_with(&heading), "{printed}");
        assert!(printed.contains("busy communicators ran all through a measurement: of NCCL "), "{printed}");
        let text = std::fs::read_to_string(&json).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2 * 3, "{text}");
        for line in &lines {
            assert_eq!((&line["beside"], &line["busy"]), (&2.into(), &2.into()), "{line}");
            for side in ["plain_busy_part", "windlass_busy_part"] {
                assert!((0.0..=1.0).contains(&line[side].as_f64().unwrap()), "{line}");
            }
            let path = if line["bytes"] == 1024 { "native" } else { "forward" };
            assert_eq!(line["path"], path, "{line}");
        }
        let picture = std::fs::read_to_string(plot.join("all_reduce-float-eager.svg")).unwrap();
        assert!(picture.contains("beside 2 idle and 2 busy"), "{picture}");
    }
}

/// The error names the idle or busy communicator that cannot be made: which one, of how many, of which side.
#[test]
fn company_that_does_not_come() {
    // NCCL's measured communicators are the first two of a process, then come the others.
    for (refused, name) in
        [("4", "NCCL's idle communicator 2 of 2"), ("5", "NCCL's busy communicator 1 of 1")]
    {
        let mut command = windlass(&["bench", "--sim", "--ranks", "2", "--beside", "2", "--busy", "1"]);
        command.args(["--op", "all_reduce", "--sizes", "1K", "--repeat", "1", "--seconds", "0.01"]);
        command.env("WINDLASS_SIM_REFUSED_INITS", refused);
        let (code, _, told) = outcome(command);
        assert_eq!(code, Some(1), "{told}");
        assert!(told.contains(&format!("{name} cannot be made: ncclCommInitRank answered")), "{told}");
    }
}

/// The script that times symmetric memory, on the simulator: NCCL makes each window anew, Windlass finds the first again, and nothing grows.
#[test]
fn symmetric_memory() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/measure/windows.py");
    let folder = tempfile::tempdir().unwrap();
    let windows_made = |switch: &str| {
        let mut command = windlass(&["run", "--sim", "--no-calibrate", "--", "python3", "-B", script]);
        command.args(["--sizes", "2M", "--cycles", "3"]).env("WINDLASS_CACHE", folder.path());
        command.env("WINDLASS", switch).env("NCCL_NVLS_ENABLE", "0").env("WINDLASS_SIM_NCCL_LOG", "1");
        let (code, printed, told) = outcome(command);
        assert_eq!((code, printed.lines().count()), (Some(0), 9), "{printed}{told}");
        assert!(printed.contains("3 cycles of 2048 KiB added: 0 bytes of device memory"), "{printed}");
        told.lines().filter(|line| line.contains("ncclCommWindowRegister")).count()
    };
    assert_eq!((windows_made("off"), windows_made("on")), (2 * (51 + 4), 2));
}

/// Errors name the wrong argument.
#[test]
fn refusals() {
    for (arguments, code, reason) in [
        (&["--sizes", "1X"][..], 2, "is no size"),
        (&["--type", "quad"], 2, "no element type \"quad\""),
        (&["--ranks", "1"], 2, "--ranks 1: expected 2 to 8, because the simulator has 8 devices"),
        (&["--seconds", "0"], 2, "--seconds 0: expected more than 0"),
        (&["--memory", "managed"], 2, "[possible values: device, nccl, window, beside]"),
        (&["--repeat", "0"], 2, "0, expected 1 to "),
        (&["--busy", "9"], 2, "9, expected 0 to 8"),
        (&["--beside", "65"], 2, "65, expected 0 to 64"),
        (&["--beside", "few"], 2, "invalid value 'few' for '--beside <N>'"),
        (&["--product", "100"], 2, "--product 100: expected a multiple of 64"),
        (&["--sizes", "10G"], 2, "--sizes: a buffer of 10G does not fit on GPU 0: expected at most "),
        (&["--plot", "/proc/self/curves"], 1, "--plot /proc/self/curves: expected a folder"),
        (&["--json", "/no/such/folder/lines"], 1, "cannot write /no/such/folder/lines"),
    ] {
        let mut command = windlass(&["bench", "--sim"]);
        command.args(arguments);
        let (found, _, told) = outcome(command);
        assert_eq!(found, Some(code), "{arguments:?}: {told}");
        assert!(told.contains(reason), "{arguments:?}: {told}");
    }
}
