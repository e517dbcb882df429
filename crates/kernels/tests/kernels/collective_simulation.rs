//! The kernels of collectives on threads of this host. Beside each scenario in `host/collective_test.cpp` stands what it holds.
//!
//! The seed is printed; `WINDLASS_SEED` repeats one.

use super::host::{self, scenarios};

// No fused multiply-adds: results of two compilations are compared to the last bit.
fn plain() -> std::path::PathBuf {
    host::compiled("collective_test.cpp", "collective_test", &["-O2", "-ffp-contract=off"])
}

fn sanitized() -> std::path::PathBuf {
    let flags = ["-O1", "-ffp-contract=off", "-fsanitize=thread"];
    host::compiled("collective_test.cpp", "collective_test_tsan", &flags)
}

scenarios!(plain:
    exhaustive sizes special_values float8 same_bits other_folds_are_found batches mixed one_way_lapped uneven ring_of_two tags counts_32 payload_like_tags grids
    ranks_ahead one_shot abort asked_as_data_come asked_as_room_comes few_resident shared_gpus unlike_grids_hang);

// The scenarios that would overwrite slots soonest, if the kernels allowed it.
scenarios!(sanitized: batches mixed one_way_lapped uneven ring_of_two grids one_shot few_resident shared_gpus);

/// The list of scenarios is complete.
#[test]
fn all_scenarios_run() {
    host::are_all(&plain(), plain::NAMES);
    assert!(sanitized::NAMES.iter().all(|name| plain::NAMES.contains(name)));
}
