//! A library that speaks NCCL, opened by its path: the real one, a simulator, or Windlass.

use crate::gpu::{Buffer, Free};
use anyhow::{Context, Result, bail};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use nccl_sys::types::*;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// An open library and the functions that it has.
pub struct Nccl {
    pub functions: Functions,
    path: PathBuf,
    /// The version code that the library reports: 22809 is 2.28.9.
    pub version: c_int,
    /// Kept open to the end of the process: communicators own threads that run its code.
    library: std::mem::ManuallyDrop<Library>,
}

/// `ncclMemAlloc`.
pub type Allocate = unsafe extern "C" fn(*mut *mut c_void, usize) -> ncclResult_t;

macro_rules! functions {
    (calls { $(
        $(#[$meta:meta])*
        [$first:literal $role:ident] fn $name:ident | $twin:ident
            ($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?;
    )* } opaque { $($opaque:tt)* }) => {
        /// One cell a function of the table; `None` where the library lacks it.
        // The whole table is bound, whichever part of it is called here.
        #[allow(non_snake_case, dead_code)]
        pub struct Functions { $(pub $name: Option<unsafe extern "C" fn($($type),*) $(-> $result)?>,)* }

        impl Functions {
            fn load(library: &Library) -> Self {
                Self { $($name: {
                    // SAFETY: the signature is the table's, which tests compare with NVIDIA's headers.
                    unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }.ok().map(|symbol| *symbol)
                },)* }
            }
        }
    };
}
nccl_sys::for_each_entry!(functions);

/// Calls one function of a library: an error if the library lacks it or answers anything but success.
macro_rules! nccl_call {
    ($nccl:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        let nccl: &$crate::nccl::Nccl = $nccl;
        match nccl.functions.$name {
            None => Err(nccl.missing(stringify!($name))),
            Some(function) => {
                // SAFETY: the signature is the table's; pointers are buffers, streams and communicators that
                // the caller keeps alive until the stream has run past the call.
                let result = unsafe { function($($argument),*) };
                nccl.checked(stringify!($name), result)
            }
        }
    }};
}
pub(crate) use nccl_call;

impl Nccl {
    /// Opens the library at `path` (absolute, so that equal SONAMEs are not taken for each other).
    pub fn open(path: &Path) -> Result<Self> {
        if !path.is_absolute() {
            bail!("{} is no absolute path: the loader would search for it by name", path.display());
        }
        // SAFETY: the constructors of a library that speaks NCCL do nothing that this process does not expect.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
            .with_context(|| format!("cannot open {}", path.display()))?;
        let nccl = Self {
            functions: Functions::load(&library),
            path: path.to_owned(),
            version: 0,
            library: std::mem::ManuallyDrop::new(library),
        };
        let mut version = 0;
        nccl_call!(&nccl, ncclGetVersion(&mut version))?;
        Ok(Self { version, ..nccl })
    }

