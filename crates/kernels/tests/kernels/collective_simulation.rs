//! The kernels of collectives on threads of this host: what each test holds is told beside the scenario in
//! `host/collective_test.cpp`.
//!
//! The seed is printed; `WINDLASS_SEED` repeats one.

use super::host::{self, scenarios};

// No fused operations: what is compared to the last bit is compiled twice.
fn plain() -> std::path::PathBuf {
    host::compiled("collective_test.cpp", "collective_test", &["-O2", "-ffp-contract=off"])
}

fn sanitized() -> std::path::PathBuf {
    let flags = ["-O1", "-ffp-contract=off", "-fsanitize=thread"];
    host::compiled("collective_test.cpp", "collective_test_tsan", &flags)
}

scenarios!(plain:
    exhaustive sizes special_values float8 same_bits other_folds_are_found batches mixed one_way_lapped uneven ring_of_two tags counts_32 payload_like_tags grids
    ranks_ahead abort few_resident shared_gpus unlike_grids_hang);

// Those that overwrite slots soonest if they may.
scenarios!(sanitized: batches mixed one_way_lapped uneven ring_of_two grids few_resident shared_gpus);

/// No scenario is forgotten.
#[test]
fn all_scenarios_run() {
    host::are_all(&plain(), plain::NAMES);
    assert!(sanitized::NAMES.iter().all(|name| plain::NAMES.contains(name)));
}
