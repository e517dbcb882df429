//! Tests with ranks in processes of their own: this test binary again, with variables that name its part.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::Ordering;
use std::thread;

use rustix::event::{PollFd, PollFlags};
use windlass_bootstrap::children::local_rendezvous::{self, RosterAnswer};
use windlass_bootstrap::id_tag::Id;
use windlass_bootstrap::outcome::{Failure, FallbackReason};
use windlass_bootstrap::{Bootstrap, Limits, Outcome, Preparation, place};

use crate::descriptors::swap_names;
use crate::support::{BringAll, Hosted, MAGIC, facts, hosted, id_of, is_peer_group, join, ready, real_facts};

/// A process that plays a part and prints a line for each step. It goes on when told to, and ends when its standard input does.
pub struct Played {
    child: Child,
    says: BufReader<ChildStdout>,
    told: Option<ChildStdin>,
}

const PART: &str = "WINDLASS_SIM_PART";
const RANK: &str = "WINDLASS_SIM_RANK";
const RANKS: &str = "WINDLASS_SIM_RANKS";
const ID: &str = "WINDLASS_SIM_ID";

pub fn play(before: &[&str], part: &str, rank: u32, ranks: u32, id: &Id) -> Played {
    let this = std::env::current_exe().unwrap();
    let mut words: Vec<std::ffi::OsString> = before.iter().map(Into::into).collect();
    words.push(this.into());
    let mut child = Command::new(&words[0])
        .args(&words[1..])
        .args(["--exact", "processes::part", "--ignored", "--nocapture"])
        .env(PART, part)
        .env(RANK, rank.to_string())
        .env(RANKS, ranks.to_string())
        .env(ID, id.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let says = BufReader::new(child.stdout.take().unwrap());
    let told = child.stdin.take();
    Played { child, says, told }
}

impl Played {
    /// The next line that the part itself prints.
    pub fn says(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.says.read_line(&mut line).unwrap(), 0, "the process ended silently");
            if let Some((_, words)) = line.split_once("part: ") {
                return words.trim_end().to_owned();
            }
        }
    }

    fn go_on(&mut self) {
        self.told.as_mut().unwrap().write_all(b".").unwrap();
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
    }
}

impl Drop for Played {
    fn drop(&mut self) {
        drop(self.told.take());
        if thread::panicking() {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

pub fn say(words: &str) {
    println!("part: {words}");
    std::io::stdout().flush().unwrap();
}

/// Waits for a line of the test; ends the process when the test ends.
pub fn await_message() {
    std::io::stdin().read_exact(&mut [0]).unwrap();
}

fn die() -> ! {
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
    unreachable!()
}

/// The parts, which only other tests run.
#[test]
#[ignore = "a process of the other tests"]
fn part() {
    let Ok(part) = std::env::var(PART) else { return };
    let number = |name| std::env::var(name).unwrap().parse::<u32>().unwrap();
    let (rank, ranks) = (number(RANK), number(RANKS));
    let hex = std::env::var(ID).unwrap();
    let mut id: Id = [0; 128];
    for (index, byte) in id.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * index..2 * index + 2], 16).unwrap();
    }
    if part == "nccl-ranks" {
        return nccl_ranks(&id, ranks);
    }
    let bootstrap = Bootstrap::start(Limits::default()).unwrap();
    if crate::rounds::plays(&part, &bootstrap, rank, ranks, &id) {
        return;
    }
    let prepare = |preparation: &Preparation<'_>| -> Result<(), String> {
        match part.as_str() {
            "swap" | "swap-lying" => swap_names(preparation),
            "die-preparing" => die(),
            "prepare-slowly" => {
                say("preparing");
                await_message();
                Ok(())
            }
            _ => Ok(()),
        }
    };
    let mut report = if part == "swap" { real_facts(rank, ranks) } else { facts(rank, ranks) };
    report.member.process_id = std::process::id();
    if part == "when-told" {
        say("waiting");
        await_message();
    }
    let participant = bootstrap.join_all(&id, vec![report]).unwrap();
    let outcomes = participant.complete(prepare);
    match &outcomes[0] {
        Outcome::PeerGroup(negotiated) => say(&format!("peer group {:x}", negotiated.hash())),
        Outcome::OnNccl(reason) => say(&format!("on NCCL: {reason}")),
        Outcome::Failed(failure) => say(&format!("failed {failure}")),
    }
    let _ = std::io::stdin().read(&mut [0]);
}

