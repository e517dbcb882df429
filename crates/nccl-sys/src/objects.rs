//! Reads the loader's list of the shared objects that are mapped into this process.

use std::ffi::{CStr, OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use libc::{c_char, c_int, c_void, dl_phdr_info, size_t};

use crate::exported::{Exports, Tables};

/// A mapped object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Object {
    /// The object's file; empty for the kernel's own object.
    pub path: PathBuf,
    /// DT_SONAME.
    pub soname: Option<OsString>,
    /// DT_NEEDED.
    pub needed: Vec<OsString>,
    /// DT_RPATH and DT_RUNPATH, `$ORIGIN` expanded, in order.
    pub search_path: Vec<PathBuf>,
    /// The first address and length of the range that holds all executable segments.
    pub text: (usize, usize),
    /// Which functions the object exports.
    pub exports: Exports,
}

// Tags of ELF's dynamic section.
const DT_NULL: i64 = 0;
const DT_NEEDED: i64 = 1;
const DT_HASH: i64 = 4;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_SONAME: i64 = 14;
const DT_RPATH: i64 = 15;
const DT_RUNPATH: i64 = 29;
const DT_GNU_HASH: i64 = 0x6fff_fef5;

#[repr(C)]
struct DynamicEntry {
    tag: i64,
    value: u64,
}

/// Every mapped object, the program first.
pub fn mapped() -> Vec<Object> {
    let mut objects: Vec<Object> = Vec::new();
    // SAFETY: `collect` is called with this very vector, one object at a time, under the loader's lock.
    unsafe { libc::dl_iterate_phdr(Some(collect), (&raw mut objects).cast()) };
    objects
}

/// Whether a mapped object needs (DT_NEEDED) a library whose name begins with `prefix`. Far cheaper than [`mapped`]: every process
/// into which this library is preloaded calls it.
pub fn is_needed(prefix: &CStr) -> bool {
    // SAFETY: `find_needed` is called with this very prefix, under the loader's lock.
    unsafe { libc::dl_iterate_phdr(Some(find_needed), prefix.as_ptr().cast_mut().cast()) == 1 }
}

unsafe extern "C" fn find_needed(info: *mut dl_phdr_info, _size: size_t, prefix: *mut c_void) -> c_int {
    // SAFETY: `is_needed` passes a C string, and the loader a valid description with `dlpi_phnum` program headers.
    let (info, prefix) = unsafe { (&*info, CStr::from_ptr(prefix.cast::<c_char>()).to_bytes()) };
    // SAFETY: as above.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum as usize) };
    let Some(dynamic) = headers.iter().find(|header| header.p_type == libc::PT_DYNAMIC) else { return 0 };
    let base = info.dlpi_addr as usize;
    let entries = base.wrapping_add(dynamic.p_vaddr as usize) as *const DynamicEntry;
    // SAFETY: a mapped object's dynamic section ends with DT_NULL, and reading stops there.
    let entries = || (0..).map(|i| unsafe { &*entries.add(i) }).take_while(|entry| entry.tag != DT_NULL);
    let strings = tables(base, entries()).strings;
    let is_asked_for = |entry: &DynamicEntry| {
        // SAFETY: string values of the dynamic section are offsets into its string table.
        let name = unsafe { CStr::from_ptr((strings + entry.value as usize) as *const c_char) };
        name.to_bytes().starts_with(prefix)
    };
    c_int::from(strings != 0 && entries().any(|entry| entry.tag == DT_NEEDED && is_asked_for(entry)))
}

/// The mapped object whose executable segments hold `address`.
pub fn holding(objects: &[Object], address: usize) -> Option<&Object> {
    objects.iter().find(|object| address.wrapping_sub(object.text.0) < object.text.1)
}

