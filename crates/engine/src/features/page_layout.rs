//! The shared page of a peer group: by it its ranks agree on what they register and on windows, tell each other
//! what they call, and say that they have closed. One rank makes it, and its descriptor goes to the others with its region.

use std::os::fd::AsFd;
use std::sync::Arc;

use crate::features::registration::agreed;
use crate::features::{check, windows};
use windlass_base::descriptor::Ours;
use windlass_base::shared_page::{self, SharedPage};
use windlass_bootstrap::negotiated::NegotiatedConfig;

/// Where the words of windows lie: behind those of what is registered, at a line of their own.
pub(crate) const WINDOWS_AT: usize = agreed::WORDS.next_multiple_of(8);
/// Where the word lies in which each rank sets its bit when it has closed: behind those, at a line of its own.
pub(crate) const CLOSED_AT: usize = (WINDOWS_AT + windows::WORDS).next_multiple_of(8);
const _: () = assert!(CLOSED_AT < shared_page::WORDS);
/// Where those lie by which ranks tell what they call: behind the first page, and only where they do.
pub(crate) const CHECKING_AT: usize = shared_page::WORDS;

/// How long the shared page of a negotiated config is.
pub(crate) fn bytes(negotiated: &NegotiatedConfig) -> usize {
    let told = if negotiated.checks() { check::words_of(negotiated.members.len()) } else { 0 };
    (8 * (CHECKING_AT + told)).next_multiple_of(shared_page::BYTES)
}

/// The rank that makes the shared page.
pub(crate) const PAGE_MAKER: u32 = 0;

/// The shared page, and what others open it by.
pub(crate) fn make(negotiated: &NegotiatedConfig) -> Result<(Arc<SharedPage>, Ours), String> {
    let made = SharedPage::create(bytes(negotiated)).map_err(|error| format!("no memory to share: {error}"));
    made.map(|(page, file)| (Arc::new(page), file))
}

/// What its maker brought.
pub(crate) fn open(bytes: usize, file: Option<Ours>) -> Result<SharedPage, String> {
    let file = file.ok_or_else(|| format!("rank {PAGE_MAKER} brought no shared page"))?;
    SharedPage::open(file.as_fd(), bytes)
        .map_err(|error| format!("rank {PAGE_MAKER}'s shared page cannot be mapped: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank that gets no shared page, or something else in its place, says so: it has no peer group then.
    #[test]
    fn pages() {
        let (_page, file) = SharedPage::create(shared_page::BYTES).unwrap();
        assert!(open(shared_page::BYTES, Some(file)).is_ok());
        let words = |file| open(shared_page::BYTES, file).unwrap_err();
        assert_eq!(words(None), "rank 0 brought no shared page");
        let null = Ours::new(std::fs::File::open("/dev/null").unwrap().into()).unwrap();
        assert!(words(Some(null)).starts_with("rank 0's shared page cannot be mapped: "));
    }
}
