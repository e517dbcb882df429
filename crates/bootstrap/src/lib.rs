//! Bootstrap: how the ranks of a new communicator meet, agree and confirm.
//!
//! The process that makes an `ncclUniqueId` hosts the session: it puts [its own port and an id tag](id_tag) into the
//! id. Ranks with Windlass [report](facts::Facts) there, the host [decides](decision), all prepare (map, test, load)
//! and confirm, and the host decides one outcome: peer group, on NCCL, or failed. A connection that begins with the id's magic,
//! as NCCL's do, goes byte for byte to NCCL's root (`relay`), and before the outcome it is the proof that a rank has no Windlass or went
//! to NCCL, and all go there. Any other is dropped and proves nothing: port scanners and health checks come to every port. NCCL's root drops it as
//! well, or is ended by it (before 2.27.3), or waits for its first bytes for ever.
//!
//! **One port an id.** NCCL's protocol says in its first eight bytes which id it means, so one port could serve all
//! ids. But a port an id needs no table of them, and closes with its root: whoever comes too late is refused, as by NCCL. It costs
//! one descriptor, where NCCL spends a descriptor and a thread; they are bounded by `WINDLASS_SESSIONS_MAX`, and a
//! port closes when NCCL's root behind it has. Where all ranks of a peer group have said that they go to NCCL later only
//! ([`capability::LAZY`](crate::negotiated::capability::LAZY)), the port closes once the outcome is known, and NCCL's
//! id, which nobody will use, [is spare](Bootstrap::spare_id).
//!
//! # How it is used
//!
//! `ncclGetUniqueId`: [`Bootstrap::host`] with a [spare id](Bootstrap::spare_id), or with one that NCCL makes (not with
//! one of NCCL_COMM_ID or of `ncclCommGetUniqueId`, which grow a communicator: those stay as they are).
//! `ncclCommInitRank`: [`facts::fallback_reason`], [`Bootstrap::decline_at_port`], or [`Bootstrap::join`] with all ranks that this caller brings to the
//! session, then [`complete_all`] over all sessions of the group with what there is to prepare; [`Participant::cancellers`] first,
//! for `ncclCommAbort`. On NCCL means the real init with the same id, which the relay serves, as it does beside a peer group.
//! `ncclCommInitAll`: [`decision::decide`], without a session. After a fork: [`process`], which begins afresh.
//!
//! `ncclCommSplit` and `ncclCommShrink`, of lazy communicators: [`Bootstrap::await_ranks`] by the rank whose process hosts, and [`Bootstrap::join_invited`] or [`Bootstrap::decline`] by each; see [`children`]. Where NCCL makes them:
//! [`Bootstrap::enter_local`] before NCCL's call, then [`Bootstrap::join_local`]; see [`local_rendezvous`].
//! Before a call whose communicators may be lazy, a round: [`Bootstrap::ask_round`] or
//! [`Bootstrap::go_to_nccl`] by each.
//!
//! # Why ranks never act on different outcomes
//!
//! Two generals cannot both be sure: whoever sends the last message does not know that it arrived. So no rank is ever
//! asked to be sure of another; there is one decider, and a rank without its message has no communicator.
//!
//! 1. The outcome is a step of one [machine](agreement::Agreement) in one process. All that ranks hear are copies of
//!    it. So two ranks that hear an outcome hear the same one.
//! 2. It is a *peer group* only if every rank has confirmed, that is, has mapped, tested and loaded all it needs. So whoever
//!    hears it needs nothing more from anyone, not even that they hear it too.
//! 3. A rank that has reported takes no step on its own: neither to NCCL nor to a peer group. If the host is lost before the outcome
//!    reached it, its init **fails** (but [`participation::WithoutHost`]). Others may have heard *peer group*: those then miss a peer, as they would if it had
//!    died just after its init, and wait for it as NCCL does, until the configured time of a stuck operation or an
//!    abort. An error here and a missing peer there is what NCCL gives, too; two paths at once would hang silently.
//! 4. A rank that was never heard of (could not connect) may go to NCCL by itself: the others cannot have agreed
//!    without it, and its NCCL connects to the same port, which makes the session end on NCCL.
//! 5. A rank that cannot prepare refuses, and the session will end on NCCL; but the outcome waits until all have confirmed
//!    or refused, since a refusal may be what a rank makes of a peer that is dying. A dead rank never speaks.
//! 6. A rank that leaves after its report and before the outcome makes the session fail, whether it had confirmed or
//!    not: nothing has been built on its message yet. After the outcome the host has no more to say, and all connections close:
//!    a communicator never needs the process that hosted its init.
//! 7. Nothing is timed. A rank that is minutes late is waited for, as NCCL waits; one that never comes and never goes
//!    to NCCL is waited for until its peers are aborted, as with NCCL.
//!
//! The remaining freedom is when NCCL is decided on: a rank with a [reason of its own](facts::fallback_reason) goes to NCCL
//! at once, and conflicts end the session at the first report that shows them.

