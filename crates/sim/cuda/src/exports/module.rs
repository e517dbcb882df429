//! Exports for modules, libraries, functions, launches and occupancy.

use crate::code::{
    CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_NOT_SUPPORTED, Code,
};
use crate::context;
use crate::ffi::{In, Out, Text};
use crate::grids;
use crate::hold;
use crate::module::{self, Function, Launch, SimLaunch, UNSAID};
use crate::stack;
use crate::stream;
use crate::sync::lock;
use crate::table::Handle;
use crate::work::Work;
use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

const THREADS_PER_BLOCK_MAX: u32 = 1024;
const THREADS_PER_MULTIPROCESSOR: i32 = 2048;
const SHARED_BYTES_MAX: i32 = 227 << 10;
const SHARED_BYTES_DEFAULT: i32 = 48 << 10;
const SHARED_BYTES_PER_MULTIPROCESSOR: usize = 228 << 10;
const CLUSTER_BLOCKS_MAX: u32 = 16;
/// The first compute capability with clusters, times 10.
const CLUSTERS_SINCE: i32 = 90;

/// `CUfunction_attribute`.
const ATTRIBUTE_THREADS_MAX: u32 = 0;
const ATTRIBUTE_REGISTERS: u32 = 4;
const ATTRIBUTE_PTX_VERSION: u32 = 5;
const ATTRIBUTE_BINARY_VERSION: u32 = 6;
const ATTRIBUTE_DYNAMIC_SHARED_MAX: u32 = 8;
const ATTRIBUTE_END: u32 = 16;

/// `CUlaunchAttributeID`.
const LAUNCH_COOPERATIVE: u32 = 2;
const LAUNCH_CLUSTER: u32 = 4;

/// `CUlaunchAttribute`; the value is a union of 64 bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LaunchAttribute {
    id: u32,
    pad: u32,
    value: [u32; 16],
}

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LaunchConfiguration {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: Handle,
    attributes: *const LaunchAttribute,
    attribute_count: u32,
}

/// The pointers to the parameters, or null.
type Parameters = *const *const u8;
/// Pairs of a key and a pointer, ended by a null key, or null.
type Extra = In<usize>;

