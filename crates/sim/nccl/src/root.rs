//! The root of an id, and how ranks report to it. The root is a thread of the process that made the id. It listens on a socket and
//! speaks NCCL 2.28.9's protocol. Ranks exchange their data through shared memory (`rendezvous.rs`); the root only answers once all
//! ranks have reported.
//!
//! A connection begins with the id's magic and its type. The root drops one that closes before the magic or sends another magic, and
//! accepts the next; before 2.27.3 one that closes ends the root. A silent connection is waited for. Invalid data after the magic ends
//! the root, and its ranks wait for ever. Once all ranks have reported the root ends, and later connections are refused.

use crate::dump;
use crate::refusal::{Outcome, refuse};
use crate::segment::Segment;
use crate::settings::settings;
use nccl_sys::*;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

/// `ncclSocketTypeBootstrap`.
const BOOTSTRAP: i32 = 1;
/// The first release whose root outlives a connection that closes before its magic.
const ROBUST_SINCE: i32 = 22_703;
/// `extInfo`: four numbers, the address where the rank waits for the root, and that for its neighbour (unused here).
const REPORT_BYTES: usize = 4 * 4 + ADDRESS_BYTES + CONNECTION_BYTES;
const ADDRESS_BYTES: usize = 28;
const CONNECTION_BYTES: usize = 128;

type Magic = [u8; 8];

fn magic(id: &ncclUniqueId) -> Magic {
    std::array::from_fn(|index| id.internal[index] as u8)
}

/// The address of an id's root.
fn address(id: &ncclUniqueId) -> SocketAddrV4 {
    read_address(&std::array::from_fn(|index| id.internal[8 + index] as u8))
}

/// The address as the bytes of a `sockaddr_in`.
pub fn write_address(place: SocketAddrV4) -> [u8; ADDRESS_BYTES] {
    let mut bytes = [0; ADDRESS_BYTES];
    bytes[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
    bytes[2..4].copy_from_slice(&place.port().to_be_bytes());
    bytes[4..8].copy_from_slice(&place.ip().octets());
    bytes
}

fn read_address(bytes: &[u8; ADDRESS_BYTES]) -> SocketAddrV4 {
    let ip = Ipv4Addr::new(bytes[4], bytes[5], bytes[6], bytes[7]);
    SocketAddrV4::new(ip, u16::from_be_bytes([bytes[2], bytes[3]]))
}

/// Listens at a free port of the first address of `WINDLASS_SIM_ADDRESSES` that is this host's.
fn listen() -> Outcome<(TcpListener, SocketAddrV4)> {
    let listener = settings().addresses.iter().find_map(|address| TcpListener::bind((*address, 0)).ok());
    let place = listener.as_ref().and_then(|listener| listener.local_addr().ok());
    match (listener, place) {
        (Some(listener), Some(SocketAddr::V4(place))) => Ok((listener, place)),
        _ => refuse(ncclSystemError, "no port of this host's can be listened at"),
    }
}

/// Starts the thread of a new id's root, and gives its address.
pub fn start(magic: Magic) -> Outcome<SocketAddrV4> {
    let (listener, place) = listen()?;
    let thread = std::thread::Builder::new().name("sim-nccl root".into()).stack_size(128 << 10);
    let serve = move || {
        raise_limit_of_files();
        let _ = collect(&listener, magic).and_then(|reports| answer_all(&reports, magic));
        close(&listener);
    };
    match thread.spawn(serve) {
        Ok(_) => Ok(place),
        Err(error) => refuse(ncclSystemError, format!("no thread for the root of an id: {error}")),
    }
}

/// Raises the process's limit of descriptors to its hard limit, as the thread of NCCL's root does (`setFilesLimit`).
fn raise_limit_of_files() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit is a local.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
    }
}

/// Shuts the socket down, as NCCL does: a forked child may still have the descriptor.
fn close(listener: &TcpListener) {
    // SAFETY: no pointers.
    unsafe { libc::shutdown(listener.as_raw_fd(), libc::SHUT_RDWR) };
}

/// A rank's message to the root.
#[derive(Clone, Copy)]
struct Report {
    rank: i32,
    ranks: i32,
    root: i32,
    roots: i32,
    answer_at: SocketAddrV4,
}

impl Report {
    fn write(&self) -> [u8; REPORT_BYTES] {
        let mut bytes = [0; REPORT_BYTES];
        for (index, number) in [self.rank, self.ranks, self.root, self.roots].into_iter().enumerate() {
            bytes[4 * index..4 * index + 4].copy_from_slice(&number.to_ne_bytes());
        }
        bytes[16..16 + ADDRESS_BYTES].copy_from_slice(&write_address(self.answer_at));
        bytes
    }

    fn read(bytes: &[u8; REPORT_BYTES]) -> Report {
        let number = |index: usize| i32::from_ne_bytes(std::array::from_fn(|byte| bytes[4 * index + byte]));
        let answer_at = read_address(&std::array::from_fn(|byte| bytes[16 + byte]));
        Report { rank: number(0), ranks: number(1), root: number(2), roots: number(3), answer_at }
    }

    /// The first rank of this root and its number of ranks; `None` if the numbers are invalid.
    fn share(&self) -> Option<(i32, i32)> {
        if self.ranks < 1 || self.roots < 1 || self.root < 0 || self.root >= self.roots {
            return None;
        }
        let (each, more) = (self.ranks / self.roots, self.ranks % self.roots);
        Some((self.root * each + self.root.min(more), each + i32::from(self.root < more)))
    }
}

