//! Holds that `windlass hang` names the rank that the others wait for, and none where all is well.

use windlass_base::stats::run::Run;

use crate::{built, outcome, simulated_nccl, windlass};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

const PROGRAM: &str = include_str!("hang.py");

/// The ranks of a program. They are killed at the end, as nothing else ends a hang.
struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        self.0.iter_mut().for_each(|child| {
            let _ = child.kill();
            let _ = child.wait();
        });
    }
}

impl Ranks {
    /// Starts ranks that make these calls, one word each, and waits until all have made theirs.
    fn start(folder: &Path, calls: &[&str]) -> Ranks {
        let links = [("libnccl.so.2", "libwindlass.so"), ("libcuda.so.1", "libsim_cuda.so")];
        for (name, library) in links {
            std::os::unix::fs::symlink(built(library), folder.join(name)).unwrap();
        }
        let nccl = simulated_nccl();
        // So that calls above LL's sizes are native, too.
        let limits = ["no", "yes"].map(|multicast| {
            format!("all_gather ranks {RANKS} gpu 9.0/32 multicast {multicast} native_bytes_max 1M\n")
        });
        std::fs::write(folder.join("limits"), format!("windlass-tuning 1\n{}", limits.concat())).unwrap();
        let start = |(rank, calls): (usize, &&str)| {
            let plain = windlass(&[]);
            let mut command = Command::new("python3");
            for (name, value) in plain.get_envs() {
                match value {
                    Some(value) => command.env(name, value),
                    None => command.env_remove(name),
                };
            }
            command
                .env("LD_LIBRARY_PATH", folder)
                .env("WINDLASS_NCCL", &nccl)
                .env("WINDLASS_TUNING", folder.join("limits"))
                // Else another test's program, as it starts, removes what a killed rank has left.
                .env("WINDLASS_RUN", Run::of_this_process().unwrap().to_string())
                .env("WINDLASS_SIM_STRICT", "0");
            command.current_dir(folder).args(["-c", PROGRAM, &rank.to_string(), &RANKS.to_string()]);
            command.args(calls.split_whitespace());
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap()
        };
        let mut ranks = Ranks(calls.iter().enumerate().map(start).collect());
        ranks.say("made\n");
        ranks
    }

    /// Waits until all ranks have said that.
    fn say(&mut self, what: &str) {
        for child in &mut self.0 {
            let mut said = String::new();
            BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut said).unwrap();
            assert_eq!(said, what);
        }
    }

    /// What is found of these ranks now.
    fn found(&self, after: &str) -> Vec<Value> {
        let (code, printed, told) = outcome(windlass(&["hang", "--json", "--after", after]));
        assert!(matches!(code, Some(0 | 3)), "{told}");
        let own: BTreeSet<u64> = self.0.iter().map(|child| child.id().into()).collect();
        let found = printed.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        found
            .filter(|one| {
                one["processes"].as_array().unwrap().iter().any(|one| own.contains(&one.as_u64().unwrap()))
            })
            .collect()
    }

    /// Waits until something is found of these ranks, and says which ranks are named, and why.
    fn named(&self) -> Vec<(String, Vec<i64>)> {
        loop {
            let found = self.found("0.5");
            if !found.is_empty() {
                return found
                    .iter()
                    .map(|one| {
                        let ranks =
                            one["ranks"].as_array().unwrap().iter().map(|rank| rank.as_i64().unwrap());
                        (one["trouble"].as_str().unwrap().to_owned(), ranks.collect())
                    })
                    .collect();
            }
        }
    }
}

const RANKS: usize = 3;

fn named(calls: [&str; RANKS]) -> Vec<(String, Vec<i64>)> {
    let folder = tempfile::tempdir().unwrap();
    Ranks::start(folder.path(), &calls).named()
}