exports! {
    fn cuModuleLoad(out: Out<Handle>, path: Text) {
        out.check()?;
        out.set(module::load_path(path.get()?, context::current()?.handle)?)
    }

    fn cuModuleLoadData(out: Out<Handle>, image: *const u8) {
        out.check()?;
        out.set(module::load_image(image, context::current()?.handle)?)
    }

    fn cuModuleLoadDataEx(
        out: Out<Handle>,
        image: *const u8,
        _count: u32,
        _options: *const u32,
        _values: *const *const c_void,
    ) {
        out.check()?;
        out.set(module::load_image(image, context::current()?.handle)?)
    }

    fn cuModuleLoadFatBinary(out: Out<Handle>, image: *const u8) {
        out.check()?;
        out.set(module::load_image(image, context::current()?.handle)?)
    }

    fn cuModuleUnload(handle: Handle) {
        module::unload(handle)
    }

    fn cuModuleGetFunction(out: Out<Handle>, handle: Handle, name: Text) {
        out.check()?;
        out.set(module::function(&module::find(handle)?, name.get()?)?)
    }

    // `CU_MODULE_EAGER_LOADING`.
    fn cuModuleGetLoadingMode(mode: Out<u32>) {
        mode.set(1)
    }

    fn cuLibraryLoadData(
        out: Out<Handle>,
        image: *const u8,
        _compile_options: *const u32,
        _compile_values: *const *const c_void,
        _compile_count: u32,
        _options: *const u32,
        _values: *const *const c_void,
        _count: u32,
    ) {
        out.check()?;
        crate::simulator::simulator()?;
        out.set(module::load_image(image, 0)?)
    }

    fn cuLibraryLoadFromFile(
        out: Out<Handle>,
        path: Text,
        _compile_options: *const u32,
        _compile_values: *const *const c_void,
        _compile_count: u32,
        _options: *const u32,
        _values: *const *const c_void,
        _count: u32,
    ) {
        out.check()?;
        crate::simulator::simulator()?;
        out.set(module::load_path(path.get()?, 0)?)
    }

    fn cuLibraryUnload(handle: Handle) {
        module::unload(handle)
    }

    fn cuLibraryGetModule(out: Out<Handle>, handle: Handle) {
        out.set(module::find(handle)?.handle)
    }

    fn cuLibraryGetKernel(out: Out<Handle>, handle: Handle, name: Text) {
        out.check()?;
        out.set(module::function(&module::find(handle)?, name.get()?)?)
    }

    // A kernel is its function here, with the same handle.
    fn cuKernelGetFunction(out: Out<Handle>, kernel: Handle) {
        out.set(module::find_function(kernel)?.handle)
    }

    fn cuKernelGetLibrary(out: Out<Handle>, kernel: Handle) {
        out.set(module::find_function(kernel)?.module.handle)
    }

    fn cuKernelGetName(name: Out<*const c_char>, kernel: Handle) {
        name.set(module::find_function(kernel)?.name.as_ptr())
    }

    fn cuKernelGetAttribute(value: Out<i32>, attribute: u32, kernel: Handle, _device: i32) {
        value.set(attribute_of(module::find_function(kernel)?.as_ref(), attribute)?)
    }

    fn cuKernelSetAttribute(attribute: u32, value: i32, kernel: Handle, _device: i32) {
        set_attribute(module::find_function(kernel)?.as_ref(), attribute, value)
    }

    fn cuKernelSetCacheConfig(kernel: Handle, _config: u32, _device: i32) {
        module::find_function(kernel).map(drop)
    }

    fn cuKernelGetParamInfo(kernel: Handle, index: usize, offset: Out<usize>, bytes: Out<usize>) {
        parameter_info(module::find_function(kernel)?.as_ref(), index, &offset, &bytes)
    }

    fn cuFuncGetParamInfo(function: Handle, index: usize, offset: Out<usize>, bytes: Out<usize>) {
        parameter_info(module::find_function(function)?.as_ref(), index, &offset, &bytes)
    }

    fn cuFuncGetModule(out: Out<Handle>, function: Handle) {
        out.set(module::find_function(function)?.module.handle)
    }

    fn cuFuncGetName(name: Out<*const c_char>, function: Handle) {
        name.set(module::find_function(function)?.name.as_ptr())
    }

    fn cuFuncGetAttribute(value: Out<i32>, attribute: u32, function: Handle) {
        value.set(attribute_of(module::find_function(function)?.as_ref(), attribute)?)
    }

    fn simNeedStack(bytes: usize) {
        stack::need(context::current()?.as_ref(), bytes);
        Ok(())
    }

    fn simHold(name: Text, state: *const AtomicU32) {
        // SAFETY: the caller keeps it until the process ends.
        let state = unsafe { state.as_ref() }.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        hold::set(name.get()?, state);
        Ok(())
    }

    fn simInitJoined() {
        Ok(())
    }

    fn simTakeGrids(prefix: Text, blocks: *mut u32, room: usize, count: Out<usize>) {
        count.check()?;
        let taken = grids::take(context::current()?.device, prefix.get()?);
        for (index, ran) in taken.iter().take(room).enumerate() {
            // SAFETY: the caller has room for so many.
            unsafe { blocks.add(index).write(*ran) };
        }
        count.set(taken.len())
    }

    fn cuFuncSetAttribute(function: Handle, attribute: u32, value: i32) {
        set_attribute(module::find_function(function)?.as_ref(), attribute, value)
    }

    fn cuFuncSetCacheConfig(function: Handle, _config: u32) {
        module::find_function(function).map(drop)
    }

    fn cuFuncSetSharedMemConfig(function: Handle, _config: u32) {
        module::find_function(function).map(drop)
    }

    fn cuFuncLoad(function: Handle) {
        module::find_function(function).map(drop)
    }

    // `CU_FUNCTION_LOADING_STATE_LOADED`.
    fn cuFuncIsLoaded(state: Out<u32>, function: Handle) {
        module::find_function(function)?;
        state.set(1)
    }

    fn cuLaunchKernel / cuLaunchKernel_ptsz(
        function: Handle,
        grid_x: u32,
        grid_y: u32,
        grid_z: u32,
        block_x: u32,
        block_y: u32,
        block_z: u32,
        shared_bytes: u32,
        stream: Handle,
        parameters: Parameters,
        extra: Extra,
    ) {
        let shape = SimLaunch {
            grid: [grid_x, grid_y, grid_z],
            block: [block_x, block_y, block_z],
            shared_bytes,
            ..SimLaunch::default()
        };
        launch(function, shape, stream, parameters, &extra)
    }

    fn cuLaunchCooperativeKernel / cuLaunchCooperativeKernel_ptsz(
        function: Handle,
        grid_x: u32,
        grid_y: u32,
        grid_z: u32,
        block_x: u32,
        block_y: u32,
        block_z: u32,
        shared_bytes: u32,
        stream: Handle,
        parameters: Parameters,
    ) {
        let shape = SimLaunch {
            grid: [grid_x, grid_y, grid_z],
            block: [block_x, block_y, block_z],
            shared_bytes,
            cooperative: 1,
            ..SimLaunch::default()
        };
        launch(function, shape, stream, parameters, &In::none())
    }

    fn cuLaunchKernelEx / cuLaunchKernelEx_ptsz(
        configuration: In<LaunchConfiguration>,
        function: Handle,
        parameters: Parameters,
        extra: Extra,
    ) {
        let configuration = configuration.get()?;
        let shape = configuration.shape()?;
        launch(function, shape, configuration.stream, parameters, &extra)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: Out<i32>,
        function: Handle,
        block_threads: i32,
        shared_bytes: usize,
    ) {
        module::find_function(function)?;
        blocks.set(occupancy(block_threads, shared_bytes)?)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: Out<i32>,
        function: Handle,
        block_threads: i32,
        shared_bytes: usize,
        _flags: u32,
    ) {
        module::find_function(function)?;
        blocks.set(occupancy(block_threads, shared_bytes)?)
    }

    fn cuOccupancyMaxPotentialBlockSize(
        grid: Out<i32>,
        block: Out<i32>,
        function: Handle,
        _shared_bytes_of: *const c_void,
        shared_bytes: usize,
        limit: i32,
    ) {
        potential(&grid, &block, function, shared_bytes, limit)
    }

    fn cuOccupancyMaxPotentialBlockSizeWithFlags(
        grid: Out<i32>,
        block: Out<i32>,
        function: Handle,
        _shared_bytes_of: *const c_void,
        shared_bytes: usize,
        limit: i32,
        _flags: u32,
    ) {
        potential(&grid, &block, function, shared_bytes, limit)
    }

    fn cuOccupancyAvailableDynamicSMemPerBlock(
        bytes: Out<usize>,
        function: Handle,
        blocks: i32,
        _block_threads: i32,
    ) {
        module::find_function(function)?;
        let blocks = usize::try_from(blocks).ok().filter(|blocks| *blocks > 0).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        bytes.set((SHARED_BYTES_PER_MULTIPROCESSOR / blocks).saturating_sub(1024).min(SHARED_BYTES_MAX as usize))
    }

    fn cuOccupancyMaxPotentialClusterSize(size: Out<i32>, function: Handle, _configuration: In<LaunchConfiguration>) {
        module::find_function(function)?;
        size.set(8)
    }

    fn cuOccupancyMaxActiveClusters(count: Out<i32>, function: Handle, configuration: In<LaunchConfiguration>) {
        module::find_function(function)?;
        let shape = configuration.get()?.shape()?;
        let threads = shape.block.iter().product::<u32>() as i32;
        let per_multiprocessor = occupancy(threads, shape.shared_bytes as usize)?;
        let blocks = shape.cluster.iter().product::<u32>().max(1) as i32;
        count.set(per_multiprocessor * multiprocessors(context::current()?.device)? / blocks)
    }
}

