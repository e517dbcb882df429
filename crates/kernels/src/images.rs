//! The compiled kernels, made by `scripts/kernels`: of mailboxes, and of collectives.

/// One compiled form of all kernels of a source, to be loaded with `cuModuleLoadData`.
#[derive(Clone, Copy, Debug)]
pub struct Image {
    /// For logs.
    pub name: &'static str,
    /// Machine code, or PTX as a text that ends with a zero byte.
    pub bytes: &'static [u8],
    /// Whether large messages may leave by asynchronous copies.
    pub has_bulk_copies: bool,
}

/// Name of the mailbox kernel in every image of its source.
pub const MAIL_KERNEL: &str = "ncclWindlassMail";

/// Threads of a block at most; more do not load.
pub const MAIL_THREADS_MAX: u32 = 512;

macro_rules! machine_code {
    ($source:literal, $name:literal, $has_bulk_copies:literal) => {
        Image {
            name: $name,
            bytes: include_bytes!(concat!("../compiled/", $source, ".", $name, ".cubin")),
            has_bulk_copies: $has_bulk_copies,
        }
    };
}

macro_rules! ptx {
    ($source:literal, $name:literal, $has_bulk_copies:literal) => {
        Image {
            name: $name,
            bytes: concat!(include_str!(concat!("../compiled/", $source, ".", $name, ".ptx")), "\0")
                .as_bytes(),
            has_bulk_copies: $has_bulk_copies,
        }
    };
}

macro_rules! images_of {
    ($source:literal, $major:expr) => {{
        // PTX serves its compute capability and all later ones, machine code the minor versions of one.
        const PTX_80: Image = ptx!($source, "compute_80", false);
        const PTX_90: Image = ptx!($source, "compute_90", true);
        const SM_80: Image = machine_code!($source, "sm_80", false);
        const SM_90: Image = machine_code!($source, "sm_90", true);
        const SM_100: Image = machine_code!($source, "sm_100", true);
        match $major {
            0..8 => &[],
            8 => &[SM_80, PTX_80],
            9 => &[SM_90, PTX_90, PTX_80],
            10 => &[SM_100, PTX_90, PTX_80],
            _ => &[PTX_90, PTX_80],
        }
    }};
}

/// What to try to load on a device of this compute capability for mailboxes, best first.
pub fn images_for(major: u32) -> &'static [Image] {
    images_of!("mailbox", major)
}

/// The same for collectives: each has all [kernels](crate::collectives::Kernel).
pub fn collective_images_for(major: u32) -> &'static [Image] {
    images_of!("collective", major)
}
