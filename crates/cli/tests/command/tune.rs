//! Holds that `windlass tune` measures and writes a valid table, and that ranks use it.

use crate::{outcome, windlass};
use windlass_transport::tuning::file::{Key, Multicast, Table};
use windlass_transport::tuning::{Collective, unmeasured_bytes_max};

/// The collectives that get a cell if no size is so large that NCCL runs it registered.
fn measured() -> impl Iterator<Item = Collective> {
    Collective::ALL.into_iter().filter(|one| *one != Collective::RegisteredAllGather)
}

/// `tune` measures and writes a table, with progress on the way, and ranks use the table. On the simulator it writes to the cache
/// only if that is named.
#[test]
fn writes_a_table() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("table");
    let mut command = windlass(&["tune", "--sim", "--ranks", "2", "--sizes", "1K:64K:64", "--repeat", "5"]);
    command.args(["--seconds", "0.02"]).arg("--out").arg(&file);
    command
        .arg("--plot")
        .arg(folder.path().join("curves"))
        .env("WINDLASS_CACHE", folder.path().join("cache"));
    let (code, printed, told) = outcome(command);
    assert_eq!(code, Some(0), "{printed}{told}");
    // Sizes above the built-in limits ran on Windlass's kernels, too.
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(!text.contains("NCCL ran both"), "{text}");
    assert!(told.contains("tune: 2 ranks, 1. all_reduce bfloat16 1K graph: "), "{told}");
    assert!(text.contains("On the simulator") && text.contains("NCCL 2.28.9"), "{text}");
    // By default it measures beside 3 idle communicators.
    assert!(told.contains("beside 3 idle") && text.contains("# Beside 3 idle communicators"), "{told}{text}");
    for curve in ["all_reduce-bfloat16-graph.svg", "all_reduce-half-graph.svg"] {
        assert!(folder.path().join("curves/ranks-2").join(curve).exists(), "{told}");
    }
    let table = Table::parse(&text).unwrap();
    assert_eq!(table.cells(), measured().count(), "{text}");
    for collective in measured() {
        let multicast = Multicast::No;
        let key = Key { collective, ranks: 2, capability: 90, multiprocessors: 32, multicast };
        assert!(matches!(table.get(&key), Some(None | Some(1024 | 65536))), "{text}");
    }
    let mut command = windlass(&["bench", "--sim", "--ranks", "2", "--op", "all_reduce", "--sizes", "1K"]);
    command.args(["--mode", "eager", "--repeat", "1", "--seconds", "0.01"]);
    command.env("WINDLASS_TUNING", &file).env("WINDLASS_LOG", "info");
    command.env("WINDLASS_CACHE", folder.path().join("cache"));
    let (code, printed, told) = outcome(command);
    assert_eq!(code, Some(0), "{printed}{told}");
    assert!(told.contains(&format!("tuning table {}: 10 cells", file.display())), "{told}");
    assert!(told.contains("limits measured on this machine") && told.contains("txt: 10 cells"), "{told}");
}

/// `--show` prints each limit with the time and way of its measurement; other numbers of ranks have the built-in limits. `--quick`
/// replaces what is there.
#[test]
fn shows() {
    let folder = tempfile::tempdir().unwrap();
    let of = |arguments: &[&str]| {
        let mut command = windlass(&["tune", "--sim"]);
        command.args(arguments).env("WINDLASS_CACHE", folder.path()).env("WINDLASS_SIM_DEVICES", "3");
        let (code, printed, told) = outcome(command);
        assert_eq!(code, Some(0), "{printed}{told}");
        printed
    };
    let before = of(&["--show"]);
    assert_eq!(before.lines().count(), 4 + Collective::ALL.len(), "{before}");
    assert!(before.starts_with("3 × ") && before.contains("\ncollective             2 ranks  "), "{before}");
    assert!(!before.contains("measured here"), "{before}");
    of(&["--ranks", "2", "--sizes", "1K", "--repeat", "5", "--seconds", "0.01"]);
    let after = of(&["--show"]);
    let cells = |of: &str| of.lines().filter(|line| line.contains(" cache ")).count();
    assert_eq!(cells(&after), measured().count(), "{after}");
    assert!(after.contains("\ncache: measured here 20"), "{after}");
    let json: serde_json::Value = serde_json::from_str(&of(&["--show", "--json"])).unwrap();
    assert_eq!(json["held"]["limits"][0]["source"], "cache", "{json}");
    assert!(after.contains(", tune of "), "{after}");
    of(&["--ranks", "2", "--quick"]);
    let quick = of(&["--show"]);
    assert!(quick.contains(", tune --quick of ") && !quick.contains(", tune of "), "{quick}");
}

