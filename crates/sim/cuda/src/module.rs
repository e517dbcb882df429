//! Modules: shared objects whose functions run as kernels. The crate's documentation says what a module must export.

use crate::clock::{self, RawWork};
use crate::code::{
    CUDA_ERROR_FILE_NOT_FOUND, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_NOT_FOUND, Code,
};
use crate::grids;
use crate::guard;
use crate::simulator::simulator;
use crate::stack;
use crate::sync::lock;
use crate::table::Handle;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, OsStr, c_void};
use std::mem::MaybeUninit;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::{Arc, Mutex};

/// The start of an image that names a shared object; its terminated path follows.
pub const IMAGE_PREFIX: &[u8] = b"windlass-sim:";

/// `e_machine` of an ELF file of device code.
const EM_CUDA: u16 = 190;

/// The first argument of every kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct SimLaunch {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    /// 1 for a cooperative launch.
    pub cooperative: u32,
    /// Blocks per cluster; 0, 0, 0 for a launch without a cluster size, which kernels see as 1, 1, 1.
    pub cluster: [u32; 3],
    pub device: i32,
    pub stream_id: u64,
}

/// [`SimLaunch::cluster`] of a launch without a cluster size.
pub const UNSAID: [u32; 3] = [0; 3];

type Kernel = unsafe extern "C" fn(*const SimLaunch, *mut *mut c_void);
type TellWork = unsafe extern "C" fn(*const *mut c_void, *mut RawWork);

pub struct Module {
    pub handle: Handle,
    pub context: Handle,
    object: usize,
    functions: Mutex<BTreeMap<CString, Handle>>,
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: opened by us once; launches hold their module, so none of its code is running.
        unsafe { libc::dlclose(self.object as *mut c_void) };
    }
}

pub struct Function {
    pub handle: Handle,
    pub name: CString,
    pub module: Arc<Module>,
    pub parameter_bytes: Vec<usize>,
    pub attributes: Mutex<BTreeMap<u32, i32>>,
    kernel: Kernel,
    /// The kernel's `_work` function, for the modelled clock.
    tell_work: Option<TellWork>,
}

/// One kernel launch with its own copy of the parameters.
#[derive(Clone)]
pub struct Launch {
    pub function: Arc<Function>,
    pub shape: SimLaunch,
    /// Storage aligned for every parameter type.
    parameters: Vec<Vec<u128>>,
}

pub fn load_path(path: &CStr, context: Handle) -> Result<Handle, Code> {
    // SAFETY: the path is terminated; constructors of the object are the application's own code.
    let object = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if object.is_null() {
        crate::report::line(format_args!(
            "cannot load module {}: {}",
            path.to_string_lossy(),
            last_loader_error()
        ));
        return Err(CUDA_ERROR_FILE_NOT_FOUND);
    }
    let functions = Mutex::default();
    let make = |handle| Module { handle, context, object: object as usize, functions };
    Ok(simulator()?.modules.insert(make).handle)
}

/// Loads a module from an image in memory: one that names a shared object after [`IMAGE_PREFIX`], or device code. For device code
/// `libsim_kernels.so` beside this library is loaded, and without that the image is refused.
pub fn load_image(image: *const u8, context: Handle) -> Result<Handle, Code> {
    if image.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if begins_with(image, IMAGE_PREFIX) {
        // SAFETY: after our prefix comes a terminated path.
        let path = unsafe { CStr::from_ptr(image.add(IMAGE_PREFIX.len()).cast()) };
        return load_path(path, context);
    }
    if !is_device_code(image) {
        return Err(CUDA_ERROR_INVALID_IMAGE);
    }
    match kernels_beside_us() {
        Ok(kernels) => load_path(&kernels, context),
        Err(missing) => {
            crate::report::line(format_args!("device code cannot run: {missing}"));
            Err(CUDA_ERROR_INVALID_IMAGE)
        }
    }
}

/// Whether an image begins with these bytes. Images carry no length, so nothing is read behind the first difference.
fn begins_with(image: *const u8, expected: &[u8]) -> bool {
    // SAFETY: the image goes on as long as it is what is expected.
    expected.iter().enumerate().all(|(offset, byte)| unsafe { image.add(offset).read() } == *byte)
}

