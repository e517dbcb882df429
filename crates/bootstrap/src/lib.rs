//! Bootstrap: how the ranks of a new communicator meet, agree and confirm.
//!
//! The process that makes an `ncclUniqueId` hosts a session for it: this process is the **host** below. It writes [its
//! own port and an id tag](id_tag) into the id. Each rank with Windlass connects to the port and
//! [reports](facts::Facts). The host [decides](decision) whether there can be a peer group. Then every rank prepares
//! (maps, tests and loads what it needs) and confirms, and the host decides one outcome: peer group, on NCCL, or
//! failed.
//!
//! NCCL's own connections come to the same port. They begin with the id's magic and go byte for byte to NCCL's root
//! (`relay`). Such a connection before the outcome proves that a rank has no Windlass or went to NCCL, so all ranks go
//! there. Any other connection proves nothing and is dropped: port scanners and health checks come to every port.
//! NCCL's root drops it, too, or is ended by it (before 2.27.3), or waits for its first bytes for ever. Only with an
//! NCCL newer than the releases whose bootstrap was read is it relayed.
//!
//! **One port per id.** NCCL's protocol names the id in its first eight bytes, so one port could serve all ids. But a
//! port per id needs no table of ids, and closes with NCCL's root: a rank that comes too late is refused, as by NCCL. A
//! port costs one descriptor, where NCCL spends a descriptor and a thread. `Limits::sessions_max` bounds the number of
//! ports. If all ranks of a peer group go to NCCL only later
//! ([`capability::LAZY`](crate::negotiated::capability::LAZY)), the port closes once the outcome is known. NCCL's id,
//! which no rank will use, [is spare](Bootstrap::spare_id) then.
//!
//! # How it is used
//!
//! - `ncclGetUniqueId`: [`Bootstrap::host`] with a [spare id](Bootstrap::spare_id) or a new id of NCCL's. An id of
//!   NCCL_COMM_ID, or of `ncclCommGetUniqueId` (which grows a communicator), stays as it is.
//! - `ncclCommInitRank`: [`facts::fallback_reason`], then for each rank [`Bootstrap::join`] or
//!   [`Bootstrap::decline_at_port`]. [`Participant::canceller`] comes next, for `ncclCommAbort`. [`complete_all`] then
//!   brings all ranks of the group to their sessions' ends, each with a function that prepares. With the outcome *on
//!   NCCL* the caller runs the real init with the same id. The relay serves that init, as it does beside a peer group.
//! - `ncclCommInitAll`: [`decision::decide`], without a session.
//! - After a fork: [`mod@process`], which starts a new bootstrap.
//! - `ncclCommSplit` and `ncclCommShrink` to lazy communicators: [`Bootstrap::await_ranks`] by the rank whose process
//!   hosts, and [`Bootstrap::join_invited`] or [`Bootstrap::decline`] by each rank; see [`children`].
//! - The same, where NCCL makes the communicators: [`Bootstrap::enter_local`] before NCCL's call, then
//!   [`Bootstrap::join_local`]; see [`children::local_rendezvous`].
//! - Before a call whose communicators may be lazy, a round: [`Bootstrap::ask_round`] by each rank, or
//!   [`Bootstrap::say_in_round`] by one that does not wait. [`children::plan`] says what each rank does.
//!
//! # Why ranks never act on different outcomes
//!
//! Two processes cannot both be sure of each other: the sender of the last message does not know whether it arrived. So
//! no rank must be sure of another. One process decides, and a rank that does not hear the decision has no
//! communicator.
//!
//! 1. The outcome is a step of one [machine](agreement::Agreement) in one process. Ranks hear only copies of it. So two
//!    ranks that hear an outcome hear the same one.
//! 2. The outcome is *peer group* only if every rank has confirmed, that is, has mapped, tested and loaded all it
//!    needs. So a rank that hears it needs nothing more from another rank, not even that the other hears it, too.
//! 3. A rank that has reported takes no step on its own: neither to NCCL nor to a peer group. If it loses the host
//!    before it hears the outcome, its init **fails** (but see [`participation::WithoutHost`]). Other ranks may have
//!    heard *peer group*. They miss a peer then, as if it had died just after its init, and wait for it as NCCL does,
//!    until the time of the hang detector or an abort. NCCL, too, gives an error on one rank and a missing peer on
//!    another. Ranks on different paths would hang silently.
//! 4. A rank that could not connect, and so was never heard of, may go to NCCL by itself. The others cannot have agreed
//!    without it, and its NCCL connects to the same port, which makes the session end on NCCL.
//! 5. A rank that cannot prepare refuses, and the session will end on NCCL. But the outcome waits until every rank has
//!    confirmed or refused, since a rank may refuse because a peer is dying. A dead rank never speaks.
//! 6. A rank that leaves after its report and before the outcome makes the session fail, whether it had confirmed or
//!    not: nothing has been built on its message yet. After the outcome the host has no more to say, and all
//!    connections close: a communicator never needs the process that hosted its init.
//! 7. No wait for a rank is timed. A rank that is minutes late is waited for, as NCCL waits. A rank that never comes
//!    and never goes to NCCL is waited for until its peers are aborted, as with NCCL.
//!
//! One freedom remains: when a session ends on NCCL. A rank with a [reason of its own](facts::fallback_reason) goes to
//! NCCL at once, and a conflict ends the session at the first report that shows it.