/// Large all-gathers, if there are any, are measured again as NCCL runs them with registered buffers.
#[test]
fn registered() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("table");
    let mut command = windlass(&["tune", "--sim", "--ranks", "2", "--sizes", "1K,8M", "--repeat", "5"]);
    command.args(["--seconds", "0.01", "--beside", "0"]).arg("--out").arg(&file);
    let (code, printed, told) = outcome(command);
    assert_eq!(code, Some(0), "{printed}{told}");
    assert!(told.lines().any(|line| line.contains("all_gather") && line.ends_with("(registered)")), "{told}");
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.contains("\nregistered_all_gather ranks 2 gpu 9.0/32 "), "{text}");
    assert_eq!(Table::parse(&text).unwrap().cells(), Collective::ALL.len(), "{text}");
}

/// The times of both sides on the simulator's clock: a latency and a number of bytes a second.
#[derive(Clone, Copy)]
struct Rates {
    nccl: (f64, f64),
    windlass: (f64, f64),
}

impl Rates {
    /// The largest of the sizes up to which Windlass always takes at most 0.95 of NCCL's time, or 1.02 of it up to `anyway`.
    fn limit(self, sizes: &[u64], anyway: u64) -> Option<u64> {
        let ns =
            |(latency_us, bandwidth): (f64, f64), bytes: u64| latency_us * 1e3 + bytes as f64 / bandwidth;
        let most = |bytes: u64| if bytes <= anyway { 1.02 } else { 0.95 };
        let is_ours = |bytes: &u64| ns(self.windlass, *bytes) <= most(*bytes) * ns(self.nccl, *bytes);
        sizes.iter().copied().take_while(is_ours).last()
    }
}

/// As text for the clock's variable, for all collectives or for one.
fn rates_of(operation: &str, Rates { nccl, windlass }: Rates) -> String {
    format!("nccl{operation}={}:{},windlass{operation}={}:{}", nccl.0, nccl.1, windlass.0, windlass.1)
}

/// The table found for so many ranks with this clock.
fn table_of(clock: &str, ranks: &str, sizes: &str) -> Table {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("table");
    let mut command = windlass(&["tune", "--sim", "--ranks", ranks, "--sizes", sizes, "--repeat", "5"]);
    command.args(["--seconds", "0.00001", "--beside", "0"]).arg("--out").arg(&file);
    command.env("WINDLASS_SIM_CLOCK", clock);
    let (code, printed, told) = outcome(command);
    assert_eq!(code, Some(0), "{printed}{told}");
    Table::parse(&std::fs::read_to_string(&file).unwrap()).unwrap()
}

fn found(table: &Table, collective: Collective, ranks: usize) -> Option<u64> {
    let multicast = Multicast::No;
    let key = Key { collective, ranks, capability: 90, multiprocessors: 32, multicast };
    table.get(&key).expect("every collective has a cell")
}