    /// A new unique id.
    pub fn unique_id(&self) -> Result<ncclUniqueId> {
        let mut id = ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] };
        nccl_call!(self, ncclGetUniqueId(&mut id))?;
        Ok(id)
    }

    /// Joins a communicator; all its ranks must.
    pub fn communicator(&self, ranks: usize, id: ncclUniqueId, rank: usize) -> Result<ncclComm_t> {
        let mut communicator = std::ptr::null_mut();
        nccl_call!(self, ncclCommInitRank(&mut communicator, ranks as c_int, id, rank as c_int))?;
        Ok(communicator)
    }

    /// The functions that give and free memory; an error names the one that this library lacks (all have both since 2.19.3).
    pub fn memory_functions(&self) -> Result<(Allocate, Free)> {
        let allocate = self.functions.ncclMemAlloc.ok_or_else(|| self.missing("ncclMemAlloc"))?;
        let free = self.functions.ncclMemFree.ok_or_else(|| self.missing("ncclMemFree"))?;
        Ok((allocate, free))
    }

    /// An error names the function that this library lacks to register windows (all have both since 2.27.3).
    pub fn has_windows(&self) -> Result<()> {
        self.functions.ncclCommWindowRegister.ok_or_else(|| self.missing("ncclCommWindowRegister"))?;
        self.functions.ncclCommWindowDeregister.ok_or_else(|| self.missing("ncclCommWindowDeregister"))?;
        Ok(())
    }

    /// Memory of `bytes` bytes of the current device as this library allocates it; a buffer of none still has an address.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer> {
        let (allocate, free) = self.memory_functions()?;
        let mut pointer = std::ptr::null_mut();
        // SAFETY: the signature is the table's; the output is a local.
        let result = unsafe { allocate(&mut pointer, bytes.max(256)) };
        self.checked("ncclMemAlloc", result)
            .with_context(|| format!("cannot allocate {bytes} bytes of NCCL's memory"))?;
        // SAFETY: just given by the library, which stays open to the end of the process, for nobody else.
        Ok(unsafe { Buffer::of_library(pointer, bytes, free) })
    }

    /// Writes Windlass's report of this process so far to a file; `None` if this library is not Windlass.
    pub fn dump(&self, file: &Path) -> Option<Result<()>> {
        type Dump = unsafe extern "C" fn(*const c_char) -> ncclResult_t;
        // SAFETY: the signature is windlass.h's.
        let function = unsafe { self.library.get::<Dump>(c"windlassDump".to_bytes_with_nul()) }.ok()?;
        let path = CString::new(file.as_os_str().as_bytes()).ok()?;
        // SAFETY: the path is a C string.
        Some(self.checked("windlassDump", unsafe { function(path.as_ptr()) }))
    }

    pub(crate) fn missing(&self, name: &str) -> anyhow::Error {
        anyhow::anyhow!("{} ({}) has no {name}", self.path.display(), version_text(self.version))
    }

    pub(crate) fn checked(&self, name: &str, result: ncclResult_t) -> Result<()> {
        if result == ncclSuccess {
            return Ok(());
        }
        let code = result.name().map_or_else(|| result.0.to_string(), str::to_owned);
        let explained = self.functions.ncclGetLastError.and_then(|function| {
            // SAFETY: a null communicator asks for the last error of this thread; the text is static or
            // thread-local and is copied at once.
            let text: *const c_char = unsafe { function(std::ptr::null_mut()) };
            // SAFETY: NCCL answers a NUL-terminated text.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned())
        });
        match explained.filter(|text| !text.is_empty()) {
            Some(text) => bail!("{name} answered {code}: {text} (library {})", self.path.display()),
            None => bail!(
                "{name} answered {code} (library {}; NCCL_DEBUG=WARN may say more)",
                self.path.display()
            ),
        }
    }
}

/// `2.28.9` for 22809.
pub fn version_text(code: c_int) -> String {
    format!("{}.{}.{}", code / 10_000, code / 100 % 100, code % 100)
}

/// An id as bytes for the channel between ranks.
pub fn id_bytes(id: &ncclUniqueId) -> Vec<u8> {
    id.internal.iter().map(|byte| *byte as u8).collect()
}

/// The id of the bytes of [`id_bytes`].
pub fn id_from_bytes(bytes: &[u8]) -> Result<ncclUniqueId> {
    let internal: [u8; NCCL_UNIQUE_ID_BYTES] = bytes
        .try_into()
        .with_context(|| format!("a unique id has {NCCL_UNIQUE_ID_BYTES} bytes, got {}", bytes.len()))?;
    Ok(ncclUniqueId { internal: internal.map(|byte| byte as c_char) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Version codes read as NVIDIA writes them.
    #[test]
    fn versions() {
        assert_eq!(version_text(22809), "2.28.9");
        assert_eq!(version_text(23203), "2.32.3");
    }

    /// Ids survive the channel; other lengths are refused.
    #[test]
    fn ids() {
        let bytes: Vec<u8> = (0..128).map(|byte| byte as u8 ^ 0xa5).collect();
        assert_eq!(id_bytes(&id_from_bytes(&bytes).unwrap()), bytes);
        assert!(id_from_bytes(&bytes[1..]).is_err());
    }
}