#![deny(unsafe_code)]
#![deny(unreachable_pub)]

pub mod agreement;
mod approach;
pub mod awaited;
pub mod children;
mod commands;
mod connection;
pub mod counts;
pub mod decision;
pub mod descriptors;

pub mod facts;
pub mod id_tag;
pub mod inquiry;
mod limits;
pub mod message;
pub mod negotiated;
pub mod outcome;
mod packet_socket;
pub mod participant;
pub mod participation;
pub mod place;
pub mod poll;
mod process_listener;
mod reactor;
mod relay;
pub mod request_socket;
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
use children::plan::SplitMessage;
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
use windlass_base::descriptor::{self, Ours};
use windlass_base::process::{self, fork_local::ForkLocal};
use windlass_base::thread;

pub use children::local_entry::LocalEntry;
pub use commands::Canceller;
pub use inquiry::Inquiry;
pub use limits::Limits;
pub use participant::{Outcome, Participant, Preparation, complete_all};

/// How long a rank that is about to report waits for free descriptors, and how often it tries.
const WANTED_WITHIN: Duration = Duration::from_secs(2);
const WANTED_EVERY: Duration = Duration::from_millis(10);
/// How long an init that NCCL runs waits for room. Not longer: a process may lack descriptors for good, and NCCL get on with fewer.
const ROOM_WITHIN: Duration = Duration::from_millis(500);

/// The bootstrap of a process: its background thread and all sessions in which the process takes part.
#[derive(Debug)]
pub struct Bootstrap {
    shared: Arc<Shared>,
    limits: Limits,
    /// The secret of this process's process listener; [`children::NOBODY`] if there is none.
    pub process_listener: Token,
    thread: Option<JoinHandle<()>>,
}

static PROCESS: ForkLocal<Bootstrap> = ForkLocal::new();

/// The bootstrap of this process, started at the first call. Fails if it cannot start, and in the forked child of a
/// process with communicators. Any other forked child starts a new one: sessions that the parent hosts are the
/// parent's.
pub fn process() -> io::Result<&'static Bootstrap> {
    if process::is_forked() {
        return Err(io::Error::other("the process was forked from one with communicators"));
    }
    process::let_forked_children_restart();
    let limits = Limits::default();
    PROCESS.get_or_try_init(|| Bootstrap::start(limits))
}

