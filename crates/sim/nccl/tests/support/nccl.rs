//! The simulator under test, through its C interface.

use libloading::os::unix::Library;
use std::ffi::CStr;

#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Comm(pub usize);

pub const SUCCESS: i32 = 0;
pub const SYSTEM_ERROR: i32 = 2;
pub const REMOTE_ERROR: i32 = 6;
pub const INTERNAL_ERROR: i32 = 3;
pub const INVALID_ARGUMENT: i32 = 4;
pub const INVALID_USAGE: i32 = 5;
pub const IN_PROGRESS: i32 = 7;
pub const INT8: i32 = 0;
pub const INT32: i32 = 2;
pub const FLOAT32: i32 = 7;
pub const SUM: i32 = 0;
pub const AVERAGE: i32 = 4;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; 128]);

/// `ncclConfig_t` of 2.28.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Config {
    pub size: usize,
    pub magic: u32,
    pub version: u32,
    pub blocking: i32,
    pub cga: i32,
    pub least: i32,
    pub most: i32,
    pub net: usize,
    pub split_share: i32,
    pub traffic: i32,
    pub name: usize,
    pub rest: [i32; 6],
}

/// `ncclSimInfo_t`.
#[repr(C)]
pub struct SimInfo {
    pub size: usize,
    pub magic: u32,
    pub version: u32,
    pub time: f32,
}

impl Default for Config {
    fn default() -> Self {
        let none = i32::MIN;
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 22809,
            blocking: none,
            cga: none,
            least: none,
            most: none,
            net: 0,
            split_share: none,
            traffic: none,
            name: 0,
            rest: [none; 6],
        }
    }
}

macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*);)*) => {
        pub struct Nccl {
            $(pub $field: unsafe extern "C" fn($($argument),*) -> i32,)*
            pub get_last_error: unsafe extern "C" fn(usize) -> *const libc::c_char,
            pub library: Library,
        }

        impl Nccl {
            pub fn open() -> &'static Nccl {
                let library = unsafe { Library::new("libnccl.so.2") }.expect("the simulator loads");
                Box::leak(Box::new(Nccl {
                    $($field: unsafe { *library.get(concat!($symbol, "\0").as_bytes()).expect($symbol) },)*
                    get_last_error: unsafe { *library.get(b"ncclGetLastError\0").expect("ncclGetLastError") },
                    library,
                }))
            }
        }
    };
}

functions! {
    get_unique_id = "ncclGetUniqueId": fn(*mut UniqueId);
    get_version = "ncclGetVersion": fn(*mut i32);
    init_rank_config = "ncclCommInitRankConfig": fn(*mut Comm, i32, UniqueId, i32, *mut Config);
    init_rank_c = "ncclCommInitRank": fn(*mut Comm, i32, UniqueId, i32);
    init_rank_scalable = "ncclCommInitRankScalable": fn(*mut Comm, i32, i32, i32, *mut UniqueId, *mut Config);
    group_simulate_end = "ncclGroupSimulateEnd": fn(*mut SimInfo);
    init_all = "ncclCommInitAll": fn(*mut Comm, i32, *const i32);
    finalize = "ncclCommFinalize": fn(Comm);
    destroy_c = "ncclCommDestroy": fn(Comm);
    abort = "ncclCommAbort": fn(Comm);
    revoke = "ncclCommRevoke": fn(Comm, i32);
    split = "ncclCommSplit": fn(Comm, i32, i32, *mut Comm, *mut Config);
    shrink = "ncclCommShrink": fn(Comm, *mut i32, i32, *mut Comm, *mut Config, i32);
    async_error = "ncclCommGetAsyncError": fn(Comm, *mut i32);
    count = "ncclCommCount": fn(Comm, *mut i32);
    user_rank = "ncclCommUserRank": fn(Comm, *mut i32);
    device = "ncclCommCuDevice": fn(Comm, *mut i32);
    mem_alloc = "ncclMemAlloc": fn(*mut usize, usize);
    mem_free = "ncclMemFree": fn(usize);
    register = "ncclCommRegister": fn(Comm, usize, usize, *mut usize);
    deregister = "ncclCommDeregister": fn(Comm, usize);
    window_register = "ncclCommWindowRegister": fn(Comm, usize, usize, *mut usize, i32);
    window_deregister = "ncclCommWindowDeregister": fn(Comm, usize);
    pre_mul_sum = "ncclRedOpCreatePreMulSum": fn(*mut i32, *const u8, i32, i32, Comm);
    operator_destroy = "ncclRedOpDestroy": fn(i32, Comm);
    all_reduce = "ncclAllReduce": fn(usize, usize, usize, i32, i32, Comm, usize);
    reduce = "ncclReduce": fn(usize, usize, usize, i32, i32, i32, Comm, usize);
    broadcast = "ncclBroadcast": fn(usize, usize, usize, i32, i32, Comm, usize);
    bcast = "ncclBcast": fn(usize, usize, i32, i32, Comm, usize);
    all_gather = "ncclAllGather": fn(usize, usize, usize, i32, Comm, usize);
    reduce_scatter = "ncclReduceScatter": fn(usize, usize, usize, i32, i32, Comm, usize);
    all_to_all = "ncclAlltoAll": fn(usize, usize, usize, i32, Comm, usize);
    gather = "ncclGather": fn(usize, usize, usize, i32, i32, Comm, usize);
    scatter = "ncclScatter": fn(usize, usize, usize, i32, i32, Comm, usize);
    send = "ncclSend": fn(usize, usize, i32, i32, Comm, usize);
    recv = "ncclRecv": fn(usize, usize, i32, i32, Comm, usize);
    group_start = "ncclGroupStart": fn();
    group_end = "ncclGroupEnd": fn();
}

impl Nccl {
    pub fn init_rank(&self, ranks: usize, id: [u8; 128], rank: usize) -> Result<Comm, i32> {
        let mut comm = Comm(0);
        match unsafe { (self.init_rank_c)(&mut comm, ranks as i32, UniqueId(id), rank as i32) } {
            SUCCESS => Ok(comm),
            code => Err(code),
        }
    }

    pub fn destroy(&self, comm: Comm) -> i32 {
        unsafe { (self.destroy_c)(comm) }
    }

    pub fn last_error(&self) -> String {
        unsafe { CStr::from_ptr((self.get_last_error)(0)) }.to_string_lossy().into_owned()
    }

    /// Runs `body` inside a group.
    pub fn group(&self, body: impl FnOnce()) -> i32 {
        assert_eq!(unsafe { (self.group_start)() }, SUCCESS);
        body();
        unsafe { (self.group_end)() }
    }

    /// Calls one of the simulator's own counters, such as `simRegistrations`.
    pub fn ask(&self, question: &str, comm: Comm) -> u64 {
        type Question = unsafe extern "C" fn(Comm) -> u64;
        unsafe { self.library.get::<Question>(question.as_bytes()).expect(question)(comm) }
    }

    pub fn allocate(&self, bytes: usize) -> usize {
        let mut address = 0;
        assert_eq!(unsafe { (self.mem_alloc)(&mut address, bytes) }, SUCCESS);
        address
    }
}
