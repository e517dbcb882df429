//! Tests for GPUs only: run with `ENGINE_TEST_ON=gpu`, `--ignored`, on a machine with two GPUs.

use std::os::fd::AsFd;
use std::time::Instant;

use windlass_base::gpu::module::{MemoryDomain, Module, Shape, Start};
use windlass_transport::heap::{Announcement, Event, Holds, Member, PeerHeap};

use crate::application::*;
use crate::support::*;

/// PTX of a kernel that spins until a word is not zero.
const SPIN: &[u8] = b".version 7.0
.target sm_70
.address_size 64
.visible .entry ncclSpin(.param .u64 word)
{
    .reg .u64 %address;
    .reg .u32 %value;
    .reg .pred %zero;
    ld.param.u64 %address, [word];
again:
    ld.volatile.u32 %value, [%address];
    setp.eq.u32 %zero, %value, 0;
    @%zero bra again;
    ret;
}
\0";

/// Beside a kernel that spins, in clusters, in the remote domain, everything works that a symmetric heap does after init. Prints
/// what each step takes.
#[test]
#[ignore = "needs two GPUs"]
fn beside_a_spinning_kernel() {
    let application = Application::on(0);
    let driver = application.driver;
    let heap = application.heap(1 << 30);
    let word = lend(&heap, 1);
    let stream = AppStream::blocking();
    // SAFETY: whole, terminated PTX.
    let module = unsafe { Module::load(driver, SPIN) }.unwrap();
    let function = module.function(c"ncclSpin", 0).unwrap();
    let clusters = if driver.device_facts(0).unwrap().capability >= 90 { 4 } else { 1 };
    let shape = Shape {
        blocks: 32,
        threads: 512,
        shared_bytes: 0,
        cluster: clusters,
        domain: if clusters > 1 { MemoryDomain::Remote } else { MemoryDomain::Default },
        start: Start::AfterStream,
    };
    let mut address = word.address();
    // SAFETY: the kernel takes one address, which stays mapped until the stream is done.
    unsafe { driver.launch(function, stream.handle(), &shape, &mut [(&raw mut address).cast()]) }.unwrap();
    let mut began = Instant::now();
    let mut tell = |what: &str| {
        println!("{what:<28} {:>8.1} us", began.elapsed().as_nanos() as f64 / 1e3);
        began = Instant::now();
    };
    let region = heap.lend(64 * MIB, &Holds::new()).unwrap();
    tell("lend 64 MiB (grows)");
    region.wait_zeroed(soon()).unwrap();
    tell("zeroed");
    let Announcement { place, descriptor } = region.announce(&[Member { rank: 1, process: 9 }]).unwrap();
    tell("announce");
    region.allow(1).unwrap();
    tell("allow device 1");
    let peer = PeerHeap::new(driver);
    let far = windlass_transport::heap::Heap::open(driver, 1, 64 * MIB).unwrap();
    tell("open a symmetric heap on device 1");
    let mapped = peer.map(place, descriptor.as_fd(), &far, &Holds::new()).unwrap();
    tell("map for device 1");
    far.probe(mapped.address, 0, mapped.address + 4, 5).unwrap();
    assert_eq!(heap.load(region.address() + 4).unwrap(), 5);
    tell("probe both ways");
    drop((mapped, descriptor));
    heap.note(Event::Died(9));
    drop(region);
    peer.settle();
    heap.settle().unwrap();
    tell("settle (unmaps both)");
    assert_eq!(cuStreamQuery(stream.0), 600, "it still spins");
    heap.store(word.address(), 1).unwrap();
    ok(cuStreamSynchronize(stream.0));
    drop(word);
    heap.settle().unwrap();
}
