//! Exports for graph nodes: adding them, and their parameters in graphs and executable graphs.

use crate::code::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, Code};
use crate::conditional::{self, Condition};
use crate::context;
use crate::event;
use crate::executable;
use crate::exports::module::prepare;
use crate::exports::stream::{BatchOperation, EdgeData, batch};
use crate::exports::transfer::{Copy3D, fill_rows};
use crate::ffi::{In, Out};
use crate::graph::{self, Content};
use crate::module::SimLaunch;
use crate::sync::lock;
use crate::table::Handle;
use crate::work::{HostFunction, Work};
use std::sync::Arc;

/// `CUDA_KERNEL_NODE_PARAMS` up to version 2.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KernelParameters {
    function: Handle,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    parameters: *const *const u8,
    extra: *const usize,
    kernel: Handle,
    context: Handle,
}

/// `CUDA_MEMSET_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FillParameters {
    destination: usize,
    pitch: usize,
    value: u32,
    element_bytes: u32,
    width: usize,
    height: usize,
}

/// `CUDA_HOST_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct HostParameters {
    function: Option<HostFunction>,
    data: usize,
}

/// `CUDA_BATCH_MEM_OP_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BatchParameters {
    context: Handle,
    count: u32,
    operations: *const BatchOperation,
    flags: u32,
}

/// `CUgraphNodeParams` of a conditional node: the type, and the conditional member of the union.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ConditionalParameters {
    node_type: u32,
    reserved: [u32; 3],
    condition: u64,
    kind: u32,
    size: u32,
    bodies: *const Handle,
    context: Handle,
}

const CONDITIONAL: u32 = 13;