impl LaunchConfiguration {
    fn shape(&self) -> Result<SimLaunch, Code> {
        let mut shape = SimLaunch {
            grid: self.grid,
            block: self.block,
            shared_bytes: self.shared_bytes,
            ..SimLaunch::default()
        };
        for attribute in In::from(self.attributes).list(self.attribute_count as usize)? {
            let [x, y, z, ..] = attribute.value;
            match attribute.id {
                LAUNCH_COOPERATIVE => shape.cooperative = u32::from(x != 0),
                LAUNCH_CLUSTER => shape.cluster = [x, y, z],
                // Hints on priority, caches and overlap have no effect on results.
                _ => {}
            }
        }
        Ok(shape)
    }
}

/// Makes a launch with a copy of its parameters, after the checks that the driver makes.
pub fn prepare(
    function: Handle,
    shape: SimLaunch,
    parameters: Parameters,
    extra: &Extra,
) -> Result<Arc<Launch>, Code> {
    let function = module::find_function(function)?;
    check_shape(&function, &shape)?;
    let launch = if extra.is_null() {
        Launch::from_pointers(function, shape, parameters)?
    } else {
        let (buffer, bytes) = read_extra(extra)?;
        Launch::from_buffer(function, shape, buffer, bytes)?
    };
    Ok(Arc::new(launch))
}

fn launch(
    function: Handle,
    shape: SimLaunch,
    stream: Handle,
    parameters: Parameters,
    extra: &Extra,
) -> Result<(), Code> {
    let stream = stream::find(stream)?;
    let shape = SimLaunch { device: stream.context.device, stream_id: stream.id, ..shape };
    let launch = prepare(function, shape, parameters, extra)?;
    stream::issue(&stream, Work::Kernel(launch)).map(drop)
}

