//! The child's side of [`asking`](crate::asking): loads the library in question and prints one line.

use crate::asking::{Device, Gpus, Load, Pair};
use crate::bench::adaptive::Place;
use crate::nccl::Nccl;
use anyhow::{Context, Result, bail};
use clap::Subcommand;
use cudarc::driver::{result, sys};
use libloading::Library;
use serde::Serialize;
use std::ffi::{CStr, c_char, c_int};
use std::path::{Path, PathBuf};
use sys::CUdevice_P2PAttribute_enum as PairAttribute;
use sys::CUdevice_attribute_enum as Attribute;
use windlass_base::gpu::nvml::Nvml;

/// A question.
#[derive(Subcommand)]
pub enum Question {
    /// Devices and pairs of devices.
    Gpus,
    /// Who uses the devices at these PCI buses.
    Loads { buses: Vec<String> },
    /// Circumstances of communicators of 2 to so many ranks, with the NCCL library at a path.
    Places { ranks: usize, path: PathBuf },
    /// The version of the NCCL library at a path.
    Version { path: PathBuf },
    /// Of what the Windlass at a path was built.
    Build { path: PathBuf },
}

/// Prints the answer.
pub fn answer(question: Question) -> Result<()> {
    match question {
        Question::Gpus => print(gpus()),
        Question::Loads { buses } => print(Ok(loads(&buses))),
        Question::Places { ranks, path } => print(places(ranks, &path)),
        Question::Version { path } => print(Nccl::open(&path).map(|nccl| nccl.version)),
        Question::Build { path } => print(build(&path)),
    }
}

fn print<T: Serialize>(outcome: Result<T>) -> Result<()> {
    println!("{}", serde_json::to_string(&outcome.map_err(|error| format!("{error:#}")))?);
    Ok(())
}

fn places(ranks: usize, path: &Path) -> Result<Vec<Place>> {
    let version = Nccl::open(path)?.version;
    (2..=ranks).map(|ranks| Place::observe(0, ranks, path, version)).collect()
}

fn build(path: &Path) -> Result<String> {
    type Function = unsafe extern "C" fn(*mut *const c_char) -> c_int;
    // SAFETY: the library starts nothing when it is loaded.
    let library = unsafe { Library::new(path) }.with_context(|| format!("cannot open {}", path.display()))?;
    // SAFETY: the signature is windlass.h's.
    let function = unsafe { library.get::<Function>(c"windlassGetBuild") }
        .with_context(|| format!("{} is older than this command", path.display()))?;
    let mut text = std::ptr::null();
    // SAFETY: the answer is one pointer.
    let result = unsafe { function(&mut text) };
    if result != 0 {
        bail!("windlassGetBuild answers {result}");
    }
    // SAFETY: on success a text that ends with a zero, valid while the library is loaded.
    Ok(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

fn gpus() -> Result<Gpus> {
    // SAFETY: opens the driver library, which is what was asked for.
    if !unsafe { sys::is_culib_present() } {
        bail!("libcuda.so.1 is not installed: this machine has no NVIDIA driver");
    }
    result::init().map_err(|error| anyhow::anyhow!("libcuda.so.1 is there, but cuInit answers {error}"))?;
    let mut cuda_version = 0;
    // SAFETY: writes one integer.
    unsafe { sys::cuDriverGetVersion(&mut cuda_version) }.result().context("cuDriverGetVersion")?;
    let ordinals = 0..result::device::get_count().context("cuDeviceGetCount")?;
    let handles: Vec<sys::CUdevice> =
        ordinals.map(result::device::get).collect::<Result<_, _>>().context("cuDeviceGet")?;
    let nvml = Nvml::opened();
    let devices = handles.iter().map(|device| describe(*device, nvml)).collect::<Result<Vec<_>>>()?;
    let pair = |(from, first): (usize, sys::CUdevice), (to, second): (usize, sys::CUdevice)| Pair {
        from,
        to,
        peer_access: pair_attribute(PairAttribute::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, first, second),
        native_atomics: pair_attribute(
            PairAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
            first,
            second,
        ),
        nvlink: nvml.and_then(|nvml| nvml.nvlink(&bus_id(first)?, &bus_id(second)?)),
    };
    let all = || handles.iter().copied().enumerate();
    let pairs_of = |from| all().filter(move |to| *to != from).map(move |to| pair(from, to));
    let pairs = all().flat_map(pairs_of).collect();
    Ok(Gpus { cuda_version, driver: nvml.and_then(Nvml::driver), devices, pairs })
}

fn describe(device: sys::CUdevice, nvml: Option<&Nvml>) -> Result<Device> {
    let attribute = |attribute| {
        // SAFETY: the device is valid. A driver too old for an attribute answers an error: not supported.
        unsafe { result::device::get_attribute(device, attribute) }.unwrap_or(0)
    };
    let bus = bus_id(device);
    Ok(Device {
        name: result::device::get_name(device).context("cuDeviceGetName")?,
        // SAFETY: the device is valid.
        memory_bytes: unsafe { result::device::total_mem(device) }.context("cuDeviceTotalMem")? as u64,
        compute_capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        ),
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        virtual_memory: attribute(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) != 0,
        posix_handles: attribute(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
            != 0,
        fabric_handles: attribute(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED) != 0,
        multicast: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED) != 0,
        load: nvml.and_then(|nvml| load(nvml, bus.as_deref()?)),
        bus,
    })
}

fn loads(buses: &[String]) -> Vec<Option<Load>> {
    buses.iter().map(|bus| load(Nvml::opened()?, bus)).collect()
}

/// None where NVML does not say all of it.
fn load(nvml: &Nvml, bus: &str) -> Option<Load> {
    let device = nvml.device(bus)?;
    Some(Load {
        processes: nvml.processes(device).len(),
        memory_bytes: nvml.memory_used(device)?,
        percent: nvml.utilization(device)?,
    })
}

fn pair_attribute(attribute: PairAttribute, from: sys::CUdevice, to: sys::CUdevice) -> bool {
    let mut value = 0;
    // SAFETY: both devices are valid and the answer is one integer.
    unsafe { sys::cuDeviceGetP2PAttribute(&mut value, attribute, from, to) }.result().is_ok() && value != 0
}

fn bus_id(device: sys::CUdevice) -> Option<String> {
    let mut text = [0; 32];
    // SAFETY: the length given is the array's; the driver ends the text with a zero.
    unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), text.len() as i32, device) }.result().ok()?;
    Some(text.iter().take_while(|byte| **byte != 0).map(|byte| *byte as u8 as char).collect())
}