#![deny(unsafe_code)]
#![deny(unreachable_pub)]

pub mod agreement;
mod approach;
pub mod arrivals;
mod canceller;
pub mod children;
pub mod colors;
mod commands;
mod connection;
pub mod counts;
pub mod decision;
pub mod descriptors;
pub mod facts;
pub mod id_tag;
pub mod inquiry;
mod limits;
mod local_entry;
pub mod local_rendezvous;
pub mod message;
pub mod negotiated;
pub mod outcome;
pub mod participant;
pub mod participation;
pub mod place;
pub mod poll;
mod process_listener;
mod reactor;
mod relay;
pub mod request_socket;
pub mod round;
mod spare;
mod waiter;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::negotiated::{Token, Version};
use children::Invitation;
use colors::{LazyVote, Parent, SplitMessage};
use commands::{Command, Expected, Host, NewSession, Shared};
use counts::Counts;
use descriptors::DescriptorSocket;
use facts::Facts;
use id_tag::{Id, IdTag};
use message::FromRank;
use outcome::{Failure, FallbackReason, SessionOutcome};
use participation::WithoutHost;
use process_listener::ProcessListener;
use reactor::Reactor;
use windlass_base::config::config;
use windlass_base::descriptor::{self, Ours};
use windlass_base::process::{self, fork_local::ForkLocal};
use windlass_base::thread;

pub use canceller::Canceller;
pub use inquiry::Inquiry;
pub use limits::Limits;
pub use local_entry::LocalEntry;
pub use participant::{Outcome, Participant, Preparation, complete_all};

/// How long descriptors are waited for that a rank needs before it can report, and how often it tries.
const WANTED_WITHIN: Duration = Duration::from_secs(2);
const WANTED_EVERY: Duration = Duration::from_millis(10);

/// The bootstrap of a process: its background thread and all sessions in which it takes part.
#[derive(Debug)]
pub struct Bootstrap {
    shared: Arc<Shared>,
    limits: Limits,
    process_listener: Token,
    thread: Option<JoinHandle<()>>,
}

static PROCESS: ForkLocal<Bootstrap> = ForkLocal::new();

/// The one of this process, started by its first use; an error if it cannot be, or in the forked child of a process with communicators.
/// Any other child begins afresh: sessions that the parent hosts are the parent's.
pub fn process() -> io::Result<&'static Bootstrap> {
    if is_in_child() {
        return Err(io::Error::other("the process was forked from one with communicators"));
    }
    process::let_forked_children_restart();
    let limits = Limits { sessions_max: config().sessions_max, ..Limits::default() };
    PROCESS.get_or_try_init(|| Bootstrap::start(limits))
}

/// The one of this process, if it has been started.
pub fn started() -> Option<&'static Bootstrap> {
    PROCESS.get().filter(|_| !is_in_child())
}

/// Whether this is the forked child of a process with communicators, where nothing of ours begins.
pub fn is_in_child() -> bool {
    process::is_forked()
}

impl Bootstrap {
    /// Starts the background thread.
    pub fn start(limits: Limits) -> io::Result<Bootstrap> {
        let shared = Arc::new(Shared::new(&limits)?);
        let for_thread = shared.clone();
        // Without one, communicators made from others have no peer group; all else works.
        let process_listener = ProcessListener::open()
            .inspect_err(|error| log::info!("bootstrap has no process listener: {error}"))
            .ok();
        let secret =
            process_listener.as_ref().map_or(children::NOBODY, |process_listener| process_listener.secret);
        let (tell, told) = std::sync::mpsc::sync_channel(1);
        // The reactor is made in its thread, to which it belongs.
        let thread =
            thread::spawn("windlass", move || match Reactor::new(for_thread, limits, process_listener) {
                Ok(reactor) => {
                    let _ = tell.send(Ok(()));
                    reactor.run();
                }
                Err(error) => drop(tell.send(Err(io::Error::from(error)))),
            })?;
        told.recv().unwrap_or_else(|_| Err(io::Error::other("the background thread did not start")))?;
        Ok(Bootstrap { shared, limits, process_listener: secret, thread: Some(thread) })
    }

