//! Staged hangs, each of which names the right rank, and healthy runs, in which none is named.

use super::*;
use crate::hang::on_gpus::{self, Waiting};
use windlass_bootstrap::awaited::Awaited;

const AFTER: f64 = 30.0;

/// Processes of a host; the process of rank r of a communicator is r.
#[derive(Clone)]
struct Host(Vec<ProcessCalls>);

/// A call of a rank, so many seconds ago.
struct Made(usize, &'static str, &'static str, u64, Option<u32>, f64);

impl Host {
    /// So many processes, in each of these communicators.
    fn new(ranks: usize, names: &[&str]) -> Host {
        let one = |rank: usize| {
            let of = |(place, name): (usize, &&str)| CallsOfRank {
                serial: place as u64 + 1,
                name: (*name).into(),
                token: 0,
                rank: rank as i32,
                ranks: ranks as i32,
                is_live: true,
                made: 0,
                collectives: 0,
                sends: vec![0; ranks],
                receives: vec![0; ranks],
                calls: Vec::new(),
            };
            let communicators = names.iter().enumerate().map(of).collect();
            let (process, request_socket) = (rank as u32, [0; 16]);
            ProcessCalls { process, program: "train".into(), is_alive: true, request_socket, communicators }
        };
        Host((0..ranks).map(one).collect())
    }

    fn of(&mut self, rank: usize, name: &str) -> &mut CallsOfRank {
        self.0[rank].communicators.iter_mut().find(|one| one.name == name).unwrap()
    }

    fn call(mut self, Made(rank, name, function, bytes, other, seconds_ago): Made) -> Host {
        let of = self.of(rank, name);
        of.made += 1;
        match (function, other) {
            ("ncclSend", Some(peer)) => of.sends[peer as usize] += 1,
            ("ncclRecv", Some(peer)) => of.receives[peer as usize] += 1,
            _ => of.collectives += 1,
        }
        let call = CallMade {
            number: of.made,
            collective: (!matches!(function, "ncclSend" | "ncclRecv")).then_some(of.collectives),
            function: function.into(),
            bytes,
            datatype: "ncclFloat32".into(),
            other,
            stream: "0x1".into(),
            path: "native".into(),
            seconds_ago,
        };
        of.calls.push(call);
        if of.calls.len() > 256 {
            of.calls.remove(0);
        }
        self
    }

    /// The same collective on these ranks.
    fn all(self, ranks: &[usize], name: &'static str, function: &'static str, bytes: u64, ago: f64) -> Host {
        ranks.iter().fold(self, |host, rank| host.call(Made(*rank, name, function, bytes, None, ago)))
    }

    fn change(mut self, rank: usize, name: &str, change: impl FnOnce(&mut CallsOfRank)) -> Host {
        change(self.of(rank, name));
        self
    }

    fn dies(mut self, rank: usize) -> Host {
        self.0[rank].is_alive = false;
        self
    }

    /// Who is named, and why.
    fn named(&self) -> Vec<(Trouble, Vec<i32>, String)> {
        compare(&self.0, AFTER).into_iter().map(|one| (one.trouble, one.ranks, one.text)).collect()
    }
}

/// Who is named where ranks of communicators wait on their GPUs for others, a bit each.
fn named_on_gpus(host: &Host, waits: &[(usize, &str, u64)]) -> Vec<(Trouble, Vec<i32>, String)> {
    let silent = silent(&host.0, AFTER, &[]);
    let members = || silent.iter().flatten();
    let waiting = |(rank, name, ranks): &(usize, &str, u64)| {
        let is_meant = |one: &&Member<'_>| one.process.process == *rank as u32 && one.of.name == *name;
        let awaited = Awaited { wire: 0, launch: 7, ranks: *ranks };
        members().find(is_meant).map(|one| Waiting::of(one, awaited))
    };
    let waiting: Vec<Waiting> = waits.iter().filter_map(waiting).collect();
    let found = on_gpus::compare(&silent, &waiting, AFTER);
    found.into_iter().map(|one| (one.trouble, one.ranks, one.text)).collect()
}

