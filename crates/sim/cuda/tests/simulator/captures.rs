use crate::driver::*;
use std::ffi::c_void;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

const INVALID_VALUE: u32 = 1;
const ILLEGAL_STATE: u32 = 401;
const UNSUPPORTED: u32 = 900;
const INVALIDATED: u32 = 901;

fn end(stream: Handle) -> Handle {
    made(|graph| cuStreamEndCapture(stream, graph))
}

#[test]
fn a_fork_and_join_replays_in_order_as_often_as_launched() {
    start();
    let (main, side) = (stream(), stream());
    let (fork, join) = (event(), event());
    let list = Arc::new(Mutex::new(Vec::new()));
    ok(cuStreamBeginCapture_v2(main, GLOBAL));
    note(main, &list, 1);
    ok(cuEventRecord(fork, main));
    ok(cuStreamWaitEvent(side, fork, 0));
    let mut status = 0;
    ok(cuStreamIsCapturing(side, &mut status));
    assert_eq!(status, 1);
    note(side, &list, 2);
    note(main, &list, 2);
    ok(cuEventRecord(join, side));
    ok(cuStreamWaitEvent(main, join, 0));
    note(main, &list, 3);
    let graph = end(main);
    assert!(list.lock().unwrap().is_empty());
    let mut nodes = 0;
    ok(cuGraphGetNodes(graph, std::ptr::null_mut(), &mut nodes));
    assert_eq!(nodes, 4);
    let executable = instantiate(graph);
    ok(cuGraphDestroy(graph));
    ok(cuGraphLaunch(executable, main));
    ok(cuGraphLaunch(executable, side));
    ok(cuCtxSynchronize());
    assert_eq!(*list.lock().unwrap(), [1, 2, 2, 3, 1, 2, 2, 3]);
    ok(cuGraphExecDestroy(executable));
    [fork, join].into_iter().for_each(|event| ok(cuEventDestroy_v2(event)));
    [main, side].into_iter().for_each(|stream| ok(cuStreamDestroy_v2(stream)));
}

extern "C" fn meet(data: *mut c_void) {
    // SAFETY: the test keeps the pair alive until the graph has run.
    let (sender, receiver) = unsafe { &*data.cast::<(Sender<()>, Mutex<Receiver<()>>)>() };
    sender.send(()).expect("the other branch lives");
    receiver.lock().expect("no panics").recv().expect("the other branch comes");
}

#[test]
fn branches_of_a_graph_that_wait_for_each_other_both_run() {
    start();
    let (main, side) = (stream(), stream());
    let (fork, join) = (event(), event());
    let (to_side, from_main) = channel::<()>();
    let (to_main, from_side) = channel::<()>();
    let pairs = [(to_side, Mutex::new(from_side)), (to_main, Mutex::new(from_main))];
    ok(cuStreamBeginCapture_v2(main, GLOBAL));
    ok(cuEventRecord(fork, main));
    ok(cuStreamWaitEvent(side, fork, 0));
    ok(cuLaunchHostFunc(main, meet, (&raw const pairs[0]).cast_mut().cast()));
    ok(cuLaunchHostFunc(side, meet, (&raw const pairs[1]).cast_mut().cast()));
    ok(cuEventRecord(join, side));
    ok(cuStreamWaitEvent(main, join, 0));
    let graph = end(main);
    let executable = instantiate(graph);
    ok(cuGraphLaunch(executable, main));
    ok(cuStreamSynchronize(main));
    ok(cuGraphExecDestroy(executable));
    ok(cuGraphDestroy(graph));
}

#[test]
fn an_unsafe_call_is_refused_and_ends_a_global_capture() {
    start();
    let stream = stream();
    let mut address = 0;
    ok(cuStreamBeginCapture_v2(stream, GLOBAL));
    assert_eq!(cuMemAlloc_v2(&mut address, 64), UNSUPPORTED);
    let mut graph = 1;
    assert_eq!(cuStreamEndCapture(stream, &mut graph), INVALIDATED);
    assert_eq!(graph, 0);
    ok(cuStreamBeginCapture_v2(stream, RELAXED));
    ok(cuMemAlloc_v2(&mut address, 64));
    assert_eq!(cuStreamSynchronize(stream), UNSUPPORTED);
    assert_eq!(cuStreamEndCapture(stream, &mut graph), INVALIDATED);
    ok(cuMemFree_v2(address));
    ok(cuStreamDestroy_v2(stream));
}

