//! Ranks as processes: the parent starts this executable once a rank and carries what ranks tell each other.
//!
//! Each rank's standard input is one end of a socket pair, over which both sides send JSON lines. The parent's first
//! line is the job. A rank asks for an [`exchange`](Channel::exchange), which answers when all ranks have asked (or
//! [the first few](Channel::among)), and ends with its result. Standard output of a rank goes to the parent's standard error, because NCCL logs there.

use crate::interruption::{self, end_with_this_process};
use anyhow::{Context, Result, anyhow, bail};
use rustix::process::Signal;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};
use windlass_base::thread;

/// What a rank tells the parent.
#[derive(Serialize, Deserialize)]
enum FromRank {
    /// Among so many ranks from 0 on; none: all.
    Exchange(Value, Option<usize>),
    Progress(String),
    Finished(Value),
    Failed(String),
}

/// A variable's name and value.
pub type Variable = (OsString, OsString);

/// The time between two looks for an interruption and the deadline.
const LOOK: Duration = Duration::from_millis(20);
/// For a killed rank to be gone. One that waits in the driver may never be, and nobody can wait for it.
const GONE: Duration = Duration::from_secs(3);
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// What to start.
pub struct Launch {
    /// The hidden subcommand that runs a rank.
    pub subcommand: &'static str,
    pub ranks: usize,
    /// Variables for every rank, beside the inherited ones.
    pub environment: Vec<Variable>,
    /// Variables that no rank inherits.
    pub without: fn(&str) -> bool,
    /// How long all ranks may say nothing before the run counts as stuck.
    pub silence: Duration,
    /// The run ends then, with all ranks; none: when they have finished.
    pub deadline: Option<Instant>,
}

/// Runs the ranks to their end; `jobs` holds one job a rank. Returns their results in rank order.
///
/// `own` gives variables for one rank alone; `progress` is called with each progress line. A rank that fails ends all others.
pub fn run(
    launch: &Launch,
    jobs: &[Value],
    own: &dyn Fn(usize) -> Vec<Variable>,
    progress: &mut dyn FnMut(usize, &str),
) -> Result<Vec<Value>> {
    assert_eq!(jobs.len(), launch.ranks);
    let (sender, events) = mpsc::channel();
    let mut ranks = Ranks { running: Vec::new() };
    for (rank, job) in jobs.iter().enumerate() {
        ranks.running.push(start(launch, rank, &own(rank), job, sender.clone())?);
    }
    drop(sender);
    let outcome = converse(launch, &mut ranks, &events, progress);
    match outcome {
        Ok(results) => {
            ranks.wait_for_exit(launch)?;
            Ok(results)
        }
        Err(error) if launch.deadline.is_some() || interruption::look().is_some() => Err(error),
        Err(error) => {
            // The others often say why, a moment later: a simulator's report of a mismatch, NCCL's warning.
            std::thread::sleep(Duration::from_millis(300));
            Err(error)
        }
    }
}

impl Launch {
    /// An error that says why the run is over, if it is.
    fn go_on(&self) -> Result<()> {
        interruption::check()?;
        if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            bail!("the time is over, and the ranks have not finished");
        }
        Ok(())
    }
}

/// What a wait for the next event came to.
enum Waited {
    Event(Event),
    Silent,
    Left,
}

