//! The kernels of `crates/kernels`, compiled for host threads, as a module of the simulated driver. The driver loads this library from
//! its own folder when a program gives it compiled device code. The documentation of `sim-cuda` says what a module exports.
//!
//! `WINDLASS_SIM_DELAY_RARITY`: one in so many steps of a kernel is followed by a random delay, 4096; 0 for no delays.

mod work;

use std::ffi::c_void;

use work::{Parameter, SimWork};

use windlass_kernels::collective::{BatchLaunch, CollectiveLaunch};
use windlass_kernels::launch::Launch;

/// `{ uint32_t count; uint32_t bytes[N]; }`
#[repr(C)]
pub struct ParameterBytes<const N: usize> {
    count: u32,
    bytes: [u32; N],
}

/// Exports a kernel, the size of its one parameter, and its `_work` function, under the names in the compiled device code.
macro_rules! kernel {
    ($name:ident, $parameters:ident, $work:ident, $compiled:ident, $launch:ty) => {
        /// The size of the kernel's parameter.
        #[allow(non_upper_case_globals)]
        #[unsafe(no_mangle)]
        pub static $parameters: ParameterBytes<1> =
            ParameterBytes { count: 1, bytes: [size_of::<$launch>() as u32] };

        unsafe extern "C" {
            fn $compiled(launch: *const c_void, parameters: *mut *mut c_void);
        }

        /// A kernel of Windlass.
        ///
        /// # Safety
        /// As the simulated driver calls kernels: a launch, and a pointer to a copy of the parameter.
        #[allow(non_snake_case)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(launch: *const c_void, parameters: *mut *mut c_void) {
            // SAFETY: the caller's guarantee.
            unsafe { $compiled(launch, parameters) }
        }

        /// Gives the work of a launch of the kernel.
        ///
        /// # Safety
        /// As for the kernel.
        #[allow(non_snake_case)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $work(parameters: *const *mut c_void, work: &mut SimWork) {
            // SAFETY: the caller's guarantee.
            let parameter = unsafe { &*parameters.read().cast::<$launch>() };
            // SAFETY: the same: the kernel reads the lists.
            *work = unsafe { parameter.work(stringify!($name)) }.into();
        }
    };
}

kernel!(
    ncclWindlassMail,
    ncclWindlassMail_params,
    ncclWindlassMail_work,
    windlass_host_ncclWindlassMail,
    Launch
);
// One line for each of `windlass_kernels::collectives::Kernel`, by build.rs.
include!(concat!(env!("OUT_DIR"), "/collectives.rs"));

/// Three matrices and their size: see [`windlassBenchProduct`].
#[allow(non_upper_case_globals)]
#[unsafe(no_mangle)]
pub static windlassBenchProduct_params: ParameterBytes<4> = ParameterBytes { count: 4, bytes: [8, 8, 8, 4] };

/// The matrix product that `windlass bench` has as PTX, for square matrices of floats, row by row.
///
/// # Safety
/// As the simulated driver calls kernels: pointers to two matrices, a third that is written, and the elements of a side.
#[allow(non_snake_case)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn windlassBenchProduct(_launch: *const c_void, parameters: *mut *mut c_void) {
    // SAFETY: the caller's guarantee.
    let matrix = |index: usize| unsafe { parameters.add(index).read().cast::<*mut f32>().read() };
    // SAFETY: the same.
    let size = unsafe { parameters.add(3).read().cast::<u32>().read() } as usize;
    let (left, right, result) = (matrix(0), matrix(1), matrix(2));
    for at in 0..size * size {
        let (row, column) = (at / size, at % size);
        // SAFETY: within the matrices.
        let term =
            |k: usize| unsafe { left.add(row * size + k).read() * right.add(k * size + column).read() };
        // SAFETY: the same.
        unsafe { result.add(at).write((0..size).map(term).sum()) };
    }
}
