// Collectives over lines (NCCL's LL128): some warps of a block send, others receive, and neither waits for the other; so a lane moves
// bytes both ways at once. `groups` / 2 half units are one unit here.
#pragma once
#include "bytes.cuh"
#include "lane.cuh"
#include "reduction.cuh"
#include "unit.cuh"

template <int groups>
struct LinesFormat {
  static constexpr uint32_t payload_bytes = groups / 2 * WINDLASS_LINES_HALF_PAYLOAD_BYTES, slot_bytes = WINDLASS_LINES_SLOT_BYTES;
};
template <int groups, bool straight>
using LinesLane = Lane<LinesFormat<groups>, straight>;
template <int groups, bool straight>
using LinesSender = Sender<LinesFormat<groups>, straight>;
template <int groups, bool straight>
using LinesReceiver = Receiver<LinesFormat<groups>, straight>;

// Puts this step's unit into the lane of each of its ranks: out[distance - 1] for the rank at that distance, or the only one for all.
// False: aborted.
template <int ranks_max, int groups, bool straight, int units>
MAIL_DEVICE bool put_lines(LinesSender<groups, straight>& way, const Vector (&out)[units][groups], uint32_t waited_for) {
  way.settle();
  if (!way.wait_for_room(waited_for)) return false;
  const uint64_t own = way.slot(way.me()) + 16 * lane_index(), tag = way.tag();
  // The whole warp at once: see send_unit.
  sync_warp();
  MAIL_UNROLL
  for (int distance = 1; distance < ranks_max; ++distance) {
    const uint32_t rank = way.peer(distance);
    const bool goes = distance < (int)way.launch.ranks && way.moves(rank);
    const Vector(&unit)[groups] = out[units == 1 ? 0 : distance - 1];
    char* const at = reinterpret_cast<char*>(way.launch.slices[rank] + own);
    MAIL_UNROLL
    for (int half = 0; half < groups / 2; ++half) {
      const Vector first = unit[2 * half], second = unit[2 * half + 1];
      store_half_if(goes, at + half * 1024, Vector{first.x, keeps_line() ? tag : first.y},
                    Vector{keeps_line() ? first.y : second.x, keeps_line() ? tag : second.y});
    }
  }
  return true;
}

// Waits for this step's unit of each of its ranks; what x has of others stays. False: aborted.
template <int groups, bool straight, int ranks_max>
MAIL_DEVICE bool take_lines(LinesReceiver<groups, straight>& way, Vector (&x)[ranks_max][groups], uint32_t waited_for) {
  const char* const first = reinterpret_cast<const char*>(way.launch.slices[way.me()] + way.slot(0) + 16 * lane_index());
  const uint64_t ring_bytes = way.ring_bytes(), tag = way.tag();
  Waiting waiting;
  for (;;) {
    // As for one unit: see receive_unit.
    sync_warp();
    MAIL_UNROLL
    for (int rank = 0; rank < ranks_max; ++rank) load_lines_if(way.moves_peer(rank), x[rank], first + rank * ring_bytes, tag);
    bool there = true;
    MAIL_UNROLL
    for (int rank = 0; rank < ranks_max; ++rank) there &= !way.moves_peer(rank) || found_lines(x[rank], tag);
    if (all_of_warp(there)) break;
    if (!waiting.ends(way.launch)) continue;
    uint32_t missing = 0;
    MAIL_UNROLL
    for (int rank = 0; rank < ranks_max; ++rank)
      if (way.moves_peer(rank) && !all_of_warp(found_lines(x[rank], tag))) missing |= 1u << rank;
    way.report_missing(missing, waited_for);
    return false;
  }
  MAIL_UNROLL
  for (int rank = 0; rank < ranks_max; ++rank) {
    MAIL_UNROLL
    for (int group = 0; group < groups; group += 2) choose(x[rank][group].y, x[rank][group + 1].x, way.moves_peer(rank) && keeps_line());
  }
  return true;
}

