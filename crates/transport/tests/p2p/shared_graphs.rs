//! Tests of graphs that several captures make, or that contain other graphs: a communicator's operations in them run one after the
//! other, and work after a launch waits for all of them.

use windlass_base::gpu::stream::{Event, Ordering};
use windlass_transport::sequencer::Afterwards;

use crate::communicator::*;
use crate::support::*;
use crate::traffic::*;

const THREAD_LOCAL: u32 = 1;

/// One device, and a rank of a communicator that sends to itself.
struct Alone {
    devices: Vec<Device>,
    ranks: Vec<Rank>,
}

impl Alone {
    fn new() -> Alone {
        let devices = devices(2);
        let ranks = communicator(&devices);
        devices[0].make_current();
        Alone { devices, ranks }
    }

    fn stream(&self) -> AppStream {
        self.devices[0].stream()
    }

    fn event(&self) -> Event {
        Event::new(self.devices[0].driver).unwrap()
    }

    fn side(&self, bytes: u64) -> Side {
        Side::of(0, &[message(0, 0, bytes)])
    }

    fn run(&self, side: &Side, stream: &AppStream) {
        self.ranks[0].p2p.run(&side.operations, stream.handle()).unwrap();
    }

    fn wait(&self, stream: &AppStream, event: &Event) {
        self.devices[0].driver.wait(stream.handle(), event, Ordering::Inside).unwrap();
    }

    fn end(self) {
        for rank in &self.ranks {
            eventually("graphs let go", || rank.holds.are_none());
        }
        end(self.ranks);
    }
}

fn begin(stream: &AppStream, graph: usize) -> u32 {
    cuStreamBeginCaptureToGraph(stream.0, graph, std::ptr::null(), std::ptr::null(), 0, THREAD_LOCAL)
}

/// Captures `body` into a graph, without dependencies on its other nodes.
fn capture_into(graph: usize, stream: &AppStream, body: impl FnOnce()) {
    ok(begin(stream, graph));
    body();
    assert_eq!(made(|out| cuStreamEndCapture(stream.0, out)), graph);
}

fn instantiate(graph: usize) -> usize {
    let executable = made(|out| cuGraphInstantiateWithFlags(out, graph, 0));
    ok(cuGraphDestroy(graph));
    executable
}

fn new_graph() -> usize {
    made(|out| cuGraphCreate(out, 0))
}

/// Time enough for work that nothing delays.
fn a_while() {
    std::thread::sleep(std::time::Duration::from_millis(50));
}

/// The events that nodes of a graph record.
fn recorded(graph: usize) -> Vec<usize> {
    const EVENT_RECORD: u32 = 7;
    let mut count = 0;
    ok(cuGraphGetNodes(graph, std::ptr::null_mut(), &mut count));
    let mut nodes = vec![0; count];
    ok(cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count));
    let is_record = |node: &usize| {
        let mut kind = 0;
        ok(cuGraphNodeGetType(*node, &mut kind));
        kind == EVENT_RECORD
    };
    nodes.retain(is_record);
    nodes.into_iter().map(|node| made(|out| cuGraphEventRecordNodeGetEvent(node, out))).collect()
}

/// A call delayed in one capture delays a later call in another capture into the same graph.
#[test]
fn captures_of_one_graph_come_in_turn() {
    let alone = Alone::new();
    let streams = [alone.stream(), alone.stream()];
    let sides = [alone.side(50), alone.side(60)];
    let graph = new_graph();
    let mut gate = None;
    capture_into(graph, &streams[0], || {
        gate = Some(Gate::on(&streams[0]));
        alone.run(&sides[0], &streams[0]);
    });
    capture_into(graph, &streams[1], || alone.run(&sides[1], &streams[1]));
    let executable = instantiate(graph);
    ok(cuGraphLaunch(executable, streams[0].0));
    a_while();
    assert!(!sides[1].has_arrived());
    gate.unwrap().open();
    streams[0].synchronize();
    sides.iter().for_each(Side::check);
    ok(cuGraphExecDestroy(executable));
    drop((sides, streams));
    alone.end();
}

