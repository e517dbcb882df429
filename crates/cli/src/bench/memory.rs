//! Whose memory the measured calls work on: it decides what can be registered with NCCL.

use crate::gpu::{Buffer, Gpu};
use crate::nccl::Nccl;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Where the buffers of the measured calls come from; what else a rank needs (matrices, first messages) is cudaMalloc's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Memory {
    /// cudaMalloc's
    Device,
    /// ncclMemAlloc's, which NCCL and Windlass can register
    Nccl,
}

impl Memory {
    /// As on the command line and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Memory::Device => "device",
            Memory::Nccl => "nccl",
        }
    }

    /// An error if one of the libraries cannot give such memory. Windlass always has the functions: what is behind it counts too.
    pub fn check(self, libraries: [&Nccl; 2]) -> Result<()> {
        match self {
            Memory::Device => Ok(()),
            Memory::Nccl => libraries
                .into_iter()
                .try_for_each(|library| library.memory_functions().map(|_| ()).context("--memory nccl")),
        }
    }

    /// Memory of `bytes` bytes, through that library if it is NCCL's.
    pub fn buffer(self, gpu: &Gpu, nccl: &Nccl, bytes: usize) -> Result<Buffer> {
        match self {
            Memory::Device => gpu.buffer(bytes),
            Memory::Nccl => nccl.buffer(bytes),
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

    /// A library that says it is NCCL 2.18.3, with more functions.
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

    /// A library that lacks one of the functions is named, with its version, whichever of the two it is.
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

    /// What a library gives goes back to it, once; what it refuses is an error with its code.
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