    /// Hosts the session of an id that NCCL has just made, and gives the id that ranks must get instead. An error
    /// leaves NCCL's own id as good as it was, without an id tag.
    pub fn host(&self, id: &Id) -> io::Result<Id> {
        let root = id_tag::address(id).ok_or_else(|| io::Error::other("the id holds no address"))?;
        let open = self.shared.counts.sessions_open.fetch_add(1, Ordering::Relaxed);
        let hosted = if open as usize >= self.limits.sessions_max {
            Counts::up(&self.shared.counts.sessions_refused);
            self.shared.send(Command::Sweep);
            Err(io::Error::other(format!("{open} sessions are open, the limit of WINDLASS_SESSIONS_MAX")))
        } else {
            self.open(id, root)
        };
        match &hosted {
            Ok(_) => Counts::up(&self.shared.counts.sessions),
            Err(_) => Counts::down(&self.shared.counts.sessions_open),
        }
        hosted
    }

    fn open(&self, id: &Id, root: std::net::SocketAddr) -> io::Result<Id> {
        let id_tag = IdTag { version: Version::THIS, token: place::random()?, root_port: root.port() };
        let (listener, port) = connection::listen(&root)?;
        let tagged =
            id_tag.encode(id, port).ok_or_else(|| io::Error::other("the id holds no usable address"))?;
        let comm = place::random()?;
        self.shared.send(Command::Open(NewSession { token: id_tag.token, comm, id: *id, listener, root }));
        Ok(tagged)
    }

    /// Takes an id that NCCL made in this process, as it made it, and that nobody has used or will: to be hosted, or to be
    /// used as it is.
    pub fn spare_id(&self) -> Option<Id> {
        let id = self.shared.spares.take()?;
        Counts::up(&self.shared.counts.ids_recycled);
        Some(id)
    }

    /// Gives an id back that NCCL made in this process, as NCCL made it, and with which nobody has gone to NCCL or will.
    pub fn return_id(&self, id: Id) {
        self.shared.spare(id);
    }

    /// Closes the session of an id that nobody will use any more: its port, and whoever waits there without an outcome.
    pub fn retire(&self, id: &Id) {
        if let Some(id_tag) = IdTag::decode(id) {
            self.shared.send(Command::Retire(id_tag.token));
        }
    }

    /// Joins the session of an id with the ranks that the caller brings: their reports go out now. Never
    /// waits. An error means that no report has gone out; the caller
    /// [declines](Bootstrap::decline_at_port).
    pub fn join(&self, id: &Id, facts: Vec<Facts>) -> io::Result<Participant> {
        let id_tag = IdTag::decode(id).ok_or_else(|| io::Error::other("the id has no tag of Windlass"))?;
        let address = id_tag::address(id).ok_or_else(|| io::Error::other("the id holds no address"))?;
        let greeting = message::greeting(id_tag.token);
        self.bring(Host::Port(address), id_tag.token, &greeting, facts, WithoutHost::Fails)
    }

    /// A rank that cannot report to the session of an id says so there, and hears whether all go to NCCL or fail. It does not go to NCCL
    /// unheard: lacking descriptors it may fail there, and the others would wait for it here; or they fail here, as its
    /// host has none for NCCL's ranks, and it would wait for them there. Waits for the host's thread.
    pub fn decline_at_port(&self, id: &Id, reason: FallbackReason) -> Result<(), Failure> {
        let Some((id_tag, address)) = IdTag::decode(id).zip(id_tag::address(id)) else { return Ok(()) };
        // More than once: the bootstrap thread may be counting them just now, which takes them for microseconds.
        let are_free = (0..3).any(|tried| {
            std::thread::sleep(Duration::from_millis(tried));
            descriptor::are_free(limits::OF_A_RANK_OF_NCCL)
        });
        let outcome = match are_free {
            true => SessionOutcome::OnNccl(reason),
            false => SessionOutcome::Failed(Failure::Short),
        };
        let mut words = message::greeting(id_tag.token).to_vec();
        words.extend(FromRank::Decline(outcome).encode());
        let inquiry = Inquiry::new(self.shared.clone());
        self.shared.send(Command::Join(Host::Port(address), vec![inquiry.reporting(words)]));
        inquiry.wait_declined()
    }

    /// Brings ranks to the session with this token, at this host, where they say this first: their reports go out now.
    fn bring(
        &self,
        host: Host,
        token: Token,
        greeting: &[u8],
        facts: Vec<Facts>,
        without_host: WithoutHost,
    ) -> io::Result<Participant> {
        let participant = self.participant(token, facts, without_host)?;
        self.shared.send(Command::Join(host, participant.reports(greeting)));
        Ok(participant)
    }

