//! Whose memory the measured calls work on, and whether it is a window: it decides what NCCL can do with it.

use super::batch::Side;
use crate::gpu::{Buffer, Gpu};
use crate::nccl::{Nccl, nccl_call};
use anyhow::{Context, Result};
use nccl_sys::types::ncclWindow_t;
use serde::{Deserialize, Serialize};
use std::ffi::c_int;

/// nccl.h's value: with both buffers of a collective in such windows, NCCL may use its symmetric kernels.
const NCCL_WIN_COLL_SYMMETRIC: c_int = 1;
/// Bytes of the memory that is a window beside the measured buffers.
const BESIDE_BYTES: usize = 2 << 20;

/// Where the buffers of the measured calls come from; what else a rank needs (matrices, first messages) is cudaMalloc's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Memory {
    /// Memory of cudaMalloc
    Device,
    /// Memory of ncclMemAlloc, which NCCL and Windlass can register
    Nccl,
    /// Memory of ncclMemAlloc in symmetric windows (ncclCommWindowRegister)
    Window,
    /// Memory of cudaMalloc, while the communicators have a window over other memory
    Beside,
}

impl Memory {
    /// The name on the command line and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Memory::Device => "device",
            Memory::Nccl => "nccl",
            Memory::Window => "window",
            Memory::Beside => "beside",
        }
    }

    /// Fails if one of the libraries cannot give such memory. Windlass has the functions always, so the real library behind it is
    /// checked, too.
    pub fn check(self, libraries: [&Nccl; 2]) -> Result<()> {
        match self {
            Memory::Device => Ok(()),
            Memory::Nccl | Memory::Window | Memory::Beside => libraries.into_iter().try_for_each(|library| {
                let has = library.memory_functions().and_then(|_| match self {
                    Memory::Window | Memory::Beside => library.has_windows(),
                    Memory::Device | Memory::Nccl => Ok(()),
                });
                has.with_context(|| format!("--memory {}", self.name()))
            }),
        }
    }

    /// A buffer of `bytes` bytes; of `ncclMemAlloc` it comes from library `nccl`.
    pub fn buffer(self, gpu: &Gpu, nccl: &Nccl, bytes: usize) -> Result<Buffer> {
        match self {
            Memory::Device | Memory::Beside => gpu.buffer(bytes),
            Memory::Nccl | Memory::Window => nccl.buffer(bytes),
        }
    }

    /// Registers windows with a side's first communicator, on all ranks: over each buffer, over other memory, or none. Drop them before
    /// the communicator and the buffers: the drop deregisters.
    pub fn windows<'a>(self, side: &'a Side, buffers: [&Buffer; 2]) -> Result<Vec<Window<'a>>> {
        match self {
            Memory::Device | Memory::Nccl => Ok(Vec::new()),
            Memory::Window => buffers.into_iter().map(|buffer| Window::new(side, buffer)).collect(),
            Memory::Beside => {
                let other = side.nccl.buffer(BESIDE_BYTES)?;
                let mut window = Window::new(side, &other)?;
                window.other = Some(other);
                Ok(vec![window])
            }
        }
    }
}

/// A window that is registered until it is dropped.
pub struct Window<'a> {
    side: &'a Side,
    handle: ncclWindow_t,
    /// The memory of a window that has its own. It is freed after the window.
    other: Option<Buffer>,
}

impl<'a> Window<'a> {
    fn new(side: &'a Side, buffer: &Buffer) -> Result<Self> {
        let (nccl, communicator, mut handle) = (&side.nccl, side.communicator, std::ptr::null_mut());
        let (at, bytes, flags) = (buffer.at(0), buffer.bytes, NCCL_WIN_COLL_SYMMETRIC);
        nccl_call!(nccl, ncclCommWindowRegister(communicator, at, bytes, &mut handle, flags))
            .with_context(|| format!("cannot register {bytes} bytes as a window"))?;
        Ok(Self { side, handle, other: None })
    }
}

impl Drop for Window<'_> {
    fn drop(&mut self) {
        let Self { side, handle, .. } = self;
        if let Err(error) = nccl_call!(&side.nccl, ncclCommWindowDeregister(side.communicator, *handle)) {
            say!("bench: {error:#}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nccl::nccl_call;
    use clap::ValueEnum;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    /// A library that claims to be NCCL 2.18.3, with more functions.
    fn library(folder: &Path, name: &str, more: &str) -> Nccl {
        let (source, library): (PathBuf, PathBuf) = (folder.join("nccl.c"), folder.join(name));
        let version =
            "#include <stdlib.h>\nint ncclGetVersion(int *version) { *version = 21803; return 0; }\n";
        std::fs::write(&source, version.to_owned() + more).unwrap();
        let built =
            Command::new("cc").arg("-shared").arg("-fPIC").arg(&source).arg("-o").arg(&library).status();
        assert!(built.unwrap().success());
        Nccl::open(&library).unwrap()
    }

    /// The error names the library that lacks a function, with its version.
    #[test]
    fn lacking() {
        let folder = tempfile::tempdir().unwrap();
        let allocates = "int ncclMemAlloc(void **at, size_t bytes) { return !(*at = malloc(bytes)); }\n";
        let frees = "int ncclMemFree(void *at) { free(at); return 0; }\n";
        let old = library(folder.path(), "old.so", "");
        let half = library(folder.path(), "half.so", allocates);
        let whole = library(folder.path(), "whole.so", &(allocates.to_owned() + frees));
        for (lacks, missing) in [(&old, "old.so (2.18.3) has no ncclMemAlloc"), (&half, "has no ncclMemFree")]
        {
            for pair in [[lacks, &whole], [&whole, lacks]] {
                assert!(Memory::Device.check(pair).is_ok());
                let error = format!("{:#}", Memory::Nccl.check(pair).unwrap_err());
                assert!(error.starts_with("--memory nccl: /") && error.ends_with(missing), "{error}");
            }
        }
        assert!(Memory::Nccl.check([&whole, &whole]).is_ok());
    }

    /// Memory goes back to its library once; a refusal is an error with the library's code.
    #[test]
    fn gives_back() {
        let folder = tempfile::tempdir().unwrap();
        let counts = "static void *given; static int calls;\n\
            int ncclMemAlloc(void **at, size_t bytes) { if (bytes > 4096) return 1; *at = given = malloc(bytes); return 0; }\n\
            int ncclMemFree(void *at) { calls += at == given ? 1 : 100; free(at); return 0; }\n\
            int ncclCommCount(void *communicator, int *count) { *count = calls; return 0; }\n";
        let library = library(folder.path(), "counts.so", counts);
        let freed = || {
            let mut calls = -1;
            nccl_call!(&library, ncclCommCount(std::ptr::null_mut(), &mut calls)).unwrap();
            calls
        };
        let buffer = library.buffer(0).unwrap();
        assert!(!buffer.at(0).is_null());
        assert_eq!(freed(), 0);
        drop(buffer);
        assert_eq!(freed(), 1);
        let error = format!("{:#}", library.buffer(5000).err().unwrap());
        assert!(error.contains("5000 bytes") && error.contains("ncclUnhandledCudaError"), "{error}");
        assert_eq!(freed(), 1);
    }

    /// Names are the same on the command line, in tables and in JSON.
    #[test]
    fn one_name() {
        for memory in Memory::value_variants() {
            assert_eq!(Memory::from_str(memory.name(), false), Ok(*memory));
            assert_eq!(serde_json::to_value(memory).unwrap(), memory.name());
        }
    }
}
