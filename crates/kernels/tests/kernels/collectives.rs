//! Holds that Rust and C++ have the same kernels, structures and constants of collectives.

use super::host;

use std::collections::BTreeSet;
use std::process::Command;

use windlass_kernels::collective::{self as c, BatchCall, BatchLaunch, CollectiveLaunch};
use windlass_kernels::collectives::Kernel;

/// The lists of kernels, the offsets and sizes of all fields, and the constants are the same.
#[test]
fn rust_and_cpp_mean_the_same() {
    macro_rules! fields {
        ($type:ident $before:literal $($field:ident)*) => {
            [$({
                let at = std::mem::offset_of!($type, $field);
                format!(concat!($before, "{} {} {}"), stringify!($field), at, size_of_val(&$type::default().$field))
            }),*]
        };
    }
    let kernels = [2, 4, 8].into_iter().flat_map(|ranks| {
        Kernel::all_for(ranks)
            .map(move |kernel| (kernel.name(), kernel.threads_max(), u32::from(!kernel.is_for_any())))
            .map(move |(name, threads, straight)| format!("{name} {ranks} {threads} {straight}"))
    });
    let fields = fields!(CollectiveLaunch ""
        regions wires control report first_tag send send_bytes receive receive_bytes rank ranks channels_log2 ring_slots
        used_channels role_warps reduction flags packets scale
    );
    let of_batches = fields!(BatchLaunch "batch_" launch calls call_of_packet packets_log2 count);
    let of_calls = fields!(BatchCall "call_" send receive send_step receive_step bytes first_packet);
    let constants = [
        ("COLLECTIVE_RANKS_MAX", c::RANKS_MAX as u64),
        ("LL_PAYLOAD_BYTES", c::LL_PAYLOAD_BYTES),
        ("LL_SLOT_BYTES", c::LL_SLOT_BYTES),
        ("LL_SLOTS", c::LL_SLOTS),
        ("LL_COUNT_BYTES", c::LL_COUNT_BYTES),
        ("BATCH_CALLS_MAX", c::BATCH_CALLS_MAX as u64),
        ("BATCH_ENTRIES", c::BATCH_ENTRIES as u64),
        ("LL128_HALF_PAYLOAD_BYTES", c::LL128_HALF_PAYLOAD_BYTES),
        ("LL128_SLOT_BYTES", c::LL128_SLOT_BYTES),
        ("CHANNEL_BYTES", c::CHANNEL_BYTES),
        ("SIMPLE_SHARED_BYTES", c::SIMPLE_SHARED_BYTES.into()),
        ("COLLECTIVE_EARLY_NEXT", c::COLLECTIVE_EARLY_NEXT.into()),
        ("COLLECTIVE_SAME", c::COLLECTIVE_SAME.into()),
        ("COLLECTIVE_EVEN", c::COLLECTIVE_EVEN.into()),
        ("COLLECTIVE_SCALAR_AT", c::COLLECTIVE_SCALAR_AT.into()),
        ("COLLECTIVE_ROOT_SHIFT", c::COLLECTIVE_ROOT_SHIFT.into()),
        ("WAITED_LL_DATA", c::WAITED_LL_DATA.into()),
        ("WAITED_LL128_CREDIT", c::WAITED_LL128_CREDIT.into()),
        ("WAITED_LL128_DATA", c::WAITED_LL128_DATA.into()),
        ("WAITED_RESULT_CREDIT", c::WAITED_RESULT_CREDIT.into()),
        ("WAITED_RESULT_DATA", c::WAITED_RESULT_DATA.into()),
        ("CHANNEL_RECEIVED", c::CHANNEL_RECEIVED as u64),
    ];
    let constants = constants.map(|(name, value)| format!("{name} {value}"));
    let fields = fields.into_iter().chain(of_batches).chain(of_calls);
    let ours: BTreeSet<String> = kernels.chain(fields).chain(constants).collect();

    let program = host::compiled("collective_check.cpp", "collective_check", &["-O0"]);
    let output = Command::new(program).output().unwrap();
    assert!(output.status.success());
    let printed = String::from_utf8(output.stdout).unwrap();
    let theirs: BTreeSet<String> = printed.lines().map(Into::into).collect();
    assert_eq!(printed.lines().count(), theirs.len(), "something is told twice");
    assert_eq!(ours, theirs);
    assert_eq!(ours.len(), 191 + 19 + 5 + 6 + 22);
}
