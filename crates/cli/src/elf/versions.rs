//! The versions of symbols by which libraries fit together: `GLIBC_2.34` and its like. The loader starts no program of which a library
//! needs a version that the file in question does not define.

use object::elf;
use object::read::ReadRef;
use object::read::elf::{FileHeader, SectionTable};
use std::collections::BTreeSet;

/// A version that a library needs of another.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Needed {
    /// The other library, by the name that is in DT_NEEDED.
    pub library: String,
    pub version: String,
}

/// What the section `.gnu.version_r` names. Weak needs are left out: the loader only warns of them.
pub fn needed<'data, Header: FileHeader, R: ReadRef<'data>>(
    sections: &SectionTable<'data, Header, R>,
    endian: Header::Endian,
    data: R,
) -> object::read::Result<BTreeSet<Needed>> {
    let mut found = BTreeSet::new();
    let Some((libraries, strings)) = sections.gnu_verneed(endian, data)? else { return Ok(found) };
    let strings = sections.strings(endian, data, strings)?;
    for library in libraries {
        let (library, versions) = library?;
        let library = String::from_utf8_lossy(library.file(endian, strings)?);
        for version in versions {
            let version = version?;
            if !version.vna_flags.get(endian).contains(elf::VER_FLG_WEAK) {
                let version = String::from_utf8_lossy(version.name(endian, strings)?);
                found.insert(Needed { library: library.clone().into(), version: version.into() });
            }
        }
    }
    Ok(found)
}

/// What the section `.gnu.version_d` defines, without the name of the file itself.
pub fn defined<'data, Header: FileHeader, R: ReadRef<'data>>(
    sections: &SectionTable<'data, Header, R>,
    endian: Header::Endian,
    data: R,
) -> object::read::Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    let Some((definitions, strings)) = sections.gnu_verdef(endian, data)? else { return Ok(found) };
    let strings = sections.strings(endian, data, strings)?;
    for definition in definitions {
        let (definition, mut names) = definition?;
        // The names after the first are those of the versions that this one continues.
        if !definition.vd_flags.get(endian).contains(elf::VER_FLG_BASE)
            && let Some(name) = names.next()?
        {
            found.insert(String::from_utf8_lossy(name.name(endian, strings)?).into_owned());
        }
    }
    Ok(found)
}

/// A version's numbers, to tell which is newer: `GLIBC_2.9` is older than `GLIBC_2.34`.
pub fn order(version: &str) -> Vec<u32> {
    let numbers = version.split(|letter: char| !letter.is_ascii_digit());
    numbers.filter_map(|number| number.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers count, not letters.
    #[test]
    fn newer_versions() {
        assert!(order("GLIBC_2.9") < order("GLIBC_2.34") && order("GLIBC_2.34") < order("GLIBC_2.34.1"));
        assert_eq!(order("GLIBC_PRIVATE"), Vec::<u32>::new());
    }
}
