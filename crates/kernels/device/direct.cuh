// All-gathers that may go directly: ranks store into each other's output where all ranks' lie in one window. No rank knows that of another
// before: so they meet on each lane, each says what it offers, and all conclude the same from it. Where it is not so the launch goes on as
// one over lines, on the same lanes. README.md "Direct" says why it is safe.
//
// Both roles of a block move; a lane's number is but a name for where two warps of all ranks meet.
#pragma once
#include "one_phase.cuh"

// One lane of one launch, as a warp of one role has it. What is of each rank is spread over the warp: thread p, and p + 8, p + 16 and
// p + 24, hold rank p's.
template <int role>
struct Meeting {
  static constexpr uint32_t met_word = role == 0 ? WINDLASS_LANE_MET : WINDLASS_LANE_MET_TOO, moved_word = role == 0 ? WINDLASS_LANE_MOVED : WINDLASS_LANE_MOVED_TOO;
  const WindlassDirectLaunch& of;
  const uint32_t lane;
  uint64_t number;  // of the launches of this kind that this lane has had from birth
  uint64_t offer;   // rank place()'s. Known when all have come

  MAIL_DEVICE Meeting(const WindlassDirectLaunch& launch, uint32_t lane) : of(launch), lane(lane) {
    number = load_word_relaxed(words_of(me()) + 8 * met_word);
  }
  MAIL_DEVICE uint32_t me() const { return of.launch.rank; }
  MAIL_DEVICE uint32_t place() const { return lane_index() % 8; }
  MAIL_DEVICE bool is_peer(uint32_t rank) const { return rank < of.launch.ranks && rank != me(); }
  MAIL_DEVICE uint64_t words_of(uint32_t rank) const { return of.launch.slices[rank] + of.launch.wires[0].lanes + lane * WINDLASS_LANE_BYTES; }
  MAIL_DEVICE uint64_t word_of_peer(uint32_t word) const { return words_of(is_peer(place()) ? place() : me()) + 8 * word; }
  // By turns: a rank may be one launch ahead of a warp here that has not looked yet, but not two.
  MAIL_DEVICE uint32_t offer_word(uint32_t from) const { return WINDLASS_LANE_OFFER + 2 * (WINDLASS_COLLECTIVE_RANKS_MAX * (number & 1) + from); }
  MAIL_DEVICE uint64_t tag() const { return of.launch.first_tag + number; }

  MAIL_DEVICE void tell_offer(uint64_t own) const {
    if (lane_index() < 8 && is_peer(place())) store_pair_if(true, reinterpret_cast<char*>(word_of_peer(offer_word(me()))), own, tag());
  }
  // Waits for what all others offer. False: the communicator is aborted.
  MAIL_DEVICE bool hear_offers(uint64_t own) {
    const bool comes = is_peer(place());
    const char* const at = reinterpret_cast<const char*>(words_of(me()) + 8 * offer_word(comes ? place() : me()));
    uint64_t found = 0;
    offer = own;
    Waiting waiting;
    for (;;) {
      load_pair_if(comes, at, tag(), offer, found);
      if (all_of_warp(!comes || found == tag())) return true;
      if (!waiting.ends(of.launch)) continue;
      report_missing(comes && found != tag(), WINDLASS_WAITED_OFFER);
      return false;
    }
  }
  MAIL_DEVICE bool is_direct(uint64_t own) const {
    const uint64_t window = own >> WINDLASS_OFFER_PLACE_BITS;
    return window != 0 && all_of_warp(place() >= of.launch.ranks || offer >> WINDLASS_OFFER_PLACE_BITS == window);
  }
  // What that rank offers, as it is seen from here.
  MAIL_DEVICE char* buffer_of(uint32_t rank) const {
    const uint64_t there = from_lane(offer, rank) & ((1ull << WINDLASS_OFFER_PLACE_BITS) - 1);
    return reinterpret_cast<char*>(of.window + rank * of.stride + there * WINDLASS_OFFER_UNIT_BYTES);
  }

  // All that this warp has moved is there: says so to all others.
  MAIL_DEVICE void tell_moved() const {
    sync_warp();
    fence_system();
    if (lane_index() < 8 && is_peer(place())) store_word(word_of_peer(moved_word + me()), number + 1);
  }
  // Waits till all others' warps of this lane have said so.
  MAIL_DEVICE bool wait_for_others(uint64_t launches) const {
    const bool comes = is_peer(place());
    const uint64_t first = words_of(me()) + 8 * (WINDLASS_LANE_MOVED + place()), second = words_of(me()) + 8 * (WINDLASS_LANE_MOVED_TOO + place());
    uint64_t moved = 0;
    Waiting waiting;
    while (!all_of_warp(!comes || moved >= launches)) {
      if (comes) {
        moved = load_word_acquire(first);
        if (moved >= launches) moved = load_word_acquire(second);
      }
      if (!waiting.ends(of.launch)) continue;
      report_missing(comes && moved < launches, WINDLASS_WAITED_MOVED);
      return false;
    }
    return true;
  }
  MAIL_DEVICE void end() const {
    sync_warp();
    if (lane_index() == 0) store_word(words_of(me()) + 8 * met_word, number + 1);
    sync_warp();
  }
  MAIL_DEVICE void report_missing(bool is_missing, uint32_t waited_for) const {
    if (is_missing && lane_index() < 8) report_entry(of.launch.report, me(), WindlassMailReportEntry{place(), waited_for, lane, 0, number, number});
  }
};

