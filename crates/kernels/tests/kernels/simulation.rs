//! The p2p kernel on threads of this host. Beside each scenario in `host/p2p_test.cpp` stands what it holds.
//!
//! The seed is printed; `WINDLASS_SEED` repeats one.

use super::host::{self, scenarios};

fn plain() -> std::path::PathBuf {
    host::compiled("p2p_test.cpp", "p2p_test", &["-O2"])
}

fn sanitized() -> std::path::PathBuf {
    host::compiled("p2p_test.cpp", "p2p_test_tsan", &["-O1", "-fsanitize=thread"])
}

scenarios!(plain:
    shared_memory sizes sizes_ordinary alignments to_itself one_way both_ways larger_than_ring smallest_rings patterns patterns_ordinary
    five_ranks several_to_one_peer three_hundred sender_ahead groups_cut tags_32 tags_64 counts_32
    none_holds_up_another payload_like_tags abort abort_ordinary
    grow_stalled grow_and_cut grow_before_use grow_one_side grow_head_to_head grow_eight_deep grow_in_traffic grow_in_traffic_ordinary
    random few_resident shared_gpus unlike_blocks_hang);

// The scenarios that reach every order of accesses; all would take minutes.
scenarios!(sanitized:
    sizes sizes_ordinary both_ways five_ranks
    grow_stalled grow_before_use grow_eight_deep grow_in_traffic grow_in_traffic_ordinary random few_resident
    shared_gpus);

/// The list of scenarios is complete.
#[test]
fn all_scenarios_run() {
    host::are_all(&plain(), plain::NAMES);
    assert!(sanitized::NAMES.iter().all(|name| plain::NAMES.contains(name)));
}

/// The tests detect a missing fence: without the signal warp's, chunks are announced before they have arrived.
#[test]
fn a_missing_fence_is_found() {
    let faulty = host::compiled("p2p_test.cpp", "p2p_test_faulty", &["-O1", "-DHOST_WITHOUT_FENCE"]);
    let output = host::output(&faulty, "both_ways");
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("FAILED"));
}