/// A rank that does not come is named, whatever path the call has; the ring of a rank names what it has called.
#[test]
fn a_rank_does_not_come() {
    for size in ["64", "16777216"] {
        let call = format!("a.AllReduce.{size}");
        let twice = format!("{call} {call}");
        let folder = tempfile::tempdir().unwrap();
        let mut ranks = Ranks::start(folder.path(), &[&twice, &call, &twice]);
        assert_eq!(ranks.named(), [("absent".into(), vec![1])]);
        let process = ranks.0[1].id().to_string();
        let (code, printed, told) = outcome(windlass(&["stats", "--calls", "--json", &process]));
        assert_eq!(code, Some(0), "{told}");
        let calls: Value = serde_json::from_str(&printed).unwrap();
        let own = &calls["communicators"][0];
        assert_eq!(
            (&own["rank"], &own["made"], &own["calls"][0]["function"]),
            (&1.into(), &1.into(), &"ncclAllReduce".into())
        );
        ranks.0[1].kill().unwrap();
        ranks.0[1].wait().unwrap();
        assert_eq!(ranks.named(), [("dead".into(), vec![1])]);
    }
}

/// Ranks whose calls differ are named.
#[test]
fn a_call_differs() {
    let differs = |ranks: &[i64]| vec![("differs".to_owned(), ranks.to_vec())];
    assert_eq!(named(["a.AllReduce.64", "a.AllReduce.64", "a.AllReduce.128"]), differs(&[2]));
    assert_eq!(named(["a.AllGather.64", "a.Broadcast.64.1", "a.AllGather.64"]), differs(&[1]));
    assert_eq!(named(["a.Send.64.1", "a.Recv.32.0", ""]), differs(&[0, 1]));
}

/// So are ranks whose message lacks its other side, and ranks that call two communicators in opposite order.
#[test]
fn messages_and_orders() {
    assert_eq!(named(["a.Recv.64.2", "", ""]), [("absent".into(), vec![2])]);
    let crossed =
        ["a.AllReduce.64 b.AllReduce.64", "b.AllReduce.64 a.AllReduce.64", "a.AllReduce.64 b.AllReduce.64"];
    assert_eq!(named(crossed), [("crossed".into(), vec![0, 1])]);
}

/// Where all ranks have made the same calls, none is named, however long ago.
#[test]
fn healthy() {
    let folder = tempfile::tempdir().unwrap();
    let both = "a.AllReduce.64 b.AllGather.64 a.Broadcast.64.1 b.AllReduce.16777216";
    let calls = [format!("{both} a.Send.64.1"), format!("{both} a.Recv.64.0"), both.to_owned()];
    let ranks = Ranks::start(folder.path(), &calls.each_ref().map(String::as_str));
    for _ in 0..20 {
        assert_eq!(ranks.found("0.0"), Vec::<Value>::new());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// Replays of graphs are no calls. A rank that stops replaying is named all the same, over LL and in one shot, and where it dies.
#[test]
fn a_rank_stops_replaying() {
    for call in ["AllReduce.64", "AllGather.98304"] {
        let graph = format!("[ a.{call} ] replay");
        let twice = format!("{graph} replay");
        let folder = tempfile::tempdir().unwrap();
        let mut ranks = Ranks::start(folder.path(), &[&twice, &graph, &twice]);
        assert_eq!(ranks.named(), [("absent".into(), vec![1])]);
        ranks.0[1].kill().unwrap();
        ranks.0[1].wait().unwrap();
        assert_eq!(ranks.named(), [("dead".into(), vec![1])]);
    }
}

/// A process whose device answers late, since its copies wait for a kernel, makes ids for other ranks meanwhile.
#[test]
fn a_question_keeps_nobody_waiting() {
    let graph = "lazy [ a.AllReduce.64 ]";
    let folder = tempfile::tempdir().unwrap();
    let [held, comes] = ["hold replay", "replay"].map(|words| format!("{graph} {words}"));
    let mut ranks = Ranks::start(folder.path(), &[&held, graph, &comes]);
    assert_eq!(ranks.named(), [("absent".into(), vec![1])]);
    for child in &mut ranks.0 {
        child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }
    ranks.say("called\n");
}

/// Where ranks go on replaying, none is named, also while one waits for another that pauses between its replays.
#[test]
fn healthy_replays() {
    for call in ["AllReduce.64", "AllGather.98304"] {
        let folder = tempfile::tempdir().unwrap();
        let [at_once, pausing] = ["0", "0.05"].map(|pause| format!("[ a.{call} ] replays.{pause}"));
        let ranks = Ranks::start(folder.path(), &[&at_once, &pausing, &at_once]);
        for _ in 0..3 {
            assert_eq!(ranks.found("2"), Vec::<Value>::new());
        }
    }
}
