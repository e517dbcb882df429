//! What an ELF file says about itself: how it is loaded, what it needs, what NCCL functions it exports.

pub mod versions;

use anyhow::{Context, Result, bail};
use nccl_sys::exported::Exports;
use object::elf;
use object::read::elf::{Dyn, FileHeader, ProgramHeader, Sym};
use object::read::{FileKind, ReadCache};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use versions::Needed;

/// A function that every Windlass library exports and no NCCL does.
pub const WINDLASS_MARK: &str = "windlassGetVersion";

/// Facts of one ELF file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Elf {
    pub bits: Bits,
    /// The machine code of the header, `EM_X86_64` and so on.
    pub machine: u16,
    /// The dynamic loader that it asks for: without one there is no preload.
    pub loader: Option<PathBuf>,
    pub soname: Option<String>,
    pub needed: Vec<String>,
    /// RPATH and RUNPATH with `$ORIGIN` expanded, in order.
    pub search_path: Vec<PathBuf>,
    /// Versions that it needs of other libraries.
    pub versions_needed: BTreeSet<Needed>,
    /// Versions that it defines, as a C library does.
    pub versions_defined: BTreeSet<String>,
    /// Exported functions named `nccl*`, `pnccl*` or `windlass*`.
    pub functions: BTreeSet<String>,
}

/// The class of an ELF file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bits {
    #[default]
    Is64,
    Is32,
}

impl Elf {
    pub fn is_windlass(&self) -> bool {
        self.functions.contains(WINDLASS_MARK)
    }

    pub fn is_nccl(&self) -> bool {
        self.functions.contains("ncclGetVersion")
    }

    /// NCCL functions that this library has and `other` lacks.
    pub fn functions_missing_in(&self, other: &Elf) -> Vec<String> {
        self.functions.difference(&other.functions).filter(|name| name.contains("nccl")).cloned().collect()
    }
}

/// The machine code of this very program.
pub fn native_machine() -> u16 {
    let machine = match std::env::consts::ARCH {
        "x86_64" => elf::EM_X86_64,
        "aarch64" => elf::EM_AARCH64,
        _ => elf::EM_NONE,
    };
    machine.0
}

/// A readable name of a machine code.
pub fn machine_name(machine: u16) -> String {
    match elf::Machine(machine) {
        elf::EM_X86_64 => "x86-64".into(),
        elf::EM_AARCH64 => "arm64".into(),
        elf::EM_386 => "x86".into(),
        elf::EM_ARM => "arm".into(),
        elf::EM_PPC64 => "ppc64".into(),
        elf::EM_RISCV => "riscv".into(),
        other => format!("machine {}", other.0),
    }
}

/// Reads the facts of the file at `path`; only the parts needed, since libraries have hundreds of megabytes.
pub fn read(path: &Path) -> Result<Elf> {
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let data = ReadCache::new(file);
    match FileKind::parse(&data) {
        Ok(FileKind::Elf64) => read_class::<elf::FileHeader64<object::Endianness>>(&data, path, Bits::Is64),
        Ok(FileKind::Elf32) => read_class::<elf::FileHeader32<object::Endianness>>(&data, path, Bits::Is32),
        _ => bail!("{} is no ELF file", path.display()),
    }
    .with_context(|| format!("damaged ELF file {}", path.display()))
}

