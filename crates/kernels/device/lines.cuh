// Collectives over lines (NCCL's LL128): some warps of a block send, others receive, and neither waits for the other; so a lane moves
// bytes both ways at once. `groups` / 2 half units are one unit here.
#pragma once
#include "lane.cuh"
#include "bytes.cuh"
#include "reduction.cuh"
#include "unit.cuh"

template <int groups>
struct LinesFormat {
  static constexpr uint32_t payload_bytes = groups / 2 * WINDLASS_LINES_HALF_PAYLOAD_BYTES, slot_bytes = WINDLASS_LINES_SLOT_BYTES;
};
template <int groups>
using LinesLane = Lane<LinesFormat<groups>>;

// Puts the next unit into the lane of each of these ranks: out[distance - 1] for the rank at that distance, or the only one for all.
// False: aborted.
template <int ranks_max, int groups, int units>
MAIL_DEVICE bool put_lines(LinesLane<groups>& way, uint32_t to, const Vector (&out)[units][groups], uint32_t waited_for) {
  way.settle();
  if (!way.wait_for_room(to, waited_for)) return false;
  const uint64_t out_slot = way.out_slot(), out_tag = way.out_tag();
  uint64_t slots[ranks_max - 1], tags[ranks_max - 1];
  MAIL_UNROLL
  for (int distance = 1; distance < ranks_max; ++distance) {
    slots[distance - 1] = from_lane(out_slot, way.call.peer(distance));
    tags[distance - 1] = from_lane(out_tag, way.call.peer(distance));
  }
  // The whole warp at once: see send_unit.
  sync_warp();
  MAIL_UNROLL
  for (int distance = 1; distance < ranks_max; ++distance) {
    const bool goes = distance < (int)way.call.launch.ranks && to >> way.call.peer(distance) & 1;
    const Vector(&unit)[groups] = out[units == 1 ? 0 : distance - 1];
    char* const own = reinterpret_cast<char*>(slots[distance - 1] + lane_index() * 16);
    const uint64_t tag = tags[distance - 1];
    MAIL_UNROLL
    for (int half = 0; half < groups / 2; ++half) {
      const Vector first = unit[2 * half], second = unit[2 * half + 1];
      store_half_if(goes, own + half * 1024, Vector{first.x, keeps_line() ? tag : first.y},
                    Vector{keeps_line() ? first.y : second.x, keeps_line() ? tag : second.y});
    }
  }
  way.has_sent(to);
  return true;
}

// Waits for the next unit of each of these ranks. False: aborted.
template <int groups, int ranks_max>
MAIL_DEVICE bool take_lines(LinesLane<groups>& way, uint32_t from, Vector (&x)[ranks_max][groups], uint32_t waited_for) {
  const WindlassCollectiveLaunch& launch = way.call.launch;
  way.settle();
  const char* const own = reinterpret_cast<const char*>(launch.slices[way.call.me()] + lane_index() * 16);
  const uint32_t in_slot = way.in_slot();
  const uint64_t in_tag = way.in_tag();
  uint32_t slots[ranks_max];
  uint64_t tags[ranks_max];
  MAIL_UNROLL
  for (int rank = 0; rank < ranks_max; ++rank) {
    slots[rank] = from_lane(in_slot, rank);
    tags[rank] = from_lane(in_tag, rank);
  }
  Waiting waiting;
  for (;;) {
    // As for one unit: see receive_unit.
    sync_warp();
    MAIL_UNROLL
    for (int rank = 0; rank < ranks_max; ++rank)
      load_lines_if(from >> rank & 1, x[rank], own + slots[rank], tags[rank]);
    bool there = true;
    MAIL_UNROLL
    for (int rank = 0; rank < ranks_max; ++rank) there &= !(from >> rank & 1) || found_lines(x[rank], tags[rank]);
    if (all_of_warp(there)) break;
    if (!waiting.ends(launch)) continue;
    uint32_t missing = 0;
    MAIL_UNROLL
    for (int rank = 0; rank < ranks_max; ++rank)
      if (from >> rank & 1 && !all_of_warp(found_lines(x[rank], tags[rank]))) missing |= 1u << rank;
    way.report_missing(missing, waited_for);
    return false;
  }
  MAIL_UNROLL
  for (int rank = 0; rank < ranks_max; ++rank) {
    MAIL_UNROLL
    for (int group = 0; group < groups; group += 2) choose(x[rank][group].y, x[rank][group + 1].x, from >> rank & 1 && keeps_line());
  }
  return true;
}