/// An eager operation waits for the last operation of the last capture, however many operations the first capture had.
#[test]
fn what_follows_waits_for_all_captures() {
    let alone = Alone::new();
    let streams = [alone.stream(), alone.stream(), alone.stream()];
    let sides = [50, 60, 70, 80].map(|bytes| alone.side(bytes));
    let graph = new_graph();
    let mut gate = None;
    capture_into(graph, &streams[0], || {
        alone.run(&sides[0], &streams[0]);
        alone.run(&sides[1], &streams[0]);
    });
    capture_into(graph, &streams[1], || {
        gate = Some(Gate::on(&streams[1]));
        alone.run(&sides[2], &streams[1]);
    });
    let executable = instantiate(graph);
    ok(cuGraphLaunch(executable, streams[0].0));
    alone.run(&sides[3], &streams[2]);
    a_while();
    assert!(streams[2].is_busy(), "the graph is not done");
    assert!(!sides[3].has_arrived());
    gate.unwrap().open();
    streams.iter().for_each(AppStream::synchronize);
    sides.iter().for_each(Side::check);
    ok(cuGraphExecDestroy(executable));
    drop((sides, streams));
    alone.end();
}

/// With many captures into one graph only one node records the communicator's event, so that a capture need not wait for all
/// earlier ones.
#[test]
fn one_node_records() {
    let alone = Alone::new();
    let streams = [alone.stream(), alone.stream()];
    let sides: Vec<Side> = (0..12).map(|index| alone.side(40 + index)).collect();
    let graph = new_graph();
    for (index, side) in sides.iter().enumerate() {
        capture_into(graph, &streams[index % 2], || alone.run(side, &streams[index % 2]));
    }
    assert_eq!(recorded(graph).len(), 1);
    let executable = instantiate(graph);
    for _ in 0..3 {
        ok(cuGraphLaunch(executable, streams[0].0));
        streams[0].synchronize();
        sides.iter().for_each(Side::check);
        sides.iter().for_each(Side::clear);
    }
    ok(cuGraphExecDestroy(executable));
    drop((sides, streams));
    alone.end();
}

/// A capture was forgotten because too many others are in progress, and is used again: its later operations run after its first
/// one.
#[test]
fn a_forgotten_capture_goes_on() {
    let alone = Alone::new();
    let (one, two, three) = (alone.stream(), alone.stream(), alone.stream());
    let (fork, join) = (alone.event(), alone.event());
    // More captures than are remembered.
    let others: Vec<AppStream> = (0..18).map(|_| alone.stream()).collect();
    let sides = [50, 60, 70].map(|bytes| alone.side(bytes));
    let between = alone.side(30);
    ok(cuStreamBeginCapture_v2(one.0, THREAD_LOCAL));
    fork.record(one.handle(), Ordering::Inside).unwrap();
    alone.wait(&two, &fork);
    let gate = Gate::on(&one);
    alone.run(&sides[0], &one);
    for other in &others {
        ok(cuStreamBeginCapture_v2(other.0, THREAD_LOCAL));
        alone.run(&between, other);
    }
    alone.run(&sides[1], &two);
    join.record(two.handle(), Ordering::Inside).unwrap();
    alone.wait(&one, &join);
    for other in &others {
        ok(cuGraphDestroy(made(|out| cuStreamEndCapture(other.0, out))));
    }
    let executable = instantiate(made(|out| cuStreamEndCapture(one.0, out)));
    ok(cuGraphLaunch(executable, one.0));
    alone.run(&sides[2], &three);
    a_while();
    assert!(!sides[1].has_arrived() && !sides[2].has_arrived());
    gate.open();
    [&one, &three].into_iter().for_each(AppStream::synchronize);
    sides.iter().for_each(Side::check);
    ok(cuGraphExecDestroy(executable));
    drop((sides, between, one, two, three, fork, join, others));
    alone.end();
}