// All-gather: stores this rank's part into every rank's output; of it what falls to this warp, as all warps of both roles move.
template <int ranks_max, int role>
MAIL_DEVICE void gather_directly(const Meeting<role>& meeting) {
  constexpr int groups = 4;
  const WindlassCollectiveLaunch& launch = meeting.of.launch;
  const uint32_t me = launch.rank;
  const uint64_t bytes = launch.send_bytes[me], piece = groups * 512, step = piece * 2 * launch.used_lanes;
  const char* const from = reinterpret_cast<const char*>(launch.send[me]);
  char* const own = reinterpret_cast<char*>(launch.receive[me]);
  // By distance, so that not all ranks store to one at once.
  char* to[ranks_max - 1];
  MAIL_UNROLL
  for (int distance = 1; distance < ranks_max; ++distance) {
    const uint32_t after = me + distance, rank = distance >= (int)launch.ranks ? me : after < launch.ranks ? after : after - launch.ranks;
    to[distance - 1] = meeting.buffer_of(rank) + me * bytes;
  }
  for (uint64_t at = piece * (2 * meeting.lane + role) + 16 * lane_index(); at < bytes; at += step) {
    Vector v[groups];
    MAIL_UNROLL
    for (int group = 0; group < groups; ++group)
      if (at + 512 * group < bytes) v[group] = load_input(from + at + 512 * group);
    MAIL_UNROLL
    for (int distance = 1; distance < ranks_max; ++distance) {
      if (distance >= (int)launch.ranks) continue;
      MAIL_UNROLL
      for (int group = 0; group < groups; ++group)
        if (at + 512 * group < bytes) store_slot(to[distance - 1] + at + 512 * group, v[group]);
    }
    if (own == from) continue;
    MAIL_UNROLL
    for (int group = 0; group < groups; ++group)
      if (at + 512 * group < bytes) store_output(own + at + 512 * group, v[group]);
  }
}

template <class Reducer, int ranks_max, int groups, bool straight, int role>
MAIL_DEVICE void run_role(const WindlassDirectLaunch& parameter) {
  const WindlassCollectiveLaunch& launch = parameter.launch;
  const Lanes first(launch, warp_index() - role * launch.role_warps);
  // What others are to reach must be whole vectors, as what this warp moves is.
  const uint64_t own = straight ? parameter.offer : 0, bytes = launch.send_bytes[launch.rank];
  if (role == 0)
    for (Lanes lanes = first; lanes.next < lanes.last; lanes.next += lanes.stride) Meeting<role>(parameter, lanes.next).tell_offer(own);
  bool is_direct = false;
  for (Lanes lanes = first; lanes.next < lanes.last; lanes.next += lanes.stride) {
    Meeting<role> meeting(parameter, lanes.next);
    if (!meeting.hear_offers(own)) return;
    is_direct = straight && meeting.is_direct(own);
    if (is_direct) {
      gather_directly<ranks_max>(meeting);
      // Before the next lane, whose offers may have to wait till a block elsewhere is done with this one.
      meeting.tell_moved();
    } else if constexpr (role == 0) {
      LinesSender<groups, straight, OneCall> way(OneCall(launch), launch.wires[0], lanes.next, bytes);
      if (!send_same<ranks_max>(way)) return;
      way.end();
    } else {
      LinesReceiver<groups, straight, OneCall> way(OneCall(launch), launch.wires[0], lanes.next, bytes);
      if (!receive_parts<Reducer, ranks_max>(way)) return;
      way.end();
    }
    meeting.end();
  }
  if constexpr (role != 0) {
    if (!is_direct) return;
    for (Lanes lanes = first; lanes.next < lanes.last; lanes.next += lanes.stride) {
      const Meeting<role> meeting(parameter, lanes.next);
      if (!meeting.wait_for_others(meeting.number)) return;
    }
  }
}

template <class Reducer, int ranks_max, int groups, bool straight>
MAIL_DEVICE void run_direct(const WindlassDirectLaunch& parameter) {
  begin_after_previous(parameter.launch.flags & WINDLASS_COLLECTIVE_EARLY_NEXT);
  if (warp_index() < parameter.launch.role_warps)
    run_role<Reducer, ranks_max, groups, straight, 0>(parameter);
  else
    run_role<Reducer, ranks_max, groups, straight, 1>(parameter);
}
