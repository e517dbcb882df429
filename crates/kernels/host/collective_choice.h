// What tests choose of a collective: its kind and its way. The product's code arranges it (arrange.h). Beside the
// product's kinds there are all-to-alls, which the kernels can move.
#pragma once
#include "arrange.h"

namespace collective {

// The first ones by their numbers in a CollectiveRequest.
enum Kind : uint32_t { all_reduce, broadcast, reduce, all_gather, reduce_scatter, all_to_all };
constexpr int kinds = 6;
inline const char* const kind_names[] = {"all-reduce", "broadcast", "reduce", "all-gather", "reduce-scatter", "all-to-all"};

enum Family { ll, ll128, two_phases, simple, simple_two_phases, one_shot, one_shot_parts };
inline bool is_simple(Family family) { return family == simple || family == simple_two_phases; }
inline bool is_one_shot(Family family) { return family == one_shot || family == one_shot_parts; }
struct Choice {
  Family family;
  uint32_t groups;  // of LL128 and one-shot
  bool operator!=(const Choice& other) const { return family != other.family || groups != other.groups; }
  WindlassFamily way() const {
    switch (family) {
      case ll128: return groups == 2 ? windlass_ll128x2 : windlass_ll128x4;
      case two_phases: return groups == 2 ? windlass_two_phases : windlass_two_phases_x4;
      case simple: return windlass_simple;
      case simple_two_phases: return windlass_simple_two_phases;
      case one_shot: return groups == 2 ? windlass_one_shot_x2 : windlass_one_shot_x4;
      case one_shot_parts: return groups == 2 ? windlass_one_shot_parts_x2 : windlass_one_shot_parts_x4;
      default: return windlass_ll;
    }
  }
};

inline bool has_kernels(uint32_t type, uint32_t by) { return windlass_reducer(type, by) != windlass_refused; }
// Whether a reduction has kernels of its own (../device/ordered.cuh), and which of them a kind uses: a reduce may run
// in one phase or in two.
inline bool is_ordered(uint32_t type, uint32_t by) { return windlass_reducer(type, by) == windlass_ordered; }
inline Choice ordered_choice(Kind kind, const Choice& like) {
  return {kind == all_reduce || (kind == reduce && like.family == two_phases) ? two_phases : ll128, 2};
}

inline uint64_t packet_bytes(const Choice& choice) { return windlass_family(choice.way()).packet_bytes; }
// Kernels of both packets of LL128 have the same roles.
inline CollectiveFamily shape_of(Family family) { return windlass_family(Choice{family, 2}.way()); }
inline uint32_t roles(Family family) { return shape_of(family).roles; }
inline uint32_t threads(Family family, uint32_t role_warps) {
  return 32 * (roles(family) * role_warps + shape_of(family).service_warps);
}
inline uint32_t shared_bytes(Family family) { return shape_of(family).shared_bytes; }

inline bool straight(const WindlassCollectiveLaunch& launch, const Choice& choice) {
  return windlass_is_straight(&launch, choice.way());
}

// Uses as many channels as a launch can. Tests choose fewer later.
inline void use_all_channels(WindlassCollectiveLaunch& launch, uint32_t channels) {
  launch.used_channels = launch.packets < channels ? (uint32_t)launch.packets : channels;
}

// Fills all fields but control, report and role_warps.
inline WindlassCollectiveLaunch arrange(Kind kind, CollectiveRequest request, const CollectiveGeometry& geometry,
                                        const uint64_t* regions, const Choice& choice) {
  WindlassCollectiveLaunch launch;
  request.kind = kind == all_to_all ? all_gather : kind;
  windlass_arrange_collective(&request, choice.way(), &geometry, regions, &launch);
  if (kind == all_to_all) {
    // An all-gather that sends each rank another part.
    launch.flags &= ~(uint32_t)WINDLASS_COLLECTIVE_SAME;
    const uint64_t bytes = request.count * request.element_bytes;
    for (uint32_t rank = 0; rank < geometry.ranks; ++rank) launch.send[rank] = request.send + rank * bytes;
  }
  use_all_channels(launch, is_one_shot(choice.family) ? geometry.one_shot_channels : geometry.channels);
  return launch;
}

inline WindlassCollectiveLaunch arrange_uneven(const UnevenRequest& request, const CollectiveGeometry& geometry,
                                               const uint64_t* regions, const Choice& choice) {
  WindlassCollectiveLaunch launch;
  windlass_arrange_uneven(&request, choice.way(), &geometry, regions, &launch);
  use_all_channels(launch, geometry.channels);
  return launch;
}

}  // namespace collective