#[test]
fn another_thread_is_bound_by_a_global_capture_only_and_not_in_relaxed_mode() {
    let context = start();
    let stream = stream();
    let allocate = move |mode: u32| {
        let thread = std::thread::spawn(move || {
            ok(cuCtxSetCurrent(context));
            let mut mode = mode;
            ok(cuThreadExchangeStreamCaptureMode(&mut mode));
            assert_eq!(mode, GLOBAL);
            let mut address = 0;
            (cuMemAlloc_v2(&mut address, 64), address)
        });
        thread.join().unwrap()
    };
    let mut graph = 0;
    ok(cuStreamBeginCapture_v2(stream, THREAD_LOCAL));
    let (code, first) = allocate(GLOBAL);
    ok(code);
    ok(cuStreamEndCapture(stream, &mut graph));
    ok(cuGraphDestroy(graph));
    ok(cuStreamBeginCapture_v2(stream, GLOBAL));
    let (code, second) = allocate(RELAXED);
    ok(code);
    assert_eq!(allocate(GLOBAL).0, UNSUPPORTED);
    assert_eq!(cuStreamEndCapture(stream, &mut graph), INVALIDATED);
    [first, second].into_iter().for_each(|address| ok(cuMemFree_v2(address)));
    ok(cuStreamDestroy_v2(stream));
}

#[test]
fn mistakes_in_a_capture_have_their_own_codes() {
    start();
    let (main, side) = (stream(), stream());
    let blocking = made(|out| cuStreamCreate(out, 0));
    let (fork, foreign) = (event(), event());
    let list = Arc::new(Mutex::new(Vec::new()));
    let mut graph = 0;
    // The legacy stream.
    assert_eq!(cuStreamBeginCapture_v2(0, GLOBAL), 900);
    ok(cuStreamBeginCapture_v2(blocking, GLOBAL));
    assert_eq!(cuEventRecord(foreign, 0), 906);
    assert_eq!(cuStreamEndCapture(blocking, &mut graph), INVALIDATED);
    // A forked stream that is never joined.
    ok(cuStreamBeginCapture_v2(main, GLOBAL));
    ok(cuEventRecord(fork, main));
    ok(cuStreamWaitEvent(side, fork, 0));
    note(side, &list, 1);
    assert_eq!(cuStreamEndCapture(side, &mut graph), 903);
    assert_eq!(cuStreamEndCapture(main, &mut graph), INVALIDATED);
    ok(cuStreamBeginCapture_v2(main, GLOBAL));
    ok(cuEventRecord(fork, main));
    ok(cuStreamWaitEvent(side, fork, 0));
    note(side, &list, 1);
    assert_eq!(cuStreamEndCapture(main, &mut graph), 904);
    // Work outside the capture, and an event within one.
    ok(cuEventRecord(foreign, side));
    ok(cuStreamBeginCapture_v2(main, RELAXED));
    assert_eq!(cuStreamWaitEvent(main, foreign, 0), 905);
    assert_eq!(cuStreamEndCapture(main, &mut graph), INVALIDATED);
    ok(cuStreamBeginCapture_v2(main, RELAXED));
    ok(cuEventRecord(fork, main));
    assert_eq!(cuEventQuery(fork), 907);
    assert_eq!(cuStreamEndCapture(main, &mut graph), INVALIDATED);
    assert_eq!(cuStreamEndCapture(main, &mut graph), 401);
}