// This step's unit of the user's buffer that begins at `buffer`. Whole vectors first, all in flight at once; what is left, a vector
// that the buffer does not fill or all at an odd address, in a loop: the unit stays in registers, as only constants index it.
template <int groups>
MAIL_DEVICE void load_unit(const LinesLane<groups>& way, Vector (&unit)[groups], uint64_t buffer, uint64_t bytes) {
  const char* const from = reinterpret_cast<const char*>(buffer + way.offset());
  const uint32_t part = way.part_of(bytes), whole = (uint64_t)from % 16 == 0 ? part & ~15u : 0;
  MAIL_UNROLL
  for (int group = 0; group < groups; ++group) {
    unit[group] = Vector{0, 0};
    if (holds_payload(group) && payload_offset(group) < whole) unit[group] = load_input(from + payload_offset(group));
  }
  if (!MAIL_SELDOM(whole != part)) return;
  MAIL_NO_UNROLL
  for (int group = 0; group < groups; ++group) {
    const uint32_t at = payload_offset(group);
    if (!holds_payload(group) || at < whole || at >= part) continue;
    const Vector v = load_bytes(from + at, part - at);
    MAIL_UNROLL
    for (int place = 0; place < groups; ++place) {
      choose(unit[place].x, v.x, place == group);
      choose(unit[place].y, v.y, place == group);
    }
  }
}
template <int groups>
MAIL_DEVICE void store_unit(const LinesLane<groups>& way, const Vector (&unit)[groups], uint64_t buffer, uint64_t bytes) {
  char* const to = reinterpret_cast<char*>(buffer + way.offset());
  const uint32_t part = way.part_of(bytes), whole = (uint64_t)to % 16 == 0 ? part & ~15u : 0;
  MAIL_UNROLL
  for (int group = 0; group < groups; ++group)
    if (holds_payload(group) && payload_offset(group) < whole) store_output(to + payload_offset(group), unit[group]);
  if (!MAIL_SELDOM(whole != part)) return;
  MAIL_NO_UNROLL
  for (int group = 0; group < groups; ++group) {
    const uint32_t at = payload_offset(group);
    if (!holds_payload(group) || at < whole || at >= part) continue;
    Vector v = unit[0];
    MAIL_UNROLL
    for (int place = 1; place < groups; ++place) {
      choose(v.x, unit[place].x, place == group);
      choose(v.y, unit[place].y, place == group);
    }
    store_bytes(to + at, v, part - at);
  }
}

// One unit of each rank, `own` being this rank's, into one: `own`.
template <class Reducer, int groups, int ranks_max>
MAIL_DEVICE void reduce_unit(Vector (&own)[groups], const Vector (&x)[ranks_max][groups], const WindlassCollectiveLaunch& launch) {
  const Reduction how{launch.reduction, launch.scale};
  MAIL_UNROLL
  for (int group = 0; group < groups; ++group) {
    uint64_t low[ranks_max], high[ranks_max];
    MAIL_UNROLL
    for (int rank = 0; rank < ranks_max; ++rank) {
      low[rank] = x[rank][group].x;
      high[rank] = x[rank][group].y;
      choose(low[rank], own[group].x, rank == (int)launch.rank);
      choose(high[rank], own[group].y, rank == (int)launch.rank);
    }
    own[group] = Vector{reduce_words<Reducer>(low, launch.ranks, how), reduce_words<Reducer>(high, launch.ranks, how)};
  }
}

