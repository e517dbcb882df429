//! The layout of the shared page of a peer group, in which ranks agree on registrations and windows, agree to sleep and to wake,
//! and say that they have closed. Rank 0 makes the page, and sends its descriptor together with its region.

use std::os::fd::AsFd;
use std::sync::Arc;

use crate::features::registration::agreed;
use crate::features::windows;
use windlass_base::descriptor::Ours;
use windlass_base::shared_page::{self, SharedPage};

/// Where the words of windows begin: after those of registration, on a line of their own.
pub(crate) const WINDOWS_AT: usize = agreed::WORDS.next_multiple_of(8);
/// The word in which each rank sets its bit when it has closed: after the words of windows, on a line of its own.
pub(crate) const CLOSED_AT: usize = (WINDOWS_AT + windows::WORDS).next_multiple_of(8);
/// The word in which ranks agree on suspends and resumes: on a line of its own.
pub(crate) const SLEEP_AT: usize = CLOSED_AT + 8;
/// The word in which each rank sets its bit when it has ended or aborted the communicator, whatever graphs still hold.
pub(crate) const LEFT_AT: usize = SLEEP_AT + 1;
const _: () = assert!(LEFT_AT < shared_page::WORDS);
/// The rank that makes the shared page.
pub(crate) const PAGE_MAKER: u32 = 0;

/// Makes the shared page, and the descriptor by which others open it.
pub(crate) fn make() -> Result<(Arc<SharedPage>, Ours), String> {
    let made = SharedPage::create(shared_page::BYTES).map_err(|error| format!("no memory to share: {error}"));
    made.map(|(page, file)| (Arc::new(page), file))
}

/// Opens the shared page by the descriptor that its maker sent.
pub(crate) fn open(file: Option<Ours>) -> Result<SharedPage, String> {
    let file = file.ok_or_else(|| format!("rank {PAGE_MAKER} brought no shared page"))?;
    SharedPage::open(file.as_fd(), shared_page::BYTES)
        .map_err(|error| format!("rank {PAGE_MAKER}'s shared page cannot be mapped: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank that gets no shared page, or another file, refuses the peer group.
    #[test]
    fn pages() {
        let (_page, file) = SharedPage::create(shared_page::BYTES).unwrap();
        assert!(open(Some(file)).is_ok());
        let words = |file| open(file).unwrap_err();
        assert_eq!(words(None), "rank 0 brought no shared page");
        let null = Ours::new(std::fs::File::open("/dev/null").unwrap().into()).unwrap();
        assert!(words(Some(null)).starts_with("rank 0's shared page cannot be mapped: "));
    }
}
