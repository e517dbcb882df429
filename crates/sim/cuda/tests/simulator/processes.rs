//! Tests over several processes. Tests named `child_…` are ignored; other tests run them in a process of their own.

use crate::driver::*;
use crate::memory::{alias, free_bytes, map, physical, reserve, unmap};
use std::io::{BufRead, BufReader, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

const CHUNK: usize = 2 << 20;

fn child(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("tests have a path"));
    command.args(["--exact", &format!("processes::{name}"), "--ignored", "--nocapture"]);
    command
}

fn finish(mut child: Child) {
    assert!(child.wait().expect("it was started").success());
}

/// Sends a descriptor with one byte.
fn send_descriptor(socket: &UnixStream, descriptor: RawFd) {
    transfer(socket, Some(descriptor));
}

fn receive_descriptor(socket: &UnixStream) -> RawFd {
    transfer(socket, None)
}

fn transfer(socket: &UnixStream, descriptor: Option<RawFd>) -> RawFd {
    let mut byte = [0_u8; 1];
    let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let mut control = [0_u64; 4];
    // SAFETY: all zero is an empty message.
    let mut message = unsafe { MaybeUninit::<libc::msghdr>::zeroed().assume_init() };
    message.msg_iov = &mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    // SAFETY: a computation only.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(4) } as usize;
    // SAFETY: the control buffer is aligned and larger than one header with one descriptor; the message outlives the calls.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&message);
        if let Some(descriptor) = descriptor {
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(4) as usize;
            libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(descriptor);
            assert_eq!(libc::sendmsg(socket.as_raw_fd(), &message, 0), 1);
            return descriptor;
        }
        assert_eq!(libc::recvmsg(socket.as_raw_fd(), &mut message, 0), 1);
        libc::CMSG_DATA(libc::CMSG_FIRSTHDR(&message)).cast::<RawFd>().read_unaligned()
    }
}

fn read_words<const N: usize>(at: usize) -> [u32; N] {
    let mut words = [0; N];
    ok(cuMemcpyDtoH_v2(words.as_mut_ptr().cast(), at, 4 * N));
    words
}

fn write_words(at: usize, words: &[u32]) {
    ok(cuMemcpyHtoD_v2(at, words.as_ptr().cast(), 4 * words.len()));
}

#[test]
fn physical_memory_is_shared_by_descriptor() {
    start();
    let (here, there) = UnixStream::pair().unwrap();
    // SAFETY: clears close-on-exec of a descriptor of ours, so that the child inherits it.
    unsafe { libc::fcntl(there.as_raw_fd(), libc::F_SETFD, 0) };
    let process =
        child("child_maps_a_descriptor").env("SIM_TEST_SOCKET", there.as_raw_fd().to_string()).spawn();
    drop(there);
    let base = reserve(CHUNK);
    let handle = physical(CHUNK);
    map(base, CHUNK, handle);
    write_words(base, &[1, 2, 3]);
    let mut descriptor = -1;
    ok(cuMemExportToShareableHandle(&mut descriptor, handle, 1, 0));
    send_descriptor(&here, descriptor);
    finish(process.unwrap());
    assert_eq!(read_words(base), [1, 2, 3, 4]);
    assert_eq!(cuMemExportToShareableHandle(&mut descriptor, handle, 8, 0), 801);
}

#[test]
#[ignore = "a child process of the test above"]
fn child_maps_a_descriptor() {
    start();
    let number = std::env::var("SIM_TEST_SOCKET").unwrap().parse().unwrap();
    // SAFETY: inherited for this purpose; nobody else in this process knows it.
    let socket = unsafe { UnixStream::from_raw_fd(number) };
    let descriptor = receive_descriptor(&socket);
    let mut handle = 0;
    ok(cuMemImportFromShareableHandle(&mut handle, descriptor as usize, 1));
    let base = reserve(CHUNK);
    map(base, CHUNK, handle);
    assert_eq!(read_words(base), [1, 2, 3]);
    write_words(base + 12, &[4]);
    assert_eq!(cuMemImportFromShareableHandle(&mut handle, number as usize, 1), 1);
}

