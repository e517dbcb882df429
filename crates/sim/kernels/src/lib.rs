//! The kernels of `crates/kernels` on threads of this host, as a module of the stand-in driver: what it runs when it is
//! given compiled device code, if this library lies beside it. The documentation of `sim-cuda` says what one exports.
//!
//! `WINDLASS_SIM_DELAY_RARITY`: one in so many steps of a kernel is followed by a random delay, 4096; 0: none is.

use std::ffi::c_void;

use windlass_kernels::launch::Launch;

unsafe extern "C" {
    fn windlass_host_mail(launch: *const c_void, parameters: *mut *mut c_void);
}

/// `{ uint32_t count; uint32_t bytes[1]; }`
#[repr(C)]
pub struct ParameterBytes {
    count: u32,
    bytes: [u32; 1],
}

/// The mailbox kernel has one parameter.
#[allow(non_upper_case_globals)]
#[unsafe(no_mangle)]
pub static ncclWindlassMail_params: ParameterBytes =
    ParameterBytes { count: 1, bytes: [size_of::<Launch>() as u32] };

/// The mailbox kernel.
///
/// # Safety
/// As the stand-in driver calls kernels: a launch, and a pointer to a copy of the parameter.
#[allow(non_snake_case)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclWindlassMail(launch: *const c_void, parameters: *mut *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe { windlass_host_mail(launch, parameters) }
}
