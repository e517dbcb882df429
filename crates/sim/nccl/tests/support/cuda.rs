//! The driver calls that scenarios make.

use libloading::os::unix::Library;

macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*);)*) => {
        pub struct Cuda {
            $(pub $field: unsafe extern "C" fn($($argument),*) -> i32,)*
            _library: Library,
        }

        impl Cuda {
            pub fn open() -> &'static Cuda {
                let library = unsafe { Library::new("libcuda.so.1") }.expect("the driver loads");
                Box::leak(Box::new(Cuda {
                    $($field: unsafe { *library.get(concat!($symbol, "\0").as_bytes()).expect($symbol) },)*
                    _library: library,
                }))
            }
        }
    };
}

functions! {
    init = "cuInit": fn(u32);
    primary = "cuDevicePrimaryCtxRetain": fn(*mut usize, i32);
    set_current = "cuCtxSetCurrent": fn(usize);
    stream_create = "cuStreamCreate": fn(*mut usize, u32);
    stream_destroy = "cuStreamDestroy_v2": fn(usize);
    stream_synchronize = "cuStreamSynchronize": fn(usize);
    stream_query = "cuStreamQuery": fn(usize);
    launch_host = "cuLaunchHostFunc": fn(usize, extern "C" fn(*mut libc::c_void), *mut libc::c_void);
    memory_alloc = "cuMemAlloc_v2": fn(*mut usize, usize);
    memory_free = "cuMemFree_v2": fn(usize);
    memory_info = "cuMemGetInfo_v2": fn(*mut usize, *mut usize);
    copy_to_host = "cuMemcpyDtoH_v2": fn(*mut libc::c_void, usize, usize);
    copy_to_device = "cuMemcpyHtoD_v2": fn(usize, *const libc::c_void, usize);
    pointer_attribute = "cuPointerGetAttribute": fn(*mut libc::c_void, u32, usize);
    address_range = "cuMemGetAddressRange_v2": fn(*mut usize, *mut usize, usize);
    retain_handle = "cuMemRetainAllocationHandle": fn(*mut u64, usize);
    release_handle = "cuMemRelease": fn(u64);
    export_handle = "cuMemExportToShareableHandle": fn(*mut i32, u64, u32, u64);
    create = "cuMemCreate": fn(*mut u64, usize, *const [u64; 4], u64);
    reserve = "cuMemAddressReserve": fn(*mut usize, usize, usize, usize, u64);
    map = "cuMemMap": fn(usize, usize, usize, u64, u64);
    set_access = "cuMemSetAccess": fn(usize, usize, *const [u32; 3], usize);
    unmap = "cuMemUnmap": fn(usize, usize);
    begin_capture = "cuStreamBeginCapture_v2": fn(usize, i32);
    end_capture = "cuStreamEndCapture": fn(usize, *mut usize);
    instantiate = "cuGraphInstantiateWithFlags": fn(*mut usize, usize, u64);
    graph_launch = "cuGraphLaunch": fn(usize, usize);
}

fn check(code: i32, what: &str) {
    assert_eq!(code, 0, "{what}");
}

impl Cuda {
    /// Makes the device's primary context current.
    pub fn use_device(&self, device: i32) {
        let mut context = 0;
        unsafe {
            check((self.init)(0), "cuInit");
            check((self.primary)(&mut context, device), "cuDevicePrimaryCtxRetain");
            check((self.set_current)(context), "cuCtxSetCurrent");
        }
    }

    pub fn stream(&self) -> usize {
        const NON_BLOCKING: u32 = 1;
        let mut stream = 0;
        unsafe { check((self.stream_create)(&mut stream, NON_BLOCKING), "cuStreamCreate") };
        stream
    }

    pub fn synchronize(&self, stream: usize) {
        unsafe { check((self.stream_synchronize)(stream), "cuStreamSynchronize") };
    }

    /// Whether all work of the stream has finished.
    pub fn is_idle(&self, stream: usize) -> bool {
        unsafe { (self.stream_query)(stream) == 0 }
    }

    pub fn allocate(&self, bytes: usize) -> usize {
        let mut address = 0;
        unsafe { check((self.memory_alloc)(&mut address, bytes), "cuMemAlloc") };
        address
    }

    /// Bytes of the current device that are free.
    pub fn free_bytes(&self) -> usize {
        let (mut free, mut total) = (0, 0);
        unsafe { check((self.memory_info)(&mut free, &mut total), "cuMemGetInfo") };
        free
    }

    /// Fresh memory of the current device `device`, as a handle that the caller releases.
    pub fn physical(&self, bytes: usize, device: usize) -> u64 {
        let (properties, mut handle) = ([1 | 1 << 32, 1 | (device as u64) << 32, 0, 0], 0);
        unsafe { check((self.create)(&mut handle, bytes, &properties, 0), "cuMemCreate") };
        handle
    }

    /// Addresses, at `hint` if it is not 0.
    pub fn addresses(&self, bytes: usize, hint: usize) -> usize {
        let mut at = 0;
        unsafe { check((self.reserve)(&mut at, bytes, 0, hint, 0), "cuMemAddressReserve") };
        at
    }

    /// Maps a whole handle at reserved addresses, and releases it.
    pub fn place(&self, at: usize, bytes: usize, handle: u64, device: usize) {
        unsafe {
            check((self.map)(at, bytes, 0, handle, 0), "cuMemMap");
            check((self.set_access)(at, bytes, &[1, device as u32, 3], 1), "cuMemSetAccess");
            check((self.release_handle)(handle), "cuMemRelease");
        }
    }

    /// Captures the work that `body` issues to the stream, and gives the executable graph.
    pub fn capture(&self, stream: usize, body: impl FnOnce()) -> usize {
        const RELAXED: i32 = 2;
        let (mut graph, mut executable) = (0, 0);
        unsafe {
            check((self.begin_capture)(stream, RELAXED), "cuStreamBeginCapture");
            body();
            check((self.end_capture)(stream, &mut graph), "cuStreamEndCapture");
            check((self.instantiate)(&mut executable, graph, 0), "cuGraphInstantiate");
        }
        executable
    }

    pub fn launch(&self, graph: usize, stream: usize) {
        unsafe { check((self.graph_launch)(graph, stream), "cuGraphLaunch") };
    }
}
