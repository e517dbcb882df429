//! Exports for initialisation, versions, error texts, and entry points by name.

use super::names;
use crate::code::{self, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND, Code};
use crate::ffi::{In, Out, Text};
use crate::simulator::{self, DRIVER_VERSION};
use std::ffi::{CString, c_char, c_void};

/// `CUdriverProcAddressQueryResult`.
const QUERY_SUCCESS: u32 = 0;
const QUERY_NOT_FOUND: u32 = 1;
const QUERY_VERSION_NOT_SUFFICIENT: u32 = 2;

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const FLAG_PER_THREAD: u64 = 2;

exports! {
    fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        simulator::start()
    }

    fn cuDriverGetVersion(version: Out<i32>) {
        version.set(DRIVER_VERSION)
    }

    fn cuGetErrorString(error: Code, text: Out<*const c_char>) {
        describe(error, &text, |(_, text)| text.as_ptr())
    }

    fn cuGetErrorName(error: Code, text: Out<*const c_char>) {
        describe(error, &text, |(name, _)| name.as_ptr())
    }

    fn cuGetProcAddress_v2(
        symbol: Text,
        function: Out<*mut c_void>,
        version: i32,
        flags: u64,
        status: Out<u32>,
    ) {
        resolve(&symbol, &function, version, flags, &status)
    }

    fn cuGetProcAddress(symbol: Text, function: Out<*mut c_void>, version: i32, flags: u64) {
        let mut status = 0;
        let found = resolve(&symbol, &function, version, flags, &Out::to(&mut status));
        if found.is_ok() && status != QUERY_SUCCESS { Err(CUDA_ERROR_NOT_FOUND) } else { found }
    }

    // There is no profiler to start or stop.
    fn cuProfilerStart() {
        simulator::simulator().map(drop)
    }

    fn cuProfilerStop() {
        simulator::simulator().map(drop)
    }

    // The tables behind this call are the CUDA runtime's private way into the driver; the simulator has none.
    fn cuGetExportTable(table: Out<*const c_void>, id: In<[u8; 16]>) {
        id.get()?;
        table.set(std::ptr::null())?;
        Err(CUDA_ERROR_NOT_FOUND)
    }
}

fn describe(
    error: Code,
    text: &Out<*const c_char>,
    pick: impl FnOnce((&'static std::ffi::CStr, &'static std::ffi::CStr)) -> *const c_char,
) -> Result<(), Code> {
    match code::describe(error) {
        Some(found) => text.set(pick(found)),
        None => {
            text.set(std::ptr::null())?;
            Err(CUDA_ERROR_INVALID_VALUE)
        }
    }
}

fn resolve(
    symbol: &Text,
    function: &Out<*mut c_void>,
    version: i32,
    flags: u64,
    status: &Out<u32>,
) -> Result<(), Code> {
    function.check()?;
    let name = symbol.get()?.to_str().map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
    if flags & !3 != 0 || flags == 3 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let exported = match names::exported(name, version) {
        names::Resolution::Name(exported) => exported,
        names::Resolution::TooOld => {
            function.set(std::ptr::null_mut())?;
            status.set_if_wanted(QUERY_VERSION_NOT_SUFFICIENT);
            return Ok(());
        }
    };
    let twins = [format!("{exported}_ptsz"), format!("{exported}_ptds")];
    let wanted = twins.iter().filter(|_| flags & FLAG_PER_THREAD != 0).chain([&exported]);
    let found = wanted.filter_map(|name| own_symbol(name)).next();
    function.set(found.unwrap_or(std::ptr::null_mut()))?;
    match found {
        Some(_) => status.set_if_wanted(QUERY_SUCCESS),
        None if status.is_null() => return Err(CUDA_ERROR_NOT_FOUND),
        None => {
            status.set_if_wanted(QUERY_NOT_FOUND);
            return Err(CUDA_ERROR_NOT_FOUND);
        }
    }
    Ok(())
}

/// A function that this library itself exports. The look-up goes by the library's path: another library may have the same names.
fn own_symbol(name: &str) -> Option<*mut c_void> {
    if !name.starts_with("cu") {
        return None;
    }
    let name = CString::new(name).ok()?;
    let mut here = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the address is this function's, which nothing can interpose, and there is room for the answer.
    let known = unsafe { libc::dladdr(own_symbol as *const c_void, here.as_mut_ptr()) };
    if known == 0 {
        return None;
    }
    // SAFETY: filled by dladdr; the path lives as long as the library.
    let path = unsafe { here.assume_init() }.dli_fname;
    // SAFETY: with RTLD_NOLOAD this only finds the library that is running.
    let library = unsafe { libc::dlopen(path, libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    if library.is_null() {
        return None;
    }
    // SAFETY: an open handle and a terminated name; the reference taken above is given back.
    let symbol = unsafe {
        let symbol = libc::dlsym(library, name.as_ptr());
        libc::dlclose(library);
        symbol
    };
    (!symbol.is_null()).then_some(symbol)
}