/// A rank is named for which others wait on their GPUs, and which does not wait itself.
#[test]
fn hangs_on_gpus() {
    use Trouble::*;
    let host = begun().all(&[0, 1, 2], "b", REDUCE, 8, 90.0);
    let check = |what: &str, host: Host, waits: &[(usize, &str, u64)], expected: (Trouble, &[i32], &str)| {
        let named = named_on_gpus(&host, waits);
        let [(trouble, ranks, text)] = &named[..] else { panic!("{what}: {named:?}") };
        assert_eq!((*trouble, &ranks[..], &text[..]), expected, "{what}");
    };
    let one = "rank 1 has not come on the GPU to a call or a graph's replay, for which ranks 0, 2 wait";
    check("one is late", host.clone(), &[(0, "a", 2), (2, "a", 2)], (Absent, &[1], one));
    let two = "ranks 1, 2 have not come on the GPU to a call or a graph's replay, for which rank 0 waits";
    check("two are late", host.clone(), &[(0, "a", 6)], (Absent, &[1, 2], two));
    let last = "rank 2 has not come on the GPU to a call or a graph's replay, for which rank 1 waits";
    check("a chain", host.clone(), &[(0, "a", 2), (1, "b", 4)], (Absent, &[2], last));
    let dead = "rank 1 died, process 1; its last call is ncclAllReduce of 8 B ncclFloat32";
    check(
        "a dead rank",
        host.clone().dies(1).all(&[1], "a", REDUCE, 8, 80.0),
        &[(0, "a", 2)],
        (Dead, &[1], dead),
    );
    let both = named_on_gpus(&host, &[(0, "a", 2), (1, "b", 1)]);
    let both: Vec<_> = both.iter().map(|(trouble, ranks, _)| (*trouble, &ranks[..])).collect();
    assert_eq!(both, [(Absent, &[1][..]), (Absent, &[0][..])], "each waits for the other");
}

/// No rank is named on whom nobody waits, that makes calls, or that nobody knows.
#[test]
fn healthy_gpus() {
    assert_eq!(named_on_gpus(&begun(), &[]), []);
    assert_eq!(named_on_gpus(&begun(), &[(0, "a", 1 << 40)]), [], "a rank that is not there");
    let busy = begun().all(&[0, 1, 2], "b", REDUCE, 8, 2.0);
    assert_eq!(named_on_gpus(&busy, &[(0, "a", 2)]), [], "busy elsewhere");
    let chain = Host::new(4, &["a", "b", "c"]).all(&[0, 1, 2, 3], "a", REDUCE, 8, 90.0);
    let chain =
        chain.all(&[0, 1, 2, 3], "b", REDUCE, 8, 90.0).call(Made(2, "c", "ncclSend", 8, Some(3), 1.0));
    assert_eq!(named_on_gpus(&chain, &[(0, "a", 2), (1, "b", 4)]), [], "the end of the chain is busy");
    let late = begun().all(&[0, 2], "a", REDUCE, 64, 50.0);
    let found = compare(&late.0, AFTER);
    assert!(silent(&late.0, AFTER, &found).is_empty(), "calls come first");
}

const REDUCE: &str = "ncclAllReduce";
const GATHER: &str = "ncclAllGather";

/// Three ranks that have reduced once in communicator a, long ago.
fn begun() -> Host {
    Host::new(3, &["a", "b"]).all(&[0, 1, 2], "a", REDUCE, 1024, 100.0)
}

fn two() -> Host {
    Host::new(2, &["a", "b"])
}

fn check(what: &str, host: Host, trouble: Trouble, ranks: &[i32], words: &str) {
    let named = host.named();
    let [(found, of, text)] = &named[..] else { panic!("{what}: {named:?}") };
    assert_eq!((*found, &of[..]), (trouble, ranks), "{what}: {text}");
    assert!(text.contains(words), "{what}: {text}");
}

