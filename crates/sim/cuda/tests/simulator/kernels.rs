//! Tests that kernels of a shared object run in stream order with the arguments of their launch.

use crate::driver::*;
use std::ffi::{CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::process::Command;

use windlass_kernels::collectives::Kernel;
use windlass_kernels::images::{P2P_KERNEL, images_for};
use windlass_kernels::launch::{Launch, Report};

const SOURCE: &str = r#"
#include <stdint.h>
struct SimLaunch { uint32_t grid[3], block[3], shared_bytes, cooperative, cluster[3]; int32_t device; uint64_t stream_id; };
const struct { uint32_t count, bytes[3]; } add_params = { 3, { 8, 8, 4 } };
void add(const struct SimLaunch *launch, void **params) {
    uint32_t *to = *(uint32_t **)params[0], *from = *(uint32_t **)params[1], value = *(uint32_t *)params[2];
    for (uint32_t i = 0; i < launch->grid[0] * launch->block[0]; i++) to[i] = from[i] + value + launch->device;
}
const struct { uint32_t count; } told_params = { 0 };
void told(const struct SimLaunch *launch, void **params) {}
void unsized(const struct SimLaunch *launch, void **params) {}
"#;

/// Builds the kernels, and gives the image that names them.
fn image(directory: &std::path::Path) -> Vec<u8> {
    let (source, object) = (directory.join("kernels.c"), directory.join("kernels.so"));
    std::fs::write(&source, SOURCE).unwrap();
    let built =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&object).arg(&source).status().unwrap();
    assert!(built.success());
    [b"windlass-sim:", object.as_os_str().as_bytes(), b"\0"].concat()
}

