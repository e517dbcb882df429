// How Windlass arranges launches: the functions of the library of crates/kernels/host-arrange, which runs the
// product's Rust code. The tests choose the way of a collective and its grid themselves.
#pragma once
#include "../device/collective.h"
#include "../device/p2p.h"

constexpr uint32_t windlass_refused = ~0u;

// --- the p2p transport (crates/kernels/src/arrange.rs) ----------------------------------------------------

struct P2pCall {
  uint64_t address;
  uint64_t bytes;
  uint32_t peer;  // index in the table of peers
  uint32_t receive;
};

// Addresses of both directions with one peer; the fields after `peer` are ignored.
struct P2pPeer {
  WindlassP2pConnection send, receive;
};

struct P2pLimits {
  uint32_t bulk_copies;  // whether the architecture has them
  uint32_t stages;       // chunks in shared memory; even, 2 to 8
  uint32_t shared_bytes_max;
};

struct P2pShape {
  uint32_t blocks;  // 0: nothing to launch; windlass_refused: no room for the state of a block's channels
  uint32_t threads;
  uint32_t shared_bytes;
  uint32_t cluster;           // blocks of a cluster; 1: no attribute
  uint32_t parameter_bytes;   // used part of the launch
  uint32_t lists_operations;  // the operations did not fit: place them and set operation_list
};

// --- collectives (crates/kernels/src/collectives) ---------------------------------------------------------

// The ways of one collective.
enum WindlassFamily : uint32_t {
  windlass_ll,
  windlass_ll128x2,
  windlass_ll128x4,
  windlass_two_phases,
  windlass_simple,
  windlass_simple_two_phases,
  windlass_one_shot_x2,
  windlass_one_shot_x4,
  windlass_two_phases_x4,
  windlass_one_shot_parts_x2,
  windlass_one_shot_parts_x4,
};

enum WindlassReducer : uint32_t {
  windlass_copy,
  windlass_sum_f32,
  windlass_sum_f16,
  windlass_sum_bf16,
  windlass_any,
  windlass_ordered,
};

struct CollectiveGeometry {
  uint64_t first_tag;
  uint32_t rank, ranks, channels, slots;  // channels and slots: powers of two
  uint32_t one_shot_channels, one_shot_slots;
};

// Offsets in the part for collectives of a region.
struct CollectiveLayout {
  WindlassWire ll, ll128, results, one_shot;
  uint64_t bytes;
};

// What all kernels of a family have in common.
struct CollectiveFamily {
  uint64_t packet_bytes;
  uint32_t roles;          // a block has as many warps for each
  uint32_t service_warps;  // and so many more
  uint32_t shared_bytes;
  uint32_t reserved;
};

struct CollectiveReduction {
  uint64_t scalar;               // of a scaled sum: the scalar's bits, or its address
  uint32_t datatype, operation;  // NCCL's numbers; 5: a scaled sum
  uint32_t scalar_at;
  uint32_t reserved;
};

struct CollectiveRequest {
  CollectiveReduction reduction;  // ignored if the kind does not reduce
  uint64_t count;                 // as NCCL counts it
  uint64_t send, receive;
  uint32_t kind;  // all-reduce, broadcast, reduce, all-gather, reduce-scatter
  uint32_t element_bytes;
  uint32_t root;
  uint32_t reserved;
};

struct UnevenPart {
  uint64_t address, bytes;
};

struct UnevenRequest {
  CollectiveReduction reduction;
  // Destination of each rank's part; of a reduction: what this rank gives to each result.
  UnevenPart parts[WINDLASS_COLLECTIVE_RANKS_MAX];
  uint64_t own;      // address of this rank's own part; of a reduction: of its result
  uint32_t reduces;  // a reduce-scatter-v, not an all-gather-v
  uint32_t reserved;
};

static_assert(sizeof(P2pCall) == 24 && sizeof(P2pPeer) == 192, "p2p");
static_assert(sizeof(P2pLimits) == 12 && sizeof(P2pShape) == 24, "p2p");
static_assert(sizeof(CollectiveGeometry) == 32 && sizeof(CollectiveLayout) == 72, "collectives");
static_assert(sizeof(CollectiveFamily) == 24 && sizeof(CollectiveReduction) == 24, "collectives");
static_assert(sizeof(CollectiveRequest) == 64, "collectives");
static_assert(sizeof(UnevenPart) == 16 && sizeof(UnevenRequest) == 168, "collectives");

extern "C" {
// Fills the launch, all but control, report, operation_list and flags. `operations` has room for as many as there are
// calls; it is filled also if the launch holds them all.
P2pShape windlass_arrange_p2p(const P2pCall* calls, size_t call_count, const P2pPeer* peers, size_t peer_count,
                              const WindlassP2pGeometry* geometry, const P2pLimits* limits,
                              WindlassP2pLaunch* launch, WindlassP2pOperation* operations);

CollectiveLayout windlass_layout(const CollectiveGeometry* geometry);
CollectiveFamily windlass_family(uint32_t family);
// A WindlassReducer; windlass_refused: there are no kernels.
uint32_t windlass_reducer(uint32_t datatype, uint32_t operation);

// These fill the launch, all but control, report, used_channels and role_warps. `regions` has an address for each rank.
// What cannot be arranged ends the program. A count of zero has a launch without packets.
void windlass_arrange_collective(const CollectiveRequest* request, uint32_t family, const CollectiveGeometry* geometry,
                                 const uint64_t* regions, WindlassCollectiveLaunch* launch);
void windlass_arrange_uneven(const UnevenRequest* request, uint32_t family, const CollectiveGeometry* geometry,
                             const uint64_t* regions, WindlassCollectiveLaunch* launch);

// Whether this rank may run the launch by the straight kernel of its family.
bool windlass_is_straight(const WindlassCollectiveLaunch* launch, uint32_t family);
}
