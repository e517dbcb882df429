// Makes a launch of an all-gather-v or reduce-scatter-v, as src/collectives/uneven.rs does in Rust, for tests, which choose the
// groups of LL128 and the grid themselves.
#pragma once
#include "collective_arrange.h"

namespace collective {

struct UnevenPart {
  uint64_t address, bytes;
};

struct UnevenRequest {
  bool reduces;
  uint32_t type, by;  // NCCL's, if it reduces
  UnevenPart parts[WINDLASS_COLLECTIVE_RANKS_MAX];  // destination of each rank's part; of a reduction: what this rank gives to each result
  uint64_t own;                                     // address of this rank's own part; of a reduction: of its result
  uint64_t scalar = 0;                              // as in Request
  bool scalar_at = false;
};

// Fills all fields but regions, control, report and the block's shape.
inline WindlassCollectiveLaunch arrange_uneven(const UnevenRequest& request, const Geometry& geometry, uint32_t groups) {
  // Types, tags, wires and channels are those of an even collective of zero bytes.
  const Kind like = request.reduces ? reduce_scatter : all_gather;
  WindlassCollectiveLaunch launch = arrange({like, 0, 1, request.type, request.by, 0, 0, 0, request.scalar, request.scalar_at}, geometry, {ll128, groups});
  const uint32_t me = geometry.rank;
  const uint64_t own_bytes = request.parts[me].bytes;
  uint64_t largest = 0;
  bool is_even = true;
  launch.flags = request.reduces ? launch.flags & WINDLASS_COLLECTIVE_SCALAR_AT : (uint32_t)WINDLASS_COLLECTIVE_SAME;
  for (uint32_t rank = 0; rank < geometry.ranks; ++rank) {
    const UnevenPart& part = request.parts[rank];
    launch.send[rank] = request.reduces ? part.address : request.own;
    launch.send_bytes[rank] = request.reduces ? part.bytes : own_bytes;
    launch.receive[rank] = request.reduces ? (rank == me ? request.own : 0) : part.address;
    launch.receive_bytes[rank] = request.reduces ? (rank == me ? own_bytes : 0) : part.bytes;
    if (part.bytes > largest) largest = part.bytes;
    is_even &= part.bytes == own_bytes;
  }
  if (is_even) launch.flags |= WINDLASS_COLLECTIVE_EVEN;
  finish(launch, {ll128, groups}, geometry, largest);
  return launch;
}

}  // namespace collective