#[test]
fn a_member_does_not_tell_its_id_in_any_mode() {
    start();
    let (main, side) = (stream(), stream());
    let fork = event();
    let (mut graph, mut id) = (0, 0);
    for mode in [GLOBAL, THREAD_LOCAL, RELAXED] {
        ok(cuStreamBeginCapture_v2(main, mode));
        assert_eq!(cuStreamGetId(main, &mut id), UNSUPPORTED);
        assert_eq!(cuStreamEndCapture(main, &mut graph), INVALIDATED);
    }
    // A stream that joined the capture later does not answer either; others do.
    ok(cuStreamBeginCapture_v2(main, GLOBAL));
    ok(cuStreamGetId(side, &mut id));
    ok(cuEventRecord(fork, main));
    ok(cuStreamWaitEvent(side, fork, 0));
    let mut mode = RELAXED;
    ok(cuThreadExchangeStreamCaptureMode(&mut mode));
    assert_eq!(cuStreamGetId(side, &mut id), UNSUPPORTED);
    ok(cuThreadExchangeStreamCaptureMode(&mut mode));
    assert_eq!(cuStreamEndCapture(main, &mut graph), INVALIDATED);
    ok(cuStreamGetId(side, &mut id));
    ok(cuEventDestroy_v2(fork));
    [main, side].into_iter().for_each(|stream| ok(cuStreamDestroy_v2(stream)));
}

#[test]
fn external_events_reach_across_launches() {
    start();
    let (main, other) = (stream(), stream());
    let external = event();
    // The flag has no meaning outside of captures.
    assert_eq!((cuStreamWaitEvent(main, external, 1), cuEventRecordWithFlags(external, main, 1)), (1, 1));
    ok(cuStreamBeginCapture_v2(main, GLOBAL));
    ok(cuStreamWaitEvent(main, external, 1));
    ok(cuEventRecordWithFlags(external, main, 1));
    let graph = end(main);
    let executable = instantiate(graph);
    let gate = Gate::in_stream(other);
    ok(cuEventRecord(external, other));
    ok(cuGraphLaunch(executable, main));
    gate.wait_until_reached();
    assert_eq!(cuEventQuery(external), NOT_READY);
    assert_eq!(cuStreamQuery(main), NOT_READY);
    gate.open();
    ok(cuEventSynchronize(external));
    ok(cuStreamSynchronize(main));
    ok(cuGraphExecDestroy(executable));
    ok(cuGraphDestroy(graph));
}

#[test]
fn an_update_takes_new_parameters_and_refuses_another_shape() {
    start();
    let stream = stream();
    let list = Arc::new(Mutex::new(Vec::new()));
    let capture = |entries: &[u32]| {
        ok(cuStreamBeginCapture_v2(stream, GLOBAL));
        entries.iter().for_each(|entry| note(stream, &list, *entry));
        end(stream)
    };
    let graphs = [capture(&[1, 2]), capture(&[3, 4]), capture(&[5])];
    let executable = instantiate(graphs[0]);
    let mut result = [9; 3];
    ok(cuGraphExecUpdate_v2(executable, graphs[1], &mut result));
    assert_eq!(result[0] as u32, 0);
    assert_eq!(cuGraphExecUpdate_v2(executable, graphs[2], &mut result), 910);
    assert_eq!(result[0] as u32, 2);
    ok(cuGraphLaunch(executable, stream));
    ok(cuStreamSynchronize(stream));
    assert_eq!(*list.lock().unwrap(), [3, 4]);
    ok(cuGraphExecDestroy(executable));
    graphs.into_iter().for_each(|graph| ok(cuGraphDestroy(graph)));
}

struct Destruction(Sender<u32>);

extern "C" fn destroyed(data: *mut c_void) {
    // SAFETY: the test keeps it alive until it has heard from us.
    let Destruction(heard) = unsafe { &*data.cast::<Destruction>() };
    heard.send(cuCtxSynchronize()).expect("the test waits");
}

