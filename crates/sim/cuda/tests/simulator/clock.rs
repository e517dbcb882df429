//! Tests that under a modelled clock events give the times that work would take, in any order of streams and graphs.

use crate::driver::*;
use std::ffi::{CStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

const CLOCK: &str = "nccl=10:1,windlass=3:2,slow=1:2";

extern "C" fn nothing(_: *mut c_void) {}

/// Starts the simulator with this clock.
fn start_with(clock: &str) {
    // SAFETY: first of all, before there are other threads.
    unsafe { std::env::set_var("WINDLASS_SIM_CLOCK", clock) };
    start();
}

/// Launches an all-reduce of NCCL of `bytes` bytes.
fn work(stream: Handle, bytes: u64) {
    let (side, operation) = (c"nccl".as_ptr(), c"all_reduce".as_ptr());
    let work = Work { side, operation, bytes, ranks: 2, reserved: 0 };
    ok(simLaunch(stream, nothing, std::ptr::null_mut(), &raw const work));
}

fn recorded(stream: Handle) -> Handle {
    let event = event();
    ok(cuEventRecord(event, stream));
    event
}

/// Microseconds between two events; waits for both.
fn us(from: Handle, to: Handle) -> f32 {
    let mut milliseconds = 0.0;
    ok(cuEventSynchronize(from));
    ok(cuEventSynchronize(to));
    ok(cuEventElapsedTime(&mut milliseconds, from, to));
    (milliseconds * 1e6).round() / 1e3
}

/// Work takes as long as the model says, on a slow device longer; all other work takes no time.
#[test]
fn work_takes_its_time() {
    start_with(CLOCK);
    let words = buffer(4096);
    for (device, factor) in [(0, 1.0), (1, 2.0)] {
        use_device(device);
        let stream = stream();
        let start = recorded(stream);
        work(stream, 5000);
        ok(cuMemsetD32Async(words, 0, 1024, stream));
        ok(cuLaunchHostFunc(stream, nothing, std::ptr::null_mut()));
        ok(simLaunch(stream, nothing, std::ptr::null_mut(), std::ptr::null()));
        let between = recorded(stream);
        work(stream, 0);
        let end = recorded(stream);
        assert_eq!(
            [us(start, between), us(between, end), us(end, start)],
            [15.0, 10.0, -25.0].map(|us| us * factor)
        );
    }
}

/// After a wait, work goes on at the later time: a stream that waits for an event, and work that the host issues after a wait.
#[test]
fn waits_take_the_later_time() {
    start_with(CLOCK);
    let (one, other) = (stream(), stream());
    let start = recorded(one);
    work(one, 90_000);
    let far = recorded(one);
    work(other, 0);
    let near = recorded(other);
    ok(cuStreamWaitEvent(other, far, 0));
    work(other, 0);
    let joined = recorded(other);
    ok(cuStreamWaitEvent(one, near, 0));
    let unmoved = recorded(one);
    assert_eq!(
        [us(start, far), us(start, near), us(start, joined), us(start, unmoved)],
        [100.0, 10.0, 110.0, 100.0]
    );
    // The host has waited for all that work.
    let idle = recorded(stream());
    assert_eq!(us(start, idle), 110.0);
    // The legacy stream and blocking streams wait for each other, also for work that has ended already.
    let blocking = made(|out| cuStreamCreate(out, 0));
    let before = recorded(blocking);
    work(blocking, 0);
    work(0, 0);
    work(blocking, 0);
    assert_eq!(us(before, recorded(blocking)), 30.0);
    work(0, 0);
    assert_eq!(us(before, recorded(0)), 40.0);
}

/// A graph takes as long as its longest path; launches run one after another.
#[test]
fn graphs_take_their_longest_way() {
    start_with(CLOCK);
    let (one, other) = (stream(), stream());
    let (fork, join) = (event(), event());
    ok(cuStreamBeginCapture_v2(one, 0));
    work(one, 0);
    ok(cuEventRecord(fork, one));
    ok(cuStreamWaitEvent(other, fork, 0));
    work(one, 10_000);
    work(other, 40_000);
    work(other, 0);
    ok(cuEventRecord(join, other));
    ok(cuStreamWaitEvent(one, join, 0));
    work(one, 5000);
    let graph = made(|graph| cuStreamEndCapture(one, graph));
    let executable = instantiate(graph);
    let start = recorded(one);
    ok(cuGraphLaunch(executable, one));
    let once = recorded(one);
    ok(cuGraphLaunch(executable, one));
    ok(cuGraphLaunch(executable, one));
    let end = recorded(one);
    assert_eq!([us(start, once), us(once, end)], [10.0 + 60.0 + 15.0, 2.0 * 85.0]);
}

/// The `_work` function of a module's kernel gives its work from its parameters; a kernel without one takes no time.
#[test]
fn kernels_tell_their_work() {
    const SOURCE: &str = r#"
        #include <stdint.h>
        struct SimLaunch;
        struct SimWork { const char *side, *operation; uint64_t bytes; uint32_t ranks, reserved; };
        const struct { uint32_t count, bytes[1]; } told_params = { 1, { 8 } };
        void told(const struct SimLaunch *launch, void **params) { *(uint64_t *)params[0] = 0; }
        void told_work(void *const *params, struct SimWork *work) {
            work->side = "windlass";
            work->bytes = *(uint64_t *)params[0];
        }
        const struct { uint32_t count, bytes[1]; } untold_params = { 1, { 8 } };
        void untold(const struct SimLaunch *launch, void **params) {}
    "#;
    start_with(CLOCK);
    let directory = std::env::temp_dir().join(format!("sim-cuda-clock-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let (source, object) = (directory.join("kernels.c"), directory.join("kernels.so"));
    std::fs::write(&source, SOURCE).unwrap();
    let built =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&object).arg(&source).status().unwrap();
    assert!(built.success());
    let image = [b"windlass-sim:", object.as_os_str().as_bytes(), b"\0"].concat();
    let module = made(|out| cuModuleLoadData(out, image.as_ptr()));
    std::fs::remove_dir_all(&directory).unwrap();
    let stream = stream();
    let takes = |name: &CStr| {
        let function = made(|out| cuModuleGetFunction(out, module, name.as_ptr()));
        let bytes = 8000_u64;
        let parameters: [*const c_void; 1] = [(&raw const bytes).cast()];
        let start = recorded(stream);
        ok(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters.as_ptr(), std::ptr::null()));
        us(start, recorded(stream))
    };
    assert_eq!([takes(c"told"), takes(c"untold")], [7.0, 0.0]);
}

/// A clock that cannot be read ends the process, and says why.
#[test]
fn what_cannot_be_read_ends_the_process() {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "clock::child_starts", "--ignored", "--nocapture"]);
    let output = child.env("WINDLASS_SIM_CLOCK", "nccl=1:1,windlass=fast").output().unwrap();
    assert_eq!(output.status.signal(), Some(libc::SIGABRT));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let reason =
        "sim-cuda: WINDLASS_SIM_CLOCK=nccl=1:1,windlass=fast: 'windlass=fast': expected LATENCY_US:GB_PER_S";
    assert!(told.contains(reason), "{told}");
}

#[test]
#[ignore = "a child process of the test above"]
fn child_starts() {
    start();
}
