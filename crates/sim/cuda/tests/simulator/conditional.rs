use crate::driver::*;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const THREAD_LOCAL: u32 = 1;
const INVALID_VALUE: u32 = 1;
const IF: u64 = 0;
const WHILE: u64 = 1;
const SWITCH: u64 = 2;

struct Conditional {
    graph: Handle,
    condition: u64,
    bodies: Vec<Handle>,
}

/// Makes a graph of one conditional node.
fn conditional(kind: u64, bodies: u64, default: u32) -> Conditional {
    let graph = made(|graph| cuGraphCreate(graph, 0));
    let mut condition = 0;
    ok(cuGraphConditionalHandleCreate(&mut condition, graph, 0, default, 1));
    let mut parameters = [0; 32];
    (parameters[0], parameters[2], parameters[3]) = (13, condition, kind | bodies << 32);
    made(|node| cuGraphAddNode_v2(node, graph, std::ptr::null(), std::ptr::null(), 0, &mut parameters));
    // SAFETY: the driver's own list, which lives as long as the node.
    let list = unsafe { std::slice::from_raw_parts(parameters[4] as *const Handle, bodies as usize) };
    Conditional { graph, condition, bodies: list.to_vec() }
}

fn capture_to(stream: Handle, body: Handle, work: impl FnOnce()) {
    ok(cuStreamBeginCaptureToGraph(stream, body, std::ptr::null(), std::ptr::null(), 0, THREAD_LOCAL));
    work();
    assert_eq!(made(|graph| cuStreamEndCapture(stream, graph)), body);
}

extern "C" fn count(data: *mut c_void) {
    // SAFETY: a test's own counter.
    unsafe { &*data.cast::<AtomicU32>() }.fetch_add(1, Ordering::SeqCst);
}

fn run(graph: Handle, stream: Handle) {
    let executable = instantiate(graph);
    ok(cuGraphDestroy(graph));
    ok(cuGraphLaunch(executable, stream));
    ok(cuGraphLaunch(executable, stream));
    ok(cuStreamSynchronize(stream));
    ok(cuGraphExecDestroy(executable));
}

/// The value at the start of a launch decides which body runs, if any.
#[test]
fn one_body_runs_or_none() {
    start();
    let stream = stream();
    for (kind, bodies, value, wanted) in [
        (IF, 1, 7, [2, 0]),
        (IF, 1, 0, [0, 0]),
        (IF, 2, 0, [0, 2]),
        (SWITCH, 2, 1, [0, 2]),
        (SWITCH, 2, 2, [0, 0]),
    ] {
        let conditional = conditional(kind, bodies, value);
        let counters = [const { AtomicU32::new(0) }; 2];
        for (body, counter) in conditional.bodies.iter().zip(&counters) {
            capture_to(stream, *body, || {
                ok(simLaunch(stream, count, std::ptr::from_ref(counter).cast_mut().cast(), std::ptr::null()));
            });
        }
        run(conditional.graph, stream);
        assert_eq!(counters.map(AtomicU32::into_inner), wanted, "{kind} {bodies} {value}");
    }
    ok(cuStreamDestroy_v2(stream));
}

static LEFT: AtomicU32 = AtomicU32::new(0);
static CONDITION: AtomicU64 = AtomicU64::new(0);

extern "C" fn count_down(_: *mut c_void) {
    let left = LEFT.fetch_sub(1, Ordering::SeqCst) - 1;
    simSetConditional(CONDITION.load(Ordering::SeqCst), left % 3);
}

/// Device code ends a loop; the next launch begins with the default value again.
#[test]
fn a_loop_runs_until_device_code_ends_it() {
    start();
    let stream = stream();
    let conditional = conditional(WHILE, 1, 1);
    LEFT.store(6, Ordering::SeqCst);
    CONDITION.store(conditional.condition, Ordering::SeqCst);
    capture_to(stream, conditional.bodies[0], || {
        ok(simLaunch(stream, count_down, std::ptr::null_mut(), std::ptr::null()))
    });
    run(conditional.graph, stream);
    assert_eq!(LEFT.load(Ordering::SeqCst), 0);
    ok(cuStreamDestroy_v2(stream));
}

extern "C" fn nothing(_: *mut c_void) {}

/// A graph is not instantiated if a body has event nodes, host functions or memory of its own, at any depth.
#[test]
fn a_body_has_kernels_and_copies_alone() {
    const EXTERNAL: u32 = 1;
    start();
    let (stream, event) = (stream(), event());
    let refused: [&dyn Fn(); 4] = [
        &|| ok(cuStreamWaitEvent(stream, event, EXTERNAL)),
        &|| ok(cuEventRecordWithFlags(event, stream, EXTERNAL)),
        &|| ok(cuLaunchHostFunc(stream, nothing, std::ptr::null_mut())),
        &|| {
            made(|address| cuMemAllocAsync(address, 64, stream));
        },
    ];
    for work in refused {
        for is_child in [false, true] {
            let conditional = conditional(IF, 1, 1);
            if is_child {
                ok(cuStreamBeginCapture_v2(stream, THREAD_LOCAL));
                work();
                let child = made(|graph| cuStreamEndCapture(stream, graph));
                let body = conditional.bodies[0];
                made(|node| cuGraphAddChildGraphNode(node, body, std::ptr::null(), 0, child));
                ok(cuGraphDestroy(child));
            } else {
                capture_to(stream, conditional.bodies[0], work);
            }
            let mut executable = 0;
            assert_eq!(cuGraphInstantiateWithFlags(&mut executable, conditional.graph, 0), INVALID_VALUE);
            ok(cuGraphDestroy(conditional.graph));
        }
    }
    ok(cuEventDestroy_v2(event));
    ok(cuStreamDestroy_v2(stream));
}
