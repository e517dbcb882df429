//! Opens the driver and finds its functions.
//!
//! The names are the versioned ones that programs have linked for years (`_v2`), so that `dlsym` finds exactly the signatures below. We do
//! not use cudarc: its loader panics if a library or a function is missing, and its codes are Rust enums, for which a newer driver's code is
//! undefined behaviour.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use libloading::os::unix::Library;
use once_cell::sync::OnceCell;

use crate::gpu::Address;
use crate::gpu::failure::{Code, Failure, SUCCESS};
use crate::gpu::types::{AccessDescription, AllocationProperties, LaunchConfiguration};

/// `CUhostFn`.
pub type HostFunction = unsafe extern "C" fn(*mut c_void);

macro_rules! calls {
    ($(fn $name:ident($($argument:ty),* $(,)?);)*) => {
        /// The driver's functions, by its names.
        #[allow(non_snake_case, missing_docs)]
        #[derive(Clone, Copy, Debug)]
        pub struct Calls {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> Code,)*
        }

        #[cfg(test)]
        const NAMES: &[&str] = &[$(stringify!($name)),*];

        impl Calls {
            fn find(library: &Library) -> Result<Calls, Failure> {
                Ok(Calls {
                    $($name: {
                        // SAFETY: the signature is cuda.h's for this name; the library is never closed.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> Code>(
                                concat!(stringify!($name), "\0").as_bytes(),
                            )
                        };
                        *found.map_err(|_| missing(stringify!($name)))?
                    },)*
                })
            }
        }
    };
}

calls! {
    fn cuInit(c_uint);
    fn cuGetErrorName(Code, *mut *const c_char);
    fn cuDeviceGet(*mut c_int, c_int);
    fn cuDeviceGetCount(*mut c_int);
    fn cuDeviceGetUuid_v2(*mut [u8; 16], c_int);
    fn cuDeviceGetPCIBusId(*mut c_char, c_int, c_int);
    fn cuDeviceGetAttribute(*mut c_int, c_uint, c_int);
    fn cuDeviceTotalMem_v2(*mut usize, c_int);
    fn cuDeviceGetP2PAttribute(*mut c_int, c_uint, c_int, c_int);
    fn cuDevicePrimaryCtxRetain(*mut usize, c_int);
    fn cuDevicePrimaryCtxGetState(c_int, *mut c_uint, *mut c_int);
    fn cuCtxGetCurrent(*mut usize);
    fn cuCtxGetDevice(*mut c_int);
    fn cuCtxPushCurrent_v2(usize);
    fn cuCtxPopCurrent_v2(*mut usize);
    fn cuCtxGetId(usize, *mut u64);
    fn cuCtxSynchronize();
    fn cuThreadExchangeStreamCaptureMode(*mut c_uint);
    fn cuStreamCreate(*mut usize, c_uint);
    fn cuStreamDestroy_v2(usize);
    fn cuStreamSynchronize(usize);
    fn cuStreamGetId(usize, *mut u64);
    fn cuStreamGetCaptureInfo_v2(
        usize, *mut c_uint, *mut u64, *mut usize, *mut *const usize, *mut usize,
    );
    fn cuStreamUpdateCaptureDependencies(usize, *const usize, usize, c_uint);
    fn cuStreamWaitEvent(usize, usize, c_uint);
    fn cuEventCreate(*mut usize, c_uint);
    fn cuEventDestroy_v2(usize);
    fn cuEventRecordWithFlags(usize, usize, c_uint);
    fn cuEventQuery(usize);
    fn cuEventElapsedTime(*mut f32, usize, usize);
    fn cuMemsetD8Async(Address, u8, usize, usize);
    fn cuMemsetD32Async(Address, c_uint, usize, usize);
    fn cuMemcpyAsync(Address, Address, usize, usize);
    fn cuMemcpyDtoHAsync_v2(*mut c_void, Address, usize, usize);
    fn cuMemcpyHtoDAsync_v2(Address, *const c_void, usize, usize);
    fn cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    fn cuMemFreeHost(*mut c_void);
    fn cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    fn cuMemHostUnregister(*mut c_void);
    fn cuMemHostGetDevicePointer_v2(*mut Address, *mut c_void, c_uint);
    fn cuMemGetInfo_v2(*mut usize, *mut usize);
    fn cuMemGetAllocationGranularity(*mut usize, *const AllocationProperties, c_uint);
    fn cuMemAddressReserve(*mut Address, usize, usize, Address, u64);
    fn cuMemAddressFree(Address, usize);
    fn cuMemCreate(*mut u64, usize, *const AllocationProperties, u64);
    fn cuMemRelease(u64);
    fn cuMemMap(Address, usize, usize, u64, u64);
    fn cuMemUnmap(Address, usize);
    fn cuMemSetAccess(Address, usize, *const AccessDescription, usize);
    fn cuMemExportToShareableHandle(*mut c_void, u64, c_uint, u64);
    fn cuMemImportFromShareableHandle(*mut u64, *mut c_void, c_uint);
    fn cuMemRetainAllocationHandle(*mut u64, *mut c_void);
    fn cuPointerGetAttributes(c_uint, *const c_uint, *mut *mut c_void, Address);
    fn cuModuleLoadData(*mut usize, *const c_void);
    fn cuModuleUnload(usize);
    fn cuModuleGetFunction(*mut usize, usize, *const c_char);
    fn cuFuncGetAttribute(*mut c_int, c_uint, usize);
    fn cuFuncSetAttribute(usize, c_uint, c_int);
    fn cuLaunchKernelEx(*const LaunchConfiguration, usize, *mut *mut c_void, *mut *mut c_void);
    fn cuUserObjectCreate(*mut usize, *mut c_void, HostFunction, c_uint, c_uint);
    fn cuUserObjectRelease(usize, c_uint);
    fn cuGraphRetainUserObject(usize, usize, c_uint, c_uint);
    fn cuGraphGetNodes(usize, *mut usize, *mut usize);
    fn cuGraphNodeGetType(usize, *mut c_uint);
    fn cuGraphChildGraphNodeGetGraph(usize, *mut usize);
    fn cuGraphAddEventRecordNode(*mut usize, usize, *const usize, usize, usize);
    fn cuGraphEventRecordNodeGetEvent(usize, *mut usize);
    fn cuGraphEventRecordNodeSetEvent(usize, usize);
    fn cuGraphAddDependencies(usize, *const usize, *const usize, usize);
    fn cuGraphRemoveDependencies(usize, *const usize, *const usize, usize);
}

