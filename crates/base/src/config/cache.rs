//! Finds the usual folder of the cache of measured limits. Pure.

use std::ffi::OsString;
use std::path::PathBuf;

/// The usual folder, by the environment: in `XDG_CACHE_HOME`, or in the home's `.cache`. None where neither is known.
pub(super) fn usual_folder(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let path = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")))?;
    Some(caches.join("windlass"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A relative path does not count, as the XDG specification says.
    #[test]
    fn folders() {
        let of = |xdg: Option<&str>, home: Option<&str>| {
            usual_folder(|name| if name == "HOME" { home } else { xdg }.map(OsString::from))
        };
        assert_eq!(of(Some("/c"), Some("/h")), Some("/c/windlass".into()));
        assert_eq!(of(Some("c"), Some("/h")), Some("/h/.cache/windlass".into()));
        assert_eq!(of(None, Some("/h")), Some("/h/.cache/windlass".into()));
        assert_eq!([of(None, None), of(Some(""), Some(""))], [None, None]);
    }
}
