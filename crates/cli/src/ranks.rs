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
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};
use windlass_base::thread;

/// What a rank tells the parent.
#[derive(Serialize, Deserialize)]
enum FromRank {
    /// Among so many ranks from 0 on; none: all.
    Exchange(Value, Option<usize>),
    Progress(Value),
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

/// Runs the ranks to their end, each with its job. Returns their results in rank order.
///
/// `own` gives variables for one rank alone; `progress` is called with what ranks tell meanwhile. A rank that fails ends all others.
pub fn run<Job: Serialize, Told: DeserializeOwned, Outcome: DeserializeOwned>(
    launch: &Launch,
    job: impl Fn(usize) -> Job,
    own: impl Fn(usize) -> Vec<Variable>,
    progress: impl FnMut(usize, Told),
) -> Result<Vec<Outcome>> {
    let (sender, events) = mpsc::channel();
    let mut ranks = Ranks(Vec::new());
    for rank in 0..launch.ranks {
        ranks.0.push(start(launch, rank, &own(rank), &job(rank), sender.clone())?);
    }
    drop(sender);
    let results = converse(launch, &mut ranks, &events, progress).inspect_err(|_| {
        // The others often say why, a moment later: a simulator's report of a mismatch, NCCL's warning.
        if launch.deadline.is_none() && interruption::look().is_none() {
            std::thread::sleep(Duration::from_millis(300));
        }
    })?;
    ranks.wait_for_exit(launch)?;
    results.into_iter().map(|value| serde_json::from_value(value).context("a rank's result")).collect()
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

struct Rank {
    process: Child,
    channel: UnixStream,
}

/// All rank processes; those that still run when this is dropped are killed.
struct Ranks(Vec<Rank>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            let _ = rank.process.kill();
        }
        thread::wait_while(GONE, LOOK_AGAIN, || self.0.iter_mut().any(|rank| runs(&mut rank.process)));
    }
}

fn runs(process: &mut Child) -> bool {
    matches!(process.try_wait(), Ok(None))
}

impl Ranks {
    /// Waits until every rank has left with success.
    fn wait_for_exit(&mut self, launch: &Launch) -> Result<()> {
        for (rank, Rank { process, .. }) in self.0.iter_mut().enumerate() {
            let mut is_over = Ok(());
            thread::wait_while(launch.silence, LOOK_AGAIN, || {
                is_over = launch.go_on();
                is_over.is_ok() && runs(process)
            });
            is_over?;
            match process.try_wait()? {
                Some(status) if status.success() => {}
                Some(status) => bail!("rank {rank} gave its result, then ended with {status}"),
                None => bail!(
                    "rank {rank} gave its result but did not exit within {} s",
                    launch.silence.as_secs()
                ),
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
    job: &impl Serialize,
    events: mpsc::Sender<Event>,
) -> Result<Rank> {
    let (mut channel, theirs) = UnixStream::pair().context("socketpair")?;
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
    let reader = BufReader::new(channel.try_clone()?);
    std::thread::spawn(move || {
        for line in reader.lines().map_while(Result::ok) {
            let message = serde_json::from_str(&line)
                .unwrap_or_else(|error| FromRank::Failed(format!("unreadable message {line:?}: {error}")));
            // Nobody listens any more where another rank has failed.
            let _ = events.send((rank, Some(message)));
        }
        let _ = events.send((rank, None));
    });
    send(&mut channel, job)?;
    Ok(Rank { process, channel })
}

/// Serves the ranks until all have finished.
fn converse<Told: DeserializeOwned>(
    launch: &Launch,
    ranks: &mut Ranks,
    events: &mpsc::Receiver<Event>,
    mut progress: impl FnMut(usize, Told),
) -> Result<Vec<Value>> {
    let mut exchange: Vec<Option<(Value, usize)>> = vec![None; launch.ranks];
    let mut results: Vec<Option<Value>> = vec![None; launch.ranks];
    let mut silent_at = Instant::now() + launch.silence;
    while results.iter().any(Option::is_none) {
        launch.go_on()?;
        let (rank, message) = match events.recv_timeout(LOOK) {
            Ok(event) => event,
            Err(RecvTimeoutError::Disconnected) => bail!("all ranks left without a result"),
            Err(RecvTimeoutError::Timeout) if Instant::now() > silent_at => bail!(
                "no rank said anything for {} s: they are stuck (ranks that wait: {:?})",
                launch.silence.as_secs(),
                (0..launch.ranks).filter(|rank| results[*rank].is_none()).collect::<Vec<_>>()
            ),
            Err(RecvTimeoutError::Timeout) => continue,
        };
        silent_at = Instant::now() + launch.silence;
        match message {
            Some(FromRank::Progress(told)) => {
                progress(rank, serde_json::from_value(told).context("unreadable progress of a rank")?);
            }
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
                    for (rank, running) in ranks.0[..members].iter_mut().enumerate() {
                        send(&mut running.channel, &all)
                            .with_context(|| format!("rank {rank} does not listen"))?;
                    }
                }
            }
            None if results[rank].is_some() => {}
            None => {
                // It has closed its channel, but a driver may keep what is left of it for ever.
                let process = &mut ranks.0[rank].process;
                thread::wait_while(GONE, LOOK_AGAIN, || runs(process));
                match process.try_wait().ok().flatten() {
                    Some(status) => bail!("rank {rank} ended with {status} before it had finished"),
                    None => bail!("rank {rank} left before it had finished"),
                }
            }
        }
    }
    Ok(results.into_iter().flatten().collect())
}

fn send(channel: &mut UnixStream, value: &impl Serialize) -> Result<()> {
    let line = serde_json::to_string(value)? + "\n";
    Ok(channel.write_all(line.as_bytes())?)
}

/// A rank's side of the conversation.
pub struct Channel {
    socket: BufReader<UnixStream>,
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
        let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
        Ok(Self { socket: BufReader::new(socket), members: None })
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

    /// Tells something to whoever started the run.
    pub fn progress(&mut self, told: &impl Serialize) -> Result<()> {
        self.tell(&FromRank::Progress(serde_json::to_value(told)?))
    }

    fn tell(&mut self, message: &FromRank) -> Result<()> {
        send(self.socket.get_mut(), message).context("the parent process is gone")
    }

    fn receive<T: DeserializeOwned>(&mut self) -> Result<T> {
        let mut line = String::new();
        if self.socket.read_line(&mut line).context("cannot read from the parent process")? == 0 {
            bail!(
                "the parent process is gone (a rank is started by `windlass demo` or `windlass bench`, not by hand)"
            );
        }
        serde_json::from_str(&line).with_context(|| format!("unreadable line from the parent: {line:?}"))
    }
}
