//! The page of memory that the ranks of a peer group share: by it they agree on what they register and on windows, tell each other
//! what they call, and say that they have closed. One rank makes it, and its descriptor goes to the others with its slice.

use std::os::fd::AsFd;
use std::sync::Arc;

use crate::descriptor::Ours;
use crate::negotiated::NegotiatedConfig;
use crate::page::{self, Page};
use crate::{agreed, checking, windows};

/// Where the words of windows lie: behind those of what is registered, at a line of their own.
pub(super) const WINDOWS_AT: usize = agreed::WORDS.next_multiple_of(8);
/// Where the word lies in which each rank sets its bit when it has closed: behind those, at a line of its own.
pub(super) const CLOSED_AT: usize = (WINDOWS_AT + windows::WORDS).next_multiple_of(8);
const _: () = assert!(CLOSED_AT < page::WORDS);
/// Where those lie by which ranks tell what they call: behind the first page, and only where they do.
pub(super) const CHECKING_AT: usize = page::WORDS;

/// How long the page of a negotiated config is.
pub(super) fn bytes(negotiated: &NegotiatedConfig) -> usize {
    let told = if negotiated.checks() { checking::words_of(negotiated.members.len()) } else { 0 };
    (8 * (CHECKING_AT + told)).next_multiple_of(page::BYTES)
}

/// The rank that makes the page of all.
pub(super) const PAGES_MAKER: u32 = 0;

/// The page, and what others open it by.
pub(super) fn make(negotiated: &NegotiatedConfig) -> Result<(Arc<Page>, Ours), String> {
    let made = Page::create(bytes(negotiated)).map_err(|error| format!("no memory to share: {error}"));
    made.map(|(page, file)| (Arc::new(page), file))
}

/// What its maker brought.
pub(super) fn open(bytes: usize, file: Option<Ours>) -> Result<Page, String> {
    let file = file.ok_or_else(|| format!("rank {PAGES_MAKER} brought no page"))?;
    Page::open(file.as_fd(), bytes)
        .map_err(|error| format!("rank {PAGES_MAKER}'s page cannot be mapped: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank that gets no page, or something else in its place, says so: it has no fabric then.
    #[test]
    fn pages() {
        let (_page, file) = Page::create(page::BYTES).unwrap();
        assert!(open(page::BYTES, Some(file)).is_ok());
        let words = |file| open(page::BYTES, file).unwrap_err();
        assert_eq!(words(None), "rank 0 brought no page");
        let null = Ours::new(std::fs::File::open("/dev/null").unwrap().into()).unwrap();
        assert!(words(Some(null)).starts_with("rank 0's page cannot be mapped: "));
    }
}