/// Waits in short turns, since somebody may end the run meanwhile.
fn wait(launch: &Launch, events: &mpsc::Receiver<Event>) -> Result<Waited> {
    let silent_at = Instant::now() + launch.silence;
    loop {
        launch.go_on()?;
        match events.recv_timeout(LOOK) {
            Ok(event) => return Ok(Waited::Event(event)),
            Err(RecvTimeoutError::Disconnected) => return Ok(Waited::Left),
            Err(RecvTimeoutError::Timeout) if Instant::now() > silent_at => return Ok(Waited::Silent),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

struct Rank {
    process: Child,
    channel: UnixStream,
}

/// All rank processes; those that still run when this is dropped are killed.
struct Ranks {
    running: Vec<Rank>,
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.running {
            let _ = rank.process.kill();
        }
        thread::wait_while(GONE, LOOK_AGAIN, || self.running.iter_mut().any(|rank| runs(&mut rank.process)));
    }
}

/// The end of a process that is about to end.
fn gone(process: &mut Child) -> Option<ExitStatus> {
    thread::wait_while(GONE, LOOK_AGAIN, || runs(process));
    process.try_wait().ok().flatten()
}

fn runs(process: &mut Child) -> bool {
    matches!(process.try_wait(), Ok(None))
}

impl Ranks {
    /// Waits until every rank has left with success.
    fn wait_for_exit(&mut self, launch: &Launch) -> Result<()> {
        let limit = launch.silence;
        let deadline = Instant::now() + limit;
        for (rank, running) in self.running.iter_mut().enumerate() {
            let status = loop {
                if let Some(status) = running.process.try_wait()? {
                    break status;
                }
                launch.go_on()?;
                if Instant::now() > deadline {
                    bail!("rank {rank} gave its result but did not exit within {} s", limit.as_secs());
                }
                std::thread::sleep(Duration::from_millis(5));
            };
            if !status.success() {
                bail!("rank {rank} gave its result, then ended with {status}");
            }
        }
        Ok(())
    }
}

type Event = (usize, Option<FromRank>);

fn start(
    launch: &Launch,
    rank: usize,
    own: &[Variable],
    job: &Value,
    events: mpsc::Sender<Event>,
) -> Result<Rank> {
    let (ours, theirs) = UnixStream::pair().context("socketpair")?;
    let executable = std::env::current_exe().context("cannot find this executable")?;
    let mut command = Command::new(&executable);
    for (name, _) in std::env::vars_os().filter(|(name, _)| (launch.without)(&name.to_string_lossy())) {
        command.env_remove(name);
    }
    // A rank that waits inside NCCL would not notice that its parent died.
    let process = end_with_this_process(&mut command, Signal::KILL)
        .arg(launch.subcommand)
        .envs(launch.environment.iter().chain(own).map(|(name, value)| (name, value)))
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::from(std::io::stderr()))
        .spawn()
        .with_context(|| format!("cannot start rank {rank} ({})", executable.display()))?;
    let reader = BufReader::new(ours.try_clone()?);
    std::thread::spawn(move || {
        for line in reader.lines() {
            let Ok(line) = line else { break };
            let message = serde_json::from_str(&line)
                .unwrap_or_else(|error| FromRank::Failed(format!("unreadable message {line:?}: {error}")));
            if events.send((rank, Some(message))).is_err() {
                return;
            }
        }
        let _ = events.send((rank, None));
    });
    let mut channel = ours;
    send(&mut channel, job)?;
    Ok(Rank { process, channel })
}

/// Serves the ranks until all have finished.
fn converse(
    launch: &Launch,
    ranks: &mut Ranks,
    events: &mpsc::Receiver<Event>,
    progress: &mut dyn FnMut(usize, &str),
) -> Result<Vec<Value>> {
    let mut exchange: Vec<Option<(Value, usize)>> = vec![None; launch.ranks];
    let mut results: Vec<Option<Value>> = vec![None; launch.ranks];
    while results.iter().any(Option::is_none) {
        let (rank, message) = match wait(launch, events)? {
            Waited::Event(event) => event,
            Waited::Silent => {
                bail!(
                    "no rank said anything for {} s: they are stuck (ranks that wait: {:?})",
                    launch.silence.as_secs(),
                    waiting(&results)
                )
            }
            Waited::Left => bail!("all ranks left without a result"),
        };
        match message {
            Some(FromRank::Progress(text)) => progress(rank, &text),
            Some(FromRank::Finished(value)) => results[rank] = Some(value),
            Some(FromRank::Failed(reason)) => bail!("rank {rank}: {reason}"),
            Some(FromRank::Exchange(value, among)) => {
                let members = among.unwrap_or(launch.ranks).min(launch.ranks);
                exchange[rank] = Some((value, members));
                let asked =
                    |asked: &Option<(Value, usize)>| asked.as_ref().is_some_and(|(_, of)| *of == members);
                if exchange[..members].iter().all(asked) {
                    let asked = exchange[..members].iter_mut().filter_map(Option::take);
                    let all: Vec<Value> = asked.map(|(value, _)| value).collect();
                    for (rank, running) in ranks.running[..members].iter_mut().enumerate() {
                        send(&mut running.channel, &all)
                            .with_context(|| format!("rank {rank} does not listen"))?;
                    }
                }
            }
            None if results[rank].is_some() => {}
            None => {
                // It has closed its channel, but a driver may keep what is left of it for ever.
                match gone(&mut ranks.running[rank].process) {
                    Some(status) => bail!("rank {rank} ended with {status} before it had finished"),
                    None => bail!("rank {rank} left before it had finished"),
                }
            }
        }
    }
    Ok(results.into_iter().flatten().collect())
}

fn waiting(results: &[Option<Value>]) -> Vec<usize> {
    results.iter().enumerate().filter(|(_, result)| result.is_none()).map(|(rank, _)| rank).collect()
}

fn send(channel: &mut UnixStream, value: &impl Serialize) -> Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    channel.write_all(&line)?;
    Ok(())
}

