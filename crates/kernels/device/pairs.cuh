// Collectives over pairs (NCCL's LL): a warp sends 8 bytes a thread to each peer and waits for as much of each. One hop and short
// code: the quickest for small sizes.
#pragma once
#include "bytes.cuh"
#include "lane.cuh"
#include "reduction.cuh"

struct PairsFormat {
  static constexpr uint32_t payload_bytes = WINDLASS_PAIRS_PAYLOAD_BYTES, slot_bytes = WINDLASS_PAIRS_SLOT_BYTES;
};
typedef Lane<PairsFormat> PairsLane;

// `bytes` (up to 8) of the user's.
MAIL_DEVICE uint64_t load_eight(uint64_t from, uint32_t bytes) {
  if (!MAIL_SELDOM(bytes < 8 || from % 8)) return load_piece<uint64_t>(reinterpret_cast<const char*>(from));
  if (bytes == 0) return 0;
  return load_bytes(reinterpret_cast<const char*>(from), bytes < 8 ? bytes : 8).x;
}
MAIL_DEVICE void store_eight(uint64_t to, uint64_t value, uint32_t bytes) {
  if (!MAIL_SELDOM(bytes < 8 || to % 8))
    store_piece<uint64_t>(reinterpret_cast<char*>(to), value);
  else if (bytes)
    store_bytes(reinterpret_cast<char*>(to), Vector{value, 0}, bytes < 8 ? bytes : 8);
}
// Of a unit's bytes, this thread's: up to 8, or more.
MAIL_DEVICE uint32_t own_bytes(uint32_t unit_bytes) {
  const uint32_t from = 8 * lane_index();
  return unit_bytes > from ? unit_bytes - from : 0;
}

template <class Reducer, int ranks_max>
MAIL_DEVICE bool run_pairs_lane(const Collective& call, uint32_t lane) {
  const WindlassCollectiveLaunch& launch = call.launch;
  const uint32_t me = call.me(), place = lane_index() % 8;
  const bool same = launch.flags & WINDLASS_COLLECTIVE_SAME;
  const Reduction how{launch.reduction, launch.scale};
  const uint64_t in_bytes = place == me || place >= launch.ranks ? 0
                            : Reducer::reduces                   ? launch.receive_bytes[me]
                                                                 : launch.receive_bytes[place];
  PairsLane way(call, launch.wires[0], lane, launch.send_bytes[place], in_bytes);
  const auto own_place = [](uint64_t slot) { return reinterpret_cast<char*>(slot + 16 * lane_index()); };
  for (;; ++way.step) {
    const uint32_t to = way.sends_to(), from = way.receives_from();
    if ((to | from) == 0) break;
    const uint64_t at = way.offset() + 8 * lane_index();
    // All loads are on their way before the first is waited for.
    const bool has_own = to >> me & 1;
    const uint64_t own = has_own ? load_eight(launch.send[me] + at, own_bytes(way.part_of(launch.send_bytes[me]))) : 0;
    uint64_t out[ranks_max];
    MAIL_UNROLL
    for (int distance = 1; distance < ranks_max; ++distance) {
      const uint32_t rank = call.peer(distance);
      out[distance] = 0;
      if (!same && distance < (int)launch.ranks && to >> rank & 1)
        out[distance] = load_eight(launch.send[rank] + at, own_bytes(way.part_of(launch.send_bytes[rank])));
    }
    way.settle();
    if (!way.wait_for_room(to, WINDLASS_WAITED_PAIRS_CREDIT)) return false;
    const uint64_t out_slot = way.out_slot(), out_tag = way.out_tag(), in_tag = way.in_tag();
    const uint32_t in_slot = way.in_slot();
    MAIL_UNROLL
    for (int distance = 1; distance < ranks_max; ++distance) {
      const uint32_t rank = call.peer(distance);
      const uint64_t slot = from_lane(out_slot, rank), tag = from_lane(out_tag, rank);
      store_pair_if(distance < (int)launch.ranks && to >> rank & 1, own_place(slot), same ? own : out[distance], tag);
    }
    way.has_sent(to);

    uint64_t x[ranks_max], found[ranks_max], tags[ranks_max];
    uint32_t slots[ranks_max];
    MAIL_UNROLL
    for (int rank = 0; rank < ranks_max; ++rank) {
      x[rank] = found[rank] = 0;
      slots[rank] = from_lane(in_slot, rank);
      tags[rank] = from_lane(in_tag, rank);
    }
    Waiting waiting;
    for (;;) {
      MAIL_UNROLL
      for (int rank = 0; rank < ranks_max; ++rank) load_pair_if(from >> rank & 1, own_place(launch.slices[me] + slots[rank]), tags[rank], x[rank], found[rank]);
      bool there = true;
      MAIL_UNROLL
      for (int rank = 0; rank < ranks_max; ++rank) there &= !(from >> rank & 1) || found[rank] == tags[rank];
      if (all_of_warp(there)) break;
      if (!waiting.ends(launch)) continue;
      uint32_t missing = 0;
      MAIL_UNROLL
      for (int rank = 0; rank < ranks_max; ++rank)
        if (from >> rank & 1 && !all_of_warp(found[rank] == tags[rank])) missing |= 1u << rank;
      way.report_missing(missing, WINDLASS_WAITED_PAIRS_DATA);
      return false;
    }
    if (Reducer::reduces) {
      if (has_own && way.part_of(launch.receive_bytes[me])) {
        MAIL_UNROLL
        for (int rank = 0; rank < ranks_max; ++rank) choose(x[rank], own, rank == (int)me);
        if constexpr (Reducer::reduces)
          store_eight(launch.receive[me] + at, reduce_words<Reducer>(x, launch.ranks, how), own_bytes(way.part_of(launch.receive_bytes[me])));
      }
    } else {
      MAIL_UNROLL
      for (int rank = 0; rank < ranks_max; ++rank)
        if (from >> rank & 1) store_eight(launch.receive[rank] + at, x[rank], own_bytes(way.part_of(launch.receive_bytes[rank])));
      if (has_own && launch.receive[me] != launch.send[me])
        store_eight(launch.receive[me] + at, own, own_bytes(way.part_of(launch.receive_bytes[me])));
    }
    way.has_consumed(from);
  }
  way.end(true, true);
  return true;
}

template <class Reducer, int ranks_max>
MAIL_DEVICE void run_pairs(const WindlassCollectiveLaunch& launch) {
  begin_after_previous(launch.flags & WINDLASS_COLLECTIVE_EARLY_NEXT);
  const Collective call{launch};
  for (Lanes lanes(launch, warp_index()); lanes.next < lanes.last; lanes.next += lanes.stride)
    if (!run_pairs_lane<Reducer, ranks_max>(call, lanes.next)) return;
}