/// Before NCCL makes communicators, and never inside a call that an abort waits for: waits up to [`ROOM_WITHIN`] until its rank finds the descriptors that it opens first. The bootstrap thread may
/// not yet have closed connections that have ended, and a rank that fails for want of descriptors lets the others hang in NCCL.
pub fn leave_room_for_nccl() {
    if started().is_some() {
        let lacks = || !descriptor::are_free(limits::OF_A_RANK_OF_NCCL);
        thread::wait_while(ROOM_WITHIN, WANTED_EVERY, lacks);
    }
}

/// The bootstrap of this process, if it has been started.
pub fn started() -> Option<&'static Bootstrap> {
    PROCESS.get().filter(|_| !process::is_forked())
}

impl Bootstrap {
    /// Starts the background thread.
    pub fn start(limits: Limits) -> io::Result<Bootstrap> {
        let shared = Arc::new(Shared::new(&limits)?);
        let for_thread = shared.clone();
        // Without a process listener, child communicators have no peer group. All else works.
        let process_listener = ProcessListener::open()
            .inspect_err(|error| log::info!("bootstrap has no process listener: {error}"))
            .ok();
        let secret =
            process_listener.as_ref().map_or(children::NOBODY, |process_listener| process_listener.secret);
        let (tell, told) = std::sync::mpsc::sync_channel(1);
        // The reactor is made in its thread, since its parts cannot be sent to another.
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

    /// Hosts the session of an id that NCCL has just made, and returns the id that ranks must get instead. After an
    /// error NCCL's own id can be used as it is, without an id tag.
    pub fn host(&self, id: &Id) -> io::Result<Id> {
        let root = id_tag::address(id).ok_or_else(|| io::Error::other("the id holds no address"))?;
        let open = self.shared.counts.sessions_open.fetch_add(1, Ordering::Relaxed);
        let hosted = if open as usize >= self.limits.sessions_max {
            Counts::up(&self.shared.counts.sessions_refused);
            self.shared.send(Command::Sweep);
            Err(io::Error::other(format!("{open} sessions are open, as many as a process may have")))
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

    /// Takes an id that NCCL made in this process and that no rank has used or will use. It is as NCCL made it: the
    /// caller may host a session for it or use it as it is.
    pub fn spare_id(&self) -> Option<Id> {
        let id = self.shared.spares.take()?;
        Counts::up(&self.shared.counts.ids_recycled);
        Some(id)
    }

    /// Closes the session of an id that no rank will use any more: its port, and the connections of ranks that wait
    /// there without an outcome.
    pub fn retire(&self, id: &Id) {
        if let Some(id_tag) = IdTag::decode(id) {
            self.shared.send(Command::Retire(id_tag.token));
        }
    }

    /// Joins the session of an id: the rank's report goes out now. Waits only for free descriptors, up to 2 seconds.
    /// After an error no report has gone out, and the caller [declines](Bootstrap::decline_at_port).
    pub fn join(&self, id: &Id, facts: Facts) -> io::Result<Participant> {
        let id_tag = IdTag::decode(id).ok_or_else(|| io::Error::other("the id has no tag of Windlass"))?;
        let address = id_tag::address(id).ok_or_else(|| io::Error::other("the id holds no address"))?;
        let greeting = message::greeting(id_tag.token);
        self.bring(Host::Port(address), id_tag.token, &greeting, &facts, WithoutHost::Fails)
    }

    /// Says at the session of an id that a rank cannot report, and waits for the host to answer whether all ranks go to
    /// NCCL (`Ok`) or fail. A rank that went to NCCL unheard could hang: if it failed there for want of descriptors,
    /// the others would wait for it here. If the host had no descriptors for NCCL's ranks, the others would fail here,
    /// and the rank would wait for them in NCCL.
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
        let mut words = message::greeting(id_tag.token);
        words.extend(FromRank::Decline(outcome).encode());
        let inquiry = Inquiry::new(self.shared.clone());
        self.shared.send(Command::Join(Host::Port(address), inquiry.reporting(words)));
        inquiry.wait_declined()
    }

    /// Sends a rank's report to the session with this token at this host, behind `greeting`. The descriptor socket is
    /// opened before that, so that it is open for every reader of the negotiated config. Waits up to 2 seconds for free
    /// descriptors.
    fn bring(
        &self,
        host: Host,
        token: Token,
        greeting: &[u8],
        facts: &Facts,
        without_host: WithoutHost,
    ) -> io::Result<Participant> {
        let until = Instant::now() + WANTED_WITHIN;
        loop {
            let participant = DescriptorSocket::open().and_then(|socket| {
                Ok(Participant::new(self.shared.clone(), token, socket, facts.clone(), without_host)?)
            });
            match participant {
                Err(error) if is_want(&error) && Instant::now() < until => std::thread::sleep(WANTED_EVERY),
                participant => {
                    return participant.inspect(|participant| {
                        self.shared.send(Command::Join(host, participant.report(greeting)));
                    });
                }
            }
        }
    }

    /// Says that this process hosts the session or round of this name. `ranks`: the ranks of the parent that come to
    /// it, one bit each. `lives`: descriptors that become readable when their processes end. A rank whose process ends
    /// before the rank has come will not come.
    pub fn await_ranks(&self, call: Token, ranks: u64, lives: Vec<(u32, Ours)>) {
        self.shared.send(Command::Expect(Expected { call, ranks, lives }));
    }

    /// Joins the session to which a rank is invited, as [`Bootstrap::join`] does. After an error the caller must
    /// [`Bootstrap::decline`], because the host waits for the rank.
    pub fn join_invited(&self, invitation: &Invitation, facts: Facts) -> io::Result<Participant> {
        self.bring_invited(invitation, facts, WithoutHost::Fails)
    }

    /// As [`Bootstrap::join_invited`], for a rank of a host-local rendezvous, whose communicator NCCL has made. After
    /// an error the caller must [`LocalEntry::decline`].
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
        self.bring(host, invitation.child, &invitation.greeting(), &facts, without_host)
    }

    /// Says that a rank does not come to the session to which it is invited, so that the session ends with this
    /// outcome, which is never a peer group. Never waits.
    pub fn decline(&self, invitation: &Invitation, outcome: SessionOutcome) {
        let mut words = invitation.greeting();
        words.extend(FromRank::Decline(outcome).encode());
        self.shared.send(Command::Tell(invitation.process_listener, words));
    }

    /// Begins a round before a split or shrink that `ranks` ranks make. This rank has the place `place` among them. Its
    /// message goes out now. Never waits.
    pub fn ask_round(
        &self,
        invitation: &Invitation,
        place: u32,
        ranks: u32,
        message: SplitMessage,
    ) -> Inquiry {
        let inquiry = Inquiry::new(self.shared.clone());
        let report = inquiry.reporting(message_in_round(invitation, place, ranks, message));
        self.shared.send(Command::Join(Host::ProcessListener(invitation.process_listener), report));
        inquiry
    }

    /// Says this in the round without waiting for the others. Never waits.
    pub fn say_in_round(&self, invitation: &Invitation, place: u32, ranks: u32, message: SplitMessage) {
        self.shared.send(Command::Tell(
            invitation.process_listener,
            message_in_round(invitation, place, ranks, message),
        ));
    }

    /// Enters the [host-local rendezvous](children::local_rendezvous) of this name on this host, as this rank of the parent.
    /// Waits for the bootstrap thread of the process that keeps the roster, until `is_over` or for 3 seconds. After an
    /// error no other rank counts on this one.
    pub fn enter_local(&self, name: Token, rank: u32, is_over: &dyn Fn() -> bool) -> io::Result<LocalEntry> {
        if self.process_listener == children::NOBODY {
            // This process might become the keeper of the roster, and the ranks then meet at its process listener.
            return Err(io::Error::other("this process has no process listener"));
        }
        LocalEntry::enter(&self.shared, name, rank, is_over)
    }

    /// The counters of this process.
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
    /// Ends the thread and with it all sessions. Ranks that wait hear that they have lost their host.
    fn drop(&mut self) {
        self.shared.send(Command::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