// This step's unit of the user's buffer that begins at `buffer`. Whole vectors first, all in flight at once; what is left, a vector
// that the buffer does not fill or all at an odd address, in a loop: the unit stays in registers, as only constants index it.
template <int groups, bool straight>
MAIL_DEVICE void load_unit(const LinesLane<groups, straight>& way, Vector (&unit)[groups], uint64_t buffer, uint64_t bytes) {
  const char* const from = reinterpret_cast<const char*>(buffer + way.offset());
  const uint32_t part = way.part_of(bytes), vectors = straight ? part : (uint64_t)from % 16 == 0 ? part & ~15u : 0;
  MAIL_UNROLL
  for (int group = 0; group < groups; ++group) {
    unit[group] = Vector{0, 0};
    if (holds_payload(group) && payload_offset(group) < vectors) unit[group] = load_input(from + payload_offset(group));
  }
  if (straight || vectors == part) return;
  MAIL_NO_UNROLL
  for (int group = 0; group < groups; ++group) {
    const uint32_t at = payload_offset(group);
    if (!holds_payload(group) || at < vectors || at >= part) continue;
    const Vector v = load_bytes(from + at, part - at);
    MAIL_UNROLL
    for (int place = 0; place < groups; ++place) {
      choose(unit[place].x, v.x, place == group);
      choose(unit[place].y, v.y, place == group);
    }
  }
}
template <int groups, bool straight>
MAIL_DEVICE void store_unit(const LinesLane<groups, straight>& way, const Vector (&unit)[groups], uint64_t buffer, uint64_t bytes) {
  char* const to = reinterpret_cast<char*>(buffer + way.offset());
  const uint32_t part = way.part_of(bytes), vectors = straight ? part : (uint64_t)to % 16 == 0 ? part & ~15u : 0;
  MAIL_UNROLL
  for (int group = 0; group < groups; ++group)
    if (holds_payload(group) && payload_offset(group) < vectors) store_output(to + payload_offset(group), unit[group]);
  if (straight || vectors == part) return;
  MAIL_NO_UNROLL
  for (int group = 0; group < groups; ++group) {
    const uint32_t at = payload_offset(group);
    if (!holds_payload(group) || at < vectors || at >= part) continue;
    Vector v = unit[0];
    MAIL_UNROLL
    for (int place = 1; place < groups; ++place) {
      choose(v.x, unit[place].x, place == group);
      choose(v.y, unit[place].y, place == group);
    }
    store_bytes(to + at, v, part - at);
  }
}

// This rank's own unit at every rank's place: others' come there.
template <int groups, int ranks_max>
MAIL_DEVICE void spread(Vector (&x)[ranks_max][groups], const Vector (&own)[groups]) {
  MAIL_UNROLL
  for (int rank = 0; rank < ranks_max; ++rank) {
    MAIL_UNROLL
    for (int group = 0; group < groups; ++group) x[rank][group] = own[group];
  }
}
// One unit of each rank into one.
template <class Reducer, int groups, int ranks_max>
MAIL_DEVICE void reduce_unit(Vector (&result)[groups], const Vector (&x)[ranks_max][groups], const WindlassCollectiveLaunch& launch) {
  const Reduction how{launch.reduction, launch.scale};
  MAIL_UNROLL
  for (int group = 0; group < groups; ++group) {
    uint64_t low[ranks_max], high[ranks_max];
    MAIL_UNROLL
    for (int rank = 0; rank < ranks_max; ++rank) low[rank] = x[rank][group].x, high[rank] = x[rank][group].y;
    result[group] = Vector{reduce_words<Reducer>(low, launch.ranks, how), reduce_words<Reducer>(high, launch.ranks, how)};
  }
}

