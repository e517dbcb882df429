// Growing: a channel moves once, and for ever, from its first ring into a larger one, in the middle of traffic. README.md
// "Growing a ring" says who tells whom and when.
//
// One word describes a larger ring, so that no reader finds half of it: its address (a multiple of 128), and in the low bits the
// binary logarithm of a channel's slots. The host writes the word into host memory, once: a copy to the device might queue
// behind the very kernel that waits for it. So reading it is slow, above all by many blocks at once (32 blocks took 27 us, as if
// one after the other). A warp reads it only after a long wait, or when the launch says that a ring has grown; a channel keeps
// its copy beside its count.
#pragma once
#include "machine.cuh"

// No piece: this channel has not moved.
constexpr uint64_t from_none = ~0ull;

WINDLASS_DEVICE uint64_t ring_address(uint64_t ring) { return ring & ~127ull; }
WINDLASS_DEVICE uint64_t ring_slots(uint64_t ring) { return 1ull << (ring & 63); }

// Loads a word that the peer or the host writes; lane 0's value for all lanes, as different values would make them diverge. Only lane 0 acquires.
WINDLASS_DEVICE uint64_t load_word_for_warp(uint64_t address) {
  uint64_t word = 0;
  if (lane_index() == 0) word = load_word_acquire(address);
  return from_first_lane(word);
}

// Where a channel goes on: pieces before `from` lie in its first ring, the others in `grown`.
struct Move {
  uint64_t from, grown;
};
// Not inlined: rarely called, and the registers are needed elsewhere.
//
// For a receiver whose polls find nothing: whether the sender has moved the channel, and where to. grown = 0: it has not.
WINDLASS_DEVICE_FUNCTION Move followed_move(uint64_t from_word, uint64_t growth_word) {
  const uint64_t from = load_word_for_warp(from_word);
  if (!from) return Move{from_none, 0};
  // The receiver's host stored its growth word before the sender's host stored its own. So a receiver that acquires the sender's
  // `from` finds its own growth word, too.
  const uint64_t grown = load_word_for_warp(growth_word);
  return grown ? Move{from - 1, grown} : Move{from_none, 0};
}

// The address of the slot of piece `count` of channel `channel`.
WINDLASS_DEVICE char* slot_of(uint64_t first_ring, uint64_t first_slots, uint64_t from, uint64_t grown, uint32_t channel,
                          uint64_t count, uint32_t slot_bytes) {
  const uint64_t ring = count >= from ? ring_address(grown) : first_ring;
  const uint64_t slots = count >= from ? ring_slots(grown) : first_slots;
  return reinterpret_cast<char*>(ring + (channel * slots + (count & (slots - 1))) * slot_bytes);
}

// How many pieces beyond the credit may be under way at piece `count`. What still lies in the first ring counts against the
// grown one: less room for a moment, and no need to remember `from` once the channel has passed it.
WINDLASS_DEVICE uint64_t slots_at(uint64_t first_slots, uint64_t from, uint64_t grown, uint64_t count) {
  return count >= from ? ring_slots(grown) : first_slots;
}