/// Ranks without Windlass: when told to, each sends all its bytes, closes, and does not connect again.
fn nccl_ranks(id: &Id, ranks: u32) {
    say("waiting");
    await_message();
    for _ in 0..ranks {
        let mut rank =
            std::net::TcpStream::connect(windlass_bootstrap::id_tag::address(id).unwrap()).unwrap();
        rank.write_all(&[&MAGIC[..], &[1; 180]].concat()).unwrap();
    }
    say("gone");
}

/// Four processes get one peer group and the same negotiated config, and each has read the others' files.
#[test]
fn peer_group_of_processes() {
    let hosted = hosted();
    let mut others: Vec<Played> = (1..4).map(|rank| play(&[], "swap", rank, 4, &hosted.id)).collect();
    let participant = hosted.bootstrap.join_all(&hosted.id, vec![real_facts(0, 4)]).unwrap();
    let outcomes = participant.complete(swap_names);
    let Outcome::PeerGroup(negotiated) = &outcomes[0] else { panic!("{outcomes:?}") };
    for other in &mut others {
        assert_eq!(other.says(), format!("peer group {:x}", negotiated.hash()));
    }
    let processes: std::collections::BTreeSet<_> =
        negotiated.members.iter().map(|member| member.process).collect();
    assert_eq!(processes.len(), 4);
}

/// A process that dies while it prepares, or between its confirmation and the outcome, makes the init of all others fail.
#[test]
fn death_before_the_outcome() {
    let lost = |outcome: &Outcome, rank| matches!(outcome, Outcome::Failed(Failure::Lost { rank: lost }) if *lost == rank);
    // It dies while it prepares.
    let hosted = hosted();
    let dying = play(&[], "die-preparing", 1, 2, &hosted.id);
    let outcome = join(&hosted.bootstrap, &hosted.id, facts(0, 2));
    assert!(lost(&outcome, 1), "{outcome:?}");
    drop(dying);

    // It dies after its confirmation, when the other rank's is still missing.
    let hosted = crate::support::hosted();
    let mut slow = play(&[], "prepare-slowly", 0, 3, &hosted.id);
    let mut confirmed = play(&[], "join", 1, 3, &hosted.id);
    let participant = hosted.bootstrap.join_all(&hosted.id, vec![facts(2, 3)]).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| participant.complete(ready));
        assert_eq!(slow.says(), "preparing");
        confirmed.child.kill().unwrap();
        let outcome = waiting.join().unwrap().remove(0);
        assert!(lost(&outcome, 1), "{outcome:?}");
        slow.go_on();
        assert_eq!(slow.says(), "failed a rank left before the outcome was known, rank 1");
    });
}

/// A process dies while others exchange descriptors with it. Whatever error they get, they hear that its rank is lost.
#[test]
fn death_while_descriptors_pass() {
    for _ in 0..10 {
        let hosted = hosted();
        let dying = play(&[], "die-preparing", 1, 3, &hosted.id);
        let mut other = play(&[], "swap-lying", 2, 3, &hosted.id);
        let participant = hosted.bootstrap.join_all(&hosted.id, vec![facts(0, 3)]).unwrap();
        let outcome = participant.complete(swap_names).remove(0);
        assert!(matches!(outcome, Outcome::Failed(Failure::Lost { rank: 1 })), "{outcome:?}");
        assert_eq!(other.says(), "failed a rank left before the outcome was known, rank 1");
        drop(dying);
    }
}

/// A process starts long after the others have begun to wait.
#[test]
fn late_process() {
    let hosted = hosted();
    let participant = hosted.bootstrap.join_all(&hosted.id, vec![facts(0, 2)]).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| participant.complete(ready));
        let mut late = play(&[], "join", 1, 2, &hosted.id);
        assert!(late.says().starts_with("peer group"));
        assert!(is_peer_group(&waiting.join().unwrap()[0]));
    });
}