/// Each names the rank that the others wait for.
#[test]
fn hangs() {
    use Trouble::*;
    let skipped = begun().all(&[0, 2], "a", REDUCE, 64, 50.0);
    check(
        "a rank skips a call",
        skipped.clone(),
        Absent,
        &[1],
        "rank 1 has not come to ncclAllReduce of 64 B ncclFloat32, collective 2; ranks 0, 2 made that call 50 s ago",
    );
    let size = begun().all(&[0, 1], "a", REDUCE, 64, 50.0).all(&[2], "a", REDUCE, 128, 50.0);
    check("another size", size, Differs, &[2], "differ in collective 2; rank 2: ncclAllReduce of 128 B");
    let function = begun().all(&[1, 2], "a", GATHER, 64, 50.0).all(&[0], "a", REDUCE, 64, 50.0);
    check("another function", function, Differs, &[0], "rank 0: ncclAllReduce of 64 B");
    let run_on = begun().all(&[0, 1], "a", REDUCE, 64, 50.0).all(&[2], "a", REDUCE, 128, 50.0);
    check(
        "another size, and all went on",
        run_on.all(&[0, 1, 2], "a", REDUCE, 8, 49.0),
        Differs,
        &[2],
        "collective 2",
    );
    check(
        "a dead rank",
        skipped.dies(1),
        Dead,
        &[1],
        "rank 1 died, process 1; its last call is ncclAllReduce of 1.0 KiB",
    );
    let message = begun().call(Made(1, "a", "ncclRecv", 8, Some(0), 40.0)).dies(0);
    check("a dead sender", message, Dead, &[0], "rank 0 died, process 0");
    let root = [(0, 0), (1, 0), (2, 1)]
        .into_iter()
        .fold(begun(), |host, (rank, root)| host.call(Made(rank, "a", "ncclBroadcast", 8, Some(root), 40.0)));
    check("another root", root, Differs, &[2], "rank 2: ncclBroadcast of 8 B ncclFloat32 with root 1");
    let ended = begun().all(&[0, 2], "a", REDUCE, 64, 50.0).change(1, "a", |of| of.is_live = false);
    check("a rank has ended", ended, Absent, &[1], "and has ended the communicator");
    let receive = begun().call(Made(2, "a", "ncclRecv", 8, Some(0), 40.0));
    check(
        "a receive without its send",
        receive,
        Absent,
        &[0],
        "rank 0 has not come to ncclSend 1 with rank 2",
    );
    let message = begun().call(Made(0, "a", "ncclSend", 16, Some(1), 40.0)).call(Made(
        1,
        "a",
        "ncclRecv",
        8,
        Some(0),
        40.0,
    ));
    check("a message of two sizes", message, Differs, &[0, 1], "the send has 16 B, the receive 8 B");
    // In a, rank 0 waits for rank 1; that waits in b for rank 2.
    let mut chain = Host::new(3, &["a", "b"]);
    chain.0[2].communicators.remove(0);
    chain.0[0].communicators.remove(1);
    let chain = chain.all(&[0], "a", REDUCE, 64, 50.0).all(&[1], "b", REDUCE, 64, 50.0);
    check("a rank that waits elsewhere is not named", chain, Absent, &[2], "rank 2 has not come to");
    let far = (0..300).fold(begun(), |host, _| host.all(&[0, 1], "a", REDUCE, 8, 50.0));
    check(
        "a call that the ring has forgotten",
        far,
        Absent,
        &[2],
        "rank 2 has not come to collective 2; ranks 0, 1",
    );
    let crossed = two().all(&[0], "a", REDUCE, 8, 60.0).all(&[0], "b", REDUCE, 8, 59.0);
    let crossed = crossed.all(&[1], "b", REDUCE, 8, 60.0).all(&[1], "a", REDUCE, 8, 59.0);
    check(
        "two communicators in opposite order",
        crossed,
        Crossed,
        &[0, 1],
        "in opposite order on one stream",
    );
    let blocked = two().all(&[0], "a", REDUCE, 8, 60.0).all(&[1], "b", REDUCE, 8, 60.0);
    assert_eq!(blocked.named().len(), 2, "each rank waits for the other, in its first call");
}

