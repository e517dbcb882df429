//! What happens to a rank that cannot reach the host of its session or round, or loses it: a pure table.

use super::outcome::{Failure, FallbackReason, SessionOutcome, bounded};
use super::waiter::Waiter;

/// Where the host is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostAt {
    /// At the port of an id, in another process as far as this process knows.
    Port,
    /// At the port of an id whose session this process hosts.
    OwnPort,
    /// At a process listener.
    ProcessListener,
}

/// Whether an attempt that failed for want of a resource is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    /// The want may pass.
    Later,
    /// The want has lasted too long.
    Refused,
}

/// Why a rank has no host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Hindrance {
    /// The host cannot be reached, as far as the rank can see. The rank has said nothing.
    Unreached {
        /// The error, in words.
        words: String,
    },
    /// This process lacked a resource (a descriptor) to try. The rank has said nothing.
    Short(Want),
    /// The connection ended before the host had sent its last message.
    Ended,
    /// The host sent a message that cannot be read.
    Unreadable,
}

/// What the rank does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// It tries again soon.
    TryAgain,
    /// The host has not heard of the rank, so the rank may go to NCCL. NCCL's root decides what happens there.
    GoToNccl {
        /// The reason.
        words: String,
    },
    /// The rank fails.
    Fail(Failure),
    /// The rank fails, and so does its session, which this process hosts: other ranks that come would find no host.
    FailWithSession(Failure),
    /// The rank fails, and its host is told, as soon as possible, that it does not come.
    FailAndWithdraw(Failure),
}

/// What a rank does after this hindrance on the way to a host at this place.
pub(crate) fn next(host: HostAt, hindrance: Hindrance) -> Next {
    match (host, hindrance) {
        (HostAt::Port | HostAt::OwnPort, Hindrance::Unreached { words }) => Next::GoToNccl { words },
        // A process listener has no root of NCCL's behind it.
        (HostAt::ProcessListener, Hindrance::Unreached { .. }) => Next::Fail(Failure::HostLost),
        // The rank had tried to reach a session of this process, which has been refused meanwhile.
        (HostAt::Port, Hindrance::Short(_)) => Next::Fail(Failure::Short),
        // NCCL would lack the same resource in this process.
        (HostAt::OwnPort | HostAt::ProcessListener, Hindrance::Short(Want::Later)) => Next::TryAgain,
        (HostAt::OwnPort, Hindrance::Short(Want::Refused)) => Next::FailWithSession(Failure::Short),
        (HostAt::ProcessListener, Hindrance::Short(Want::Refused)) => Next::FailAndWithdraw(Failure::Short),
        (_, Hindrance::Ended) => Next::Fail(Failure::HostLost),
        (_, Hindrance::Unreadable) => Next::Fail(Failure::Unreadable),
    }
}

/// Tells the waiting rank the part that concerns it.
pub(crate) fn tell(waiter: &dyn Waiter, next: &Next) {
    match next {
        Next::TryAgain => {}
        Next::GoToNccl { words } => {
            waiter.end(SessionOutcome::OnNccl(FallbackReason::Unreachable { words: bounded(words) }));
        }
        Next::Fail(failure) | Next::FailWithSession(failure) | Next::FailAndWithdraw(failure) => {
            waiter.lost(failure.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERYWHERE: [HostAt; 3] = [HostAt::Port, HostAt::OwnPort, HostAt::ProcessListener];

    fn unreached() -> Hindrance {
        Hindrance::Unreached { words: "refused".into() }
    }

    /// Only a rank that has said nothing, and whose id has a root of NCCL's behind it, goes to NCCL by itself.
    #[test]
    fn goes_to_nccl() {
        let hindrances = [
            unreached(),
            Hindrance::Short(Want::Later),
            Hindrance::Short(Want::Refused),
            Hindrance::Ended,
            Hindrance::Unreadable,
        ];
        for host in EVERYWHERE {
            for hindrance in &hindrances {
                let goes = matches!(next(host, hindrance.clone()), Next::GoToNccl { .. });
                let may = host != HostAt::ProcessListener && *hindrance == unreached();
                assert_eq!(goes, may, "{host:?} {hindrance:?}");
            }
        }
        assert_eq!(next(HostAt::Port, unreached()), Next::GoToNccl { words: "refused".into() });
        assert_eq!(next(HostAt::ProcessListener, unreached()), Next::Fail(Failure::HostLost));
    }

    /// A want is waited for. Then the rank's session fails, or the host hears that the rank does not come.
    #[test]
    fn waits_for_what_is_wanting() {
        let (later, refused) = (Hindrance::Short(Want::Later), Hindrance::Short(Want::Refused));
        assert_eq!(next(HostAt::OwnPort, later.clone()), Next::TryAgain);
        assert_eq!(next(HostAt::ProcessListener, later.clone()), Next::TryAgain);
        assert_eq!(next(HostAt::OwnPort, refused.clone()), Next::FailWithSession(Failure::Short));
        assert_eq!(next(HostAt::ProcessListener, refused.clone()), Next::FailAndWithdraw(Failure::Short));
        for refused_meanwhile in [later, refused] {
            assert_eq!(next(HostAt::Port, refused_meanwhile), Next::Fail(Failure::Short));
        }
    }

    /// A rank that has spoken to its host and loses it fails, wherever the host was.
    #[test]
    fn loses_its_host() {
        for host in EVERYWHERE {
            assert_eq!(next(host, Hindrance::Ended), Next::Fail(Failure::HostLost));
            assert_eq!(next(host, Hindrance::Unreadable), Next::Fail(Failure::Unreadable));
        }
    }
}