/// With no descriptor left to accept with, the host tries again at intervals, without spinning, until there is one. Whoever connects has
/// shown no token, and gets none of the reserve.
#[test]
fn no_descriptors_left() {
    let hosted = hosted();
    let mut ranks = [0, 1, 2].map(|rank| play(&[], "when-told", rank, 3, &hosted.id));
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.says(), "waiting"));
    let starved = &hosted.bootstrap.counts().starved;
    let all = take_descriptors(&hosted);
    ranks.iter_mut().for_each(Played::go_on);
    while starved.load(Ordering::Relaxed) < 3 {
        thread::yield_now();
    }
    assert_eq!(windlass_base::descriptor::missing_of_reserve(), 0);
    drop(all);
    ranks.iter_mut().for_each(|rank| assert!(rank.says().starts_with("peer group")));
    assert!(starved.load(Ordering::Relaxed) < 20);
}

/// While a slow rank of NCCL's is relayed to the root of another id, ranks wait longer for a descriptor, as that relay will give
/// its own back.
#[test]
fn no_descriptors_left_beside_a_relay() {
    let hosted = hosted();
    let other_root = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let other = hosted.bootstrap.host(&id_of(&other_root.local_addr().unwrap())).unwrap();
    let mut slow =
        std::net::TcpStream::connect(windlass_bootstrap::id_tag::address(&other).unwrap()).unwrap();
    slow.write_all(&MAGIC).unwrap();
    let mut at_root = other_root.accept().unwrap().0;
    let mut ranks = [0, 1].map(|rank| play(&[], "when-told", rank, 2, &hosted.id));
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.says(), "waiting"));
    let starved = &hosted.bootstrap.counts().starved;
    let all = take_descriptors(&hosted);
    ranks.iter_mut().for_each(Played::go_on);
    while starved.load(Ordering::Relaxed) == 0 {
        thread::yield_now();
    }
    thread::sleep(windlass_base::descriptor::WANTED_FOR + std::time::Duration::from_millis(500));
    drop(all);
    ranks.iter_mut().for_each(|rank| assert!(rank.says().starts_with("peer group")));
    slow.write_all(&[1; 180]).unwrap();
    drop(slow);
    let mut bytes = Vec::new();
    at_root.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes.len(), 188);
}

/// Takes all descriptors of this process.
fn take_descriptors(hosted: &Hosted) -> Vec<std::net::TcpListener> {
    let mut few = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    few.current = Some(64);
    rustix::process::setrlimit(rustix::process::Resource::Nofile, few).unwrap();
    std::iter::from_fn(|| hosted.root.try_clone().ok()).collect()
}

/// A rank that cannot report, as it could not open a descriptor, ends as the other ranks do: on NCCL, or with an error if no
/// descriptor is left to relay NCCL's ranks. (It once went to NCCL without a message, and waited there for ranks that had failed
/// here.)
#[test]
fn declines_at_a_port() {
    let reason = FallbackReason::NoIdentity { words: "no descriptor".into() };
    for is_short in [false, true] {
        let hosted = hosted();
        let waits = hosted.bootstrap.join_all(&hosted.id, vec![facts(1, 3)]).unwrap();
        let mut all = if is_short { take_descriptors(&hosted) } else { Vec::new() };
        // Four are left, for both ends of both ranks' connections.
        all.truncate(all.len().saturating_sub(4));
        let declined = hosted.bootstrap.decline_at_port(&hosted.id, reason.clone());
        let heard = waits.complete(ready).remove(0);
        match is_short {
            false => {
                assert_eq!(declined, Ok(()));
                assert!(matches!(&heard, Outcome::OnNccl(of_all) if *of_all == reason), "{heard:?}");
            }
            true => {
                assert_eq!(declined, Err(Failure::Short));
                assert!(matches!(heard, Outcome::Failed(Failure::Short)), "{heard:?}");
            }
        }
        drop(all);
        // A late rank hears the same.
        let late = hosted.bootstrap.decline_at_port(&hosted.id, reason.clone());
        assert_eq!(late.is_err(), is_short, "{late:?}");
    }
}

