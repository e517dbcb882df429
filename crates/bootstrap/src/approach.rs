//! What becomes of a rank that does not get to the host of its session or round, or loses it, as a pure table.

use super::outcome::{Failure, FallbackReason, SessionOutcome, bounded};
use super::waiter::Waiter;

/// Where the host is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostAt {
    /// At the port of an id, in another process as far as this one knows.
    Port,
    /// At the port of an id whose session this process hosts.
    OwnPort,
    /// At a process listener.
    ProcessListener,
}

/// Whether something that could not be done is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    /// It may pass.
    Later,
    /// It has not passed for too long.
    Refused,
}

/// What came between the rank and its host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Hindrance {
    /// Nobody is there, as far as the rank can see. It has said nothing.
    Unreached {
        /// What was seen.
        words: String,
    },
    /// It could not be tried, as something is wanting. It has said nothing.
    Short(Want),
    /// The connection ended before the host had said all.
    Ended,
    /// The host said what cannot be read.
    Unreadable,
}

/// What follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// It is tried again soon.
    TryAgain,
    /// Nobody has heard of the rank, so it may go to NCCL: whose root is there, or is not, for it too.
    GoToNccl {
        /// Why.
        words: String,
    },
    /// The rank fails.
    Fail(Failure),
    /// The rank fails, and its session, which is hosted here: others who come would find nobody.
    FailWithSession(Failure),
    /// The rank fails, and its host must hear that it does not come: it is told so as soon as it can be.
    FailAndWithdraw(Failure),
}

/// What follows for a rank whose host is there.
pub(crate) fn next(host: HostAt, hindrance: Hindrance) -> Next {
    match (host, hindrance) {
        (HostAt::Port | HostAt::OwnPort, Hindrance::Unreached { words }) => Next::GoToNccl { words },
        // Behind a process listener there is no root of NCCL's.
        (HostAt::ProcessListener, Hindrance::Unreached { .. }) => Next::Fail(Failure::HostLost),
        // The rank had tried to come to a session here, which was refused meanwhile.
        (HostAt::Port, Hindrance::Short(_)) => Next::Fail(Failure::Short),
        // NCCL could do no better in this process.
        (HostAt::OwnPort | HostAt::ProcessListener, Hindrance::Short(Want::Later)) => Next::TryAgain,
        (HostAt::OwnPort, Hindrance::Short(Want::Refused)) => Next::FailWithSession(Failure::Short),
        (HostAt::ProcessListener, Hindrance::Short(Want::Refused)) => Next::FailAndWithdraw(Failure::Short),
        (_, Hindrance::Ended) => Next::Fail(Failure::HostLost),
        (_, Hindrance::Unreadable) => Next::Fail(Failure::Unreadable),
    }
}

/// The rank hears of it what concerns itself.
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

    /// Only a rank of which nobody has heard, and whose id has a root of NCCL's behind it, goes there by itself.
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

    /// What is wanting is waited for, and then others are told who wait for the rank, or for its session.
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

    /// Wherever the host was, who has spoken to it and loses it fails.
    #[test]
    fn loses_its_host() {
        for host in EVERYWHERE {
            assert_eq!(next(host, Hindrance::Ended), Next::Fail(Failure::HostLost));
            assert_eq!(next(host, Hindrance::Unreadable), Next::Fail(Failure::Unreadable));
        }
    }
}