/// Waits for the reports of all ranks of this root; with several roots also for that of the next root's first rank.
fn collect(listener: &TcpListener, magic: Magic) -> io::Result<Vec<Report>> {
    let wrong = || io::Error::from(ErrorKind::InvalidData);
    let mut reports: Vec<Report> = Vec::new();
    loop {
        let mut connection = accept(listener, magic)?;
        let report = Report::read(&receive(&mut connection)?);
        let first = *reports.first().unwrap_or(&report);
        let alike = |report: &Report| (report.ranks, report.root, report.roots);
        let (begin, own) = report.share().ok_or_else(wrong)?;
        let local = report.rank - begin;
        let expected = own + i32::from(report.roots > 1);
        let again = reports.iter().any(|other| other.rank == report.rank);
        if alike(&report) != alike(&first) || !(0..expected).contains(&local) || again {
            return Err(wrong());
        }
        reports.push(report);
        if reports.len() == expected as usize {
            reports.retain(|report| report.rank - begin < own);
            return Ok(reports);
        }
    }
}

fn answer_all(reports: &[Report], magic: Magic) -> io::Result<()> {
    reports.iter().try_for_each(|report| {
        let mut connection = TcpStream::connect(report.answer_at)?;
        send(&mut connection, magic, &[0; CONNECTION_BYTES])
    })
}

/// Accepts the next connection that sends the magic and the right type.
fn accept(listener: &TcpListener, magic: Magic) -> io::Result<TcpStream> {
    loop {
        let mut connection = match listener.accept() {
            Ok((connection, _)) => connection,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        connection.set_nonblocking(false)?;
        let mut said = Magic::default();
        match connection.read_exact(&mut said) {
            Ok(()) if said == magic => {}
            Ok(()) => continue,
            Err(error) if settings().version < ROBUST_SINCE => return Err(error),
            Err(_) => continue,
        }
        let mut kind = [0; 4];
        connection.read_exact(&mut kind)?;
        match i32::from_ne_bytes(kind) {
            BOOTSTRAP => return Ok(connection),
            _ => return Err(ErrorKind::InvalidData.into()),
        }
    }
}

/// Receives a message of exactly `BYTES` bytes after its length.
fn receive<const BYTES: usize>(connection: &mut TcpStream) -> io::Result<[u8; BYTES]> {
    let (mut length, mut bytes) = ([0; 4], [0; BYTES]);
    connection.read_exact(&mut length)?;
    if i32::from_ne_bytes(length) != BYTES as i32 {
        return Err(ErrorKind::InvalidData.into());
    }
    connection.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn send(connection: &mut TcpStream, magic: Magic, message: &[u8]) -> io::Result<()> {
    connection.set_nodelay(true)?;
    connection.write_all(&magic)?;
    connection.write_all(&BOOTSTRAP.to_ne_bytes())?;
    connection.write_all(&(message.len() as i32).to_ne_bytes())?;
    connection.write_all(message)
}

/// A rank that has reported to its root.
pub struct Reported {
    listener: TcpListener,
    magic: Magic,
}

/// Reports this rank to the root of its id; of several, to the one that this rank belongs to. The first rank of a root also reports to
/// the root before. Gives `None` without ids.
pub fn report(ids: &[ncclUniqueId], rank: usize, ranks: usize) -> Outcome<Option<Reported>> {
    if ids.is_empty() {
        return Ok(None);
    }
    let (listener, answer_at) = listen()?;
    let (rank, ranks, roots) = (rank as i32, ranks as i32, ids.len() as i32);
    let of = |root: i32| Report { rank, ranks, root, roots, answer_at };
    let is_of =
        |root: &i32| of(*root).share().is_some_and(|(begin, own)| (begin..begin + own).contains(&rank));
    let Some(root) = (0..roots).find(is_of) else {
        return refuse(ncclInvalidArgument, format!("{roots} ids are too many for {ranks} ranks"));
    };
    tell(&ids[root as usize], &of(root))?;
    if roots > 1 && of(root).share().is_some_and(|(begin, _)| begin == rank) {
        let before = (root + roots - 1) % roots;
        // The root before expects the rank after its last one.
        let rank = if rank == 0 { ranks } else { rank };
        tell(&ids[before as usize], &Report { rank, ..of(before) })?;
    }
    Ok(Some(Reported { listener, magic: magic(&ids[root as usize]) }))
}

/// Sends a report to the root of an id. If nothing listens there it fails at once; NCCL tries for a minute.
fn tell(id: &ncclUniqueId, report: &Report) -> Outcome {
    let root = address(id);
    let told =
        TcpStream::connect(root).and_then(|mut connection| send(&mut connection, magic(id), &report.write()));
    told.or_else(|error| refuse(ncclRemoteError, format!("the root of the id at {root}: {error}")))
}

impl Reported {
    /// Waits for the root's answer, which it gives once all ranks have reported.
    pub fn wait(self, segment: &Segment, rank: usize, leave: &AtomicBool) -> Outcome {
        let began = Instant::now();
        let mut poll = libc::pollfd { fd: self.listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one descriptor, which is open.
        while unsafe { libc::poll(&raw mut poll, 1, 100) } <= 0 {
            if leave.load(SeqCst) {
                return refuse(ncclInternalError, "aborted while joining");
            }
            if began.elapsed() > settings().timeout {
                segment.rank(rank).waits_for.set("the answer of the id's root");
                dump::stuck(segment, rank);
            }
        }
        let answer = accept(&self.listener, self.magic)
            .and_then(|mut connection| receive::<CONNECTION_BYTES>(&mut connection));
        match answer {
            Ok(_) => Ok(()),
            Err(error) => refuse(ncclRemoteError, format!("the answer of the id's root: {error}")),
        }
    }
}
