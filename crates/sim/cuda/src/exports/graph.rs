//! Exports for graphs as a whole: making, inspecting, instantiating, launching.

use crate::capture;
use crate::code::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND, CUDA_ERROR_NOT_SUPPORTED, Code};
use crate::executable::{self, Mismatch};
use crate::exports::stream::EdgeData;
use crate::ffi::{In, Out};
use crate::graph::{self, Content, Node};
use crate::simulator::simulator;
use crate::stream;
use crate::sync::lock;
use crate::table::Handle;
use std::ffi::c_char;
use std::sync::Arc;

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct InstantiateParameters {
    flags: u64,
    upload_stream: Handle,
    error_node: Handle,
    result: u32,
}

/// `CUgraphExecUpdateResultInfo`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UpdateResult {
    result: u32,
    error_node: Handle,
    error_from: Handle,
}

exports! {
    fn cuGraphCreate(out: Out<Handle>, flags: u32) {
        out.check()?;
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        out.set(simulator()?.graphs.insert(graph::Graph::new).handle)
    }

    fn cuGraphDestroy(handle: Handle) {
        capture::refuse_into(graph::find(handle)?.as_ref())?;
        graph::destroy(handle)
    }

    fn cuGraphClone(out: Out<Handle>, original: Handle) {
        out.check()?;
        out.set(graph::clone(graph::find(original)?.as_ref(), false)?.handle)
    }

    fn cuGraphNodeFindInClone(out: Out<Handle>, original: Handle, clone: Handle) {
        let nodes = graph::find(clone)?.nodes();
        let twin = nodes.iter().find(|node| node.original == Some(original));
        out.set(twin.ok_or(CUDA_ERROR_INVALID_VALUE)?.handle)
    }

    fn cuGraphNodeGetType(node: Handle, kind: Out<u32>) {
        kind.set(graph::find_node(node)?.content().node_type())
    }

    fn cuGraphGetNodes(handle: Handle, nodes: Out<Handle>, count: Out<usize>) {
        list(&handles(&graph::find(handle)?.nodes()), &nodes, &count)
    }

    fn cuGraphGetRootNodes(handle: Handle, nodes: Out<Handle>, count: Out<usize>) {
        let mut roots = graph::find(handle)?.nodes();
        roots.retain(|node| node.dependencies().is_empty());
        list(&handles(&roots), &nodes, &count)
    }

    fn cuGraphGetEdges(handle: Handle, from: Out<Handle>, to: Out<Handle>, count: Out<usize>) {
        edges(handle, &from, &to, &Out::none(), &count)
    }

    fn cuGraphGetEdges_v2(
        handle: Handle,
        from: Out<Handle>,
        to: Out<Handle>,
        data: Out<EdgeData>,
        count: Out<usize>,
    ) {
        edges(handle, &from, &to, &data, &count)
    }

    fn cuGraphNodeGetDependencies(node: Handle, nodes: Out<Handle>, count: Out<usize>) {
        list(&graph::find_node(node)?.dependencies(), &nodes, &count)
    }

    fn cuGraphNodeGetDependencies_v2(node: Handle, nodes: Out<Handle>, data: Out<EdgeData>, count: Out<usize>) {
        plain_edges(&data, &count);
        list(&graph::find_node(node)?.dependencies(), &nodes, &count)
    }

    fn cuGraphNodeGetDependentNodes(node: Handle, nodes: Out<Handle>, count: Out<usize>) {
        list(&dependents(node)?, &nodes, &count)
    }

    fn cuGraphNodeGetDependentNodes_v2(node: Handle, nodes: Out<Handle>, data: Out<EdgeData>, count: Out<usize>) {
        plain_edges(&data, &count);
        list(&dependents(node)?, &nodes, &count)
    }

    fn cuGraphAddDependencies(graph: Handle, from: In<Handle>, to: In<Handle>, count: usize) {
        add_dependencies(graph, &from, &to, count)
    }

    fn cuGraphAddDependencies_v2(
        graph: Handle,
        from: In<Handle>,
        to: In<Handle>,
        _data: In<EdgeData>,
        count: usize,
    ) {
        add_dependencies(graph, &from, &to, count)
    }

    fn cuGraphRemoveDependencies(graph: Handle, from: In<Handle>, to: In<Handle>, count: usize) {
        remove_dependencies(graph, &from, &to, count)
    }

    fn cuGraphRemoveDependencies_v2(
        graph: Handle,
        from: In<Handle>,
        to: In<Handle>,
        _data: In<EdgeData>,
        count: usize,
    ) {
        remove_dependencies(graph, &from, &to, count)
    }

    fn cuGraphDestroyNode(node: Handle) {
        graph::destroy_node(node)
    }

    fn cuGraphInstantiateWithFlags(out: Out<Handle>, graph: Handle, flags: u64) {
        out.check()?;
        out.set(executable::instantiate(graph::find(graph)?.as_ref(), flags)?)
    }

    fn cuGraphInstantiate_v2(
        out: Out<Handle>,
        graph: Handle,
        error_node: Out<Handle>,
        _log: *mut c_char,
        _log_bytes: usize,
    ) {
        out.check()?;
        error_node.set_if_wanted(0);
        out.set(executable::instantiate(graph::find(graph)?.as_ref(), 0)?)
    }

    fn cuGraphInstantiateWithParams / cuGraphInstantiateWithParams_ptsz(
        out: Out<Handle>,
        graph: Handle,
        parameters: Out<InstantiateParameters>,
    ) {
        out.check()?;
        let asked = parameters.get()?;
        let made = executable::instantiate(graph::find(graph)?.as_ref(), asked.flags);
        // 0 is success, 1 any error.
        parameters.set(InstantiateParameters { error_node: 0, result: u32::from(made.is_err()), ..asked })?;
        out.set(made?)
    }

    fn cuGraphExecGetFlags(executable: Handle, flags: Out<u64>) {
        flags.set(executable::find(executable)?.flags)
    }

    fn cuGraphUpload / cuGraphUpload_ptsz(executable: Handle, stream: Handle) {
        executable::find(executable)?;
        stream::issue(&stream::find(stream)?, crate::work::Work::Empty).map(drop)
    }

    fn cuGraphLaunch / cuGraphLaunch_ptsz(executable: Handle, stream: Handle) {
        let executable = executable::find(executable)?;
        executable.launch(&stream::find(stream)?)
    }

    fn cuGraphExecDestroy(executable: Handle) {
        executable::destroy(executable)
    }

    fn cuGraphExecUpdate_v2(executable: Handle, graph: Handle, result: Out<UpdateResult>) {
        result.check()?;
        match executable::find(executable)?.update(graph::find(graph)?.as_ref())? {
            None => result.set(UpdateResult { result: 0, error_node: 0, error_from: 0 }),
            Some(Mismatch { result: reason, node }) => {
                result.set(UpdateResult { result: reason, error_node: node, error_from: 0 })?;
                Err(executable::UPDATE_REFUSED)
            }
        }
    }

    fn cuGraphExecUpdate(executable: Handle, graph: Handle, error_node: Out<Handle>, result: Out<u32>) {
        result.check()?;
        match executable::find(executable)?.update(graph::find(graph)?.as_ref())? {
            None => result.set(0),
            Some(mismatch) => {
                error_node.set_if_wanted(mismatch.node);
                result.set(mismatch.result)?;
                Err(executable::UPDATE_REFUSED)
            }
        }
    }

    fn cuGraphNodeSetEnabled(executable: Handle, node: Handle, enabled: u32) {
        executable::find(executable)?.set_enabled(node, enabled != 0)
    }

    fn cuGraphNodeGetEnabled(executable: Handle, node: Handle, enabled: Out<u32>) {
        enabled.set(u32::from(executable::find(executable)?.is_enabled(node)?))
    }

    fn cuGraphChildGraphNodeGetGraph(node: Handle, out: Out<Handle>) {
        match graph::find_node(node)?.content() {
            Content::Child(child) => out.set(child.handle),
            Content::Work(_) | Content::Conditional(_) => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
}

fn handles(nodes: &[Arc<Node>]) -> Vec<Handle> {
    nodes.iter().map(|node| node.handle).collect()
}

/// Fills an array of `*count` elements, padded with null, and sets `*count` to the number written. Without an array it sets `*count`
/// to the number there are.
fn list(found: &[Handle], nodes: &Out<Handle>, count: &Out<usize>) -> Result<(), Code> {
    let room = count.get()?;
    if nodes.is_null() {
        return count.set(found.len());
    }
    let mut padded = found.to_vec();
    padded.resize(room.max(found.len()), 0);
    nodes.fill(room, &padded);
    count.set(room.min(found.len()))
}

/// Writes the edge data of an array of `*count` elements: zeros, as all edges are ordinary ones.
fn plain_edges(data: &Out<EdgeData>, count: &Out<usize>) {
    if let (false, Ok(room)) = (data.is_null(), count.get()) {
        data.fill(room, &vec![[0; 8]; room]);
    }
}

fn edges(
    handle: Handle,
    from: &Out<Handle>,
    to: &Out<Handle>,
    data: &Out<EdgeData>,
    count: &Out<usize>,
) -> Result<(), Code> {
    let nodes = graph::find(handle)?.nodes();
    let of_node = |node: &Arc<Node>| -> Vec<_> {
        node.dependencies().into_iter().map(|dependency| (dependency, node.handle)).collect()
    };
    let (sources, targets): (Vec<_>, Vec<_>) = nodes.iter().flat_map(of_node).unzip();
    plain_edges(data, count);
    if !from.is_null() && !to.is_null() {
        let room = count.get()?;
        to.fill(room, &targets);
    }
    list(&sources, from, count)
}

fn dependents(handle: Handle) -> Result<Vec<Handle>, Code> {
    let node = graph::find_node(handle)?;
    let mut nodes = graph::find(node.graph)?.nodes();
    nodes.retain(|other| other.dependencies().contains(&handle));
    Ok(handles(&nodes))
}

fn pairs(
    handle: Handle,
    from: &In<Handle>,
    to: &In<Handle>,
    count: usize,
) -> Result<Vec<(Handle, Arc<Node>)>, Code> {
    let pair = |index| {
        let source = graph::find_node(from.at(index)?)?;
        let target = graph::find_node(to.at(index)?)?;
        let same_graph = source.graph == handle && target.graph == handle && source.handle != target.handle;
        if same_graph { Ok((source.handle, target)) } else { Err(CUDA_ERROR_INVALID_VALUE) }
    };
    (0..count).map(pair).collect()
}

fn add_dependencies(handle: Handle, from: &In<Handle>, to: &In<Handle>, count: usize) -> Result<(), Code> {
    graph::find(handle)?;
    let pairs = pairs(handle, from, to, count)?;
    if pairs.iter().any(|(source, target)| target.dependencies().contains(source)) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    for (source, target) in pairs {
        lock(&target.state).dependencies.push(source);
    }
    Ok(())
}

fn remove_dependencies(handle: Handle, from: &In<Handle>, to: &In<Handle>, count: usize) -> Result<(), Code> {
    if graph::allocates(graph::find(handle)?.as_ref()) {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    let pairs = pairs(handle, from, to, count)?;
    if !pairs.iter().all(|(source, target)| target.dependencies().contains(source)) {
        return Err(CUDA_ERROR_NOT_FOUND);
    }
    for (source, target) in pairs {
        lock(&target.state).dependencies.retain(|dependency| *dependency != source);
    }
    Ok(())
}
