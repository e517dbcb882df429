//! Holds that the committed output of the compiler was made from today's sources. (`scripts/kernels` makes it; `scripts/kernels
//! --check` compiles again and compares the output itself.)

use super::host;

use std::collections::BTreeSet;
use std::fs;

use sha2::{Digest, Sha256};
use windlass_kernels::collectives::Kernel;
use windlass_kernels::images::{DIGEST, Image, P2P_KERNEL, collective_images_for, images_for};

/// The digests beside the output are those of the sources.
#[test]
fn output_is_fresh() {
    let folder = host::crate_folder();
    let mut names: Vec<String> = fs::read_dir(folder.join("device"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let sources: String = names
        .iter()
        .map(|name| {
            let bytes = fs::read(folder.join("device").join(name)).unwrap();
            format!("{}  {name}\n", host::hex(&Sha256::digest(bytes)))
        })
        .collect();
    let committed = fs::read_to_string(folder.join("compiled/sources.sha256")).unwrap();
    let sorted = |text: &str| {
        let mut lines: Vec<String> = text.lines().map(Into::into).collect();
        lines.sort();
        lines
    };
    assert_eq!(sorted(&committed), sorted(&sources), "crates/kernels/compiled is stale: run scripts/kernels");
}

/// The digest in builds is that of the committed output.
#[test]
fn digest_is_fresh() {
    let folder = host::crate_folder().join("compiled");
    let mut images: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    images.retain(|path| path.extension().is_some_and(|extension| extension == "zst"));
    images.sort();
    let mut digest = Sha256::new();
    images.iter().for_each(|path| digest.update(fs::read(path).unwrap()));
    assert_eq!(
        DIGEST,
        host::hex(&digest.finalize()),
        "crates/kernels/compiled is stale: run scripts/kernels"
    );
}

/// The packed code for all GPUs stays small. (It was 4 MiB until user bytes were loaded by assembly, which is as long but packs
/// less well.)
#[test]
fn output_is_packed() {
    let folder = host::crate_folder().join("compiled");
    let bytes: u64 =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
    assert!(bytes < 17 << 18, "crates/kernels/compiled has {bytes} bytes");
}

/// Every image has its kernels, PTX states the oldest version and target that it supports, and every GPU since sm_80 has an image
/// to load.
#[test]
fn images_are_what_they_say() {
    let collectives = Kernel::all().map(|kernel| kernel.name()).collect();
    let sources =
        [(images_for as fn(u32) -> &'static [Image], vec![P2P_KERNEL]), (collective_images_for, collectives)];
    for (images_for, kernels) in sources {
        let mut seen = BTreeSet::new();
        for image in (8..14).flat_map(images_for) {
            if !seen.insert(image.name) {
                continue;
            }
            let code = image.unpack().unwrap();
            let text = String::from_utf8_lossy(&code);
            for kernel in &kernels {
                assert!(text.contains(kernel), "{} lacks {kernel}", image.name);
            }
            let head = match image.name {
                "compute_80" => ".version 7.7\n.target sm_80\n",
                "compute_90" => ".version 8.0\n.target sm_90\n",
                _ => "\x7fELF",
            };
            assert!(text.contains(head), "{}", image.name);
            assert_eq!(head.starts_with('.'), image.name.starts_with("compute"));
            assert!(code.ends_with(b"\0"), "{} has no end", image.name);
            if image.name.starts_with("compute") {
                assert_eq!(text.find('\0'), Some(text.len() - 1), "{} ends early", image.name);
                // Only 9.0 and later can wait for the kernel before.
                assert_eq!(text.contains("\ngriddepcontrol"), image.name == "compute_90", "{}", image.name);
                assert_eq!(text.matches("griddepcontrol").count(), text.matches("\ngriddepcontrol").count());
                // Loads of bytes as volatile ones split a warp (README.md, "The warp must be together"). Only PTX shows that, which
                // a driver compiles.
                for narrow in
                    ["ld.volatile.u8", "ld.volatile.u16", "ld.volatile.global.u8", "ld.volatile.global.u16"]
                {
                    assert!(!text.contains(narrow), "{} has {narrow}", image.name);
                }
            }
        }
        assert_eq!(Vec::from_iter(seen), ["compute_80", "compute_90", "sm_100", "sm_80", "sm_90"]);
        assert!(images_for(7).is_empty());
        for major in 8..14 {
            assert!(images_for(major).iter().any(|image| image.name.starts_with("compute")));
        }
    }
    for image in (8..14).flat_map(images_for).filter(|image| image.name.starts_with("compute")) {
        let code = image.unpack().unwrap();
        let has_bulk_copies = String::from_utf8_lossy(&code).contains("cp.async.bulk");
        assert_eq!(has_bulk_copies, image.has_bulk_copies, "{}", image.name);
    }
}
