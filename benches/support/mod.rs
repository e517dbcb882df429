//! The same functions twice: in a library that does nothing, and through Windlass over that library.

use std::ffi::{c_int, c_void};
use std::path::PathBuf;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use nccl_sys::*;

pub type AllReduce = unsafe extern "C" fn(
    *const c_void,
    *mut c_void,
    usize,
    ncclDataType_t,
    ncclRedOp_t,
    ncclComm_t,
    cudaStream_t,
) -> ncclResult_t;
pub type Count = unsafe extern "C" fn(ncclComm_t, *mut c_int) -> ncclResult_t;
pub type Version = unsafe extern "C" fn(*mut c_int) -> ncclResult_t;
pub type Group = unsafe extern "C" fn() -> ncclResult_t;

pub struct Functions {
    pub all_reduce: AllReduce,
    pub count: Count,
    pub version: Version,
    pub group_start: Group,
    pub group_end: Group,
}

impl Functions {
    fn of(file: &str) -> Functions {
        let path = built(file);
        // SAFETY: our own libraries, whose functions have these signatures; never closed.
        unsafe {
            let library = Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL)
                .expect("run scripts/overhead, which builds it");
            let functions = Functions {
                all_reduce: *library.get::<AllReduce>(b"ncclAllReduce\0").expect("exported"),
                count: *library.get::<Count>(b"ncclCommCount\0").expect("exported"),
                version: *library.get::<Version>(b"ncclGetVersion\0").expect("exported"),
                group_start: *library.get::<Group>(b"ncclGroupStart\0").expect("exported"),
                group_end: *library.get::<Group>(b"ncclGroupEnd\0").expect("exported"),
            };
            std::mem::forget(library);
            functions
        }
    }

    /// Direct, and through Windlass. Reports once that both are what they should be.
    pub fn both() -> (Functions, Functions) {
        // SAFETY: no other thread runs yet.
        unsafe {
            std::env::set_var("WINDLASS_NCCL", built("libsim_null.so"));
            std::env::set_var("WINDLASS_STATS", "on");
        }
        let (direct, through) = (Functions::of("libsim_null.so"), Functions::of("libwindlass.so"));
        assert_ne!(direct.count as usize, through.count as usize);
        let mut ranks = 0;
        // SAFETY: the null library accepts any handle.
        unsafe { (through.count)(handle(), &mut ranks) };
        assert_eq!(ranks, 2, "Windlass did not reach the null library");
        (direct, through)
    }

    pub fn call_all_reduce(&self) {
        let null = std::ptr::null_mut();
        // SAFETY: the null library reads nothing.
        unsafe { (self.all_reduce)(null, null, 1024, ncclFloat32, ncclSum, handle(), std::ptr::null_mut()) };
    }

    pub fn call_version(&self) {
        let mut version = 0;
        // SAFETY: the output is a local.
        unsafe { (self.version)(&mut version) };
    }

    pub fn call_count(&self) {
        let mut ranks = 0;
        // SAFETY: the output is a local.
        unsafe { (self.count)(handle(), &mut ranks) };
    }

    pub fn call_group(&self) {
        // SAFETY: no arguments.
        unsafe {
            (self.group_start)();
            (self.group_end)();
        }
    }
}

/// What the null library takes for a communicator.
fn handle() -> ncclComm_t {
    0x5000 as ncclComm_t
}

fn built(file: &str) -> PathBuf {
    let program = std::env::current_exe().expect("a path");
    program
        .ancestors()
        .map(|folder| folder.join(file))
        .find(|path| path.exists())
        .unwrap_or_else(|| file.into())
}