exports! {
    fn cuGraphConditionalHandleCreate(
        out: Out<u64>,
        graph: Handle,
        context: Handle,
        default: u32,
        flags: u32,
    ) {
        out.check()?;
        context::find_or_current(context)?;
        let graph = graph::find(graph)?;
        let default = match flags {
            0 => None,
            1 => Some(default),
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        };
        out.set(Condition::add(&graph, default))
    }

    fn cuGraphAddNode(
        out: Out<Handle>,
        graph: Handle,
        dependencies: In<Handle>,
        count: usize,
        parameters: Out<ConditionalParameters>,
    ) {
        add_conditional(&out, graph, &dependencies, count, &parameters)
    }

    fn cuGraphAddNode_v2(
        out: Out<Handle>,
        graph: Handle,
        dependencies: In<Handle>,
        _edges: In<EdgeData>,
        count: usize,
        parameters: Out<ConditionalParameters>,
    ) {
        add_conditional(&out, graph, &dependencies, count, &parameters)
    }

    fn cuGraphAddEmptyNode(out: Out<Handle>, graph: Handle, dependencies: In<Handle>, count: usize) {
        add(&out, graph, &dependencies, count, Work::Empty)
    }

    fn cuGraphAddKernelNode_v2(
        out: Out<Handle>,
        graph: Handle,
        dependencies: In<Handle>,
        count: usize,
        parameters: In<KernelParameters>,
    ) {
        add(&out, graph, &dependencies, count, kernel_work(&parameters)?)
    }

    fn cuGraphKernelNodeSetParams_v2(node: Handle, parameters: In<KernelParameters>) {
        set(node, kernel_work(&parameters)?)
    }

    fn cuGraphExecKernelNodeSetParams_v2(executable: Handle, node: Handle, parameters: In<KernelParameters>) {
        executable::find(executable)?.set_work(node, kernel_work(&parameters)?)
    }

    fn cuGraphAddMemcpyNode(
        out: Out<Handle>,
        graph: Handle,
        dependencies: In<Handle>,
        count: usize,
        copy: In<Copy3D>,
        _context: Handle,
    ) {
        add(&out, graph, &dependencies, count, Work::Copy(copy.get()?.plan()?))
    }

    fn cuGraphMemcpyNodeSetParams(node: Handle, copy: In<Copy3D>) {
        set(node, Work::Copy(copy.get()?.plan()?))
    }

    fn cuGraphExecMemcpyNodeSetParams(executable: Handle, node: Handle, copy: In<Copy3D>, _context: Handle) {
        executable::find(executable)?.set_work(node, Work::Copy(copy.get()?.plan()?))
    }

    fn cuGraphAddMemsetNode(
        out: Out<Handle>,
        graph: Handle,
        dependencies: In<Handle>,
        count: usize,
        fill: In<FillParameters>,
        _context: Handle,
    ) {
        add(&out, graph, &dependencies, count, fill_work(&fill)?)
    }

    fn cuGraphMemsetNodeSetParams(node: Handle, fill: In<FillParameters>) {
        set(node, fill_work(&fill)?)
    }

    fn cuGraphMemsetNodeGetParams(node: Handle, out: Out<FillParameters>) {
        let Work::Fill(fill) = work_of(node)? else { return Err(CUDA_ERROR_INVALID_VALUE) };
        out.set(FillParameters {
            destination: fill.destination,
            pitch: fill.pitch,
            value: fill.value,
            element_bytes: fill.element_bytes as u32,
            width: fill.width,
            height: fill.height,
        })
    }

    fn cuGraphExecMemsetNodeSetParams(executable: Handle, node: Handle, fill: In<FillParameters>, _context: Handle) {
        executable::find(executable)?.set_work(node, fill_work(&fill)?)
    }

    fn cuGraphAddHostNode(
        out: Out<Handle>,
        graph: Handle,
        dependencies: In<Handle>,
        count: usize,
        host: In<HostParameters>,
    ) {
        add(&out, graph, &dependencies, count, host_work(&host)?)
    }

    fn cuGraphHostNodeSetParams(node: Handle, host: In<HostParameters>) {
        set(node, host_work(&host)?)
    }

    fn cuGraphHostNodeGetParams(node: Handle, out: Out<HostParameters>) {
        let Work::Host { function, data } = work_of(node)? else { return Err(CUDA_ERROR_INVALID_VALUE) };
        out.set(HostParameters { function: Some(function), data })
    }

    fn cuGraphExecHostNodeSetParams(executable: Handle, node: Handle, host: In<HostParameters>) {
        executable::find(executable)?.set_work(node, host_work(&host)?)
    }

    fn cuGraphAddChildGraphNode(
        out: Out<Handle>,
        graph: Handle,
        dependencies: In<Handle>,
        count: usize,
        child: Handle,
    ) {
        out.check()?;
        let (graph, child) = (graph::find(graph)?, graph::find(child)?);
        if graph.handle == child.handle {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        out.set(graph::add_child(&graph, &child, &dependencies.list(count)?)?.handle)
    }

    fn cuGraphAddEventRecordNode(
        out: Out<Handle>,
        graph: Handle,
        dependencies: In<Handle>,
        count: usize,
        event: Handle,
    ) {
        add(&out, graph, &dependencies, count, Work::RecordEvent(event::find(event)?))
    }

    fn cuGraphEventRecordNodeGetEvent(node: Handle, out: Out<Handle>) {
        let Work::RecordEvent(event) = work_of(node)? else { return Err(CUDA_ERROR_INVALID_VALUE) };
        out.set(event.handle)
    }

    fn cuGraphEventRecordNodeSetEvent(node: Handle, event: Handle) {
        set(node, Work::RecordEvent(event::find(event)?))
    }

    fn cuGraphExecEventRecordNodeSetEvent(executable: Handle, node: Handle, event: Handle) {
        executable::find(executable)?.set_work(node, Work::RecordEvent(event::find(event)?))
    }

    fn cuGraphAddEventWaitNode(
        out: Out<Handle>,
        graph: Handle,
        dependencies: In<Handle>,
        count: usize,
        event: Handle,
    ) {
        add(&out, graph, &dependencies, count, Work::WaitEvent(event::find(event)?))
    }

    fn cuGraphEventWaitNodeGetEvent(node: Handle, out: Out<Handle>) {
        let Work::WaitEvent(event) = work_of(node)? else { return Err(CUDA_ERROR_INVALID_VALUE) };
        out.set(event.handle)
    }

    fn cuGraphEventWaitNodeSetEvent(node: Handle, event: Handle) {
        set(node, Work::WaitEvent(event::find(event)?))
    }

    fn cuGraphExecEventWaitNodeSetEvent(executable: Handle, node: Handle, event: Handle) {
        executable::find(executable)?.set_work(node, Work::WaitEvent(event::find(event)?))
    }

    fn cuGraphAddBatchMemOpNode(
        out: Out<Handle>,
        graph: Handle,
        dependencies: In<Handle>,
        count: usize,
        parameters: In<BatchParameters>,
    ) {
        add(&out, graph, &dependencies, count, batch_work(&parameters)?)
    }

    fn cuGraphBatchMemOpNodeSetParams(node: Handle, parameters: In<BatchParameters>) {
        set(node, batch_work(&parameters)?)
    }

    fn cuGraphExecBatchMemOpNodeSetParams(executable: Handle, node: Handle, parameters: In<BatchParameters>) {
        executable::find(executable)?.set_work(node, batch_work(&parameters)?)
    }
}

/// `cuGraphAddNode` for conditional nodes. Other types are refused: they have functions of their own.
fn add_conditional(
    out: &Out<Handle>,
    graph: Handle,
    dependencies: &In<Handle>,
    count: usize,
    parameters: &Out<ConditionalParameters>,
) -> Result<(), Code> {
    out.check()?;
    let asked = parameters.get()?;
    if asked.node_type != CONDITIONAL {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    let graph = graph::find(graph)?;
    let conditional = Arc::new(conditional::make(asked.kind, asked.condition, asked.size)?);
    let node = graph::add_conditional(&graph, conditional.clone(), &dependencies.list(count)?)?;
    parameters.set(ConditionalParameters { bodies: conditional.handles.as_ptr(), ..asked })?;
    out.set(node.handle)
}

fn add(
    out: &Out<Handle>,
    graph: Handle,
    dependencies: &In<Handle>,
    count: usize,
    work: Work,
) -> Result<(), Code> {
    out.check()?;
    let graph = graph::find(graph)?;
    out.set(graph::add_node(&graph, work, &dependencies.list(count)?)?.handle)
}

/// Replaces a node's work by other work of the same type.
fn set(node: Handle, work: Work) -> Result<(), Code> {
    let node = graph::find_node(node)?;
    let mut state = lock(&node.state);
    if state.content.node_type() != work.node_type() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    state.content = Content::Work(work);
    Ok(())
}

fn work_of(node: Handle) -> Result<Work, Code> {
    match graph::find_node(node)?.content() {
        Content::Work(work) => Ok(work),
        Content::Child(_) | Content::Conditional(_) => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

fn kernel_work(parameters: &In<KernelParameters>) -> Result<Work, Code> {
    let parameters = parameters.get()?;
    let function = if parameters.function != 0 { parameters.function } else { parameters.kernel };
    let shape = SimLaunch {
        grid: parameters.grid,
        block: parameters.block,
        shared_bytes: parameters.shared_bytes,
        device: crate::context::find_or_current(parameters.context)?.device,
        ..SimLaunch::default()
    };
    Ok(Work::Kernel(prepare(function, shape, parameters.parameters, &In::from(parameters.extra))?))
}

fn fill_work(fill: &In<FillParameters>) -> Result<Work, Code> {
    let fill = fill.get()?;
    let element_bytes = fill.element_bytes as usize;
    Ok(Work::Fill(fill_rows(
        fill.destination,
        fill.pitch,
        fill.value,
        element_bytes,
        fill.width,
        fill.height,
    )?))
}

fn host_work(host: &In<HostParameters>) -> Result<Work, Code> {
    let host = host.get()?;
    Ok(Work::Host { function: host.function.ok_or(CUDA_ERROR_INVALID_VALUE)?, data: host.data })
}

fn batch_work(parameters: &In<BatchParameters>) -> Result<Work, Code> {
    let parameters = parameters.get()?;
    Ok(Work::Memory(batch(&In::from(parameters.operations), parameters.count)?))
}
