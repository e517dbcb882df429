//! Why calls of a communicator took their path, in one sentence.

use crate::path::Path;
use crate::stats::features::Feature;
use crate::stats::report::size;
use crate::stats::snapshot::{CallCounts, CommunicatorCounts};

/// What a reader has to know of these calls.
pub fn why(calls: &CallCounts, communicator: &CommunicatorCounts) -> String {
    match calls.path.as_str() {
        path if path == Path::Native.name() => "a kernel of Windlass ran each".into(),
        path if path == Path::P2p.name() => "kernels of Windlass moved them over peers' memory".into(),
        path if path == Path::Registered.name() => {
            "NCCL ran them over buffers that Windlass registered".into()
        }
        _ => on_nccl(calls, communicator),
    }
}

fn on_nccl(calls: &CallCounts, communicator: &CommunicatorCounts) -> String {
    let lacks = communicator.lacks.get(Feature::Native.name());
    match (standing(communicator), lacks) {
        (Some(standing), _) => standing,
        (None, Some(why)) => format!("no native collectives: {why}"),
        (None, None) => match limit(calls) {
            Some(limit) => format!(
                "not {limit} ({}), or of another type or in a group whose limits are lower",
                communicator.limits_from.join(", ")
            ),
            None => "NCCL runs all of this function".into(),
        },
    }
}

/// Why NCCL runs every call of a communicator, and what would change that. None for one with a peer group, or an unknown one.
pub fn standing(communicator: &CommunicatorCounts) -> Option<String> {
    match (communicator.fallback(), communicator.change.as_str()) {
        (None, _) if communicator.peer_group.is_empty() && communicator.serial > 0 => {
            Some("on NCCL: WINDLASS_PEER_GROUPS=off is set (unset it)".into())
        }
        (None, _) => None,
        (Some(reason), "") => Some(format!("on NCCL: {reason}")),
        (Some(reason), change) => Some(format!("on NCCL: {reason} ({change})")),
    }
}

/// Below which size Windlass's kernels run the function.
pub fn limit(calls: &CallCounts) -> Option<String> {
    (calls.native_below > 0).then(|| format!("below {}", size(calls.native_below)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each path and each reason has its sentence.
    #[test]
    fn sentences() {
        let of = |path: &str, below: u64, change: serde_json::Value| {
            let calls = serde_json::json!({
                "function": "ncclAllReduce", "path": path, "calls": 1, "bytes": 8, "native_below": below,
            });
            let mut communicator = serde_json::json!({
                "serial": 1, "state": "live", "rank": 0, "ranks": 2, "device": 0, "peer_group": "yes",
                "limits_from": ["built in"], "calls": [calls],
            });
            for (name, value) in change.as_object().unwrap() {
                communicator[name] = value.clone();
            }
            let communicator: CommunicatorCounts = serde_json::from_value(communicator).unwrap();
            why(&communicator.calls[0], &communicator)
        };
        let none = || serde_json::json!({});
        for (told, expected) in [
            (of("native", 0, none()), "a kernel of Windlass ran each"),
            (of("p2p", 0, none()), "kernels of Windlass moved them over peers' memory"),
            (of("registered", 0, none()), "NCCL ran them over buffers that Windlass registered"),
            (
                of("forward", 8 << 20, none()),
                "not below 8.0 MiB (built in), or of another type or in a group whose limits are lower",
            ),
            (of("forward", 0, none()), "NCCL runs all of this function"),
            (
                of(
                    "forward",
                    0,
                    serde_json::json!({"lacks": {"native collectives": "they are for at most 8 ranks"}}),
                ),
                "no native collectives: they are for at most 8 ranks",
            ),
            (
                of(
                    "forward",
                    0,
                    serde_json::json!({"peer_group": "ranks share a GPU", "change": "give each its own"}),
                ),
                "on NCCL: ranks share a GPU (give each its own)",
            ),
            (
                of("forward", 0, serde_json::json!({"peer_group": ""})),
                "on NCCL: WINDLASS_PEER_GROUPS=off is set (unset it)",
            ),
        ] {
            assert_eq!(told, expected);
        }
    }
}