#[test]
fn a_user_object_dies_with_its_last_holder_where_cuda_calls_are_not_permitted() {
    start();
    let (sender, receiver) = channel();
    let destruction = Destruction(sender);
    let stream = stream();
    let graph = made(|out| cuGraphCreate(out, 0));
    let data = (&raw const destruction).cast_mut().cast();
    let object = made(|out| cuUserObjectCreate(out, data, destroyed, 1, 1));
    ok(cuGraphRetainUserObject(graph, object, 1, 1));
    let clone = made(|out| cuGraphClone(out, graph));
    let executable = instantiate(clone);
    let gate = Gate::in_stream(stream);
    ok(cuGraphLaunch(executable, stream));
    ok(cuGraphDestroy(graph));
    ok(cuGraphDestroy(clone));
    ok(cuGraphExecDestroy(executable));
    // The launch that is still to run holds the last reference.
    assert!(receiver.try_recv().is_err());
    gate.open();
    assert_eq!(receiver.recv().unwrap(), 800);
    ok(cuStreamDestroy_v2(stream));
}

#[test]
fn an_executable_holds_the_user_objects_of_child_graphs_too() {
    start();
    let (sender, receiver) = channel();
    let destruction = Destruction(sender);
    let (parent, child) = (made(|out| cuGraphCreate(out, 0)), made(|out| cuGraphCreate(out, 0)));
    let data = (&raw const destruction).cast_mut().cast();
    let object = made(|out| cuUserObjectCreate(out, data, destroyed, 1, 1));
    ok(cuGraphRetainUserObject(child, object, 1, 1));
    made(|out| cuGraphAddChildGraphNode(out, parent, std::ptr::null(), 0, child));
    let executable = instantiate(parent);
    [child, parent].into_iter().for_each(|graph| ok(cuGraphDestroy(graph)));
    assert!(receiver.try_recv().is_err());
    let stream = stream();
    ok(cuGraphLaunch(executable, stream));
    ok(cuStreamSynchronize(stream));
    ok(cuGraphExecDestroy(executable));
    assert_eq!(receiver.recv().unwrap(), 800);
    ok(cuStreamDestroy_v2(stream));
}

#[test]
fn a_captured_launch_runs_with_the_graph_that_captured_it() {
    start();
    let stream = stream();
    let list = Arc::new(Mutex::new(Vec::new()));
    ok(cuStreamBeginCapture_v2(stream, GLOBAL));
    [2, 3].into_iter().for_each(|entry| note(stream, &list, entry));
    let inner = end(stream);
    let inner_executable = instantiate(inner);
    ok(cuStreamBeginCapture_v2(stream, GLOBAL));
    note(stream, &list, 1);
    ok(cuGraphLaunch(inner_executable, stream));
    note(stream, &list, 4);
    let outer = end(stream);
    let outer_executable = instantiate(outer);
    ok(cuGraphExecDestroy(inner_executable));
    ok(cuGraphLaunch(outer_executable, stream));
    ok(cuStreamSynchronize(stream));
    assert_eq!(*list.lock().unwrap(), [1, 2, 3, 4]);
    ok(cuGraphExecDestroy(outer_executable));
    [inner, outer].into_iter().for_each(|graph| ok(cuGraphDestroy(graph)));
    ok(cuStreamDestroy_v2(stream));
}

fn nodes(graph: Handle) -> Vec<Handle> {
    let mut count = 0;
    ok(cuGraphGetNodes(graph, std::ptr::null_mut(), &mut count));
    let mut nodes = vec![0; count];
    ok(cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count));
    nodes
}

fn node_type(node: Handle) -> u32 {
    let mut kind = 0;
    ok(cuGraphNodeGetType(node, &mut kind));
    kind
}

fn begin_into(stream: Handle, graph: Handle) {
    ok(cuStreamBeginCaptureToGraph(stream, graph, std::ptr::null(), std::ptr::null(), 0, THREAD_LOCAL));
}

