//! Holds that Rust and C++ have the same kernels, structures and constants: those that host and kernels share, and those of the C
//! interface by which the C++ tests arrange launches. C++ is asked by a program that is made here, so that fields are listed once.

use super::host;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use host_arrange::{
    CollectiveFamily, CollectiveReduction, CollectiveRequest, P2pCall, P2pLimits, P2pShape, UnevenRequest,
};
use windlass_kernels::arrange::Peer;
use windlass_kernels::collective::{self as c, BatchCall, BatchLaunch, CollectiveLaunch, Wire};
use windlass_kernels::collectives::{self, Kernel, Layout, Part};
use windlass_kernels::launch::{self as l, Connection, Geometry, Launch, Operation, Report, ReportEntry};

fn field_size<T, Field>(_: fn(&T) -> &Field) -> usize {
    size_of::<Field>()
}

/// Says in C++ how large each structure is, where each of its fields lies, and that there are no others: no byte is left over.
fn structures() -> String {
    let mut said = String::new();
    macro_rules! structure {
        ($type:ty, $name:ident: $($field:ident)*) => {
            let name = stringify!($name);
            let whole = size_of::<$type>();
            said += &format!("static_assert(sizeof({name}) == {whole}, \"{name}\");\n");
            let mut bytes = 0;
            $(
                let at = std::mem::offset_of!($type, $field);
                let size = field_size(|one: &$type| &one.$field);
                let field = stringify!($field);
                said += &format!(
                    "static_assert(offsetof({name}, {field}) == {at} && sizeof({name}::{field}) == {size}, \"{name}\");\n"
                );
                bytes += size;
            )*
            assert_eq!(bytes, whole, "{name} has fields that are not listed here");
        };
    }
    structure!(Geometry, WindlassP2pGeometry:
        first_tag bulk_from_bytes ll128_channels ll128_slots bulk_channels bulk_slots bulk_chunk_bytes
        rank
    );
    structure!(Operation, WindlassP2pOperation: address bytes);
    structure!(Connection, WindlassP2pConnection:
        ll128_ring ll128_credit ll128_progress ll128_from bulk_ring bulk_posted bulk_credit
        bulk_progress growth peer flags first_block first_operation operations active_ll128_blocks
        active_ll128_rounds active_bulk_channels
    );
    structure!(Launch, WindlassP2pLaunch:
        geometry control report operation_list growth_requests send_connections receive_connections
        used_blocks bulk_tasks ll128_send_warps ll128_receive_warps copy_warps stages copy_blocks
        jobs_per_warp ll128_rounds flags operations copies storage
    );
    structure!(ReportEntry, WindlassP2pReportEntry: peer waited_for channel operation sequence seen);
    structure!(Report, WindlassP2pReport: claimed rank reserved entries);
    structure!(Wire, WindlassWire: rings channels);
    structure!(CollectiveLaunch, WindlassCollectiveLaunch:
        regions wires control report first_tag send send_bytes receive receive_bytes rank ranks
        channels_log2 ring_slots used_channels role_warps reduction flags packets scale
    );
    structure!(BatchLaunch, WindlassBatchLaunch: launch calls call_of_packet packets_log2 count);
    structure!(BatchCall, WindlassBatchCall: send receive send_step receive_step bytes first_packet);
    structure!(P2pCall, P2pCall: address bytes peer receive);
    structure!(Peer, P2pPeer: send receive);
    structure!(P2pLimits, P2pLimits: bulk_copies stages shared_bytes_max);
    structure!(P2pShape, P2pShape: blocks threads shared_bytes cluster parameter_bytes lists_operations);
    structure!(collectives::Geometry, CollectiveGeometry:
        first_tag rank ranks channels slots one_shot_channels one_shot_slots
    );
    structure!(Layout, CollectiveLayout: ll ll128 results one_shot bytes);
    structure!(CollectiveFamily, CollectiveFamily: packet_bytes roles service_warps shared_bytes reserved);
    structure!(CollectiveReduction, CollectiveReduction: scalar datatype operation scalar_at reserved);
    structure!(CollectiveRequest, CollectiveRequest: reduction count send receive kind element_bytes root reserved);
    structure!(Part, UnevenPart: address bytes);
    structure!(UnevenRequest, UnevenRequest: reduction parts own reduces reserved);
    said
}

