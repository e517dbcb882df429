// Simple: packets of large collectives by ordinary stores, with no tags on the wire. A packet is there when the posted word of its channel says so,
// which the sender's signal warp stores; so it comes a fence later than an LL128 line. Packets lie in the slots of LL128 and count
// in their numbers: each format overwrites the other's slots under the same rules.
//
// A sending warp does not fence: it tells the block's signal warp through shared memory, and that makes one fence for all it was told.
#pragma once
#include "channel.cuh"

template <int groups_>
struct SimpleFormat {
  static constexpr int groups = groups_;
  static constexpr uint32_t payload_bytes = groups * 512, slot_bytes = WINDLASS_LL128_SLOT_BYTES;
  static WINDLASS_DEVICE bool holds(int) { return true; }
  static WINDLASS_DEVICE uint32_t offset(int group) { return group * 512 + 16 * lane_index(); }
};
constexpr int simple_groups = 4;
typedef SimpleFormat<simple_groups> Simple;

// How many packets a warp has stored in this launch, on all its channels.
struct Told {
  uint32_t* counter;
  uint32_t packets;
};
template <bool straight>
struct SimpleSender : Sender<Simple, straight> {
  Told& packets_told;
  WINDLASS_DEVICE SimpleSender(const OneCall& source, const WindlassWire& wire, uint32_t channel, uint64_t bytes, Told& told)
      : Sender<Simple, straight>(source, wire, channel, bytes), packets_told(told) {}
  // The signal warp stores the sent words instead, after its last posted word.
  WINDLASS_DEVICE void end() {}
};
template <bool straight>
struct SimpleReceiver : Receiver<Simple, straight> {
  static constexpr bool loads_ahead = true;
  uint64_t posted = 0;  // packets of rank place() with numbers below are there
  using Receiver<Simple, straight>::Receiver;
};

// As for LL128.
template <int ranks_max, bool straight, int packets>
WINDLASS_DEVICE bool put_packet(SimpleSender<straight>& way, const Vector (&out)[packets][simple_groups], uint32_t waited_for) {
  way.settle();
  if (!way.wait_for_room(waited_for)) return false;
  const uint64_t slot = way.slot() + 16 * lane_index(), ring_bytes = way.ring_bytes();
  WINDLASS_UNROLL
  for (int distance = 1; distance < ranks_max; ++distance) {
    const uint32_t rank = way.peer(distance);
    if (distance >= (int)way.launch.ranks || !way.moves(rank)) continue;
    char* const at = reinterpret_cast<char*>(way.launch.regions[rank] + slot + ring_of(way.me(), rank) * ring_bytes);
    WINDLASS_UNROLL
    for (int group = 0; group < simple_groups; ++group) store_slot(at + 512 * group, out[packets == 1 ? 0 : distance - 1][group]);
  }
  // Orders all lanes' stores before lane 0's release in `tell`.
  sync_warp();
  ++way.packets_told.packets;
  if (lane_index() == 0) tell(way.packets_told.counter, way.packets_told.packets);
  return true;
}

template <int sources, bool straight>
WINDLASS_DEVICE bool take_packet(SimpleReceiver<straight>& way, Vector (&x)[sources][simple_groups], uint32_t waited_for) {
  const uint32_t place = way.place();
  const bool comes = way.moves_peer(place);
  const uint64_t word = way.words_of(way.me()) + 8 * (WINDLASS_CHANNEL_POSTED + place);
  Waiting waiting;
  while (!all_of_warp(!comes || way.posted > way.number())) {
    if (comes) way.posted = load_word_acquire(word);
    if (!waiting.ends(way.launch)) continue;
    // Nobody may have to be reported: the last packet came with this very load.
    if (const uint32_t missing = ballot_of_warp(comes && way.posted <= way.number()) & 0xff) {
      way.report_missing(missing, waited_for);
      return false;
    }
  }
  // Orders all lanes' loads of the slots behind the acquires, as only some lanes have acquired each peer's word.
  sync_warp();
  const char* const first = reinterpret_cast<const char*>(way.launch.regions[way.me()] + way.slot() + 16 * lane_index());
  const uint64_t ring_bytes = way.ring_bytes();
  WINDLASS_UNROLL
  for (int i = 0; i < sources; ++i) {
    const uint32_t rank = source_of<sources>(way, i);
    if (!way.moves_peer(rank)) continue;
    WINDLASS_UNROLL
    for (int group = 0; group < simple_groups; ++group) x[i][group] = load_slot(first + ring_of(rank, way.me()) * ring_bytes + 512 * group);
  }
  return true;
}

// Returns the counters of a block's sending warps. Waits for the block: no warp goes on before all of them are zero.
WINDLASS_DEVICE uint32_t* begin_posting(const WindlassCollectiveLaunch& launch, uint32_t phases) {
  uint32_t* const counters = reinterpret_cast<uint32_t*>(shared_memory());
  if (thread_index() < phases * launch.role_warps) counters[thread_index()] = 0;
  sync_block();
  begin_after_previous(launch.flags & WINDLASS_COLLECTIVE_EARLY_NEXT);
  return counters;
}

// Runs the signal warp. A thread posts the packets of one sending warp of one phase (a connection) to some of the peers.
template <int phases, bool straight>
WINDLASS_DEVICE void post(const WindlassCollectiveLaunch& launch, uint32_t* counters) {
  const uint32_t connections = phases * launch.role_warps, connection = lane_index() % connections, team = lane_index() / connections, teams = 32 / connections;
  const WindlassWire& wire = launch.wires[phases == 1 ? 0 : connection / launch.role_warps];
  const auto way_of = [&](uint32_t channel) { return Channel<Simple, straight>(OneCall(launch), wire, channel, 0); };
  const auto base_of = [&](uint32_t channel) { return load_word_relaxed(way_of(channel).words_of(launch.rank) + 8 * WINDLASS_CHANNEL_SENT); };
  Channels channels(launch, connection % launch.role_warps);
  bool live = team < teams && channels.next < channels.last;
  uint32_t seen = 0, at = 0;
  uint64_t base = live ? base_of(channels.next) : 0;
  Waiting waiting;
  while (any_of_warp(live)) {
    const uint32_t now = live ? told(counters + connection) : seen;
    if (!any_of_warp(now != seen)) {
      if (waiting.ends_with_all(launch)) return;
      continue;
    }
    // Each thread posts what it acquired itself from its sending warp: its own fence orders the packets' stores before its posted words.
    fence_system();
    while (seen != now) {
      const auto way = way_of(channels.next);
      const uint32_t step = now - seen < way.steps - at ? now - seen : way.steps - at;
      seen += step;
      at += step;
      for (uint32_t distance = 1 + team; distance < launch.ranks; distance += teams)
        store_word(way.words_of(way.peer(distance)) + 8 * (WINDLASS_CHANNEL_POSTED + launch.rank), base + at);
      if (at < way.steps) continue;
      at = 0;
      channels.next += channels.stride;
      live = channels.next < channels.last;
      if (live) base = base_of(channels.next);
    }
  }
  // No thread stores the sent words before all have read them.
  sync_warp();
  if (team != 0) return;
  for (Channels served(launch, connection % launch.role_warps); served.next < served.last; served.next += served.stride) way_of(served.next).tell_sent(base_of(served.next));
}
