//! The shared objects mapped into this process, read from the loader's own list.

use std::ffi::{CStr, OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use libc::{c_char, c_int, c_void, dl_phdr_info, size_t};

/// A mapped object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Object {
    /// Its file; empty for one that has none (the kernel's own).
    pub path: PathBuf,
    /// DT_SONAME.
    pub soname: Option<OsString>,
    /// DT_NEEDED.
    pub needed: Vec<OsString>,
    /// DT_RPATH and DT_RUNPATH, `$ORIGIN` expanded, in order.
    pub search_path: Vec<PathBuf>,
    /// First address and length of its executable segments together.
    pub text: (usize, usize),
}

// Tags of ELF's dynamic section.
const DT_NULL: i64 = 0;
const DT_NEEDED: i64 = 1;
const DT_STRTAB: i64 = 5;
const DT_SONAME: i64 = 14;
const DT_RPATH: i64 = 15;
const DT_RUNPATH: i64 = 29;

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
        return std::fs::read_link("/proc/self/exe").unwrap_or_default();
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
    let Some(strings) = entries().find(|entry| entry.tag == DT_STRTAB) else { return };
    let mut strings = strings.value as usize;
    if strings < base {
        // The loader leaves read-only dynamic sections (the kernel's object) unrelocated.
        strings += base;
    }
    let text = |entry: &DynamicEntry| {
        // SAFETY: string values of the dynamic section are offsets into its string table.
        let bytes = unsafe { CStr::from_ptr((strings + entry.value as usize) as *const c_char) };
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

    /// This very test program is seen, with libc among what it needs and our code in its text.
    #[test]
    fn sees_this_program() {
        let objects = mapped();
        assert_eq!(objects[0].path, std::env::current_exe().unwrap());
        assert!(objects[0].needed.iter().any(|name| name == "libc.so.6"));
        let ours = holding(&objects, sees_this_program as *const () as usize).unwrap();
        assert_eq!(ours.path, objects[0].path);
    }

    /// `$ORIGIN` in both spellings is the object's folder; empty parts vanish.
    #[test]
    fn expands_origin() {
        let list = OsStr::new("$ORIGIN/../nccl/lib::${ORIGIN}:/opt/x");
        let expected: Vec<PathBuf> = ["/a/b/../nccl/lib", "/a/b", "/opt/x"].map(PathBuf::from).into();
        assert_eq!(expand_search_path(list, Path::new("/a/b/libtorch.so")), expected);
    }
}
