//! Holds that the committed output of the compiler was made of today's sources (`scripts/kernels` makes it;
//! `scripts/kernels --check` compiles again and compares the output itself).

use super::host;

use std::fs;

use sha2::{Digest, Sha256};
use windlass_kernels::images::{self, MAIL_KERNEL, images_for};

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

/// Every image has the kernel, PTX names the oldest version and target that it promises, and every GPU since sm_80
/// finds something to load.
#[test]
fn images_are_what_they_say() {
    let has = |bytes: &[u8], name: &str| bytes.windows(name.len()).any(|window| window == name.as_bytes());
    for image in [images::PTX_80, images::PTX_90, images::SM_80, images::SM_90, images::SM_100] {
        assert!(has(image.bytes, MAIL_KERNEL), "{}", image.name);
        assert_eq!(has(image.bytes, ".version"), image.name.starts_with("compute"), "{}", image.name);
    }
    assert!(has(images::PTX_80.bytes, ".version 7.7\n.target sm_80\n"));
    assert!(has(images::PTX_90.bytes, ".version 8.0\n.target sm_90\n"));
    assert!(images::PTX_90.bytes.ends_with(b"\0") && has(images::PTX_90.bytes, "cp.async.bulk"));
    assert!(!has(images::PTX_80.bytes, "cp.async.bulk"));
    assert!(images_for(7).is_empty());
    for major in 8..14 {
        assert!(images_for(major).iter().any(|image| image.name.starts_with("compute")));
    }
}