#[test]
fn a_captured_launch_is_a_child_of_the_graph() {
    const CHILD: u32 = 4;
    start();
    let stream = stream();
    let list = Arc::new(Mutex::new(Vec::new()));
    let recorded = event();
    ok(cuStreamBeginCapture_v2(stream, GLOBAL));
    note(stream, &list, 1);
    ok(cuEventRecordWithFlags(recorded, stream, 1));
    let inner = end(stream);
    let executable = instantiate(inner);
    ok(cuStreamBeginCapture_v2(stream, GLOBAL));
    ok(cuGraphLaunch(executable, stream));
    let outer = end(stream);
    let [child] = nodes(outer)[..] else { panic!("one node") };
    assert_eq!(node_type(child), CHILD);
    let within = nodes(made(|out| cuGraphChildGraphNodeGetGraph(child, out)));
    assert_eq!(within.iter().copied().map(node_type).collect::<Vec<_>>(), [3, 7]);
    assert_eq!(made(|out| cuGraphEventRecordNodeGetEvent(within[1], out)), recorded);
    ok(cuGraphExecDestroy(executable));
    [inner, outer].into_iter().for_each(|graph| ok(cuGraphDestroy(graph)));
    ok(cuEventDestroy_v2(recorded));
    ok(cuStreamDestroy_v2(stream));
}

#[test]
fn two_captures_into_one_graph_are_ordered_by_dependencies() {
    const ADD: u32 = 0;
    start();
    let (main, side) = (stream(), stream());
    let list = Arc::new(Mutex::new(Vec::new()));
    let graph = made(|out| cuGraphCreate(out, 0));
    // Captured first, but made to run after a node that is captured later.
    begin_into(side, graph);
    note(side, &list, 2);
    let [second] = nodes(graph)[..] else { panic!("one node") };
    let foreign = made(|out| cuGraphCreate(out, 0));
    add_node(foreign);
    assert_eq!(cuStreamUpdateCaptureDependencies(side, &nodes(foreign)[0], 1, ADD), 1);
    note(side, &list, 3);
    assert_eq!(end(side), graph);
    begin_into(main, graph);
    note(main, &list, 1);
    let first = nodes(graph)[2];
    ok(cuGraphAddDependencies(graph, &first, &second, 1));
    assert_eq!(cuGraphAddDependencies(graph, &first, &second, 1), 1);
    ok(cuStreamUpdateCaptureDependencies(main, &nodes(graph)[1], 1, ADD));
    note(main, &list, 4);
    // While a capture adds to the graph, it and its nodes cannot be destroyed, and it cannot be instantiated.
    let mut executable = 0;
    assert_eq!(cuGraphDestroyNode(second), 1);
    assert_eq!(cuGraphDestroy(graph), 1);
    assert_eq!(cuGraphInstantiateWithFlags(&mut executable, graph, 0), 1);
    assert_eq!(end(main), graph);
    let executable = instantiate(graph);
    ok(cuGraphLaunch(executable, main));
    ok(cuStreamSynchronize(main));
    assert_eq!(*list.lock().unwrap(), [1, 2, 3, 4]);
    ok(cuGraphExecDestroy(executable));
    [graph, foreign].into_iter().for_each(|graph| ok(cuGraphDestroy(graph)));
    [main, side].into_iter().for_each(|stream| ok(cuStreamDestroy_v2(stream)));
}

/// Adds a node without visible effect, by a capture into the graph.
fn add_node(graph: Handle) {
    let (stream, event) = (stream(), event());
    begin_into(stream, graph);
    ok(cuEventRecordWithFlags(event, stream, 1));
    assert_eq!(end(stream), graph);
    ok(cuEventDestroy_v2(event));
    ok(cuStreamDestroy_v2(stream));
}

#[test]
fn a_cycle_is_never_made_executable() {
    start();
    let stream = stream();
    let list = Arc::new(Mutex::new(Vec::new()));
    ok(cuStreamBeginCapture_v2(stream, GLOBAL));
    [1, 2].into_iter().for_each(|entry| note(stream, &list, entry));
    let graph = end(stream);
    let [first, second] = nodes(graph)[..] else { panic!("two nodes") };
    ok(cuGraphAddDependencies(graph, &second, &first, 1));
    let mut executable = 0;
    assert_eq!(cuGraphInstantiateWithFlags(&mut executable, graph, 0), 1);
    ok(cuGraphRemoveDependencies(graph, &second, &first, 1));
    let executable = instantiate(graph);
    ok(cuGraphExecDestroy(executable));
    ok(cuGraphDestroy(graph));
    ok(cuStreamDestroy_v2(stream));
}