unsafe extern "C" fn collect(info: *mut dl_phdr_info, _size: size_t, data: *mut c_void) -> c_int {
    // SAFETY: `mapped` passes its vector, and the loader a valid description.
    let (info, objects) = unsafe { (&*info, &mut *data.cast::<Vec<Object>>()) };
    let mut object = Object { path: object_path(info.dlpi_name, objects.is_empty()), ..Object::default() };
    // SAFETY: the loader describes `dlpi_phnum` program headers.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum as usize) };
    let base = info.dlpi_addr as usize;
    for header in headers {
        let start = base.wrapping_add(header.p_vaddr as usize);
        if header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_X != 0 {
            object.text = union(object.text, (start, header.p_memsz as usize));
        }
        if header.p_type == libc::PT_DYNAMIC {
            read_dynamic(&mut object, base, start as *const DynamicEntry);
        }
    }
    objects.push(object);
    0
}

fn object_path(name: *const c_char, program: bool) -> PathBuf {
    // SAFETY: the loader's names are C strings that live as long as the object, and we hold its lock.
    let name = if name.is_null() { &[][..] } else { unsafe { CStr::from_ptr(name) }.to_bytes() };
    if name.is_empty() && program {
        // Not `self`: the main thread may have ended.
        return std::fs::read_link("/proc/thread-self/exe").unwrap_or_default();
    }
    PathBuf::from(OsStr::from_bytes(name))
}

fn union(one: (usize, usize), other: (usize, usize)) -> (usize, usize) {
    if one.1 == 0 {
        return other;
    }
    let start = one.0.min(other.0);
    let end = (one.0 + one.1).max(other.0 + other.1);
    (start, end - start)
}

fn read_dynamic(object: &mut Object, base: usize, entries: *const DynamicEntry) {
    let entries = || {
        // SAFETY: a mapped object's dynamic section ends with DT_NULL, and reading stops there.
        (0..).map(move |i| unsafe { &*entries.add(i) }).take_while(|entry| entry.tag != DT_NULL)
    };
    let tables = tables(base, entries());
    if tables.strings == 0 {
        return;
    }
    // SAFETY: the tables of a mapped object, and we hold the loader's lock.
    object.exports = Exports::by(|name| unsafe { tables.define(name) });
    let text = |entry: &DynamicEntry| {
        // SAFETY: string values of the dynamic section are offsets into its string table.
        let bytes = unsafe { CStr::from_ptr((tables.strings + entry.value as usize) as *const c_char) };
        OsStr::from_bytes(bytes.to_bytes()).to_owned()
    };
    for entry in entries() {
        match entry.tag {
            DT_NEEDED => object.needed.push(text(entry)),
            DT_SONAME => object.soname = Some(text(entry)),
            DT_RPATH | DT_RUNPATH => {
                let expanded = expand_search_path(&text(entry), &object.path);
                object.search_path.extend(expanded);
            }
            _ => {}
        }
    }
}

fn tables<'a>(base: usize, entries: impl Iterator<Item = &'a DynamicEntry>) -> Tables {
    let mut tables = Tables::default();
    for entry in entries {
        let place = match entry.tag {
            DT_STRTAB => &mut tables.strings,
            DT_SYMTAB => &mut tables.symbols,
            DT_GNU_HASH => &mut tables.gnu_hash,
            DT_HASH => &mut tables.hash,
            _ => continue,
        };
        let address = entry.value as usize;
        // The loader does not relocate read-only dynamic sections (the kernel's object).
        *place = if address < base { address + base } else { address };
    }
    tables
}

/// Splits a RPATH, RUNPATH or LD_LIBRARY_PATH and replaces `$ORIGIN` by the folder of `object`.
pub fn expand_search_path(list: &OsStr, object: &Path) -> Vec<PathBuf> {
    let origin = object.parent().unwrap_or(Path::new("")).as_os_str().as_bytes();
    list.as_bytes()
        .split(|byte| *byte == b':')
        .filter(|part| !part.is_empty())
        .map(|part| {
            let part = replace(&replace(part, b"${ORIGIN}", origin), b"$ORIGIN", origin);
            PathBuf::from(OsStr::from_bytes(&part))
        })
        .collect()
}