fn constants() -> String {
    let mut said = String::new();
    macro_rules! constants {
        ($module:ident: $($name:ident)*) => {
            $(said += &constant(stringify!($name), $module::$name as u64);)*
        };
    }
    constants!(l:
        PACKET_SLOT_BYTES PACKET_PAYLOAD_BYTES LL128_WORD_STRIDE BULK_WORD_STRIDE PROGRESS_STRIDE
        LL128_FROM_STRIDE LAUNCH_BYTES LAUNCH_HEAD_BYTES INLINE_BYTES REPORT_ENTRIES BULK_SERVICE_WARPS
        GROWTH_REQUESTS_PER_WIRE VIRTUAL_BLOCKS_MAX PACKETS_A_BLOCK BLOCKS_SHIFT CONNECTION_RECEIVE
        CONNECTION_ORDINARY_STORES LAUNCH_BULK_GREW CONTROL_RUN CONTROL_ABORT CONTROL_ASK
        WAITED_P2P_LL128_CREDIT WAITED_P2P_LL128_DATA WAITED_BULK_CREDIT WAITED_BULK_DATA
    );
    constants!(c:
        LL_PAYLOAD_BYTES LL_SLOT_BYTES LL_SLOTS LL_COUNT_BYTES BATCH_CALLS_MAX BATCH_ENTRIES
        LL128_HALF_PAYLOAD_BYTES LL128_SLOT_BYTES CHANNEL_BYTES SIMPLE_SHARED_BYTES
        COLLECTIVE_EARLY_NEXT COLLECTIVE_SAME COLLECTIVE_EVEN COLLECTIVE_SCALAR_AT COLLECTIVE_ROOT_SHIFT
        WAITED_LL_DATA WAITED_LL128_CREDIT WAITED_LL128_DATA WAITED_RESULT_CREDIT WAITED_RESULT_DATA
        WAITED_ONE_SHOT_DATA ONE_SHOT_LAUNCHES
        CHANNEL_RECEIVED
    );
    said + &constant("COLLECTIVE_RANKS_MAX", c::RANKS_MAX as u64)
}

fn constant(name: &str, value: u64) -> String {
    format!("static_assert(WINDLASS_{name} == {value}, \"{name}\");\n")
}

/// What the program prints: kernels of `device/collective_list.h`.
const MAIN: &str = r#"
int main() {
#define KERNEL(name, family, reducer, ranks, groups, threads_max, straight) std::printf("%s %d %d %d\n", #name, ranks, threads_max, straight);
  WINDLASS_COLLECTIVE_KERNELS(KERNEL)
}
"#;

/// The lists of kernels, all fields and the constants are the same.
#[test]
fn rust_and_cpp_mean_the_same() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (source, program) = (folder.join("structures.cpp"), folder.join("structures"));
    let include = |file| format!("#include \"{}\"\n", host::crate_folder().join(file).display());
    let includes = include("device/collective_list.h") + &include("host/arrange.h") + "#include <cstdio>\n";
    fs::write(&source, includes + &structures() + &constants() + MAIN).unwrap();
    host::compile(&source, &program, &["-O0"]);

    let kernels = [2, 4, 8].into_iter().flat_map(|ranks| {
        Kernel::all_for(ranks)
            .map(move |kernel| (kernel.name(), kernel.threads_max(), u32::from(!kernel.is_for_any())))
            .map(move |(name, threads, straight)| format!("{name} {ranks} {threads} {straight}"))
    });
    let ours: BTreeSet<String> = kernels.collect();
    let output = Command::new(program).output().unwrap();
    assert!(output.status.success());
    let printed = String::from_utf8(output.stdout).unwrap();
    let theirs: BTreeSet<String> = printed.lines().map(Into::into).collect();
    assert_eq!(printed.lines().count(), theirs.len(), "something is told twice");
    assert_eq!(ours, theirs);
    assert_eq!(ours.len(), 228);
}
