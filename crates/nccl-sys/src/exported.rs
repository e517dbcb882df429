//! Tells by a mapped object's own hash table whether it exports functions of NCCL or Windlass. Unlike `dlsym` this
//! runs no code of the loader's, takes no lock, and does not look into the objects that it depends on.

use std::ffi::CStr;

/// A function that every Windlass library exports and no NCCL does: it identifies this library and its copies.
pub const MARK: &CStr = c"windlassGetVersion";

/// A function that every NCCL exports: programs need it to make a communicator.
pub const INIT: &CStr = c"ncclCommInitRank";
/// Its second name, by which interposers pass it on. Every NCCL exports it, and few interposers.
pub const INIT_BEHIND: &CStr = c"pncclCommInitRank";

/// Which functions an object exports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Exports {
    /// Neither NCCL's functions nor Windlass's.
    #[default]
    Other,
    /// NCCL's functions.
    Nccl,
    /// Functions of NCCL in front of a library that has them, as tracers have.
    Interposer,
    /// NCCL's functions and Windlass's own.
    Windlass,
}

impl Exports {
    /// The kind of an object; `has` tells whether it exports a function.
    pub fn by(has: impl Fn(&CStr) -> bool) -> Exports {
        match (has(INIT), has(MARK)) {
            (_, true) => Exports::Windlass,
            (true, false) if has(INIT_BEHIND) => Exports::Nccl,
            (true, false) => Exports::Interposer,
            (false, false) => Exports::Other,
        }
    }
}

/// The addresses of an object's symbol tables; 0 if there is no such table.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tables {
    /// DT_STRTAB.
    pub strings: usize,
    /// DT_SYMTAB.
    pub symbols: usize,
    /// DT_GNU_HASH.
    pub gnu_hash: usize,
    /// DT_HASH, which older linkers make.
    pub hash: usize,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: u64,
    size: u64,
}

// The types of symbols that can be called, in the lower half of `info`.
const STT_FUNC: u8 = 2;
const STT_GNU_IFUNC: u8 = 10;
/// The section of symbols that an object needs but does not define.
const SHN_UNDEF: u16 = 0;

impl Tables {
    /// Whether the object defines a function of this name.
    ///
    /// # Safety
    ///
    /// The tables are those of an object that the loader has mapped and does not unmap during the call.
    pub unsafe fn define(&self, name: &CStr) -> bool {
        if self.strings == 0 || self.symbols == 0 {
            return false;
        }
        // SAFETY: as guaranteed by the caller; the tables are as the loader itself reads them.
        unsafe {
            match (self.gnu_hash, self.hash) {
                (0, 0) => false,
                (0, table) => self.in_hash(table, name),
                (table, _) => self.in_gnu_hash(table, name),
            }
        }
    }

    /// The layout of DT_GNU_HASH: the numbers of buckets, of the first symbol, of filter words, a shift; the filter;
    /// the first symbol of each bucket; the hashes of all symbols in order. A lowest bit of 1 ends a bucket.
    unsafe fn in_gnu_hash(&self, table: usize, name: &CStr) -> bool {
        let hash = gnu_hash(name);
        // SAFETY: the caller's guarantee.
        let [buckets, first, filter_words, shift] = [0, 1, 2, 3].map(|index| unsafe { word(table, index) });
        if buckets == 0 || filter_words == 0 {
            return false;
        }
        let filter = table + 16;
        let at = (hash / 64) as usize & (filter_words as usize - 1);
        // SAFETY: the index is below the number of filter words, which is a power of two.
        let bits = unsafe { ((filter + 8 * at) as *const u64).read_unaligned() };
        if bits >> (hash % 64) & 1 == 0 || bits >> ((hash >> (shift & 31)) % 64) & 1 == 0 {
            return false;
        }
        let heads = filter + 8 * filter_words as usize;
        let hashes = heads + 4 * buckets as usize;
        // SAFETY: one of the buckets.
        let mut index = unsafe { word(heads, (hash % buckets) as usize) };
        if index < first {
            return false;
        }
        loop {
            // SAFETY: from a bucket's head up to its last symbol, whose hash says that it is.
            let found = unsafe { word(hashes, (index - first) as usize) };
            // SAFETY: as above.
            if found | 1 == hash | 1 && unsafe { self.is(index, name) } {
                return true;
            }
            if found & 1 == 1 {
                return false;
            }
            index += 1;
        }
    }

    /// The layout of DT_HASH: the numbers of buckets and of symbols; the first symbol of each bucket; for each symbol
    /// the next one.
    unsafe fn in_hash(&self, table: usize, name: &CStr) -> bool {
        // SAFETY: the caller's guarantee.
        let [buckets, symbols] = [0, 1].map(|index| unsafe { word(table, index) });
        if buckets == 0 {
            return false;
        }
        let (heads, nexts) = (table + 8, table + 8 + 4 * buckets as usize);
        // SAFETY: one of the buckets.
        let mut index = unsafe { word(heads, (hash(name) % buckets) as usize) };
        for _ in 0..symbols {
            if index == 0 || index >= symbols {
                return false;
            }
            // SAFETY: one of the symbols.
            if unsafe { self.is(index, name) } {
                return true;
            }
            // SAFETY: as above.
            index = unsafe { word(nexts, index as usize) };
        }
        false
    }

    unsafe fn is(&self, index: u32, name: &CStr) -> bool {
        let place = (self.symbols + index as usize * size_of::<Symbol>()) as *const Symbol;
        // SAFETY: one of the object's symbols, whose name is an offset into its strings.
        let symbol = unsafe { place.read_unaligned() };
        let is_function = matches!(symbol.info & 15, STT_FUNC | STT_GNU_IFUNC);
        // SAFETY: as above.
        let text = || unsafe { CStr::from_ptr((self.strings + symbol.name as usize) as *const libc::c_char) };
        is_function && symbol.section != SHN_UNDEF && text() == name
    }
}

/// SAFETY: the caller guarantees an array of more than `index` words at `array`.
unsafe fn word(array: usize, index: usize) -> u32 {
    // SAFETY: see above.
    unsafe { (array as *const u32).add(index).read_unaligned() }
}

fn gnu_hash(name: &CStr) -> u32 {
    let add = |hash: u32, byte: &u8| hash.wrapping_mul(33).wrapping_add(u32::from(*byte));
    name.to_bytes().iter().fold(5381, add)
}

fn hash(name: &CStr) -> u32 {
    name.to_bytes().iter().fold(0, |hash: u32, byte| {
        let hash = (hash << 4).wrapping_add(u32::from(*byte));
        let high = hash & 0xf000_0000;
        (hash ^ high >> 24) & !high
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both hashes give known values.
    #[test]
    fn hashes() {
        assert_eq!((gnu_hash(c""), gnu_hash(c"printf")), (0x1505, 0x156b_2bb8));
        assert_eq!((hash(c""), hash(c"printf"), hash(c"exit")), (0, 0x077_905a6, 0x0006_cf04));
    }

    /// Windlass's mark decides, even if NCCL's names are exported.
    #[test]
    fn whose() {
        assert_eq!(Exports::by(|name| name == INIT || name == INIT_BEHIND), Exports::Nccl);
        assert_eq!(Exports::by(|name| name == INIT), Exports::Interposer);
        assert_eq!(Exports::by(|_| true), Exports::Windlass);
        assert_eq!(Exports::by(|_| false), Exports::Other);
    }
}