fn replace(text: &[u8], what: &[u8], by: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len() + by.len());
    let mut rest = text;
    while let Some(at) = rest.windows(what.len()).position(|window| window == what) {
        out.extend_from_slice(&rest[..at]);
        out.extend_from_slice(by);
        rest = &rest[at + what.len()..];
    }
    out.extend_from_slice(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// This test program is among the objects: it needs libc, and its text holds this code.
    #[test]
    fn sees_this_program() {
        let objects = mapped();
        assert_eq!(objects[0].path, std::env::current_exe().unwrap());
        assert!(objects[0].needed.iter().any(|name| name == "libc.so.6"));
        let ours = holding(&objects, sees_this_program as *const () as usize).unwrap();
        assert_eq!(ours.path, objects[0].path);
        assert!(is_needed(c"libc.so") && !is_needed(c"libnccl.so"));
    }

    /// Exported functions are found in an object's own tables, also in the kernel's object; functions that it only
    /// needs are not. Both kinds of tables agree.
    #[test]
    fn sees_exports() {
        let exporting = |name: &CStr| {
            let mut seen = (name, Vec::<String>::new());
            // SAFETY: `note` is called with this very pair.
            unsafe { libc::dl_iterate_phdr(Some(note), (&raw mut seen).cast()) };
            seen.1
        };
        let printf = exporting(c"printf");
        assert!(printf.len() == 1 && printf[0].ends_with("/libc.so.6"), "{printf:?}");
        assert_eq!(exporting(c"__vdso_gettimeofday"), ["linux-vdso.so.1"]);
        assert_eq!(exporting(c"no_such_function"), Vec::<String>::new());
        assert!(mapped().iter().all(|object| object.exports == Exports::Other));
    }

    unsafe extern "C" fn note(info: *mut dl_phdr_info, _size: size_t, data: *mut c_void) -> c_int {
        // SAFETY: as in `collect`.
        let (info, seen) = unsafe { (&*info, &mut *data.cast::<(&CStr, Vec<String>)>()) };
        // SAFETY: as in `collect`.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum as usize) };
        let Some(dynamic) = headers.iter().find(|header| header.p_type == libc::PT_DYNAMIC) else { return 0 };
        let base = info.dlpi_addr as usize;
        let entries = base.wrapping_add(dynamic.p_vaddr as usize) as *const DynamicEntry;
        // SAFETY: as in `read_dynamic`.
        let entries = (0..).map(|i| unsafe { &*entries.add(i) }).take_while(|entry| entry.tag != DT_NULL);
        let all = tables(base, entries);
        let kinds = [Tables { hash: 0, ..all }, Tables { gnu_hash: 0, ..all }];
        // SAFETY: the tables of a mapped object, and we hold the loader's lock.
        let answers = kinds.map(|tables| unsafe { tables.define(seen.0) });
        let has = [all.gnu_hash != 0, all.hash != 0];
        if has == [true, true] {
            assert_eq!(answers[0], answers[1]);
        }
        if answers.contains(&true) {
            // SAFETY: the loader's name of it.
            seen.1.push(unsafe { CStr::from_ptr(info.dlpi_name) }.to_string_lossy().into_owned());
        }
        0
    }

    /// Both spellings of `$ORIGIN` become the object's folder; empty parts are dropped.
    #[test]
    fn expands_origin() {
        let list = OsStr::new("$ORIGIN/../nccl/lib::${ORIGIN}:/opt/x");
        let expected: Vec<PathBuf> = ["/a/b/../nccl/lib", "/a/b", "/opt/x"].map(PathBuf::from).into();
        assert_eq!(expand_search_path(list, Path::new("/a/b/libtorch.so")), expected);
    }
}
