//! Handles a rank that fails by itself, because the driver refused work that its peers count on. Its communicator then takes no more calls:
//! the next message would arrive in the place of the lost one. Its peers hear of it, and to them the rank is as good as dead
//! ([`crate::peers::health::hang_detector`]): what it had sent arrives, and a wait for more ends with an asynchronous error.

use windlass_base::gpu::Failure;
use windlass_transport::TransportError;

/// Where work was issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Went {
    /// To a stream that no capture has.
    ToStream,
    /// Into the graph of a capture.
    IntoCapture,
}

/// Whether peers wait in vain for the work that was refused here.
// Divergence: NCCL's communicator goes on after a launch that failed, and its peers wait, or take later messages for the lost
// ones.
pub(in crate::peers) fn is_lost(error: &TransportError, went: Went) -> bool {
    match (error, went) {
        // The graph of a broken capture never runs, here or on other ranks.
        (_, Went::IntoCapture) => false,
        (TransportError::Cuda(failure), _) => !is_of_capture(failure),
        // Aborts end what came before, and the others are the program's own mistakes.
        (
            TransportError::Aborted { .. } | TransportError::NoRank { .. } | TransportError::Unmatched { .. },
            _,
        ) => false,
        _ => true,
    }
}

/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` … `_WRONG_THREAD`: the stream belongs to a capture that is already broken.
pub(in crate::peers) fn is_of_capture(failure: &Failure) -> bool {
    failure.code.is_some_and(|code| (900..=908).contains(&code.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use windlass_base::gpu::failure::Code;

    /// What the driver refuses is lost. A broken capture, the program's mistakes and what ended before lose nothing.
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
