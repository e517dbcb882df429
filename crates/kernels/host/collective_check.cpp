// Prints the kernels of collective_list.h and the fields of collective.h, for the comparison with Rust (tests/kernels/collectives.rs).
#include <cstdio>

#include "../device/collective.h"
#include "../device/collective_list.h"

int main() {
#define KERNEL(name, family, reducer, ranks, groups, threads_max, straight) std::printf("%s %d %d %d\n", #name, ranks, threads_max, straight);
  WINDLASS_COLLECTIVE_KERNELS(KERNEL)
#define FIELD(field) std::printf("%s %zu %zu\n", #field, offsetof(WindlassCollectiveLaunch, field), sizeof(WindlassCollectiveLaunch::field));
  FIELD(regions) FIELD(wires) FIELD(control) FIELD(report) FIELD(first_tag) FIELD(send) FIELD(send_bytes) FIELD(receive)
  FIELD(receive_bytes) FIELD(rank) FIELD(ranks) FIELD(channels_log2) FIELD(ring_slots) FIELD(used_channels) FIELD(role_warps)
  FIELD(reduction) FIELD(flags) FIELD(packets) FIELD(scale)
#define BATCH_FIELD(field) std::printf("batch_%s %zu %zu\n", #field, offsetof(WindlassBatchLaunch, field), sizeof(WindlassBatchLaunch::field));
  BATCH_FIELD(launch) BATCH_FIELD(calls) BATCH_FIELD(call_of_packet) BATCH_FIELD(packets_log2) BATCH_FIELD(count)
#define CALL_FIELD(field) std::printf("call_%s %zu %zu\n", #field, offsetof(WindlassBatchCall, field), sizeof(WindlassBatchCall::field));
  CALL_FIELD(send) CALL_FIELD(receive) CALL_FIELD(send_step) CALL_FIELD(receive_step) CALL_FIELD(bytes) CALL_FIELD(first_packet)
#define CONSTANT(name) std::printf("%s %d\n", #name, WINDLASS_##name);
  CONSTANT(COLLECTIVE_RANKS_MAX) CONSTANT(LL_PAYLOAD_BYTES) CONSTANT(LL_SLOT_BYTES) CONSTANT(LL_SLOTS) CONSTANT(LL_COUNT_BYTES) CONSTANT(BATCH_CALLS_MAX) CONSTANT(BATCH_ENTRIES) CONSTANT(LL128_HALF_PAYLOAD_BYTES)
  CONSTANT(LL128_SLOT_BYTES) CONSTANT(CHANNEL_BYTES) CONSTANT(SIMPLE_SHARED_BYTES) CONSTANT(COLLECTIVE_EARLY_NEXT) CONSTANT(COLLECTIVE_SAME) CONSTANT(COLLECTIVE_EVEN) CONSTANT(COLLECTIVE_SCALAR_AT) CONSTANT(COLLECTIVE_ROOT_SHIFT)
  CONSTANT(WAITED_LL_DATA) CONSTANT(WAITED_LL128_CREDIT) CONSTANT(WAITED_LL128_DATA)
  CONSTANT(WAITED_RESULT_CREDIT) CONSTANT(WAITED_RESULT_DATA) CONSTANT(CHANNEL_RECEIVED)
}
