// All-reduce in two phases, unit by unit: some warps send every rank its share, some reduce this rank's share and send the result,
// some take the others' results. In place too: a share is overwritten by its result only after that was made of it.
#pragma once
#include "lines.cuh"

constexpr int result_groups = 2;
typedef LinesLane<result_groups> ResultLane;

// Reduces this rank's share and sends the result to all.
template <class Reducer, int ranks_max>
MAIL_DEVICE bool reduce_and_send(ResultLane& shares, ResultLane& results) {
  const WindlassCollectiveLaunch& launch = shares.call.launch;
  const uint32_t me = shares.call.me();
  for (;; ++shares.step, ++results.step) {
    const uint32_t from = shares.receives_from(), to = results.sends_to();
    if (from == 0) return true;
    Vector x[ranks_max][result_groups], result[1][result_groups];
    load_unit(shares, result[0], launch.send[me], launch.send_bytes[me]);
    if (!take_lines(shares, from, x, WINDLASS_WAITED_LINES_DATA)) return false;
    reduce_unit<Reducer>(result[0], x, launch);
    shares.has_consumed(from);
    if (!put_lines<ranks_max>(results, to, result, WINDLASS_WAITED_RESULT_CREDIT)) return false;
    store_unit(results, result[0], launch.receive[me], launch.receive_bytes[me]);
  }
}

template <int ranks_max>
MAIL_DEVICE bool take_results(ResultLane& results) {
  const WindlassCollectiveLaunch& launch = results.call.launch;
  for (;; ++results.step) {
    const uint32_t from = results.receives_from();
    if (from == 0) return true;
    Vector x[ranks_max][result_groups];
    if (!take_lines(results, from, x, WINDLASS_WAITED_RESULT_DATA)) return false;
    MAIL_UNROLL
    for (int rank = 0; rank < ranks_max; ++rank)
      if (from >> rank & 1) store_unit(results, x[rank], launch.receive[rank], launch.receive_bytes[rank]);
    results.has_consumed(from);
  }
}

// See run_lines.
template <class Reducer, int ranks_max>
MAIL_DEVICE void run_all_reduce(const WindlassCollectiveLaunch& launch) {
  begin_after_previous(launch.flags & WINDLASS_COLLECTIVE_EARLY_NEXT);
  const Collective call{launch};
  const uint32_t role = warp_index() / launch.role_warps, warp = warp_index() % launch.role_warps, place = lane_index() % 8;
  // Their shares go out and mine come in; then the other way round.
  const bool other = place != launch.rank && place < launch.ranks;
  const uint64_t own_bytes = other ? launch.receive_bytes[launch.rank] : 0, their_bytes = other ? launch.receive_bytes[place] : 0;
  if (role == 0) {
    for (Lanes lanes(launch, warp); lanes.next < lanes.last; lanes.next += lanes.stride) {
      ResultLane shares(call, launch.wires[0], lanes.next, their_bytes, own_bytes);
      if (!send_parts<Reducer, ranks_max>(shares)) return;
      shares.end(true, false);
    }
  } else if (role == 1) {
    for (Lanes lanes(launch, warp); lanes.next < lanes.last; lanes.next += lanes.stride) {
      ResultLane shares(call, launch.wires[0], lanes.next, their_bytes, own_bytes);
      ResultLane results(call, launch.wires[1], lanes.next, own_bytes, their_bytes);
      if (!reduce_and_send<Reducer, ranks_max>(shares, results)) return;
      shares.end(false, true);
      results.end(true, false);
    }
  } else {
    for (Lanes lanes(launch, warp); lanes.next < lanes.last; lanes.next += lanes.stride) {
      ResultLane results(call, launch.wires[1], lanes.next, own_bytes, their_bytes);
      if (!take_results<ranks_max>(results)) return;
      results.end(false, true);
    }
  }
}