/// Memory that another process maps counts as used until that process unmaps it or dies.
#[test]
fn imported_memory_is_used_until_the_importer_lets_go() {
    start();
    let whole = free_bytes();
    for how in ["unmaps", "dies"] {
        let (here, there) = UnixStream::pair().unwrap();
        // SAFETY: clears close-on-exec of a descriptor of ours, so that the child inherits it.
        unsafe { libc::fcntl(there.as_raw_fd(), libc::F_SETFD, 0) };
        let process = child("child_holds_a_descriptor")
            .env("SIM_TEST_SOCKET", there.as_raw_fd().to_string())
            .env("SIM_TEST_HOW", how)
            .spawn()
            .unwrap();
        drop(there);
        let base = reserve(CHUNK);
        let handle = physical(CHUNK);
        map(base, CHUNK, handle);
        let second = alias(base, CHUNK);
        let mut descriptor = -1;
        ok(cuMemExportToShareableHandle(&mut descriptor, handle, 1, 0));
        ok(cuMemRelease(handle));
        send_descriptor(&here, descriptor);
        // SAFETY: exported for this test; the message holds it now.
        unsafe { libc::close(descriptor) };
        let told = |here: &UnixStream| (&mut &*here).read_exact(&mut [0]).unwrap();
        told(&here);
        unmap(base, CHUNK);
        assert_eq!(free_bytes(), whole - CHUNK);
        unmap(second, CHUNK);
        assert_eq!(free_bytes(), whole - CHUNK, "the other process maps it");
        (&mut &here).write_all(&[1]).unwrap();
        if how == "unmaps" {
            told(&here);
            assert_eq!(free_bytes(), whole);
            (&mut &here).write_all(&[1]).unwrap();
        }
        finish(process);
        assert_eq!(free_bytes(), whole);
    }
}

#[test]
#[ignore = "a child process of the test above"]
fn child_holds_a_descriptor() {
    start();
    let number = std::env::var("SIM_TEST_SOCKET").unwrap().parse().unwrap();
    // SAFETY: inherited for this purpose; nobody else in this process knows it.
    let mut socket = unsafe { UnixStream::from_raw_fd(number) };
    let descriptor = receive_descriptor(&socket);
    let mut handle = 0;
    ok(cuMemImportFromShareableHandle(&mut handle, descriptor as usize, 1));
    // SAFETY: received just now.
    unsafe { libc::close(descriptor) };
    let base = reserve(CHUNK);
    map(base, CHUNK, handle);
    ok(cuMemRelease(handle));
    let mut word = [0];
    socket.write_all(&[1]).unwrap();
    socket.read_exact(&mut word).unwrap();
    if std::env::var("SIM_TEST_HOW").unwrap() == "dies" {
        return;
    }
    unmap(base, CHUNK);
    socket.write_all(&[1]).unwrap();
    socket.read_exact(&mut word).unwrap();
}

/// A forked child that lives on keeps no memory that its parent had imported and mapped.
#[test]
fn a_forked_child_holds_no_memory() {
    start();
    let whole = free_bytes();
    let (base, memory) = (reserve(CHUNK), physical(CHUNK));
    let (mut descriptor, mut imported) = (-1, 0);
    ok(cuMemExportToShareableHandle(&mut descriptor, memory, 1, 0));
    ok(cuMemImportFromShareableHandle(&mut imported, descriptor as usize, 1));
    // SAFETY: exported for this test.
    unsafe { libc::close(descriptor) };
    map(base, CHUNK, imported);
    // SAFETY: the child only waits.
    let process = unsafe { libc::fork() };
    if process == 0 {
        // SAFETY: waits for a signal.
        unsafe { libc::pause() };
    }
    ok(cuMemRelease(memory));
    assert_eq!(free_bytes(), whole - CHUNK, "it is mapped here");
    unmap(base, CHUNK);
    ok(cuMemRelease(imported));
    let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while free_bytes() != whole && std::time::Instant::now() < until {
        std::thread::yield_now();
    }
    let is_back = free_bytes() == whole;
    // SAFETY: a child of ours, which ends now.
    unsafe { (libc::kill(process, libc::SIGKILL), libc::waitpid(process, std::ptr::null_mut(), 0)) };
    assert!(is_back);
}

fn hexadecimal(words: [u64; 8]) -> String {
    words.map(|word| format!("{word:x}")).join(" ")
}

fn words(line: &str) -> IpcHandle {
    let words: Vec<u64> = line.split(' ').map(|word| u64::from_str_radix(word, 16).unwrap()).collect();
    IpcHandle(words.try_into().unwrap())
}

#[test]
fn ipc_handles_open_memory_and_events_of_another_process() {
    start();
    let stream = stream();
    let block = buffer(4096);
    let event = made(|out| cuEventCreate(out, 2 | 4));
    let (mut memory_handle, mut event_handle) = ([0; 8], [0; 8]);
    ok(cuIpcGetMemHandle(&mut memory_handle, block));
    ok(cuIpcGetEventHandle(&mut event_handle, event));
    let mut address = 0;
    assert_eq!(cuIpcOpenMemHandle_v2(&mut address, IpcHandle(memory_handle), 1), 201);
    write_words(block, &[5, 6]);
    let gate = Gate::in_stream(stream);
    ok(cuEventRecord(event, stream));
    let mut process = child("child_opens_ipc_handles")
        .env("SIM_TEST_MEMORY", hexadecimal(memory_handle))
        .env("SIM_TEST_EVENT", hexadecimal(event_handle))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The child has seen the event pending before the gate opens.
    let mut line = String::new();
    BufReader::new(process.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "pending\n");
    gate.open();
    finish(process);
    assert_eq!(read_words(block), [5, 6, 7]);
    ok(cuMemFree_v2(block));
    ok(cuEventDestroy_v2(event));
    ok(cuStreamDestroy_v2(stream));
}