/// The first release of CUDA that has every function of the list, as `cuDriverGetVersion` gives it.
pub const CUDA_MIN: c_int = 12000;
/// The first driver of that release.
pub const DRIVER_MIN: u32 = 525;

/// The driver of this process.
#[derive(Debug)]
pub struct Driver {
    /// Its functions.
    pub calls: Calls,
}

static DRIVER: OnceCell<Driver> = OnceCell::new();

/// Set in the child of a fork: CUDA does not work there, and other threads of the parent may hold locks.
static FORKED: AtomicBool = AtomicBool::new(false);

extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// The driver, opened and initialised at the first call. A failure is not remembered.
pub fn driver() -> Result<&'static Driver, Failure> {
    DRIVER.get_or_try_init(|| Driver::open(c"libcuda.so.1"))
}

/// The driver, if it was opened before. Opens nothing.
pub fn opened() -> Option<&'static Driver> {
    DRIVER.get()
}

impl Driver {
    /// Opens a driver by the library name that the loader knows. The library stays open.
    pub fn open(name: &CStr) -> Result<Driver, Failure> {
        // SAFETY: every CUDA program runs this library's constructors; its text is the driver's or a simulator's.
        let library = unsafe { Library::open(Some(name.to_string_lossy().as_ref()), libc::RTLD_NOW) };
        let library = library.map_err(|error| {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            Failure::without_code("dlopen", "an error", cause.unwrap_or_else(|| error.to_string()))
        })?;
        let driver = Driver::of(Calls::find(&library)?);
        std::mem::forget(library);
        // SAFETY: 0 is the only flag there is; repeating it is harmless.
        driver.check("cuInit", unsafe { (driver.calls.cuInit)(0) }, || "flags 0".into())?;
        Ok(driver)
    }

    /// Makes a driver of the given functions.
    pub fn of(calls: Calls) -> Driver {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            nccl_sys::open::stay_mapped();
            // SAFETY: a function of this library, which stays mapped.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        });
        // A driver that is made here is of this process, also where its parent's could not be opened.
        FORKED.store(false, Ordering::Relaxed);
        Driver { calls }
    }

    /// Whether this process was forked off one that had opened the driver. No call of the driver works then.
    #[inline]
    pub fn is_in_forked_child(&self) -> bool {
        FORKED.load(Ordering::Relaxed)
    }

    /// Turns a code into a result. Calls `detail` only on failure.
    pub fn check(
        &self,
        call: &'static str,
        code: Code,
        detail: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        if code == SUCCESS { Ok(()) } else { Err(Failure::of(self, call, code, detail())) }
    }

    /// What a call of the driver gives by its one output. `ask` makes the call.
    pub fn output<T: Default>(
        &self,
        call: &'static str,
        ask: impl FnOnce(&mut T) -> Code,
        detail: impl FnOnce() -> String,
    ) -> Result<T, Failure> {
        let mut output = T::default();
        self.check(call, ask(&mut output), detail)?;
        Ok(output)
    }

    /// Makes a destructor's call, which gives something back. Makes none in a forked child, where it could not work.
    pub fn release(
        &self,
        call: &'static str,
        give_back: impl FnOnce() -> Code,
        detail: impl FnOnce() -> String,
    ) {
        if !self.is_in_forked_child() {
            self.note(call, give_back(), detail);
        }
    }

    /// Logs a failed call of a destructor, which can return no error, unless the process is exiting.
    pub fn note(&self, call: &'static str, code: Code, detail: impl FnOnce() -> String) {
        if code != SUCCESS && code != super::failure::DEINITIALIZED {
            ::log::warn!("{}", Failure::of(self, call, code, detail()));
        }
    }
}

fn missing(name: &'static str) -> Failure {
    Failure::without_code(
        name,
        "nothing",
        "this libcuda does not have it; driver 525 (CUDA 12.0) is the oldest that will do".into(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Functions of the list that CUDA 11.4 lacks, each with the first release that has it.
    const NEWER: [(&str, c_int); 3] =
        [("cuLaunchKernelEx", 11080), ("cuCtxGetId", 12000), ("cuStreamGetId", 12000)];

    /// The newest function decides what driver is needed.
    #[test]
    fn oldest_driver() {
        assert_eq!(NAMES.len(), 70, "a new function: which release of CUDA has it first?");
        assert!(NEWER.iter().all(|(name, _)| NAMES.contains(name)));
        assert_eq!(NEWER.map(|(_, since)| since).into_iter().max(), Some(CUDA_MIN));
        let said = format!("driver {DRIVER_MIN} (CUDA {}.{})", CUDA_MIN / 1000, CUDA_MIN / 10 % 100);
        assert!(missing("cuInit").to_string().contains(&said), "{said}");
    }
}