/// With the simulator's clock each collective has a known crossover, which is found: a different one each, none, and beyond all
/// sizes.
#[test]
fn known_crossovers_are_found() {
    let sizes: Vec<u64> = (10..=15).map(|power| 1 << power).collect();
    let usual = Rates { nccl: (20.0, 100.0), windlass: (18.3, 2.0) };
    let of = |collective| match collective {
        Collective::AllReduce | Collective::OtherAllReduce => Rates { windlass: (17.8, 4.0), ..usual },
        Collective::Broadcast => Rates { windlass: (21.0, 500.0), ..usual },
        Collective::Reduce | Collective::OtherReduce => Rates { windlass: (1.0, 500.0), ..usual },
        Collective::UnevenAllGather => Rates { windlass: (16.5, 2.0), ..usual },
        Collective::UnevenReduceScatter => Rates { nccl: (25.0, 100.0), ..usual },
        _ => usual,
    };
    // The clock knows no data types.
    let of_clock = measured().filter(|collective| !collective.is_other());
    let every: Vec<String> =
        of_clock.map(|collective| rates_of(&format!(".{}", collective.name()), of(collective))).collect();
    let clock = [rates_of("", usual), every.join(",")].join(",");
    let table = table_of(&clock, "2", "1K:32K:2");
    let expected: Vec<_> = measured()
        .map(|collective| of(collective).limit(&sizes, unmeasured_bytes_max(collective).unwrap_or(0)))
        .collect();
    assert_eq!(measured().map(|collective| found(&table, collective, 2)).collect::<Vec<_>>(), expected);
    let [none, all] =
        [None, Some(32 << 10)].map(|limit| expected.iter().filter(|found| **found == limit).count());
    assert_eq!((none, all), (1, 2));
}

/// Other numbers of ranks have crossovers of their own.
#[test]
fn crossovers_of_more_ranks_are_found() {
    let sizes = [1, 4].map(|kib| kib << 10);
    let usual = Rates { nccl: (20.0, 100.0), windlass: (17.5, 1.0) };
    let of_eight = Rates { windlass: (5.0, 1000.0), ..usual };
    let clock = [rates_of("", usual), rates_of("@8", of_eight)].join(",");
    let table = table_of(&clock, "3,4,8", "1K:4K:4");
    for (ranks, rates) in [(3, usual), (4, usual), (8, of_eight)] {
        for collective in measured() {
            let found = found(&table, collective, ranks);
            let usual = unmeasured_bytes_max(collective).unwrap_or(0);
            assert_eq!(found, rates.limit(&sizes, usual), "{collective:?} of {ranks}");
        }
    }
}

/// A table's limits hold, up and down.
#[test]
fn a_table_holds() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("table");
    let line = "ranks 2 gpu 9.0/32 multicast no native_bytes_max";
    let text = format!("windlass-tuning 1\nall_reduce {line} 64K\nall_gather {line} none\n");
    std::fs::write(&file, text).unwrap();
    let mut command = windlass(&["bench", "--sim", "--ranks", "2", "--op", "all_reduce,all_gather,reduce"]);
    command.args(["--sizes", "1K,64K", "--mode", "eager", "--repeat", "1", "--seconds", "0.01"]);
    command.env("WINDLASS_TUNING", &file);
    let (code, printed, told) = outcome(command);
    assert_eq!(code, Some(0), "{printed}{told}");
    let paths: Vec<&str> =
        printed.lines().skip(2).take(6).filter_map(|line| line.split_whitespace().last()).collect();
    assert_eq!(paths, ["native", "native", "forward", "forward", "native", "forward"], "{printed}");
}

/// Impossible requests are refused before anything is measured.
#[test]
fn refuses() {
    for (arguments, code, reason) in [
        (&["--ranks", "1", "--out", "/tmp/x"][..], 2, "--ranks 1: expected 2 to 8"),
        (&["--ranks", "99", "--out", "/tmp/x"], 2, "--ranks 99: expected 2 to 8"),
        (&["--ranks", "2", "--out", "/nowhere/at/all"], 1, "cannot write beside"),
        (&["--ranks", "2", "--out", "/tmp/x", "--beside", "65"], 2, "65, expected 0 to 64"),
        (&["--show", "--quick"], 2, "cannot be used with"),
    ] {
        let mut command = windlass(&["tune", "--sim"]);
        command.args(arguments);
        let (found, _, told) = outcome(command);
        assert_eq!(found, Some(code), "{told}");
        assert!(told.contains(reason), "{told}");
    }
}