fn read_class<Header: FileHeader<Endian = object::Endianness>>(
    data: &ReadCache<File>,
    path: &Path,
    bits: Bits,
) -> Result<Elf> {
    let header = Header::parse(data)?;
    let endian = header.endian()?;
    let mut found = Elf { bits, machine: header.e_machine(endian).0, ..Elf::default() };
    let segments = header.program_headers(endian, data)?;
    for segment in segments {
        if let Some(loader) = segment.interpreter(endian, data)? {
            found.loader = Some(OsStr::from_bytes(loader).into());
        }
    }
    let sections = header.sections(endian, data)?;
    found.versions_needed = versions::needed(&sections, endian, data)?;
    found.versions_defined = versions::defined(&sections, endian, data)?;
    if let Some((entries, strings)) = sections.dynamic(endian, data)? {
        let strings = sections.strings(endian, data, strings)?;
        let text = |entry: &Header::Dyn| entry.string(endian, strings).map(String::from_utf8_lossy);
        for entry in entries {
            match entry.tag(endian) {
                elf::DT_NULL => break,
                elf::DT_NEEDED => found.needed.push(text(entry)?.into_owned()),
                elf::DT_SONAME => found.soname = Some(text(entry)?.into_owned()),
                elf::DT_RPATH | elf::DT_RUNPATH => {
                    let list = entry.string(endian, strings)?;
                    found
                        .search_path
                        .extend(nccl_sys::objects::expand_search_path(OsStr::from_bytes(list), path));
                }
                _ => {}
            }
        }
    }
    let symbols = sections.symbols(endian, data, elf::SHT_DYNSYM)?;
    for symbol in symbols.iter() {
        let is_function = matches!(symbol.st_type(), elf::STT_FUNC | elf::STT_GNU_IFUNC);
        if !is_function || symbol.is_undefined(endian) {
            continue;
        }
        let name = symbol.name(endian, symbols.strings())?;
        if [&b"nccl"[..], b"pnccl", b"windlass"].iter().any(|prefix| name.starts_with(prefix)) {
            found.functions.insert(String::from_utf8_lossy(name).into_owned());
        }
    }
    Ok(found)
}

/// Whose functions the file at `path` exports.
pub fn exports(path: &Path) -> Result<Exports> {
    let Elf { functions, .. } = read(path)?;
    Ok(Exports::by(|name| name.to_str().is_ok_and(|name| functions.contains(name))))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// This test program: dynamic, of this machine, needs libc, and is neither NCCL nor Windlass.
    #[test]
    fn reads_itself() {
        let own = read(&std::env::current_exe().unwrap()).unwrap();
        assert_eq!((own.bits, own.machine), (Bits::Is64, native_machine()));
        assert!(own.loader.is_some() && !own.is_nccl() && !own.is_windlass());
        assert!(own.needed.iter().any(|name| name == "libc.so.6"), "{:?}", own.needed);
        let c_library = own.versions_needed.iter().find(|needed| needed.library == "libc.so.6").unwrap();
        assert!(c_library.version.starts_with("GLIBC_2."), "{c_library:?}");
        assert_eq!(own.versions_defined, BTreeSet::new());
    }

    /// Exports are found with both kinds of hash tables: none of NCCL's in this program, all in a library made so.
    #[test]
    fn exports_by_hash() {
        assert_eq!(exports(&std::env::current_exe().unwrap()).unwrap(), Exports::Other);
        assert!(exports(Path::new("/etc/passwd")).is_err());
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("library.c");
        for style in ["gnu", "sysv"] {
            for (text, expected) in [
                ("int ncclCommInitRank(void) { return 0; }", Exports::Interposer),
                (
                    "int ncclCommInitRank(void) { return 0; } int pncclCommInitRank(void) { return 0; }",
                    Exports::Nccl,
                ),
                (
                    "int ncclCommInitRank(void) { return 0; } int windlassGetVersion(void) { return 0; }",
                    Exports::Windlass,
                ),
                ("int ncclCommInitRank(void); int call(void) { return ncclCommInitRank(); }", Exports::Other),
                (
                    "static int ncclCommInitRank(void) { return 0; } int call(void) { return ncclCommInitRank(); }",
                    Exports::Other,
                ),
            ] {
                std::fs::write(&source, text).unwrap();
                let library = folder.path().join("library.so");
                let mut compiler = std::process::Command::new("cc");
                compiler.args(["-shared", "-fPIC", &format!("-Wl,--hash-style={style}"), "-o"]);
                assert!(compiler.arg(&library).arg(&source).status().unwrap().success());
                assert_eq!(exports(&library).unwrap(), expected, "{style}: {text}");
            }
        }
    }

    /// A text file is refused by name.
    #[test]
    fn refuses_text() {
        let error = read(Path::new("/etc/passwd")).unwrap_err();
        assert!(format!("{error:#}").contains("/etc/passwd is no ELF file"), "{error:#}");
    }
}