#[test]
fn kernels_run_in_order_with_the_parameters_of_their_launch() {
    start();
    let directory = std::env::temp_dir().join(format!("sim-cuda-kernels-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let module = made(|out| cuModuleLoadData(out, image(&directory).as_ptr()));
    std::fs::remove_dir_all(&directory).unwrap();
    let function = |name: &str, out: &mut usize| {
        let name = CString::new(name).unwrap();
        cuModuleGetFunction(out, module, name.as_ptr())
    };
    let add = made(|out| function("add", out));
    let mut none = 0;
    assert_eq!(function("unsized", &mut none), 500);
    assert_eq!(function("missing", &mut none), 500);
    let stream = stream();
    let words = buffer(4 * 64);
    let gate = Gate::in_stream(stream);
    ok(cuMemsetD32Async(words, 100, 64, stream));
    let mut value = 5_u32;
    let parameters: [*const c_void; 3] =
        [(&raw const words).cast(), (&raw const words).cast(), (&raw const value).cast()];
    let launch = || cuLaunchKernel(add, 2, 1, 1, 32, 1, 1, 0, stream, parameters.as_ptr(), std::ptr::null());
    ok(launch());
    // SAFETY: nobody else looks at it now; the launch above must have its own copy.
    unsafe { (&raw mut value).write_volatile(1) };
    ok(launch());
    gate.open();
    let mut found = [0_u32; 64];
    ok(cuStreamSynchronize(stream));
    ok(cuMemcpyDtoH_v2(found.as_mut_ptr().cast(), words, 256));
    assert_eq!(found, [106; 64]);
    assert_eq!(cuLaunchKernel(add, 0, 1, 1, 32, 1, 1, 0, stream, parameters.as_ptr(), std::ptr::null()), 1);
    assert_eq!(cuModuleLoadData(&mut none, c"\x7fELF".as_ptr().cast()), 200);
    ok(cuMemFree_v2(words));
    ok(cuStreamDestroy_v2(stream));
    ok(cuModuleUnload(module));
}

/// `simTakeGrids` gives each launch once, on streams and in graphs, by a prefix of the kernel's name.
#[test]
fn grids_are_told_of_streams_and_graphs() {
    start();
    let directory = std::env::temp_dir().join(format!("sim-cuda-grids-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let module = made(|out| cuModuleLoadData(out, image(&directory).as_ptr()));
    std::fs::remove_dir_all(&directory).unwrap();
    let told = made(|out| cuModuleGetFunction(out, module, c"told".as_ptr()));
    let stream = stream();
    let run = |blocks| {
        ok(cuLaunchKernel(told, blocks, 1, 1, 1, 1, 1, 0, stream, std::ptr::null(), std::ptr::null()));
    };
    let taken = || {
        let (mut blocks, mut count) = ([0; 2], 9);
        ok(cuStreamSynchronize(stream));
        ok(simTakeGrids(c"tol".as_ptr(), blocks.as_mut_ptr(), blocks.len(), &mut count));
        (count, blocks)
    };
    run(7);
    assert_eq!(taken(), (0, [0, 0])); // nobody had asked yet
    run(3);
    ok(cuStreamBeginCapture_v2(stream, 0));
    run(5);
    let graph = made(|graph| cuStreamEndCapture(stream, graph));
    assert_eq!(taken(), (1, [3, 0]));
    let executable = instantiate(graph);
    for _ in 0..3 {
        ok(cuGraphLaunch(executable, stream));
    }
    assert_eq!(taken(), (3, [5, 5]));
    assert_eq!(taken(), (0, [0, 0]));
    ok(cuGraphExecDestroy(executable));
    ok(cuGraphDestroy(graph));
    ok(cuStreamDestroy_v2(stream));
    ok(cuModuleUnload(module));
}

/// Seen on driver 580 on an H100: an update to a launch without a cluster size keeps the former one. Blocks of the new grid that make no
/// whole cluster do not run, without an error.
#[test]
fn an_update_lets_a_cluster_stand() {
    start();
    let directory = std::env::temp_dir().join(format!("sim-cuda-clusters-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let module = made(|out| cuModuleLoadData(out, image(&directory).as_ptr()));
    std::fs::remove_dir_all(&directory).unwrap();
    let add = made(|out| cuModuleGetFunction(out, module, c"add".as_ptr()));
    let stream = stream();
    let words = buffer(4 * 8);
    let captured = |blocks: u32, cluster: u32| {
        let value = 1_u32;
        let parameters: [*const c_void; 3] =
            [(&raw const words).cast(), (&raw const words).cast(), (&raw const value).cast()];
        let attribute =
            LaunchAttribute { id: 4, pad: 0, value: [cluster, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0] };
        let configuration = LaunchConfiguration {
            grid: [blocks, 1, 1],
            block: [1, 1, 1],
            shared_bytes: 0,
            stream,
            attributes: &raw const attribute,
            attribute_count: u32::from(cluster > 0),
        };
        ok(cuStreamBeginCapture_v2(stream, 0));
        ok(cuLaunchKernelEx(&configuration, add, parameters.as_ptr(), std::ptr::null()));
        made(|graph| cuStreamEndCapture(stream, graph))
    };
    let blocks_run = |former, cluster, blocks| {
        let graphs = [captured(8, former), captured(blocks, cluster)];
        let executable = instantiate(graphs[0]);
        let mut result = [9; 3];
        ok(cuGraphExecUpdate_v2(executable, graphs[1], &mut result));
        ok(cuMemsetD32Async(words, 0, 8, stream));
        ok(cuGraphLaunch(executable, stream));
        ok(cuStreamSynchronize(stream));
        ok(cuGraphExecDestroy(executable));
        graphs.into_iter().for_each(|graph| ok(cuGraphDestroy(graph)));
        let mut found = [0_u32; 8];
        ok(cuMemcpyDtoH_v2(found.as_mut_ptr().cast(), words, 32));
        found.iter().sum::<u32>()
    };
    assert_eq!([blocks_run(4, 0, 1), blocks_run(4, 0, 6), blocks_run(4, 0, 4)], [0, 4, 4]);
    assert_eq!(
        [blocks_run(4, 1, 1), blocks_run(4, 2, 6), blocks_run(0, 0, 6), blocks_run(0, 4, 4)],
        [1, 6, 6, 4]
    );
    ok(cuMemFree_v2(words));
    ok(cuStreamDestroy_v2(stream));
    ok(cuModuleUnload(module));
}

/// For Windlass's compiled kernels, machine code and PTX, the library beside the simulator runs; other functions are not found.
#[test]
fn compiled_kernels_are_stood_in_for() {
    start();
    let stream = stream();
    let (mut control, mut report) = (0, 0);
    ok(cuMemHostAlloc(&mut control, 64, 0));
    ok(cuMemAlloc_v2(&mut report, size_of::<Report>()));
    for image in images_for(9) {
        let code = image.unpack().unwrap();
        let module = made(|out| cuModuleLoadData(out, code.as_ptr()));
        drop(code);
        let mut function = 0;
        assert_eq!(cuModuleGetFunction(&mut function, module, c"add".as_ptr()), 500);
        let name = CString::new(P2P_KERNEL).unwrap();
        ok(cuModuleGetFunction(&mut function, module, name.as_ptr()));
        let launch =
            Launch { control: control as u64, report: report as u64, copy_warps: 1, ..Launch::default() };
        let parameters: [*const c_void; 1] = [(&raw const launch).cast()];
        ok(cuLaunchKernel(function, 2, 1, 1, 64, 1, 1, 4096, stream, parameters.as_ptr(), std::ptr::null()));
        ok(cuStreamSynchronize(stream));
        for kernel in Kernel::all() {
            let name = CString::new(kernel.name()).unwrap();
            ok(cuModuleGetFunction(&mut function, module, name.as_ptr()));
        }
        ok(cuModuleUnload(module));
    }
    let mut none = 0;
    assert_eq!(cuModuleLoadData(&mut none, c"// no\n.target sm_90".as_ptr().cast()), 200);
    ok(cuMemFreeHost(control));
    ok(cuMemFree_v2(report));
    ok(cuStreamDestroy_v2(stream));
}

#[test]
fn entry_points_are_found_by_name_and_version() {
    let find = |name: &str, version: i32| {
        let name = CString::new(name).unwrap();
        let (mut function, mut status) = (0, 9);
        let code = cuGetProcAddress_v2(name.as_ptr(), &mut function, version, 0, &mut status);
        (code, function != 0, status)
    };
    assert_eq!(find("cuMemAlloc", 12000), (0, true, 0));
    assert_eq!(find("cuStreamBeginCapture", 12000), (0, true, 0));
    assert_eq!(find("cuMemCreate", 9000), (0, false, 2));
    assert_eq!(find("cuNoSuchThing", 12000), (500, false, 1));
    // The base name means the newest variant of that version.
    let address = |name: &str, version| {
        let name = CString::new(name).unwrap();
        let (mut function, mut status) = (0, 0);
        ok(cuGetProcAddress_v2(name.as_ptr(), &mut function, version, 0, &mut status));
        function
    };
    assert_eq!(address("cuMemAlloc", 12000), address("cuMemAlloc_v2", 12000));
    assert_ne!(address("cuEventElapsedTime", 12000), address("cuEventElapsedTime", 12080));
}

#[test]
fn peers_are_enabled_once_and_calls_before_init_are_refused() {
    let mut count = 0;
    assert_eq!(cuDeviceGetCount(&mut count), 3);
    start();
    let peer = use_device(1);
    use_device(0);
    ok(cuCtxEnablePeerAccess(peer, 0));
    assert_eq!(cuCtxEnablePeerAccess(peer, 0), 704);
    let mut value = 0;
    ok(cuDeviceGetAttribute(&mut value, 16, 0));
    assert_eq!(value, 32);
    let mut current = 0;
    ok(cuCtxSetCurrent(0));
    ok(cuCtxGetCurrent(&mut current));
    assert_eq!(current, 0);
    assert_eq!(cuCtxSynchronize(), 201);
}
