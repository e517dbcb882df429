//! Holds the compiled kernels of the p2p transport and of collectives, made by `scripts/kernels`. They are packed into a tenth of their size;
//! an image is unpacked only when a device loads it.

use ruzstd::decoding::FrameDecoder;
use ruzstd::decoding::errors::FrameDecoderError;

/// SHA-256 of the compiled kernels, packed as they are committed, one after the other in the order of their names. It tells two builds
/// apart.
pub const DIGEST: &str = include_str!("../compiled/images.sha256").trim_ascii();

/// One compiled form of all kernels of a source, to be loaded with `cuModuleLoadData`.
#[derive(Clone, Copy, Debug)]
pub struct Image {
    /// For logs.
    pub name: &'static str,
    /// Machine code or PTX, as one frame of zstd. PTX for 8.0 may be packed as that for 9.0: see [`for_8_0`].
    packed: &'static [u8],
    /// Whether large messages may leave by asynchronous copies.
    pub has_bulk_copies: bool,
}

impl Image {
    /// The code for the driver: machine code, or PTX as a text, ended by a zero byte. Unpacking machine code of collectives takes 20 to 30 ms, PTX of
    /// these 37 ms and 48 for 8.0. Meanwhile machine code takes twice its size of memory, and PTX three times (28 MiB). Fails if the library's file is
    /// damaged.
    pub fn unpack(&self) -> Result<Vec<u8>, FrameDecoderError> {
        let mut decoder = FrameDecoder::new();
        decoder.init(self.packed)?;
        let mut code = Vec::with_capacity(decoder.content_size() as usize + 1);
        decoder.decode_all_to_vec(self.packed, &mut code)?;
        code.push(0);
        Ok(if self.name == "compute_80" { for_8_0(&code) } else { code })
    }
}

/// Makes PTX for 8.0 of that for 9.0 of the same source: `scripts/kernels` does the same, and compiles it. Of collectives only the head and the wait
/// for the kernel before differ, so one text is packed for both. The own text for 8.0 of the p2p transport stays as it is.
fn for_8_0(text: &[u8]) -> Vec<u8> {
    let lines = text.split_inclusive(|byte| *byte == b'\n').skip(2);
    let mut older = Vec::with_capacity(text.len());
    older.extend_from_slice(b".version 7.7\n.target sm_80\n");
    lines.filter(|line| !line.starts_with(b"griddepcontrol")).for_each(|line| older.extend_from_slice(line));
    older
}

/// Name of the p2p transport kernel in every image of its source.
pub const P2P_KERNEL: &str = "ncclWindlassMail";

macro_rules! image {
    ($source:literal, $name:literal, $form:literal, $has_bulk_copies:literal) => {
        Image {
            name: $name,
            packed: include_bytes!(concat!("../compiled/", $source, ".", $name, ".", $form, ".zst")),
            has_bulk_copies: $has_bulk_copies,
        }
    };
}

macro_rules! images_of {
    ($source:literal, $ptx_80:expr, $major:expr) => {{
        // PTX runs on its compute capability and all later ones, machine code on the minor versions of one.
        const PTX_90: Image = image!($source, "compute_90", "ptx", true);
        const PTX_80: Image = $ptx_80;
        const SM_80: Image = image!($source, "sm_80", "cubin", false);
        const SM_90: Image = image!($source, "sm_90", "cubin", true);
        const SM_100: Image = image!($source, "sm_100", "cubin", true);
        match $major {
            0..8 => &[],
            8 => &[SM_80, PTX_80],
            9 => &[SM_90, PTX_90, PTX_80],
            10 => &[SM_100, PTX_90, PTX_80],
            _ => &[PTX_90, PTX_80],
        }
    }};
}

/// The images to try on a device of this major compute capability for the p2p transport, best first.
pub fn images_for(major: u32) -> &'static [Image] {
    images_of!("p2p", image!("p2p", "compute_80", "ptx", false), major)
}

/// The images to try for collectives, best first: each has all [kernels](crate::collectives::Kernel).
pub fn collective_images_for(major: u32) -> &'static [Image] {
    images_of!("collective", Image { name: "compute_80", has_bulk_copies: false, ..PTX_90 }, major)
}