/// Without a descriptor a host-local rendezvous accepts a connection as soon as there is one.
#[test]
fn no_descriptors_left_at_a_local_rendezvous() {
    let (hosted, name) = (hosted(), place::random().unwrap());
    let first = hosted.bootstrap.enter_local(name, 0, &|| false).unwrap();
    let socket = UnixStream::pair().unwrap();
    let all = take_descriptors(&hosted);
    // One descriptor for the connecting side.
    drop(socket.0);
    let address = local_rendezvous::address(name).unwrap();
    let address = SocketAddr::from_abstract_name(address.abstract_name().unwrap()).unwrap();
    let mut late = UnixStream::connect_addr(&address).unwrap();
    let starved = &hosted.bootstrap.counts().starved;
    while starved.load(Ordering::Relaxed) < 3 {
        thread::yield_now();
    }
    assert!(starved.load(Ordering::Relaxed) < 20);
    drop((all, socket.1));
    late.write_all(&local_rendezvous::greeting(name, 1)).unwrap();
    let mut answer = [0; local_rendezvous::ANSWER_BYTES];
    late.read_exact(&mut answer).unwrap();
    assert_eq!(RosterAnswer::decode(&answer), Some(RosterAnswer::Entered));
    drop(first);
}

/// NCCL's ranks are accepted with the reserve, but there is no descriptor for their connection to the root. These ranks have closed
/// and do not connect again; they wait until there are descriptors, and all reach the root.
#[test]
fn no_descriptors_left_to_relay() {
    let hosted = hosted();
    let mut ranks = play(&[], "nccl-ranks", 0, 4, &hosted.id);
    assert_eq!(ranks.says(), "waiting");
    let counts = hosted.bootstrap.counts();
    let all = take_descriptors(&hosted);
    ranks.go_on();
    assert_eq!(ranks.says(), "gone");
    while counts.starved.load(Ordering::Relaxed) < 3 {
        assert_eq!(counts.relays_broken.load(Ordering::Relaxed), 0);
        assert_eq!(counts.relays.load(Ordering::Relaxed), 0);
        thread::yield_now();
    }
    drop(all);
    for rank in 0..4 {
        let wait = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
        let came = rustix::event::poll(&mut [PollFd::new(&hosted.root, PollFlags::IN)], Some(&wait)).unwrap();
        assert_eq!(came, 1, "{rank} of 4 ranks reached the root");
        let mut bytes = Vec::new();
        hosted.root.accept().unwrap().0.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes.len(), 188);
    }
    assert!(counts.starved.load(Ordering::Relaxed) < 20);
}

/// Whether a command that a test needs works here; prints why a test is skipped.
fn possible(what: &str, command: &[&str]) -> bool {
    let tried = Command::new(command[0]).args(&command[1..]).output();
    let works = tried.as_ref().is_ok_and(|output| output.status.success());
    if !works {
        println!("skipped: no {what} here: {tried:?}");
    }
    works
}

/// Ranks in different process-id namespaces meet.
#[test]
fn process_id_namespace() {
    if !possible("process-id namespace", &["unshare", "-rpf", "true"]) {
        return;
    }
    let hosted = hosted();
    let mut apart = play(&["unshare", "-rpf"], "swap", 1, 2, &hosted.id);
    let outcome = hosted.bootstrap.join_all(&hosted.id, vec![real_facts(0, 2)]).unwrap().complete(swap_names);
    assert!(is_peer_group(&outcome[0]), "{outcome:?}");
    assert!(apart.says().starts_with("peer group"));
    // The pidfd from that namespace reports the end of its process here.
    let peers = std::mem::take(&mut *crate::descriptors::PEERS.lock().unwrap());
    let [peer] = &peers[..] else { panic!("{peers:?}") };
    let ended = |timeout| rustix::event::poll(&mut [PollFd::new(peer, PollFlags::IN)], timeout).unwrap();
    assert_eq!(ended(Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 })), 0);
    drop(apart);
    assert_eq!(ended(None), 1);
}

/// A network namespace that reaches this one over a pair of virtual interfaces. Dropping it removes it.
struct Apart(String);