/// Whether an image is a cubin or PTX: a text whose first word after comments and space is `.version`.
fn is_device_code(image: *const u8) -> bool {
    if begins_with(image, b"\x7fELF\x02\x01") {
        // SAFETY: the header of an ELF file is 64 bytes long; the machine stands at 18.
        let machine = unsafe { image.add(18).cast::<u16>().read_unaligned() };
        return machine == EM_CUDA;
    }
    // SAFETY: a text ends with a zero byte; whatever else begins so is not read further.
    let byte = |at: usize| unsafe { image.add(at).read() };
    let mut at = 0;
    loop {
        match byte(at) {
            b'/' if byte(at + 1) == b'/' => {
                while !matches!(byte(at), b'\n' | 0) {
                    at += 1;
                }
            }
            white if white.is_ascii_whitespace() => at += 1,
            // SAFETY: within the text.
            _ => return begins_with(unsafe { image.add(at) }, b".version "),
        }
    }
}

/// The path of `libsim_kernels.so` in this library's folder, behind symbolic links, through which programs may load it. Else says what is
/// missing.
fn kernels_beside_us() -> Result<CString, String> {
    let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the address is one of this library's, the output a local; zeros are a whole answer.
    let own = unsafe {
        libc::dladdr(kernels_beside_us as *const c_void, found.as_mut_ptr());
        found.assume_init().dli_fname
    };
    if own.is_null() {
        return Err("the simulator's CUDA library has no path".into());
    }
    // SAFETY: not null, see above: the loader's own name of this library, which stays loaded.
    let own = unsafe { CStr::from_ptr(own) };
    let own = OsStr::from_bytes(own.to_bytes());
    let own = std::fs::canonicalize(own).map_err(|error| format!("{}: {error}", own.display()))?;
    let kernels = own.with_file_name("libsim_kernels.so");
    if !kernels.exists() {
        return Err(format!("{} is missing beside the simulator's CUDA library", kernels.display()));
    }
    CString::new(kernels.into_os_string().into_vec()).map_err(|error| error.to_string())
}

pub fn unload(handle: Handle) -> Result<(), Code> {
    let simulator = simulator()?;
    let module = simulator.modules.remove(handle).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    for function in std::mem::take(&mut *lock(&module.functions)).into_values() {
        simulator.functions.remove(function);
    }
    Ok(())
}

pub fn find(handle: Handle) -> Result<Arc<Module>, Code> {
    simulator()?.modules.get(handle).ok_or(CUDA_ERROR_INVALID_HANDLE)
}

pub fn find_function(handle: Handle) -> Result<Arc<Function>, Code> {
    simulator()?.functions.get(handle).ok_or(CUDA_ERROR_INVALID_HANDLE)
}

/// The handle of the function with this name, the same each time.
pub fn function(module: &Arc<Module>, name: &CStr) -> Result<Handle, Code> {
    let mut functions = lock(&module.functions);
    if let Some(handle) = functions.get(name) {
        return Ok(*handle);
    }
    let kernel = module.symbol(name).ok_or(CUDA_ERROR_NOT_FOUND)?;
    let beside = |suffix: &[u8]| {
        CString::new([name.to_bytes(), suffix].concat()).map_err(|_| CUDA_ERROR_INVALID_VALUE)
    };
    let parameters = beside(b"_params")?;
    let Some(sizes) = module.symbol(&parameters) else {
        crate::report::line(format_args!("the module has {name:?} but lacks {parameters:?}"));
        return Err(CUDA_ERROR_NOT_FOUND);
    };
    let parameter_bytes = read_sizes(sizes.cast_const().cast());
    // SAFETY: whoever exports the name beside its `_params` guarantees the kernel's signature.
    let kernel = unsafe { std::mem::transmute::<*mut c_void, Kernel>(kernel) };
    let tell_work = module.symbol(&beside(b"_work")?);
    // SAFETY: as of the kernel.
    let tell_work = tell_work.map(|tell| unsafe { std::mem::transmute::<*mut c_void, TellWork>(tell) });
    let function = simulator()?.functions.insert(|handle| Function {
        handle,
        name: name.to_owned(),
        module: module.clone(),
        parameter_bytes,
        attributes: Mutex::default(),
        kernel,
        tell_work,
    });
    functions.insert(name.to_owned(), function.handle);
    Ok(function.handle)
}

impl Module {
    fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the object is open as long as `self` lives.
        let symbol = unsafe { libc::dlsym(self.object as *mut c_void, name.as_ptr()) };
        (!symbol.is_null()).then_some(symbol)
    }
}