// Sends its part to each rank. What a rank keeps itself is copied beside that, if data only moves.
template <class Reducer, int ranks_max, int groups>
MAIL_DEVICE bool send_parts(LinesLane<groups>& way) {
  const WindlassCollectiveLaunch& launch = way.call.launch;
  const uint32_t me = way.call.me();
  const bool copies = !Reducer::reduces && launch.receive[me] != launch.send[me];
  for (;; ++way.step) {
    const uint32_t to = way.sends_to();
    if (to == 0) return true;
    // All loads are on their way before the first is waited for.
    Vector out[ranks_max - 1][groups];
    MAIL_UNROLL
    for (int distance = 1; distance < ranks_max; ++distance) {
      const uint32_t rank = way.call.peer(distance);
      if (distance < (int)launch.ranks && to >> rank & 1) load_unit(way, out[distance - 1], launch.send[rank], launch.send_bytes[rank]);
    }
    if (copies && to >> me & 1) {
      Vector own[groups];
      load_unit(way, own, launch.send[me], launch.send_bytes[me]);
      store_unit(way, own, launch.receive[me], launch.receive_bytes[me]);
    }
    if (!put_lines<ranks_max>(way, to, out, WINDLASS_WAITED_LINES_CREDIT)) return false;
  }
}

// Sends the same to all.
template <int ranks_max, int groups>
MAIL_DEVICE bool send_same(LinesLane<groups>& way) {
  const WindlassCollectiveLaunch& launch = way.call.launch;
  const uint32_t me = way.call.me();
  const bool copies = launch.receive[me] != launch.send[me];
  for (;; ++way.step) {
    const uint32_t to = way.sends_to();
    if (to == 0) return true;
    Vector own[1][groups];
    load_unit(way, own[0], launch.send[me], launch.send_bytes[me]);
    if (!put_lines<ranks_max>(way, to, own, WINDLASS_WAITED_LINES_CREDIT)) return false;
    if (copies && to >> me & 1) store_unit(way, own[0], launch.receive[me], launch.receive_bytes[me]);
  }
}

template <class Reducer, int ranks_max, int groups>
MAIL_DEVICE bool receive_parts(LinesLane<groups>& way) {
  const WindlassCollectiveLaunch& launch = way.call.launch;
  const uint32_t me = way.call.me();
  for (;; ++way.step) {
    const uint32_t from = way.receives_from();
    if (from == 0) return true;
    Vector x[ranks_max][groups];
    if constexpr (Reducer::reduces) {
      Vector own[groups];
      load_unit(way, own, launch.send[me], launch.send_bytes[me]);
      if (!take_lines(way, from, x, WINDLASS_WAITED_LINES_DATA)) return false;
      reduce_unit<Reducer>(own, x, launch);
      store_unit(way, own, launch.receive[me], launch.receive_bytes[me]);
    } else {
      if (!take_lines(way, from, x, WINDLASS_WAITED_LINES_DATA)) return false;
      MAIL_UNROLL
      for (int rank = 0; rank < ranks_max; ++rank)
        if (from >> rank & 1) store_unit(way, x[rank], launch.receive[rank], launch.receive_bytes[rank]);
    }
    way.has_consumed(from);
  }
}

// A warp has one role; each goes through the lanes by itself, so that the compiler keeps nothing of the other's in registers.
template <class Reducer, int ranks_max, int groups>
MAIL_DEVICE void run_lines(const WindlassCollectiveLaunch& launch) {
  begin_after_previous(launch.flags & WINDLASS_COLLECTIVE_EARLY_NEXT);
  const Collective call{launch};
  const uint32_t me = launch.rank, place = lane_index() % 8;
  const uint64_t in_bytes = place == me || place >= launch.ranks ? 0
                            : Reducer::reduces                   ? launch.receive_bytes[me]
                                                                 : launch.receive_bytes[place];
  const uint64_t out_bytes = launch.send_bytes[place];
  if (warp_index() >= launch.role_warps) {
    for (Lanes lanes(launch, warp_index() - launch.role_warps); lanes.next < lanes.last; lanes.next += lanes.stride) {
      LinesLane<groups> way(call, launch.wires[0], lanes.next, out_bytes, in_bytes);
      if (!receive_parts<Reducer, ranks_max>(way)) return;
      way.end(false, true);
    }
    return;
  }
  const bool same = !Reducer::reduces && launch.flags & WINDLASS_COLLECTIVE_SAME;
  for (Lanes lanes(launch, warp_index()); lanes.next < lanes.last; lanes.next += lanes.stride) {
    LinesLane<groups> way(call, launch.wires[0], lanes.next, out_bytes, in_bytes);
    if (!(same ? send_same<ranks_max>(way) : send_parts<Reducer, ranks_max>(way))) return;
    way.end(true, false);
  }
}
