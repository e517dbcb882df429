// Packets of collectives over LL128: 8 threads store 120 bytes of payload and 8 of tag at once, so a tag shows that its payload is
// there. `groups` / 2 half packets are one packet here.
#pragma once
#include "channel.cuh"
#include "packet.cuh"

template <int groups_>
struct Ll128Format {
  static constexpr int groups = groups_;
  static constexpr uint32_t payload_bytes = groups / 2 * WINDLASS_LL128_HALF_PAYLOAD_BYTES, slot_bytes = WINDLASS_LL128_SLOT_BYTES;
  // Whether this thread has payload in a group, and where in the packet.
  static WINDLASS_DEVICE bool holds(int group) { return holds_payload(group); }
  static WINDLASS_DEVICE uint32_t offset(int group) { return payload_offset(group); }
};
template <int groups, bool straight, class Source>
using Ll128Sender = Sender<Ll128Format<groups>, straight, Source>;
template <int groups, bool straight, class Source>
using Ll128Receiver = Receiver<Ll128Format<groups>, straight, Source>;

// Stores this step's packets to their receivers: out[distance - 1] for the rank at that distance, or the only one for all.
template <int ranks_max, class Way, int groups, int packets>
WINDLASS_DEVICE void store_lines(const Way& way, const Vector (&out)[packets][groups]) {
  const uint64_t slot = way.slot() + 16 * lane_index(), ring_bytes = way.ring_bytes(), tag = way.tag();
  // The whole warp at once: see send_packet.
  sync_warp();
  WINDLASS_UNROLL
  for (int distance = 1; distance < ranks_max; ++distance) {
    const uint32_t rank = way.peer(distance);
    const bool goes = distance < (int)way.launch.ranks && way.moves(rank);
    const Vector(&packet)[groups] = out[packets == 1 ? 0 : distance - 1];
    char* const at = reinterpret_cast<char*>(way.launch.regions[rank] + slot + ring_of(way.me(), rank) * ring_bytes);
    WINDLASS_UNROLL
    for (int half = 0; half < groups / 2; ++half) {
      const Vector first = packet[2 * half], second = packet[2 * half + 1];
      store_half_if(goes, at + half * 1024, Vector{first.x, keeps_line() ? tag : first.y},
                    Vector{keeps_line() ? first.y : second.x, keeps_line() ? tag : second.y});
    }
  }
}

// Waits for this step's packet from each peer that sends one; x keeps its values for other ranks. See `source_of`. False: aborted.
template <class Way, int groups, int sources>
WINDLASS_DEVICE bool wait_for_lines(const Way& way, Vector (&x)[sources][groups], uint32_t waited_for) {
  const char* const first = reinterpret_cast<const char*>(way.launch.regions[way.me()] + way.slot() + 16 * lane_index());
  const uint64_t ring_bytes = way.ring_bytes(), tag = way.tag();
  Waiting waiting;
  for (;;) {
    // As for one packet: see receive_packet.
    sync_warp();
    WINDLASS_UNROLL
    for (int i = 0; i < sources; ++i) {
      const uint32_t rank = source_of<sources>(way, i);
      load_lines_if(way.moves_peer(rank), x[i], first + ring_of(rank, way.me()) * ring_bytes, tag);
    }
    bool there = true;
    WINDLASS_UNROLL
    for (int i = 0; i < sources; ++i) there &= !way.moves_peer(source_of<sources>(way, i)) || found_lines(x[i], tag);
    if (all_of_warp(there)) break;
    if (!waiting.ends(way.launch)) continue;
    uint32_t missing = 0;
    WINDLASS_UNROLL
    for (int i = 0; i < sources; ++i) {
      const uint32_t rank = source_of<sources>(way, i);
      if (way.moves_peer(rank) && !all_of_warp(found_lines(x[i], tag))) missing |= 1u << rank;
    }
    way.report_missing(missing, waited_for);
    return false;
  }
  WINDLASS_UNROLL
  for (int i = 0; i < sources; ++i) {
    WINDLASS_UNROLL
    for (int group = 0; group < groups; group += 2) choose(x[i][group].y, x[i][group + 1].x, way.moves_peer(source_of<sources>(way, i)) && keeps_line());
  }
  return true;
}

// Waits for room, then stores this step's packets: see store_lines. False: aborted.
template <int ranks_max, int groups, bool straight, class Source, int packets>
WINDLASS_DEVICE bool put_packet(Ll128Sender<groups, straight, Source>& way, const Vector (&out)[packets][groups], uint32_t waited_for) {
  way.settle();
  if (!way.wait_for_room(waited_for)) return false;
  store_lines<ranks_max>(way, out);
  return true;
}
template <int groups, bool straight, class Source, int sources>
WINDLASS_DEVICE bool take_packet(Ll128Receiver<groups, straight, Source>& way, Vector (&x)[sources][groups], uint32_t waited_for) {
  return wait_for_lines(way, x, waited_for);
}
