//! A rank that fails by itself: the driver refused what its peers count on. From then on its communicator takes nothing
//! here, because what comes next would arrive as what was lost; and its peers hear of it, to whom it is as good as dead
//! ([`crate::peers::health::hang_detector`]): what it had sent arrives, and who waits for more gets an asynchronous error.

use windlass_base::gpu::Failure;
use windlass_bootstrap::negotiated::Token;
use windlass_bootstrap::negotiated::bytes::{Reader, Writer};
use windlass_transport::TransportError;

/// Where a group went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::peers) enum Went {
    ToStream,
    IntoCapture,
}

/// Whether peers wait in vain for what was refused here.
// Divergence: NCCL's communicator goes on after a launch that failed, and its peers wait, or take later messages for the lost
// ones.
pub(in crate::peers) fn is_lost(error: &TransportError, went: Went) -> bool {
    match (error, went) {
        // Of a capture that did not come about nothing runs, here or elsewhere.
        (_, Went::IntoCapture) => false,
        (TransportError::Cuda(failure), _) => !is_of_capture(failure),
        // What has ended before, and the program's own mistakes.
        (
            TransportError::Aborted { .. } | TransportError::NoRank { .. } | TransportError::Unmatched { .. },
            _,
        ) => false,
        _ => true,
    }
}

/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` … `_WRONG_THREAD`: the stream is of a capture that is broken already.
fn is_of_capture(failure: &Failure) -> bool {
    failure.code.is_some_and(|code| (900..=908).contains(&code.0))
}

/// A message for a peer of a rank that has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::peers) struct Loss {
    pub comm: Token,
    pub from: u32,
    pub to: u32,
}

impl Loss {
    pub(in crate::peers) fn encode(self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.token(self.comm).u32(self.from).u32(self.to);
        writer.finish()
    }

    pub(in crate::peers) fn decode(words: &[u8]) -> Option<Loss> {
        let mut reader = Reader::new(words);
        let (comm, from, to) = (reader.token()?, reader.u32()?, reader.u32()?);
        reader.finish()?;
        (from < 64).then_some(Loss { comm, from, to })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use windlass_base::gpu::failure::Code;

    /// Messages read back.
    #[test]
    fn words() {
        let loss = Loss { comm: Token([7; 16]), from: 3, to: 1 };
        assert_eq!(Loss::decode(&loss.encode()), Some(loss));
        assert_eq!(Loss::decode(&loss.encode()[1..]), None);
        assert_eq!(Loss::decode(&Loss { from: 64, ..loss }.encode()), None);
    }

    /// What the driver refuses is lost; a broken capture, the program's mistakes and what ended before lose nothing.
    #[test]
    fn what_is_lost() {
        let cuda = |code| {
            let failure = Failure::without_code("cuLaunchKernelEx", "a code", String::new());
            TransportError::from(Failure { code: Some(Code(code)), ..failure })
        };
        let room = || TransportError::NoRoom { operations: 9, most: 8 };
        let kernel = TransportError::NoKernel { name: "x" };
        let lost = [cuda(719), cuda(400), room(), kernel].map(|error| is_lost(&error, Went::ToStream));
        assert_eq!(lost, [true; 4]);
        assert!(!is_lost(&room(), Went::IntoCapture));
        let others = [
            cuda(901),
            TransportError::NoRank { peer: 3, ranks: 2 },
            TransportError::Unmatched { rank: 0, sends: 2, receives: 1 },
            TransportError::Aborted { rank: 0 },
        ];
        assert!(others.iter().all(|error| !is_lost(error, Went::ToStream)));
    }
}