// Sends its part to each rank. What a rank keeps itself is copied beside that, if data only moves.
template <class Reducer, int ranks_max, int groups, bool straight>
MAIL_DEVICE bool send_parts(LinesSender<groups, straight>& way) {
  const WindlassCollectiveLaunch& launch = way.launch;
  const uint32_t me = way.me();
  const bool copies = !Reducer::reduces && launch.receive[me] != launch.send[me];
  for (; way.has_step(); ++way.step) {
    // All loads are on their way before the first is waited for.
    Vector out[ranks_max - 1][groups];
    MAIL_UNROLL
    for (int distance = 1; distance < ranks_max; ++distance) {
      const uint32_t rank = way.peer(distance);
      if (distance < (int)launch.ranks && way.moves(rank)) load_unit(way, out[distance - 1], launch.send[rank], launch.send_bytes[rank]);
    }
    if (copies && way.moves(me)) {
      Vector own[groups];
      load_unit(way, own, launch.send[me], launch.send_bytes[me]);
      store_unit(way, own, launch.receive[me], launch.receive_bytes[me]);
    }
    if (!put_lines<ranks_max>(way, out, WINDLASS_WAITED_LINES_CREDIT)) return false;
  }
  return true;
}

// Sends the same to all.
template <int ranks_max, int groups, bool straight>
MAIL_DEVICE bool send_same(LinesSender<groups, straight>& way) {
  const WindlassCollectiveLaunch& launch = way.launch;
  const uint32_t me = way.me();
  const bool copies = launch.receive[me] != launch.send[me];
  for (; way.has_step(); ++way.step) {
    Vector own[1][groups];
    load_unit(way, own[0], launch.send[me], launch.send_bytes[me]);
    if (!put_lines<ranks_max>(way, own, WINDLASS_WAITED_LINES_CREDIT)) return false;
    if (copies && way.moves(me)) store_unit(way, own[0], launch.receive[me], launch.receive_bytes[me]);
  }
  return true;
}

template <class Reducer, int ranks_max, int groups, bool straight>
MAIL_DEVICE bool receive_parts(LinesReceiver<groups, straight>& way) {
  const WindlassCollectiveLaunch& launch = way.launch;
  const uint32_t me = way.me();
  for (; way.has_step(); ++way.step) {
    Vector x[ranks_max][groups];
    if constexpr (Reducer::reduces) {
      Vector own[groups];
      load_unit(way, own, launch.send[me], launch.send_bytes[me]);
      spread(x, own);
      if (!take_lines(way, x, WINDLASS_WAITED_LINES_DATA)) return false;
      reduce_unit<Reducer>(own, x, launch);
      store_unit(way, own, launch.receive[me], launch.receive_bytes[me]);
    } else {
      if (!take_lines(way, x, WINDLASS_WAITED_LINES_DATA)) return false;
      MAIL_UNROLL
      for (int rank = 0; rank < ranks_max; ++rank)
        if (way.moves_peer(rank)) store_unit(way, x[rank], launch.receive[rank], launch.receive_bytes[rank]);
    }
    way.has_consumed();
  }
  return true;
}

// A warp has one role; each goes through the lanes by itself, so that the compiler keeps nothing of the other's in registers.
template <class Reducer, int ranks_max, int groups, bool straight>
MAIL_DEVICE void run_lines(const WindlassCollectiveLaunch& launch) {
  begin_after_previous(launch.flags & WINDLASS_COLLECTIVE_EARLY_NEXT);
  const uint32_t me = launch.rank, place = lane_index() % 8;
  if (warp_index() >= launch.role_warps) {
    const uint64_t bytes = launch.receive_bytes[Reducer::reduces ? me : place];
    for (Lanes lanes(launch, warp_index() - launch.role_warps); lanes.next < lanes.last; lanes.next += lanes.stride) {
      LinesReceiver<groups, straight> way(launch, launch.wires[0], lanes.next, bytes);
      if (!receive_parts<Reducer, ranks_max>(way)) return;
      way.end();
    }
    return;
  }
  const bool same = !Reducer::reduces && launch.flags & WINDLASS_COLLECTIVE_SAME;
  for (Lanes lanes(launch, warp_index()); lanes.next < lanes.last; lanes.next += lanes.stride) {
    LinesSender<groups, straight> way(launch, launch.wires[0], lanes.next, launch.send_bytes[place]);
    if (!(same ? send_same<ranks_max>(way) : send_parts<Reducer, ranks_max>(way))) return;
    way.end();
  }
}
