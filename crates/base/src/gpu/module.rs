//! Loads kernels: modules from bytes, loaded whole before they are needed. Launches them with attributes.

use std::ffi::{CStr, c_int, c_void};

use windlass_kernels::images::Image;

use crate::gpu::types::{Attribute, LaunchConfiguration};
use crate::gpu::{Driver, Failure, StreamHandle};

/// `CUlaunchAttributeID`.
const CLUSTER_DIMENSION: u32 = 4;
const PROGRAMMATIC_STREAM_SERIALIZATION: u32 = 6;
const MEM_SYNC_DOMAIN: u32 = 10;

/// `CUfunction_attribute`.
const NUM_REGS: u32 = 4;
const MAX_DYNAMIC_SHARED_SIZE_BYTES: u32 = 8;

/// The memory synchronisation domain of a kernel: which stores its fences wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryDomain {
    /// Those of ordinary kernels.
    #[default]
    Default,
    /// Those of NCCL's domain, so that fences of ordinary kernels do not wait for stores over NVLink.
    Remote,
}

/// When a kernel may begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// After all work before it in its stream.
    #[default]
    AfterStream,
    /// As soon as the kernel before it allows (programmatic serialization).
    WhenAllowed,
}

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Blocks of the grid.
    pub blocks: u32,
    /// Threads per block.
    pub threads: u32,
    /// Dynamic shared memory per block, bytes.
    pub shared_bytes: u32,
    /// Blocks per cluster, a divisor of `blocks`. 0: launch without the attribute.
    pub cluster: u32,
    /// Memory synchronisation domain.
    pub domain: MemoryDomain,
    /// When the kernel may begin.
    pub start: Start,
}

/// Loaded code. Dropping it unloads, which can wait for the device: only when nothing of ours runs.
#[derive(Debug)]
pub struct Module {
    driver: &'static Driver,
    handle: usize,
}

/// A kernel of a module. Its user must keep the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function(usize);

/// Loads the first image that the current context accepts, best first, and returns it with what `take` makes of its module; none if there are
/// no images. A device may refuse an image that was made for another one. `what` names the images in the log.
pub fn load_first<'a, T>(
    driver: &'static Driver,
    images: &'a [Image],
    what: &str,
    take: impl Fn(Module) -> Result<T, Failure>,
) -> Result<Option<(&'a Image, T)>, Failure> {
    let mut last = None;
    for image in images {
        match Module::of(driver, image).and_then(&take) {
            Ok(taken) => return Ok(Some((image, taken))),
            Err(failure) => {
                ::log::debug!("{what} {}: {failure}", image.name);
                last = Some(failure);
            }
        }
    }
    last.map_or(Ok(None), Err)
}

impl Module {
    /// Loads an image of ours into the current context. It is unpacked for each load: an unpacked copy would cost each process its size.
    fn of(driver: &'static Driver, image: &Image) -> Result<Module, Failure> {
        let damaged =
            |why| Failure::without_code("unpacking", "a damaged image", format!("{}: {why}", image.name));
        let code = image.unpack().map_err(damaged)?;
        // SAFETY: images of the kernels crate are whole.
        unsafe { Module::load(driver, &code) }
    }

    /// Loads a cubin, a fat binary or terminated PTX into the current context.
    ///
    /// # Safety
    /// `image` must be whole, as the driver finds its end by its format.
    pub unsafe fn load(driver: &'static Driver, image: &[u8]) -> Result<Module, Failure> {
        // SAFETY: the caller's guarantee. The driver keeps a copy of its own, also for what it loads later (cuLibraryLoadData's
        // option CU_LIBRARY_BINARY_IS_PRESERVED says what it otherwise does).
        let load =
            |handle: &mut usize| unsafe { (driver.calls.cuModuleLoadData)(handle, image.as_ptr().cast()) };
        let handle = driver.output("cuModuleLoadData", load, || format!("image bytes {}", image.len()))?;
        Ok(Module { driver, handle })
    }

    /// Finds a kernel and loads its code onto the device now. With lazy loading its first launch would load it, and that can wait for a kernel
    /// that waits for us.
    pub fn function(&self, name: &CStr, shared_bytes_max: u32) -> Result<Function, Failure> {
        let (calls, detail) = (&self.driver.calls, || format!("kernel {}", name.to_string_lossy()));
        // SAFETY: the name is terminated and the output a local.
        let find =
            |handle: &mut usize| unsafe { (calls.cuModuleGetFunction)(handle, self.handle, name.as_ptr()) };
        let handle = self.driver.output("cuModuleGetFunction", find, detail)?;
        // SAFETY: as above. Asking for an attribute loads the code.
        let load = |registers: &mut c_int| unsafe { (calls.cuFuncGetAttribute)(registers, NUM_REGS, handle) };
        self.driver.output("cuFuncGetAttribute", load, detail)?;
        if shared_bytes_max > 0 {
            let bytes = shared_bytes_max as c_int;
            // SAFETY: the function was found above.
            let code = unsafe { (calls.cuFuncSetAttribute)(handle, MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes) };
            self.driver
                .check("cuFuncSetAttribute", code, || format!("{}, shared bytes {bytes}", detail()))?;
        }
        Ok(Function(handle))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded by `load`; users of its functions are gone.
        let unload = || unsafe { (self.driver.calls.cuModuleUnload)(self.handle) };
        self.driver.release("cuModuleUnload", unload, String::new);
    }
}

impl Driver {
    /// Launches a kernel. Allocates nothing.
    ///
    /// # Safety
    /// `parameters` point to values of the kernel's parameters, in order and in number; what they name stays mapped
    /// until the kernel is done.
    pub unsafe fn launch(
        &self,
        function: Function,
        stream: StreamHandle,
        shape: &Shape,
        parameters: &mut [*mut c_void],
    ) -> Result<(), Failure> {
        let mut attributes = [Attribute { id: 0, pad: 0, value: [0; 16] }; 3];
        let mut count = 0;
        let mut add = |id, value: &[u32]| {
            attributes[count].id = id;
            attributes[count].value[..value.len()].copy_from_slice(value);
            count += 1;
        };
        if shape.cluster > 0 {
            add(CLUSTER_DIMENSION, &[shape.cluster, 1, 1]);
        }
        if shape.domain == MemoryDomain::Remote {
            add(MEM_SYNC_DOMAIN, &[1]);
        }
        if shape.start == Start::WhenAllowed {
            add(PROGRAMMATIC_STREAM_SERIALIZATION, &[1]);
        }
        let configuration = LaunchConfiguration {
            grid: [shape.blocks, 1, 1],
            block: [shape.threads, 1, 1],
            shared_bytes: shape.shared_bytes,
            stream: stream.0,
            attributes: attributes.as_ptr().cast(),
            attribute_count: count as u32,
        };
        // SAFETY: the configuration and its attributes are locals, which the driver reads during the call; the rest is
        // the caller's guarantee.
        let code = unsafe {
            (self.calls.cuLaunchKernelEx)(
                &configuration,
                function.0,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.check("cuLaunchKernelEx", code, || format!("stream {:#x}, {shape:?}", stream.0))
    }
}