#[test]
#[ignore = "a child process of the test above"]
fn child_opens_ipc_handles() {
    start();
    let memory_handle = words(&std::env::var("SIM_TEST_MEMORY").unwrap());
    let event_handle = words(&std::env::var("SIM_TEST_EVENT").unwrap());
    let event = made(|out| cuIpcOpenEventHandle(out, event_handle));
    assert_eq!(cuEventQuery(event), NOT_READY);
    std::io::stderr().write_all(b"pending\n").unwrap();
    ok(cuEventSynchronize(event));
    let block = made(|out| cuIpcOpenMemHandle_v2(out, memory_handle, 1));
    assert_eq!(read_words(block), [5, 6]);
    write_words(block + 8, &[7]);
    assert_eq!(cuMemFree_v2(block), 1);
    ok(cuIpcCloseMemHandle(block));
    ok(cuEventDestroy_v2(event));
}

#[test]
fn a_forked_child_is_refused() {
    start();
    let address = buffer(64);
    // SAFETY: the child calls the driver's guard and leaves at once.
    let process = unsafe { libc::fork() };
    if process == 0 {
        let codes = [cuInit(0), cuMemFree_v2(address), cuCtxSynchronize()];
        // SAFETY: leaves without running handlers of the parent.
        unsafe { libc::_exit(i32::from(codes != [3, 3, 3])) };
    }
    let mut status = -1;
    // SAFETY: room for the status of a child of ours.
    assert_eq!(unsafe { libc::waitpid(process, &mut status, 0) }, process);
    assert_eq!(status, 0);
    ok(cuMemFree_v2(address));
}

#[test]
fn a_strict_process_that_leaks_says_so_and_fails() {
    let strict = |name: &str| child(name).env("WINDLASS_SIM_STRICT", "1").output().unwrap();
    let leaky = strict("child_leaks");
    assert_eq!(leaky.status.code(), Some(86));
    let report = String::from_utf8(leaky.stderr).unwrap();
    for line in ["1 device allocations", "2 streams", "1 events", "1 virtual memory handles", "1 graphs"] {
        assert!(report.contains(&format!("sim-cuda: leak: {line}\n")), "{report}");
    }
    let clean = strict("child_does_not_leak");
    assert_eq!((clean.status.code(), clean.stderr.as_slice()), (Some(0), &[][..]));
}

#[test]
fn a_closed_stderr_loses_the_report_and_not_the_status() {
    let mut command = child("child_closes_stderr_and_leaks");
    assert_eq!(command.env("WINDLASS_SIM_STRICT", "1").output().unwrap().status.code(), Some(86));
}

#[test]
#[ignore = "a child process of the test above"]
fn child_closes_stderr_and_leaks() {
    start();
    buffer(64);
    // SAFETY: nothing in this process needs it any more.
    unsafe { libc::close(2) };
}

#[test]
#[ignore = "a child process of a test above"]
fn child_leaks() {
    start();
    buffer(64);
    stream();
    stream();
    event();
    physical(CHUNK);
    made(|out| cuGraphCreate(out, 0));
    // Objects that end with the context are leaks, too.
    ok(cuDevicePrimaryCtxRelease_v2(0));
}

#[test]
#[ignore = "a child process of the test above"]
fn child_does_not_leak() {
    start();
    let address = buffer(64);
    ok(cuMemFree_v2(address));
    // A capture that was never ended ends with its stream.
    let stream = stream();
    ok(cuStreamBeginCapture_v2(stream, 0));
    ok(cuStreamDestroy_v2(stream));
    ok(cuDevicePrimaryCtxRelease_v2(0));
}

#[test]
#[ignore = "a child process of the test below"]
fn child_reads_freed_memory() {
    start();
    let address = buffer(4096);
    ok(cuMemFree_v2(address));
    // SAFETY: there is nothing there, which is the point: this faults.
    unsafe { std::ptr::read_volatile(address as *const u8) };
}

#[test]
fn freed_memory_faults() {
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(child("child_reads_freed_memory").output().unwrap().status.signal(), Some(libc::SIGSEGV));
}
