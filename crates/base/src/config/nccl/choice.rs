//! Picks NCCL's variables that may change its choice of an algorithm or its speed.

use std::collections::BTreeMap;

/// Names that change nothing of collectives within a host; a final `*` stands for any ending. All other names count.
const WITHOUT_EFFECT: &[&str] = &[
    "NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT",
    "NCCL_COMM_BLOCKING",
    "NCCL_COMM_ID",
    "NCCL_CONF_FILE",
    "NCCL_CROSS_NIC",
    "NCCL_DEBUG*",
    "NCCL_DESYNC_DEBUG",
    "NCCL_DUMP_*",
    "NCCL_ENABLE_TIMING",
    "NCCL_GRAPH_DUMP_FILE*",
    "NCCL_HOME",
    "NCCL_HOSTID",
    "NCCL_IB_*",
    "NCCL_INCLUDE*",
    "NCCL_INSPECTOR_*",
    "NCCL_LIB*",
    "NCCL_OOB_*",
    "NCCL_PROFILE*",
    "NCCL_RAS_*",
    "NCCL_ROOT*",
    "NCCL_SET_THREAD_NAME",
    "NCCL_SOCKET_*",
    "NCCL_TOPO_DUMP_FILE*",
    "NCCL_UID_STAGGER_*",
    "NCCL_VERSION",
];

/// `NAME=value` of the variables that may change NCCL's choice, sorted by name. The environment counts before NCCL's files, and an
/// earlier file before a later one.
pub(super) fn of<'a>(
    environment: impl Iterator<Item = (String, String)>,
    files: impl Iterator<Item = (&'a str, &'a str)>,
) -> Vec<String> {
    let mut all: BTreeMap<String, String> = environment.collect();
    files.for_each(|(name, value)| {
        all.entry(name.to_owned()).or_insert_with(|| value.to_owned());
    });
    let counts =
        |name: &str| name.starts_with("NCCL_") && !WITHOUT_EFFECT.iter().any(|known| is(name, known));
    all.into_iter().filter(|(name, _)| counts(name)).map(|(name, value)| format!("{name}={value}")).collect()
}

fn is(name: &str, known: &str) -> bool {
    known.strip_suffix('*').map_or(name == known, |beginning| name.starts_with(beginning))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every variable counts that is not in the list. The environment counts before files, the first file before the second.
    #[test]
    fn counts() {
        let environment =
            [("NCCL_DEBUG", "INFO"), ("NCCL_ALGO", "Ring"), ("HOME", "/root"), ("NCCL_PROFILER_PLUGIN", "x")];
        let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let files =
            [("NCCL_ALGO", "Tree"), ("NCCL_NEW", "1"), ("NCCL_NEW", "2"), ("NCCL_SOCKET_IFNAME", "a")];
        assert_eq!(of(environment.into_iter(), files.into_iter()), ["NCCL_ALGO=Ring", "NCCL_NEW=1"]);
    }
}
