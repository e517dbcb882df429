//! The compiled kernels, made by `scripts/kernels`.

/// One compiled form of all kernels, to be loaded with `cuModuleLoadData`.
#[derive(Clone, Copy, Debug)]
pub struct Image {
    /// For logs.
    pub name: &'static str,
    /// Machine code, or PTX as a text that ends with a zero byte.
    pub bytes: &'static [u8],
    /// Whether large messages may leave by asynchronous copies.
    pub has_bulk_copies: bool,
}

/// Name of the mailbox kernel in every image.
pub const MAIL_KERNEL: &str = "ncclWindlassMail";

/// Threads of a block at most; more do not load.
pub const MAIL_THREADS_MAX: u32 = 512;

/// For compute capability 8.0 and later.
pub const PTX_80: Image = Image {
    name: "compute_80",
    bytes: concat!(include_str!("../compiled/mailbox.compute_80.ptx"), "\0").as_bytes(),
    has_bulk_copies: false,
};
/// For compute capability 9.0 and later.
pub const PTX_90: Image = Image {
    name: "compute_90",
    bytes: concat!(include_str!("../compiled/mailbox.compute_90.ptx"), "\0").as_bytes(),
    has_bulk_copies: true,
};
/// For compute capability 8.x.
pub const SM_80: Image =
    Image { name: "sm_80", bytes: include_bytes!("../compiled/mailbox.sm_80.cubin"), has_bulk_copies: false };
/// For compute capability 9.0.
pub const SM_90: Image =
    Image { name: "sm_90", bytes: include_bytes!("../compiled/mailbox.sm_90.cubin"), has_bulk_copies: true };
/// For compute capability 10.x.
pub const SM_100: Image = Image {
    name: "sm_100",
    bytes: include_bytes!("../compiled/mailbox.sm_100.cubin"),
    has_bulk_copies: true,
};

/// What to try to load on a device of this compute capability, best first.
pub fn images_for(major: u32) -> &'static [Image] {
    match major {
        0..8 => &[],
        8 => &[SM_80, PTX_80],
        9 => &[SM_90, PTX_90, PTX_80],
        10 => &[SM_100, PTX_90, PTX_80],
        _ => &[PTX_90, PTX_80],
    }
}