/// A rank's side of the conversation.
pub struct Channel {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
    members: Option<usize>,
}

/// Runs the body of a rank: reads the job, runs `body`, sends its result or its failure.
pub fn work<Job: DeserializeOwned, Outcome: Serialize>(
    body: impl FnOnce(&mut Channel, Job) -> Result<Outcome>,
) -> Result<()> {
    let mut channel = Channel::open()?;
    let outcome = channel.receive().and_then(|job| body(&mut channel, job));
    match outcome {
        Ok(outcome) => channel.tell(&FromRank::Finished(serde_json::to_value(outcome)?)),
        Err(error) => {
            channel.tell(&FromRank::Failed(format!("{error:#}")))?;
            // No clean-up: destroying a communicator could wait for ranks that are stuck because of us.
            std::process::exit(1);
        }
    }
}

impl Channel {
    fn open() -> Result<Self> {
        let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
        let writer = UnixStream::from(socket);
        let reader = BufReader::new(writer.try_clone()?);
        Ok(Self { reader, writer, members: None })
    }

    /// From now on exchanges are among so many ranks from 0 on, which all must say; none: among all.
    pub fn among(&mut self, members: Option<usize>) {
        self.members = members;
    }

    /// Gives `value` to all ranks and returns everyone's, in rank order. All ranks must call it.
    pub fn exchange<T: Serialize + DeserializeOwned>(&mut self, value: &T) -> Result<Vec<T>> {
        self.tell(&FromRank::Exchange(serde_json::to_value(value)?, self.members))?;
        self.receive()
    }

    /// What rank 0 has in `value`. All ranks must call it.
    pub fn share_first<T: Serialize + DeserializeOwned>(&mut self, value: &T) -> Result<T> {
        self.exchange(value)?.into_iter().next().ok_or_else(|| anyhow!("an exchange without ranks"))
    }

    /// Shows a line to whoever started the run.
    pub fn progress(&mut self, text: impl Into<String>) -> Result<()> {
        self.tell(&FromRank::Progress(text.into()))
    }

    fn tell(&mut self, message: &FromRank) -> Result<()> {
        send(&mut self.writer, message).context("the parent process is gone")
    }

    fn receive<T: DeserializeOwned>(&mut self) -> Result<T> {
        let mut line = String::new();
        if self.reader.read_line(&mut line).context("cannot read from the parent process")? == 0 {
            bail!(
                "the parent process is gone (a rank is started by `windlass demo` or `windlass bench`, not by hand)"
            );
        }
        serde_json::from_str(&line).with_context(|| format!("unreadable line from the parent: {line:?}"))
    }
}
