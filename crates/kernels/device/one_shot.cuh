// All-reduces, all-gathers and reduce-scatters of middle sizes in one phase: LL128 lines with LL's counting. A warp sends all its packets of a channel
// to all peers before it takes the first, so that the whole message is under way at once. There is no credit, and nothing is cleaned.
//
// A channel counts its launches from init, one count for all peers. A ring has room for two launches, so a rank at a channel's launch n overwrites
// what every peer took in launch n - 2: see ll.cuh. Which tags a place had before does not matter, as no two launches of a channel share a tag.
#pragma once
#include "parts.cuh"

// A channel of this rank in one launch. Packet u of every connection goes by channel u mod used_channels, and lies in place u of its launch.
template <int groups, bool straight>
struct OneShot : Channel<Ll128Format<groups>, straight> {
  typedef Channel<Ll128Format<groups>, straight> Base;
  using Base::launch;
  const uint64_t count_word;
  const uint64_t loaded;
  uint64_t count;  // launches that have used the channel. Known only after `settle`

  WINDLASS_DEVICE OneShot(const WindlassCollectiveLaunch& launch, uint32_t channel)
      : Base(OneCall(launch), launch.wires[0], channel, 0),
        count_word(launch.regions[launch.rank] + launch.wires[0].channels + channel * WINDLASS_LL_COUNT_BYTES),
        loaded(load_word_relaxed(count_word)) {}
  // Without the division by which `steps` is known: it would stand before the first load.
  WINDLASS_DEVICE bool has_step() const { return this->step * launch.used_channels + this->channel < (uint32_t)launch.packets; }
  // Uses the count. The caller issues loads of user data before, so that these do not wait for the count.
  WINDLASS_DEVICE void settle() {
    if (this->step == 0) count = loaded;
  }
  WINDLASS_DEVICE bool moves(uint32_t rank) const { return rank < launch.ranks; }
  WINDLASS_DEVICE bool moves_peer(uint32_t rank) const { return rank != launch.rank && moves(rank); }
  WINDLASS_DEVICE uint64_t tag() const { return launch.first_tag + count; }
  // Offset in a receiver's region of this step's packet in its first ring.
  WINDLASS_DEVICE uint64_t slot() const {
    const uint32_t place = this->step * launch.used_channels + this->channel;
    return launch.wires[0].rings + ((uint64_t)((uint32_t)count & 1) * launch.ring_slots + place) * (groups * 512);
  }
  WINDLASS_DEVICE uint64_t ring_bytes() const { return (uint64_t)launch.ring_slots * (WINDLASS_ONE_SHOT_LAUNCHES * groups * 512); }
  WINDLASS_DEVICE void report_missing(uint32_t ranks, uint32_t waited_for) const {
    if (lane_index() < 8 && ranks >> this->place() & 1)
      report_entry(launch.report, launch.rank, WindlassP2pReportEntry{this->place(), waited_for, this->channel, 0, count, count});
  }
  WINDLASS_DEVICE void end() const {
    if (lane_index() == 0) store_word(count_word, count + 1);
  }
};

// Runs a channel. `parts`: each peer gets its own part, else all get the same. In place too: what a result overwrites only this warp has sent and read
// before. False: aborted.
template <class Reducer, int ranks_max, bool parts, int groups, bool straight>
WINDLASS_DEVICE bool run_one_shot_channel(OneShot<groups, straight>& way) {
  const WindlassCollectiveLaunch& launch = way.launch;
  const uint32_t me = launch.rank;
  // Of every connection: one-shot is for even launches.
  const uint64_t bytes = launch.receive_bytes[me];
  WINDLASS_NO_UNROLL
  for (; way.has_step(); ++way.step) {
    Vector out[parts ? ranks_max - 1 : 1][groups];
    WINDLASS_UNROLL
    for (int distance = 1; distance < (parts ? ranks_max : 2); ++distance)
      if (!parts || distance < (int)launch.ranks) load_packet(way, out[distance - 1], launch.send[parts ? way.peer(distance) : me], bytes);
    way.settle();
    store_lines<ranks_max>(way, out);
    // What only moves also goes to this rank's own place.
    if (!Reducer::reduces && launch.receive[me] != launch.send[me]) store_packet(way, out[0], launch.receive[me], bytes);
  }
  WINDLASS_NO_UNROLL
  for (way.step = 0; way.has_step(); ++way.step) {
    constexpr int sources = sources_of<Reducer, ranks_max>;
    Vector own[groups], x[sources][groups];
    if constexpr (Reducer::reduces) {
      load_packet(way, own, launch.send[me], bytes);
      if constexpr (sources > 1) spread(x, own);
    }
    if (!wait_for_lines(way, x, WINDLASS_WAITED_ONE_SHOT_DATA)) return false;
    if constexpr (Reducer::reduces) {
      reduce_packet<Reducer>(own, x, launch);
      store_packet(way, own, launch.receive[me], bytes);
    } else {
      WINDLASS_UNROLL
      for (int i = 0; i < sources; ++i) {
        const uint32_t rank = source_of<sources>(way, i);
        if (way.moves_peer(rank)) store_packet(way, x[i], launch.receive[rank], bytes);
      }
    }
  }
  way.end();
  return true;
}

template <class Reducer, int ranks_max, int groups, bool straight, bool parts>
WINDLASS_DEVICE void run_one_shot(const WindlassCollectiveLaunch& launch) {
  begin_after_previous(launch.flags & WINDLASS_COLLECTIVE_EARLY_NEXT);
  WINDLASS_NO_UNROLL
  for (Channels channels(launch, warp_index()); channels.next < channels.last; channels.next += channels.stride) {
    OneShot<groups, straight> way(launch, channels.next);
    if (!run_one_shot_channel<Reducer, ranks_max, parts>(way)) return;
  }
}