#[test]
fn a_node_records_another_event_once_told() {
    start();
    let stream = stream();
    let (former, latter) = (event(), event());
    ok(cuStreamBeginCapture_v2(stream, GLOBAL));
    let gate = Gate::in_stream(stream);
    ok(cuEventRecordWithFlags(former, stream, 1));
    let graph = end(stream);
    let records = nodes(graph)[1];
    assert_eq!(made(|out| cuGraphEventRecordNodeGetEvent(records, out)), former);
    ok(cuGraphEventRecordNodeSetEvent(records, latter));
    assert_eq!(made(|out| cuGraphEventRecordNodeGetEvent(records, out)), latter);
    let executable = instantiate(graph);
    ok(cuGraphLaunch(executable, stream));
    ok(cuEventQuery(former));
    assert_eq!(cuEventQuery(latter), NOT_READY);
    gate.open();
    ok(cuStreamSynchronize(stream));
    ok(cuEventQuery(latter));
    ok(cuGraphExecDestroy(executable));
    ok(cuGraphDestroy(graph));
    [former, latter].into_iter().for_each(|event| ok(cuEventDestroy_v2(event)));
    ok(cuStreamDestroy_v2(stream));
}

#[test]
fn memory_allocated_in_a_capture_lives_as_long_as_what_was_made_of_it() {
    start();
    let stream = stream();
    let target = buffer(64);
    ok(cuStreamBeginCapture_v2(stream, GLOBAL));
    let block = made(|out| cuMemAllocAsync(out, 64, stream));
    ok(cuMemsetD32Async(block, 9, 16, stream));
    ok(cuMemcpyDtoDAsync_v2(target, block, 64, stream));
    ok(cuMemFreeAsync(block, stream));
    assert_eq!(cuMemFreeAsync(target, stream), 801);
    let graph = end(stream);
    let executable = instantiate(graph);
    ok(cuGraphDestroy(graph));
    for _ in 0..2 {
        ok(cuMemsetD32Async(target, 0, 16, stream));
        ok(cuGraphLaunch(executable, stream));
        let mut words = [0_u32; 16];
        ok(cuStreamSynchronize(stream));
        ok(cuMemcpyDtoH_v2(words.as_mut_ptr().cast(), target, 64));
        assert_eq!(words, [9; 16]);
    }
    ok(cuGraphExecDestroy(executable));
    let mut value = 0_u64;
    assert_eq!(cuPointerGetAttribute((&raw mut value).cast(), 7, block), 1);
    ok(cuStreamDestroy_v2(stream));
    ok(cuMemFree_v2(target));
}

/// Seen on driver 580 (CUDA 13.0).
#[test]
fn captures_into_one_graph_have_one_id() {
    start();
    let (one, two) = (stream(), stream());
    let graph = made(|out| cuGraphCreate(out, 0));
    let id_of = |stream| {
        let (mut status, mut id) = (0, 0);
        let (none, nowhere) = (std::ptr::null_mut(), std::ptr::null_mut());
        ok(cuStreamGetCaptureInfo_v2(stream, &mut status, &mut id, none, nowhere, std::ptr::null_mut()));
        id
    };
    let recorded = event();
    begin_into(one, graph);
    let first = id_of(one);
    ok(cuEventRecord(recorded, one));
    let refused =
        cuStreamBeginCaptureToGraph(two, graph, std::ptr::null(), std::ptr::null(), 0, THREAD_LOCAL);
    assert_eq!(refused, ILLEGAL_STATE);
    assert_eq!(end(one), graph);
    begin_into(two, graph);
    assert_eq!(id_of(two), first);
    assert_eq!(cuStreamWaitEvent(two, recorded, 0), INVALID_VALUE);
    let mut none = 0;
    assert_eq!(cuStreamEndCapture(two, &mut none), INVALIDATED);
    ok(cuStreamBeginCapture_v2(one, THREAD_LOCAL));
    assert_ne!(id_of(one), first);
    [end(one), graph].into_iter().for_each(|graph| ok(cuGraphDestroy(graph)));
    ok(cuEventDestroy_v2(recorded));
    [one, two].into_iter().for_each(|stream| ok(cuStreamDestroy_v2(stream)));
}
