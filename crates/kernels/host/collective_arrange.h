// Makes a launch of a collective, as src/collectives does in Rust, for tests and the benchmark, which choose wire and grid themselves.
#pragma once
#include <cstring>

#include "../device/collective.h"

namespace collective {

enum Kind { all_reduce, broadcast, reduce, all_gather, reduce_scatter, all_to_all };
constexpr int kinds = 6;
inline const char* const kind_names[] = {"all-reduce", "broadcast", "reduce", "all-gather", "reduce-scatter", "all-to-all"};

struct Geometry {
  uint64_t first_tag;
  uint32_t rank, ranks, channels, slots;  // channels and slots: powers of two
};

// Offsets in the part for collectives of a region.
struct Layout {
  WindlassWire ll, ll128, results;
  uint64_t bytes;
  explicit Layout(const Geometry& geometry) {
    uint64_t end = 0;
    const auto take = [&](uint64_t bytes) {
      const uint64_t at = end;
      end += (bytes + 127) / 128 * 128;
      return at;
    };
    const uint64_t ranks = geometry.ranks, channels = geometry.channels;
    const auto ll128_wire = [&] { return WindlassWire{take(ranks * channels * geometry.slots * WINDLASS_LL128_SLOT_BYTES), take(channels * WINDLASS_CHANNEL_BYTES)}; };
    ll = {take(ranks * channels * WINDLASS_LL_SLOTS * WINDLASS_LL_SLOT_BYTES), take(channels * WINDLASS_LL_COUNT_BYTES)};
    ll128 = ll128_wire();
    results = ll128_wire();
    bytes = end;
  }
};

enum Family { ll, ll128, two_phases, simple, simple_two_phases };
inline bool is_simple(Family family) { return family == simple || family == simple_two_phases; }
struct Choice {
  Family family;
  uint32_t groups;  // of LL128
  bool operator!=(const Choice& other) const { return family != other.family || groups != other.groups; }
};

// Whether a reduction has kernels of its own (../device/ordered.cuh), and which of them a kind uses: a reduce may run in one phase or in two.
inline bool is_ordered(uint32_t type, uint32_t by) { return type >= 10 || by == 5; }
// All but averages of integers.
inline bool has_kernels(uint32_t type, uint32_t by) { return type >= 6 || by != 4; }
inline Choice ordered_choice(Kind kind, const Choice& like) {
  return {kind == all_reduce || (kind == reduce && like.family == two_phases) ? two_phases : ll128, 2};
}

// LL is for collectives in which every rank sends to every other one, at most one packet a channel.
inline bool goes_by_ll(Kind kind, uint64_t connection_bytes, uint32_t channels) {
  return kind != broadcast && kind != reduce && connection_bytes <= (uint64_t)channels * WINDLASS_LL_PAYLOAD_BYTES;
}

inline uint64_t packet_bytes(const Choice& choice) {
  if (choice.family == ll) return WINDLASS_LL_PAYLOAD_BYTES;
  if (is_simple(choice.family)) return WINDLASS_LL128_SLOT_BYTES;
  return choice.groups / 2 * WINDLASS_LL128_HALF_PAYLOAD_BYTES;
}

struct Request {
  Kind kind;
  uint64_t count;  // as NCCL counts it
  uint32_t element_bytes;
  uint32_t type, by;  // of a reduction: NCCL's type and operation
  uint32_t root;
  uint64_t send, receive;
  uint64_t scalar = 0;  // of a scaled sum: the scalar's bits, or its address
  bool scalar_at = false;
};

inline uint64_t scale_of(uint32_t type, uint32_t by, uint32_t ranks) {
  const bool average = by == 4;
  if (type < 6 || (by != 0 && !average)) return 0;
  uint64_t bits = 0;
  if (type == 8) {
    const double scale = average ? 1.0 / ranks : 1.0;
    std::memcpy(&bits, &scale, sizeof scale);
  } else {
    const float scale = average ? (float)(1.0 / ranks) : 1.0f;
    std::memcpy(&bits, &scale, sizeof scale);
  }
  return bits;
}

// Fills the fields that follow from the buffers. `largest`: bytes of the largest connection of all.
inline void finish(WindlassCollectiveLaunch& launch, const Choice& choice, const Geometry& geometry, uint64_t largest) {
  const uint64_t packet = packet_bytes(choice);
  launch.packets = (largest + packet - 1) / packet;
  launch.used_channels = launch.packets < geometry.channels ? (uint32_t)launch.packets : geometry.channels;
}

// Whether this rank may use the straight kernel.
inline bool straight(const WindlassCollectiveLaunch& launch, const Choice& choice) {
  uint64_t bits = 0;
  for (uint32_t rank = 0; rank < launch.ranks; ++rank) {
    if (launch.send_bytes[rank]) bits |= launch.send[rank] | launch.send_bytes[rank];
    if (launch.receive_bytes[rank]) bits |= launch.receive[rank] | launch.receive_bytes[rank];
  }
  return launch.flags & WINDLASS_COLLECTIVE_EVEN && bits % (choice.family == ll ? 8 : 16) == 0;
}

// Fills all fields but regions, control, report and the block's shape.
inline WindlassCollectiveLaunch arrange(const Request& request, const Geometry& geometry, const Choice& choice) {
  WindlassCollectiveLaunch launch;
  std::memset(&launch, 0, sizeof launch);
  const Layout layout(geometry);
  const uint32_t me = geometry.rank, ranks = geometry.ranks;
  const uint64_t bytes = request.count * request.element_bytes;
  launch.wires[0] = choice.family == ll ? layout.ll : layout.ll128;
  launch.wires[1] = layout.results;
  launch.first_tag = geometry.first_tag;
  launch.rank = me;
  launch.ranks = ranks;
  while (1u << launch.channels_log2 < geometry.channels) ++launch.channels_log2;
  launch.ring_slots = geometry.slots;
  const bool reduces = request.kind == all_reduce || request.kind == reduce || request.kind == reduce_scatter;
  if (reduces) {
    launch.reduction = request.type | request.by << 8;
    launch.scale = request.by == 5 ? request.scalar : scale_of(request.type, request.by, ranks);
    if (request.scalar_at) launch.flags |= WINDLASS_COLLECTIVE_SCALAR_AT;
  }
  const auto sends = [&](uint32_t rank, uint64_t at, uint64_t bytes) { launch.send[rank] = at, launch.send_bytes[rank] = bytes; };
  const auto receives = [&](uint32_t rank, uint64_t at, uint64_t bytes) { launch.receive[rank] = at, launch.receive_bytes[rank] = bytes; };
  uint64_t largest = bytes;
  switch (request.kind) {
    case all_reduce:
      if (choice.family == two_phases || choice.family == simple_two_phases) {
        // Shares are multiples of 16 bytes, except the last one that is not empty.
        const uint64_t share = ((bytes + ranks - 1) / ranks + 15) / 16 * 16;
        largest = share < bytes ? share : bytes;
        for (uint32_t rank = 0; rank < ranks; ++rank) {
          const uint64_t from = rank * share < bytes ? rank * share : bytes, left = bytes - from;
          sends(rank, request.send + from, left < share ? left : share);
          receives(rank, request.receive + from, left < share ? left : share);
        }
      } else {
        launch.flags |= WINDLASS_COLLECTIVE_SAME;
        for (uint32_t rank = 0; rank < ranks; ++rank) sends(rank, request.send, bytes);
        receives(me, request.receive, bytes);
      }
      break;
    case broadcast:
      if (me == request.root) {
        launch.flags |= WINDLASS_COLLECTIVE_SAME;
        for (uint32_t rank = 0; rank < ranks; ++rank) sends(rank, request.send, bytes);
        receives(me, request.receive, bytes);
      } else {
        receives(request.root, request.receive, bytes);
      }
      break;
    case reduce:
      if (choice.family == two_phases) {
        // Shares are those of an all-reduce of all ranks but the root.
        const uint64_t share = ((bytes + ranks - 2) / (ranks - 1) + 15) / 16 * 16;
        largest = share < bytes ? share : bytes;
        launch.flags |= (request.root + 1) << WINDLASS_COLLECTIVE_ROOT_SHIFT;
        for (uint32_t rank = 0, index = 0; rank < ranks; ++rank) {
          if (rank == request.root) continue;
          const uint64_t from = index * share < bytes ? index * share : bytes, left = bytes - from;
          ++index;
          sends(rank, request.send + from, left < share ? left : share);
          if (me == request.root) receives(rank, request.receive + from, left < share ? left : share);
        }
        break;
      }
      sends(request.root, request.send, bytes);
      if (me == request.root) receives(me, request.receive, bytes);
      break;
    case all_gather:
      launch.flags |= WINDLASS_COLLECTIVE_SAME;
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        sends(rank, request.send, bytes);
        receives(rank, request.receive + rank * bytes, bytes);
      }
      break;
    case reduce_scatter:
      for (uint32_t rank = 0; rank < ranks; ++rank) sends(rank, request.send + rank * bytes, bytes);
      receives(me, request.receive, bytes);
      break;
    case all_to_all:
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        sends(rank, request.send + rank * bytes, bytes);
        receives(rank, request.receive + rank * bytes, bytes);
      }
      break;
  }
  if (request.kind != broadcast && request.kind != reduce) launch.flags |= WINDLASS_COLLECTIVE_EVEN;
  finish(launch, choice, geometry, largest);
  return launch;
}

inline uint32_t roles(Family family) { return family == ll ? 1 : family == two_phases || family == simple_two_phases ? 3 : 2; }
inline uint32_t threads(Family family, uint32_t role_warps) { return 32 * (roles(family) * role_warps + is_simple(family)); }
inline uint32_t shared_bytes(Family family) { return is_simple(family) ? WINDLASS_SIMPLE_SHARED_BYTES : 0; }

}  // namespace collective
