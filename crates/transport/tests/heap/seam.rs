//! Tests of `gpu`, the module that calls CUDA.

use std::ffi::c_void;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;

use windlass_base::gpu::module::{MemoryDomain, Module, Shape, Start};
use windlass_base::gpu::stream::{Event, Ordering, Stream};
use windlass_base::gpu::{Driver, device::Reach};

use crate::application::*;
use crate::support::*;

/// Without a driver, or with one that lacks functions, the only effect is an error that says so.
#[test]
fn without_a_driver() {
    let failure = Driver::open(c"libcuda-that-nobody-has.so.1").unwrap_err();
    assert!(
        failure.to_string().starts_with("dlopen answered an error: libcuda-that-nobody-has.so.1"),
        "{failure}"
    );
    let failure = Driver::open(c"libm.so.6").unwrap_err();
    assert_eq!(
        failure.to_string(),
        "cuInit answered nothing: this libcuda does not have it; driver 525 (CUDA 12.0) is the oldest that will do"
    );
}

/// The properties of the simulator's device, and an error in the driver's words.
#[test]
fn facts() {
    if on_a_gpu() {
        return;
    }
    let driver = start();
    let facts = driver.device_facts(1).unwrap();
    assert_eq!((facts.uuid, facts.pci.as_str()), (*b"windlass-sim-gp\x01", "0000:02:00.0"));
    assert_eq!((facts.capability, facts.multiprocessors, facts.memory_domains), (90, 132, 4));
    assert!(facts.virtual_memory && facts.posix_handles);
    assert_eq!(
        driver.reach(0, 1).unwrap(),
        Reach { access: true, native_atomics: true, performance_rank: 0 }
    );
    assert!(driver.reach(2, 2).unwrap().access);
    assert_eq!(driver.device_count().unwrap(), 8);
    let failure = driver.device_facts(99).unwrap_err();
    assert_eq!(failure.to_string(), "cuDeviceGet answered CUDA_ERROR_INVALID_DEVICE (101): device 99");
    assert_eq!(failure.result(), nccl_sys::ncclUnhandledCudaError);
}

/// Streams have unique ids, also when handles are used again. Events tell whether work is done, and order streams.
#[test]
fn streams_and_events() {
    let application = Application::on(0);
    let driver = application.driver;
    let first = Stream::new(driver).unwrap();
    let (handle, id) = (first.handle, driver.stream_id(first.handle).unwrap());
    let mut flags = 0;
    ok(cuStreamGetFlags(handle.0, &mut flags));
    assert_eq!(flags, 1, "it does not wait for the default stream");
    drop(first);
    let second = Stream::new(driver).unwrap();
    assert!(on_a_gpu() || second.handle == handle, "the simulator reuses handles");
    assert_ne!(driver.stream_id(second.handle).unwrap(), id);
    let (spinning, waiting) = (AppStream::new(), AppStream::new());
    let [event, after] = [(); 2].map(|()| Event::new(driver).unwrap());
    let gate = Gate::on(&spinning);
    gate.wait_until_reached();
    event.record(spinning.handle(), Ordering::Inside).unwrap();
    driver.wait(waiting.handle(), &event, Ordering::Inside).unwrap();
    after.record(waiting.handle(), Ordering::Inside).unwrap();
    assert!(!event.is_done().unwrap() && !after.is_done().unwrap());
    gate.open();
    eventually("both are done", || event.is_done().unwrap() && after.is_done().unwrap());
}

const KERNEL: &str = r#"
#include <stdint.h>
struct SimLaunch { uint32_t grid[3], block[3], shared_bytes, cooperative, cluster[3]; int32_t device; uint64_t stream_id; };
const struct { uint32_t count, bytes[2]; } ncclTell_params = { 2, { 8, 4 } };
void ncclTell(const struct SimLaunch *launch, void **params) {
    uint32_t *to = *(uint32_t **)params[0];
    to[0] = launch->grid[0]; to[1] = launch->block[0]; to[2] = launch->shared_bytes; to[3] = launch->cluster[0];
    to[4] = *(uint32_t *)params[1];
}
"#;

/// A kernel gets the shape and the parameters of its launch.
#[test]
fn launches() {
    if on_a_gpu() {
        return;
    }
    let application = Application::on(0);
    let driver = application.driver;
    let folder = std::env::temp_dir().join(format!("windlass-kernels-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (source, object) = (folder.join("kernel.c"), folder.join("kernel.so"));
    std::fs::write(&source, KERNEL).unwrap();
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&object).arg(&source).status();
    assert!(built.unwrap().success());
    let image = [b"windlass-sim:", object.as_os_str().as_bytes(), b"\0"].concat();
    // SAFETY: a whole image of the simulator's kind.
    let module = unsafe { Module::load(driver, &image) }.unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let function = module.function(c"ncclTell", 100 << 10).unwrap();
    assert_eq!(module.function(c"ncclNothing", 0).unwrap_err().detail, "kernel ncclNothing");
    let heap = application.heap(16 * MIB);
    let region = lend(&heap, MIB);
    let stream = AppStream::new();
    let (mut to, mut value) = (region.address(), 5_u32);
    let mut launch = |cluster, domain, start| {
        let shape = Shape { blocks: 32, threads: 512, shared_bytes: 64 << 10, cluster, domain, start };
        let mut parameters: [*mut c_void; 2] = [(&raw mut to).cast(), (&raw mut value).cast()];
        // SAFETY: the kernel takes an address, mapped while it runs, and a word.
        unsafe { driver.launch(function, stream.handle(), &shape, &mut parameters) }.unwrap();
        ok(cuStreamSynchronize(stream.0));
        (0..5).map(|word| heap.load(region.address() + 4 * word).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(launch(4, MemoryDomain::Remote, Start::WhenAllowed), [32, 512, 64 << 10, 4, 5]);
    assert_eq!(launch(1, MemoryDomain::Default, Start::AfterStream), [32, 512, 64 << 10, 1, 5]);
    drop(region);
    heap.settle().unwrap();
}