fn check_shape(function: &Function, shape: &SimLaunch) -> Result<(), Code> {
    let threads: u64 = shape.block.iter().map(|size| u64::from(*size)).product();
    let blocks: u64 = shape.grid.iter().map(|size| u64::from(*size)).product();
    let said = if shape.cluster == UNSAID { [1; 3] } else { shape.cluster };
    let cluster: u32 = said.iter().product();
    let whole_clusters =
        shape.grid.iter().zip(said).all(|(grid, cluster)| cluster > 0 && grid.is_multiple_of(cluster));
    if threads == 0 || blocks == 0 || threads > u64::from(THREADS_PER_BLOCK_MAX) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if shape.cluster != UNSAID
        && crate::simulator::simulator()?.device(shape.device)?.capability < CLUSTERS_SINCE
    {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    if !whole_clusters || cluster > CLUSTER_BLOCKS_MAX {
        return Err(crate::code::CUDA_ERROR_INVALID_CLUSTER_SIZE);
    }
    if shape.shared_bytes as i32 > attribute_of(function, ATTRIBUTE_DYNAMIC_SHARED_MAX)? {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let resident = occupancy(threads as i32, shape.shared_bytes as usize)? * multiprocessors(shape.device)?;
    if shape.cooperative != 0 && blocks > resident as u64 {
        return Err(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
    }
    Ok(())
}

/// Keys of `extra`: 1 names the buffer, 2 points to its size.
fn read_extra(extra: &Extra) -> Result<(*const u8, usize), Code> {
    let (mut buffer, mut bytes) = (std::ptr::null(), 0);
    for pair in 0..8 {
        let key = extra.at(2 * pair)?;
        match key {
            0 => return Ok((buffer, bytes)),
            1 => buffer = extra.at(2 * pair + 1)? as *const u8,
            2 => bytes = In::from(extra.at(2 * pair + 1)? as *const usize).get()?,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
    Err(CUDA_ERROR_INVALID_VALUE)
}

fn attribute_of(function: &Function, attribute: u32) -> Result<i32, Code> {
    if attribute >= ATTRIBUTE_END {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let default = match attribute {
        ATTRIBUTE_THREADS_MAX => THREADS_PER_BLOCK_MAX as i32,
        ATTRIBUTE_REGISTERS => 32,
        ATTRIBUTE_PTX_VERSION | ATTRIBUTE_BINARY_VERSION => 90,
        ATTRIBUTE_DYNAMIC_SHARED_MAX => SHARED_BYTES_DEFAULT,
        9 => -1,
        _ => 0,
    };
    Ok(lock(&function.attributes).get(&attribute).copied().unwrap_or(default))
}

fn set_attribute(function: &Function, attribute: u32, value: i32) -> Result<(), Code> {
    let allowed = match attribute {
        ATTRIBUTE_DYNAMIC_SHARED_MAX => (0..=SHARED_BYTES_MAX).contains(&value),
        9..=15 => true,
        _ => false,
    };
    if !allowed {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    lock(&function.attributes).insert(attribute, value);
    Ok(())
}

fn parameter_info(
    function: &Function,
    index: usize,
    offset: &Out<usize>,
    bytes: &Out<usize>,
) -> Result<(), Code> {
    let own = *function.parameter_bytes.get(index).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let align = |at: usize, bytes: usize| at.next_multiple_of(1 << bytes.trailing_zeros().min(4));
    let before = function.parameter_bytes[..index].iter().fold(0, |at, bytes| align(at, *bytes) + bytes);
    offset.set(align(before, own))?;
    bytes.set_if_wanted(own);
    Ok(())
}

fn multiprocessors(device: i32) -> Result<i32, Code> {
    Ok(crate::simulator::simulator()?.device(device)?.multiprocessors)
}

fn occupancy(block_threads: i32, shared_bytes: usize) -> Result<i32, Code> {
    if block_threads <= 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let by_threads = THREADS_PER_MULTIPROCESSOR / (block_threads as u32).next_multiple_of(32) as i32;
    // A block takes 1 KiB of shared memory for the system.
    let by_shared = SHARED_BYTES_PER_MULTIPROCESSOR / (shared_bytes + 1024);
    Ok(by_threads.min(by_shared as i32).min(32))
}

fn potential(
    grid: &Out<i32>,
    block: &Out<i32>,
    function: Handle,
    shared_bytes: usize,
    limit: i32,
) -> Result<(), Code> {
    module::find_function(function).map_err(|_| CUDA_ERROR_INVALID_HANDLE)?;
    grid.check()?;
    let threads =
        if limit > 0 { limit.min(THREADS_PER_BLOCK_MAX as i32) } else { THREADS_PER_BLOCK_MAX as i32 };
    block.set(threads)?;
    grid.set(occupancy(threads, shared_bytes)? * multiprocessors(context::current()?.device)?)
}
