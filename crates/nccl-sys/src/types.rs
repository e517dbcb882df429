//! The C types of `nccl.h` as of 2.32: codes as transparent integers, structures as `repr(C)`.
//!
//! Every type is also described as data ([`CODES`], [`STRUCTS`]). The C header is generated from it, and the layouts
//! of NVIDIA's headers are compared with it.

#![allow(non_camel_case_types, non_upper_case_globals, non_snake_case, missing_docs)]

use libc::{c_char, c_int, c_uint, c_void};

/// A C enumeration as data.
#[derive(Debug)]
pub struct CodeType {
    pub name: &'static str,
    /// Names and values, in header order. A repeated value is an alias.
    pub values: &'static [(&'static str, c_int)],
}

/// A C structure as data.
#[derive(Debug)]
pub struct StructType {
    pub name: &'static str,
    pub size: usize,
    pub fields: &'static [Field],
}

/// A field of a [`StructType`]; `offset` in bytes.
#[derive(Debug)]
pub struct Field {
    pub name: &'static str,
    pub rust_type: &'static str,
    pub offset: usize,
}

macro_rules! codes {
    ($($(#[$meta:meta])* $type:ident { $($name:ident = $value:expr,)* })*) => {
        $(
            $(#[$meta])*
            #[repr(transparent)]
            #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
            pub struct $type(pub c_int);
            $(pub const $name: $type = $type($value);)*
        )*
        /// Every enumeration of the header.
        pub const CODES: &[CodeType] =
            &[$(CodeType { name: stringify!($type), values: &[$((stringify!($name), $value),)*] },)*];
    };
}

macro_rules! structs {
    ($($(#[$meta:meta])* $type:ident { $($field:ident: $field_type:ty,)* })*) => {
        $(
            $(#[$meta])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub struct $type { $(pub $field: $field_type,)* }
        )*
        /// Every structure of the header whose fields users may touch.
        pub const STRUCTS: &[StructType] = &[$(StructType {
            name: stringify!($type),
            size: size_of::<$type>(),
            fields: &[$(Field {
                name: stringify!($field),
                rust_type: stringify!($field_type),
                offset: core::mem::offset_of!($type, $field),
            },)*],
        },)*];
    };
}

/// The type behind [`ncclComm_t`].
#[repr(C)]
pub struct ncclComm {
    _opaque: [u8; 0],
}
/// The type behind [`ncclWindow_t`].
#[repr(C)]
pub struct ncclWindow_vidmem {
    _opaque: [u8; 0],
}
/// The type behind [`ncclParamHandle_t`].
#[repr(C)]
pub struct ncclParamHandle {
    _opaque: [u8; 0],
}
/// The type behind [`cudaStream_t`].
#[repr(C)]
pub struct CUstream_st {
    _opaque: [u8; 0],
}
/// The type behind [`cudaEvent_t`].
#[repr(C)]
pub struct CUevent_st {
    _opaque: [u8; 0],
}

pub type ncclComm_t = *mut ncclComm;
pub type ncclWindow_t = *mut ncclWindow_vidmem;
pub type ncclParamHandle_t = *mut ncclParamHandle;
pub type cudaStream_t = *mut CUstream_st;
pub type cudaEvent_t = *mut CUevent_st;

pub const NCCL_UNIQUE_ID_BYTES: usize = 128;
pub const NCCL_CONFIG_UNDEF_INT: c_int = c_int::MIN;
pub const NCCL_SPLIT_NOCOLOR: c_int = -1;
pub const NCCL_API_MAGIC: c_uint = 0xcafe_beef;

codes! {
    /// What every call answers.
    ncclResult_t {
        ncclSuccess = 0,
        ncclUnhandledCudaError = 1,
        ncclSystemError = 2,
        ncclInternalError = 3,
        ncclInvalidArgument = 4,
        ncclInvalidUsage = 5,
        ncclRemoteError = 6,
        ncclInProgress = 7,
        ncclTimeout = 8,
        ncclNumResults = 9,
    }
    ncclRedOp_t {
        ncclSum = 0,
        ncclProd = 1,
        ncclMax = 2,
        ncclMin = 3,
        ncclAvg = 4,
        ncclNumOps = 5,
        ncclMaxRedOp = 0x7fff_ffff,
    }
    ncclDataType_t {
        ncclInt8 = 0,
        ncclChar = 0,
        ncclUint8 = 1,
        ncclInt32 = 2,
        ncclInt = 2,
        ncclUint32 = 3,
        ncclInt64 = 4,
        ncclUint64 = 5,
        ncclFloat16 = 6,
        ncclHalf = 6,
        ncclFloat32 = 7,
        ncclFloat = 7,
        ncclFloat64 = 8,
        ncclDouble = 8,
        ncclBfloat16 = 9,
        ncclFloat8e4m3 = 10,
        ncclFloat8e5m2 = 11,
        ncclNumTypes = 12,
    }
    /// Where the scalar of `ncclRedOpCreatePreMulSum` lives.
    ncclScalarResidence_t {
        ncclScalarDevice = 0,
        ncclScalarHostImmediate = 1,
    }
    ncclCommMemStat_t {
        ncclStatGpuMemSuspend = 0,
        ncclStatGpuMemSuspended = 1,
        ncclStatGpuMemPersist = 2,
        ncclStatGpuMemTotal = 3,
    }
    ncclHostCftMode_t {
        ncclHostCftDefault = NCCL_CONFIG_UNDEF_INT,
        ncclHostCftEnable = 1,
        ncclHostCftDisable = 2,
        ncclHostCftFallback = 3,
    }
    ncclNvlsHostMode_t {
        ncclNvlsHostModeDefault = NCCL_CONFIG_UNDEF_INT,
        ncclNvlsHostModeEnable = 0,
        ncclNvlsHostModeDisableTransport = 1,
        ncclNvlsHostModeDisableSymmetricMultimem = 2,
        ncclNvlsHostModeDisable = 0x7fff_ffff,
    }
    ncclEncryptionMode_t {
        NCCL_ENCRYPTION_MODE_NONE = 0,
        NCCL_ENCRYPTION_MODE_PSK = 1,
    }
}

structs! {
    /// Every rank of a new communicator passes the very same bytes.
    ncclUniqueId {
        internal: [c_char; NCCL_UNIQUE_ID_BYTES],
    }
    /// Configuration of a communicator. `size` tells the library which fields the caller knows: older headers
    /// end earlier, the fields that both know lie at equal offsets.
    ncclConfig_t {
        size: usize,
        magic: c_uint,
        version: c_uint,
        blocking: c_int,
        cgaClusterSize: c_int,
        minCTAs: c_int,
        maxCTAs: c_int,
        netName: *const c_char,
        splitShare: c_int,
        trafficClass: c_int,
        commName: *const c_char,
        collnetEnable: c_int,
        CTAPolicy: c_int,
        shrinkShare: c_int,
        nvlsCTAs: c_int,
        nChannelsPerNetPeer: c_int,
        nvlinkCentricSched: c_int,
        graphUsageMode: c_int,
        numRmaCtx: c_int,
        maxP2pPeers: c_int,
        graphStreamOrdering: c_int,
        launchOrderImplicit: c_int,
        numRmaSig: c_int,
        rmaEagerInit: c_int,
        hostCftMode: c_int,
        nvlsHostMode: c_int,
    }
    ncclConfigExtKey {
        vendorId: c_int,
        optionId: c_int,
    }
    /// One vendor option of a call, in a list that ends with a null `next`.
    ncclConfigExt_t {
        next: *mut c_void,
        key: ncclConfigExtKey,
        val: *mut c_void,
    }
    /// Configuration of one collective call.
    ncclCollConfig_t {
        size: usize,
        magic: c_uint,
        version: c_uint,
        ext: *mut ncclConfigExt_t,
        minCTAs: c_int,
        maxCTAs: c_int,
        nvlsCTAs: c_int,
        cgaClusterSize: c_int,
        algSelection: *const c_char,
        forceAlgSelection: c_int,
        CTAPolicy: c_int,
        userProfilerTag: u64,
        launchCompletionEvent: cudaEvent_t,
    }
    ncclSimInfo_t {
        size: usize,
        magic: c_uint,
        version: c_uint,
        estimatedTime: f32,
    }
    ncclWaitSignalDesc_t {
        opCnt: c_int,
        peer: c_int,
        sigIdx: c_int,
        ctx: c_int,
    }
    ncclEncryptionConfig_t {
        size: usize,
        magic: c_uint,
        version: c_uint,
        mode: c_int,
        psk: *const c_char,
    }
}

impl ncclResult_t {
    /// NCCL's name for the code, or `None` for a code that 2.32 does not have.
    pub fn name(self) -> Option<&'static str> {
        CODES[0].values.iter().find(|(_, value)| *value == self.0).map(|(name, _)| *name)
    }

    /// This code if it is a failure, else the next one.
    pub fn and(self, next: ncclResult_t) -> ncclResult_t {
        if self == ncclSuccess { next } else { self }
    }

    /// The code as a result.
    pub fn ok(self) -> Result<(), ncclResult_t> {
        if self == ncclSuccess { Ok(()) } else { Err(self) }
    }
}

impl ncclDataType_t {
    /// Bytes of one element, or `None` for a type that 2.32 does not have.
    #[inline]
    pub fn size_bytes(self) -> Option<usize> {
        /// By code, from ncclInt8 to ncclFloat8e5m2.
        const SIZES: [u8; 12] = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1];
        SIZES.get(self.0 as usize).map(|size| *size as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first enumeration is the result type, on which `ncclResult_t::name` stands.
    #[test]
    fn result_names() {
        assert_eq!(CODES[0].name, "ncclResult_t");
        assert_eq!(ncclInvalidUsage.name(), Some("ncclInvalidUsage"));
        assert_eq!(ncclResult_t(99).name(), None);
    }

    /// Every named data type but the count has a size, and aliases agree.
    #[test]
    fn element_sizes() {
        for (name, value) in CODES[2].values {
            assert_eq!(ncclDataType_t(*value).size_bytes().is_some(), *name != "ncclNumTypes", "{name}");
        }
        assert_eq!(ncclHalf.size_bytes(), ncclFloat16.size_bytes());
        let sizes = [ncclUint8, ncclBfloat16, ncclInt, ncclFloat, ncclUint64, ncclDouble, ncclFloat8e4m3]
            .map(|t| t.size_bytes());
        assert_eq!(sizes, [1, 2, 4, 4, 8, 8, 1].map(Some));
        assert_eq!(ncclDataType_t(-1).size_bytes(), None);
    }
}
