// A packet: what one warp puts into a slot of an LL128 channel at once. Sixteen lines of 120 payload and 8 tag bytes.
//
// Each thread holds four vectors. Group g is the 512 bytes (four lines) that the warp stores with one instruction. Every
// eighth thread (the keeper of a line) owns the last 16 bytes of its line, of which 8 are the tag, so of two groups it has
// one vector of payload: half of it goes into each group's line. In this order a half packet is 960 bytes in a row:
//   group 0: vectors 0..31 of the half packet, thread by thread; group 1: vectors 32..59, threads that keep no line.
#pragma once
#include "vectors.cuh"

constexpr int packet_groups = 4;
typedef Vector Packet[packet_groups];

WINDLASS_DEVICE bool keeps_line() { return (lane_index() & 7) == 7; }
// Whether this thread holds payload in group g, and at which byte of the packet that payload begins.
WINDLASS_DEVICE bool holds_payload(int group) { return (group & 1) == 0 || !keeps_line(); }
WINDLASS_DEVICE uint32_t payload_offset(int group) {
  const uint32_t lane = lane_index();
  return (uint32_t)(group / 2) * WINDLASS_HALF_PACKET_PAYLOAD_BYTES + 16 * (group & 1 ? 32 + lane - lane / 8 : lane);
}

// `bytes`: 1 to WINDLASS_PACKET_PAYLOAD_BYTES, the part of the message that this packet carries. Whole vectors first, all in flight
// at once; then, if there is one, the vector that the message does not fill.
WINDLASS_DEVICE void load_payload(Packet& packet, const char* from, uint32_t bytes, uint32_t width) {
  const uint32_t whole = width == 16 ? bytes & ~15u : 0;
  WINDLASS_UNROLL
  for (int group = 0; group < packet_groups; ++group) {
    packet[group] = Vector{0, 0};
    if (holds_payload(group) && payload_offset(group) < whole) packet[group] = load_input(from + payload_offset(group));
  }
  if (whole == bytes) return;
  WINDLASS_UNROLL
  for (int group = 0; group < packet_groups; ++group) {
    const uint32_t at = payload_offset(group);
    if (holds_payload(group) && at >= whole && at < bytes)
      packet[group] = load_narrow(from + at, bytes - at < 16 ? bytes - at : 16, width);
  }
}

WINDLASS_DEVICE void store_payload(char* to, const Packet& packet, uint32_t bytes, uint32_t width) {
  const uint32_t whole = width == 16 ? bytes & ~15u : 0;
  WINDLASS_UNROLL
  for (int group = 0; group < packet_groups; ++group)
    if (holds_payload(group) && payload_offset(group) < whole) store_output(to + payload_offset(group), packet[group]);
  if (whole == bytes) return;
  WINDLASS_UNROLL
  for (int group = 0; group < packet_groups; ++group) {
    const uint32_t at = payload_offset(group);
    if (holds_payload(group) && at >= whole && at < bytes)
      store_narrow(to + at, packet[group], bytes - at < 16 ? bytes - at : 16, width);
  }
}

// Both sides move the second half of a slot only when the message reaches into it.
WINDLASS_DEVICE bool uses_second_half(uint32_t bytes) { return bytes > WINDLASS_HALF_PACKET_PAYLOAD_BYTES; }

WINDLASS_DEVICE void send_packet(char* slot, const Packet& packet, uint32_t bytes, uint64_t tag) {
  char* const own = slot + lane_index() * 16;
  WINDLASS_UNROLL
  for (int half = 0; half < 2; ++half) {
    if (half == 1 && !uses_second_half(bytes)) return;
    Vector first = packet[2 * half], second = packet[2 * half + 1];
    if (keeps_line()) {
      second = Vector{first.y, tag};
      first.y = tag;
    }
    // Race: threads that have just diverged (in narrow loads, above all) need not reconverge by themselves. Then a keeper
    // stores its tag before its neighbours store their payload, and the receiver takes the slot's earlier content.
    // Seen on H200: wrong bytes in every message with a tail or at an odd address; votes and shuffles before do not help.
    sync_warp();
    store_half(own + half * 1024, first, second);
  }
}

// Polls once: true if the whole packet with this tag has arrived; `packet` is then its payload.
WINDLASS_DEVICE bool receive_packet(Packet& packet, const char* slot, uint32_t bytes, uint64_t tag) {
  const char* const own = slot + lane_index() * 16;
  // The same race on this side, after narrow stores of the packet before: payload loaded early, its keeper's tag late.
  sync_warp();
  const bool there = uses_second_half(bytes) ? load_lines<4>(packet, own, tag) : load_lines<2>(packet, own, tag);
  if (there && keeps_line()) {
    packet[0].y = packet[1].x;
    packet[2].y = packet[3].x;
  }
  return there;
}