/// Reads `{ uint32_t count; uint32_t bytes[count]; }`.
fn read_sizes(table: *const u32) -> Vec<usize> {
    // SAFETY: exported by the module in this layout, as the crate's documentation asks.
    let count = unsafe { table.read() } as usize;
    // SAFETY: `count` sizes follow.
    (1..=count).map(|index| unsafe { table.add(index).read() } as usize).collect()
}

fn last_loader_error() -> String {
    // SAFETY: gives null or a terminated string that lives until the next loader call of this thread.
    let error = unsafe { libc::dlerror() };
    if error.is_null() {
        return "no reason given".into();
    }
    // SAFETY: not null, see above.
    unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned()
}

impl Launch {
    /// Copies the parameters from an array of pointers to them, as `kernelParams` is.
    pub fn from_pointers(
        function: Arc<Function>,
        shape: SimLaunch,
        pointers: *const *const u8,
    ) -> Result<Self, Code> {
        if pointers.is_null() && !function.parameter_bytes.is_empty() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let copy = |(index, bytes): (usize, &usize)| {
            // SAFETY: the application passes as many pointers as the kernel has parameters.
            let from = unsafe { pointers.add(index).read() };
            if from.is_null() { Err(CUDA_ERROR_INVALID_VALUE) } else { Ok(copy_bytes(from, *bytes)) }
        };
        let parameters = function.parameter_bytes.iter().enumerate().map(copy).collect::<Result<_, _>>()?;
        Ok(Launch { function, shape, parameters })
    }

    /// Copies the parameters from the buffer that `extra` names, in which each has its natural alignment.
    pub fn from_buffer(
        function: Arc<Function>,
        shape: SimLaunch,
        buffer: *const u8,
        bytes_max: usize,
    ) -> Result<Self, Code> {
        let mut offset = 0_usize;
        let mut parameters = Vec::new();
        for bytes in &function.parameter_bytes {
            let alignment = 1 << bytes.trailing_zeros().min(4);
            offset = offset.next_multiple_of(alignment);
            if buffer.is_null() || offset + bytes > bytes_max {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            // SAFETY: within the buffer that the application describes.
            parameters.push(copy_bytes(unsafe { buffer.add(offset) }, *bytes));
            offset += bytes;
        }
        Ok(Launch { function, shape, parameters })
    }

    /// What a graph runs after an update from `former` to this launch. Seen on driver 580: if this launch has no cluster size, the former one
    /// stays, and only whole clusters of the new grid run, perhaps none.
    pub fn updating(self: &Arc<Launch>, former: &Launch) -> Arc<Launch> {
        if self.shape.cluster != UNSAID || former.shape.cluster == UNSAID {
            return self.clone();
        }
        let mut launch = Launch::clone(self);
        launch.shape.cluster = former.shape.cluster;
        for (blocks, cluster) in launch.shape.grid.iter_mut().zip(former.shape.cluster) {
            *blocks -= *blocks % cluster.max(1);
        }
        Arc::new(launch)
    }

    pub fn run(&self) {
        if self.shape.grid.contains(&0) {
            return;
        }
        grids::ran(self);
        let cluster = if self.shape.cluster == UNSAID { [1; 3] } else { self.shape.cluster };
        let shape = SimLaunch { cluster, ..self.shape };
        let mut pointers: Vec<*mut c_void> =
            self.parameters.iter().map(|parameter| parameter.as_ptr().cast_mut().cast()).collect();
        // Read before the kernel runs: the lists that its parameters name may be overwritten once it has ended.
        let work = if clock::is_modelled() { self.work(&pointers) } else { None };
        stack::while_running(self.function.module.context, || {
            guard::forbidding_calls(|| {
                // SAFETY: the kernel has this signature (see `function`), and every pointer leads to a parameter's copy.
                unsafe { (self.function.kernel)(&shape, pointers.as_mut_ptr()) }
            });
        });
        work.iter().for_each(|work| clock::pass(self.shape.device, work));
    }

    fn work(&self, parameters: &[*mut c_void]) -> Option<clock::Work> {
        let mut work = RawWork::NONE;
        // SAFETY: the function has this signature (see `function`), and every pointer leads to a parameter's copy.
        unsafe { self.function.tell_work?(parameters.as_ptr(), &mut work) };
        work.read()
    }
}

fn copy_bytes(from: *const u8, bytes: usize) -> Vec<u128> {
    let mut copy = vec![0_u128; bytes.div_ceil(16)];
    // SAFETY: the application passes `bytes` readable bytes, and the copy has room for them.
    unsafe { std::ptr::copy_nonoverlapping(from, copy.as_mut_ptr().cast(), bytes) };
    copy
}