/// Operations in a child graph, at any depth, run before those captured into the graph later.
#[test]
fn a_child_graph_comes_first() {
    let alone = Alone::new();
    let streams = [alone.stream(), alone.stream()];
    let sides = [50, 60, 70].map(|bytes| alone.side(bytes));
    let (inner, middle, outer) = (new_graph(), new_graph(), new_graph());
    let mut gate = None;
    capture_into(inner, &streams[0], || {
        gate = Some(Gate::on(&streams[0]));
        alone.run(&sides[0], &streams[0]);
    });
    made(|out| cuGraphAddChildGraphNode(out, middle, std::ptr::null(), 0, inner));
    made(|out| cuGraphAddChildGraphNode(out, outer, std::ptr::null(), 0, middle));
    capture_into(outer, &streams[1], || alone.run(&sides[1], &streams[1]));
    [inner, middle].into_iter().for_each(|graph| ok(cuGraphDestroy(graph)));
    let executable = instantiate(outer);
    ok(cuGraphLaunch(executable, streams[0].0));
    alone.run(&sides[2], &streams[1]);
    a_while();
    assert!(!sides[1].has_arrived() && !sides[2].has_arrived());
    gate.unwrap().open();
    streams.iter().for_each(AppStream::synchronize);
    sides.iter().for_each(Side::check);
    ok(cuGraphExecDestroy(executable));
    drop((sides, streams));
    alone.end();
}

/// A graph launched in a capture on one stream runs before the communicator's next operation on another stream of the capture.
#[test]
fn a_launched_graph_comes_first() {
    let alone = Alone::new();
    let (one, two) = (alone.stream(), alone.stream());
    let (fork, join) = (alone.event(), alone.event());
    let sides = [50, 60].map(|bytes| alone.side(bytes));
    let mut gate = None;
    let inner = captured(&one, || {
        gate = Some(Gate::on(&one));
        alone.run(&sides[0], &one);
    });
    let outer = captured(&one, || {
        fork.record(one.handle(), Ordering::Inside).unwrap();
        alone.wait(&two, &fork);
        ok(cuGraphLaunch(inner, two.0));
        alone.run(&sides[1], &one);
        join.record(two.handle(), Ordering::Inside).unwrap();
        alone.wait(&one, &join);
    });
    ok(cuGraphLaunch(outer, one.0));
    a_while();
    assert!(!sides[1].has_arrived());
    gate.unwrap().open();
    one.synchronize();
    sides.iter().for_each(Side::check);
    [inner, outer].into_iter().for_each(|executable| ok(cuGraphExecDestroy(executable)));
    drop((sides, one, two, fork, join));
    alone.end();
}

/// Work of others (NCCL's, say) in a second capture runs after the operations of the first. The communicator's later operations run
/// after that work.
#[test]
fn what_is_ordered_comes_after_other_captures() {
    let alone = Alone::new();
    let streams = [alone.stream(), alone.stream()];
    let sides = [50, 60].map(|bytes| alone.side(bytes));
    let word = made_word();
    let graph = new_graph();
    let mut gate = None;
    capture_into(graph, &streams[0], || {
        gate = Some(Gate::on(&streams[0]));
        alone.run(&sides[0], &streams[0]);
    });
    capture_into(graph, &streams[1], || {
        for _ in 0..3 {
            let afterwards = alone.ranks[0].p2p.sequencer().before_nccl(streams[1].handle(), true);
            assert_eq!(afterwards, Ok(Afterwards::FollowInCapture));
            ok(cuMemsetD32Async(word, 7, 1, streams[1].0));
        }
        alone.run(&sides[1], &streams[1]);
    });
    let executable = instantiate(graph);
    ok(cuGraphLaunch(executable, streams[0].0));
    a_while();
    assert_ne!(read_word(word), 7);
    gate.unwrap().open();
    streams[0].synchronize();
    assert_eq!(read_word(word), 7);
    sides.iter().for_each(Side::check);
    ok(cuGraphExecDestroy(executable));
    ok(cuMemFree_v2(word));
    drop((sides, streams));
    alone.end();
}

fn made_word() -> u64 {
    let mut word = 0;
    ok(cuMemAlloc_v2(&mut word, 4));
    ok(cuMemcpyHtoD_v2(word, [0_u8; 4].as_ptr().cast(), 4));
    word
}

fn read_word(word: u64) -> u32 {
    let mut read = 0_u32;
    ok(cuMemcpyDtoH_v2((&raw mut read).cast(), word, 4));
    read
}
