//! Says for whom a rank of this process waits on its GPU, to `windlass hang`, which asks at the request socket. Nobody is asked for it, and no
//! kernel: the words that ranks read are the ones by which kernels find each other's data.

use std::time::Duration;

use nccl_sys::ncclSuccess;

use windlass_base::scoped::Flagged;
use windlass_bootstrap::awaited::{Awaited, Question};
use windlass_bootstrap::request_socket::Answer;

use crate::background::side_thread;
use crate::background::worker::{Chore, READS};
use crate::peers::group::PeerGroup;
use crate::peers::registry;

/// How long the worker waits for words of the device. A copy may stand behind the program's own, and these behind the kernel that waits.
const READ_WITHIN: Duration = Duration::from_millis(100);

/// Answers `windlass hang`.
pub(in crate::peers) struct AwaitedRanks;

impl Chore for AwaitedRanks {
    fn answer(&mut self, words: &[u8]) -> Option<Answer> {
        let Question { token, rank } = Question::decode(words)?;
        let is_meant = |one: &PeerGroup| one.negotiated().comm.number() == token && one.rank() == rank;
        let meant = registry::alive().find(|one| is_meant(one))?;
        let busy = Flagged::by(&READS)?;
        let awaited = side_thread::run(Some(READ_WITHIN), move || {
            let _busy = busy;
            // Goes before the flag.
            let meant = meant;
            meant.awaited()
        })??;
        (!awaited.is_empty()).then(|| Answer { words: Awaited::encode(&awaited), descriptor: None })
    }
}

impl PeerGroup {
    /// For whom this rank waits. None where the driver says nothing, where the communicator has failed or was aborted, and while it sleeps.
    fn awaited(&self) -> Option<Vec<Awaited>> {
        let (_awake, sleeps) = self.sleep.awake()?;
        let transports = self.transports()?;
        if self.error() != ncclSuccess || transports.sequencer.is_aborted() {
            return None;
        }
        let mut awaited = transports.native.as_ref()?.awaited().ok()?;
        // Launches are counted anew after a sleep, and are then others.
        awaited.iter_mut().for_each(|one| one.launch |= u64::from(sleeps) << 48);
        Some(awaited)
    }
}