impl Apart {
    fn new() -> Option<(Apart, std::net::Ipv4Addr)> {
        let number = std::process::id();
        let name = format!("windlass{number}");
        if !possible("network namespace", &["ip", "netns", "add", &name]) {
            return None;
        }
        let apart = Apart(name.clone());
        let (here, there) = (format!("wl{number}a"), format!("wl{number}b"));
        let octets = [10, 231, (number >> 6) as u8, (number << 2) as u8];
        let address = |last: u8| {
            std::net::Ipv4Addr::new(octets[0], octets[1], octets[2], octets[3] + last).to_string() + "/30"
        };
        let (ours, theirs) = (address(1), address(2));
        let steps: [&[&str]; 5] = [
            &["ip", "link", "add", &here, "type", "veth", "peer", "name", &there, "netns", &name],
            &["ip", "addr", "add", &ours, "dev", &here],
            &["ip", "link", "set", &here, "up"],
            &["ip", "netns", "exec", &name, "ip", "addr", "add", &theirs, "dev", &there],
            &["ip", "netns", "exec", &name, "ip", "link", "set", &there, "up"],
        ];
        let all = steps.iter().all(|step| possible("virtual interfaces", step));
        all.then(|| (apart, ours.trim_end_matches("/30").parse().unwrap()))
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).output();
    }
}

/// Ranks in different network namespaces go to NCCL: by their reports, or, if these show no difference, because descriptors cannot
/// be passed.
#[test]
fn network_namespace() {
    let Some((apart, ours)) = Apart::new() else { return };
    let session = || {
        let bootstrap = Bootstrap::start(Limits::default()).unwrap();
        let root = std::net::TcpListener::bind((ours, 0)).unwrap();
        let mut id = id_of(&root.local_addr().unwrap());
        id[12..16].copy_from_slice(&ours.octets());
        let id = bootstrap.host(&id).unwrap();
        Hosted { bootstrap, root, id }
    };
    let before = ["ip", "netns", "exec", &apart.0];
    let hosted = session();
    let mut other = play(&before, "swap", 1, 2, &hosted.id);
    let outcome = hosted.bootstrap.join_all(&hosted.id, vec![real_facts(0, 2)]).unwrap().complete(swap_names);
    assert!(matches!(outcome[0], Outcome::OnNccl(FallbackReason::OtherNetwork { .. })), "{outcome:?}");
    assert!(other.says().starts_with("on NCCL: ranks are in different network namespaces"));

    let hosted = session();
    let mut other = play(&before, "swap-lying", 1, 2, &hosted.id);
    let outcome = hosted.bootstrap.join_all(&hosted.id, vec![facts(0, 2)]).unwrap().complete(swap_names);
    let Outcome::OnNccl(FallbackReason::Refused { words, .. }) = &outcome[0] else { panic!("{outcome:?}") };
    assert!(words.contains("cannot be reached") || words.contains("has ended"), "{words}");
    assert!(other.says().starts_with("on NCCL: a rank could not prepare"));
}

/// A child forked from a process with sessions and without communicators closes Windlass's descriptors and no other, and has its
/// own bootstrap. The parent's peers see the parent's end.
#[test]
fn forked_child() {
    let hosted = hosted();
    let own = Bootstrap::start(Limits::default()).unwrap();
    let outcomes = own.join_all(&hosted.id, vec![facts(0, 2), facts(1, 2)]).unwrap().complete(ready);
    assert!(outcomes.iter().all(is_peer_group));
    let of_parent = std::ptr::from_ref(windlass_bootstrap::process().unwrap()).addr();
    let (reader, mut writer) = std::io::pipe().unwrap();
    // SAFETY: the child calls only what is allowed after a fork of a process with threads.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let left = windlass_base::descriptor::open() as u8;
        let mut sockets = 0u8;
        for number in 3..1024 {
            // SAFETY: a query of a number.
            unsafe {
                let mut status: libc::stat = std::mem::zeroed();
                if libc::fstat(number, &mut status) == 0 && status.st_mode & libc::S_IFMT == libc::S_IFSOCK {
                    sockets += 1;
                }
            }
        }
        let began = windlass_bootstrap::started().is_some();
        let own = windlass_bootstrap::process();
        let is_own = own.is_ok_and(|own| std::ptr::from_ref(own).addr() != of_parent);
        let _ = writer.write_all(&[left, sockets, began.into(), is_own.into()]);
        // SAFETY: ends the child without the parent's exit handlers.
        unsafe { libc::_exit(0) };
    }
    drop(writer);
    let mut told = [9; 4];
    (&reader).read_exact(&mut told).unwrap();
    // NCCL's root, which the test holds, is not Windlass's.
    assert_eq!(told, [0, 1, 0, 1]);
    // SAFETY: our own child.
    unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
}