/// No rank is named.
#[test]
fn healthy_runs() {
    let one_order = two().all(&[0, 1], "a", REDUCE, 8, 60.0).all(&[0, 1], "b", REDUCE, 8, 59.0);
    let configured =
        begun().all(&[0, 1], "a", "ncclAllReduceConfig", 64, 50.0).all(&[2], "a", REDUCE, 64, 50.0);
    let types = [("ncclInt8", 0), ("ncclUint8", 1), ("ncclInt8", 2)].into_iter().fold(
        begun(),
        |host, (datatype, rank)| {
            let host = host.all(&[rank], "a", GATHER, 64, 50.0);
            host.change(rank, "a", |of| of.calls[1].datatype = datatype.into())
        },
    );
    let in_group = begun().all(&[0, 1], "a", REDUCE, 64, 50.0).all(&[0, 1], "a", GATHER, 8, 50.0);
    let streams = two().all(&[0], "a", REDUCE, 8, 60.0).all(&[0], "b", REDUCE, 8, 59.0);
    let streams = streams.all(&[1], "b", REDUCE, 8, 60.0).all(&[1], "a", REDUCE, 8, 59.0);
    let streams = streams.change(0, "b", |of| of.calls[0].stream = "0x2".into());
    let roots = two().call(Made(0, "a", "ncclBroadcast", 8, Some(0), 60.0)).call(Made(
        0,
        "b",
        "ncclBroadcast",
        8,
        Some(0),
        59.0,
    ));
    let roots = roots.call(Made(1, "b", "ncclBroadcast", 8, Some(0), 60.0)).call(Made(
        1,
        "a",
        "ncclBroadcast",
        8,
        Some(0),
        59.0,
    ));
    let elsewhere = begun().all(&[0, 2], "a", REDUCE, 64, 50.0).all(&[0, 1, 2], "b", REDUCE, 8, 2.0);
    let mut of_other_host = begun().all(&[0, 1], "a", REDUCE, 64, 50.0);
    of_other_host.0.remove(2);
    let pingpong = begun().call(Made(0, "a", "ncclSend", 16, Some(1), 40.0)).call(Made(
        1,
        "a",
        "ncclRecv",
        16,
        Some(0),
        40.0,
    ));
    let over =
        [0, 1, 2].into_iter().fold(begun(), |host, rank| host.change(rank, "a", |of| of.is_live = false));
    let unnamed = begun().all(&[0, 2], "a", REDUCE, 64, 50.0);
    let unnamed =
        [0, 1, 2].into_iter().fold(unnamed, |host, rank| host.change(rank, "a", |of| of.name.clear()));
    let healthy = [
        ("idle for long", begun()),
        ("no call yet", Host::new(3, &["a"])),
        ("a rank is late by seconds", begun().all(&[0, 2], "a", REDUCE, 64, 20.0)),
        ("calls go on", begun().all(&[0, 2], "a", REDUCE, 64, 50.0).all(&[2], "a", REDUCE, 64, 1.0)),
        ("two communicators in one order", one_order),
        ("a function with a configuration", configured),
        ("types of one size, where nothing is combined", types),
        (
            "a group's calls in another order",
            in_group.all(&[2], "a", GATHER, 8, 50.0).all(&[2], "a", REDUCE, 64, 50.0),
        ),
        ("opposite orders on two streams", streams),
        ("opposite orders of calls that may end early", roots),
        ("a late rank that is busy elsewhere", elsewhere),
        ("a rank on another host", of_other_host),
        ("messages of one size", pingpong),
        ("a process that ends before the others, none of which waits", begun().dies(2)),
        ("killed after all had ended", over.clone().dies(1)),
        ("all have ended", over),
        ("communicators without a name", unnamed),
    ];
    for (what, host) in healthy {
        assert_eq!(host.named(), [], "{what}");
    }
}