    /// Before any report, so that whoever reads the negotiated config finds the socket open. Where descriptors are wanting they are waited for.
    fn participant(
        &self,
        token: Token,
        facts: Vec<Facts>,
        without_host: WithoutHost,
    ) -> io::Result<Participant> {
        let until = Instant::now() + WANTED_WITHIN;
        loop {
            let descriptor_socket = DescriptorSocket::open();
            let participant = descriptor_socket.and_then(|descriptor_socket| {
                Ok(Participant::new(
                    self.shared.clone(),
                    token,
                    descriptor_socket,
                    facts.clone(),
                    without_host,
                )?)
            });
            match participant {
                Err(error) if is_want(&error) && Instant::now() < until => std::thread::sleep(WANTED_EVERY),
                participant => return participant,
            }
        }
    }

    /// The secret of the process listener of this process; [`children::NOBODY`] if it has none.
    pub fn process_listener(&self) -> Token {
        self.process_listener
    }

    /// This process hosts the session or the round of this name, to which these ranks of the parent come (one bit each): those
    /// whose process, by its pidfd, ends before they have come, will not.
    pub fn await_ranks(&self, call: Token, ranks: u64, lives: Vec<(u32, Ours)>) {
        self.shared.send(Command::Expect(Expected { call, ranks, lives }));
    }

    /// Joins the session to which a rank is invited, as [`Bootstrap::join`] does. After an error the rank
    /// must [`Bootstrap::decline`]: it is waited for.
    pub fn join_invited(&self, invitation: &Invitation, facts: Facts) -> io::Result<Participant> {
        self.bring_invited(invitation, facts, WithoutHost::Fails)
    }

    /// The same for a rank of a host-local rendezvous, whose communicator NCCL has made. After an error it must [`LocalEntry::decline`].
    pub fn join_local(&self, invitation: &Invitation, facts: Facts) -> io::Result<Participant> {
        self.bring_invited(invitation, facts, WithoutHost::GoesToNccl)
    }

    fn bring_invited(
        &self,
        invitation: &Invitation,
        facts: Facts,
        without_host: WithoutHost,
    ) -> io::Result<Participant> {
        let host = Host::ProcessListener(invitation.process_listener);
        self.bring(host, invitation.child, &invitation.greeting(), vec![facts], without_host)
    }

    /// A rank that does not come to the session to which it is invited, which ends with this outcome: never a peer group.
    /// Never waits.
    pub fn decline(&self, invitation: &Invitation, outcome: SessionOutcome) {
        let mut words = invitation.greeting();
        words.extend(FromRank::Decline(outcome).encode());
        self.shared.send(Command::Tell(invitation.process_listener, words));
    }

    /// Begins a round before a split or shrink that so many ranks make, this one in this place among them: its message goes
    /// out now. Never waits.
    pub fn ask_round(
        &self,
        invitation: &Invitation,
        place: u32,
        ranks: u32,
        message: SplitMessage,
    ) -> Inquiry {
        let inquiry = Inquiry::new(self.shared.clone());
        let reports = vec![inquiry.reporting(message_in_round(invitation, place, ranks, message))];
        self.shared.send(Command::Join(Host::ProcessListener(invitation.process_listener), reports));
        inquiry
    }

    /// The same for a rank that goes to NCCL without waiting, and so all do.
    pub fn go_to_nccl(&self, invitation: &Invitation, place: u32, ranks: u32, parent: Parent) {
        let message = SplitMessage { color: None, key: 0, vote: LazyVote::InNccl, parent };
        self.shared.send(Command::Tell(
            invitation.process_listener,
            message_in_round(invitation, place, ranks, message),
        ));
    }

    /// Enters the [host-local rendezvous](local_rendezvous) of this name on this host, as this rank of the parent. Waits for the thread of whoever keeps it, until `is_over`;
    /// after an error nobody counts on this rank.
    pub fn enter_local(&self, name: Token, rank: u32, is_over: &dyn Fn() -> bool) -> io::Result<LocalEntry> {
        if self.process_listener == children::NOBODY {
            // It might keep the roster of ranks that are to meet here.
            return Err(io::Error::other("this process has no process listener"));
        }
        LocalEntry::enter(&self.shared, name, rank, is_over)
    }

    /// What has been counted.
    pub fn counts(&self) -> &Counts {
        &self.shared.counts
    }
}

fn is_want(error: &io::Error) -> bool {
    Errno::from_io_error(error).is_some_and(descriptor::is_want)
}

fn message_in_round(invitation: &Invitation, place: u32, ranks: u32, message: SplitMessage) -> Vec<u8> {
    let mut words = invitation.to_round().greeting();
    words.extend(FromRank::Split { place, ranks, message }.encode());
    words
}

impl Drop for Bootstrap {
    /// Ends the thread and with it all sessions; ranks that wait are told.
    fn drop(&mut self) {
        self.shared.send(Command::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
