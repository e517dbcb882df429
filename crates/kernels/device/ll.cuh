// Small even collectives over LL: on each channel every rank sends every other rank one packet, or none.
// So one count and two slots are enough for a channel: a rank at a channel's launch n has received from every peer's launch n - 1, and
// that peer had ended launch n - 2 by then. No credit, no loop over packets, few instructions: code that runs once must first be fetched.
#pragma once
#include "reduction.cuh"
#include "report.cuh"
#include "rings.cuh"
#include "waiting.cuh"

// Moves a thread's 8 bytes of a user buffer, or the `left` ones that remain; byte by byte, unless straight.
template <bool straight>
WINDLASS_DEVICE uint64_t load_eight(uint64_t from, uint32_t left) {
  const char* const bytes = reinterpret_cast<const char*>(from);
  uint64_t value = 0;
  if constexpr (straight) {
    value = load_piece<uint64_t>(bytes);
  } else {
    WINDLASS_UNROLL
    for (uint32_t at = 0; at < 8; ++at)
      if (at < left) value |= (uint64_t)load_piece<uint8_t>(bytes + at) << 8 * at;
  }
  return value;
}
template <bool straight>
WINDLASS_DEVICE void store_eight(uint64_t to, uint64_t value, uint32_t left) {
  char* const bytes = reinterpret_cast<char*>(to);
  if constexpr (straight) {
    store_piece<uint64_t>(bytes, value);
  } else {
    WINDLASS_UNROLL
    for (uint32_t at = 0; at < 8; ++at)
      if (at < left) store_piece<uint8_t>(bytes + at, (uint8_t)(value >> 8 * at));
  }
}

// Where a thread's 8 bytes of a collective lie in the user's buffers.
struct LaunchPart {
  const WindlassCollectiveLaunch& launch;
  uint32_t at;
  // The same for every connection, and no more than the channels hold.
  WINDLASS_DEVICE uint32_t bytes() const { return (uint32_t)launch.send_bytes[0]; }
  WINDLASS_DEVICE uint64_t send(uint32_t rank) const { return launch.send[rank] + at; }
  WINDLASS_DEVICE uint64_t receive(uint32_t rank) const { return launch.receive[rank] + at; }
  WINDLASS_DEVICE uint64_t result(uint32_t me) const { return receive(me); }
  WINDLASS_DEVICE bool moves(uint32_t rank) const { return launch.receive[rank] != launch.send[rank]; }
};
// The same for one collective of a batch.
struct BatchPart {
  const WindlassBatchCall& call;
  uint32_t at;
  WINDLASS_DEVICE uint32_t bytes() const { return call.bytes; }
  WINDLASS_DEVICE uint64_t send(uint32_t rank) const { return call.send + rank * call.send_step + at; }
  WINDLASS_DEVICE uint64_t receive(uint32_t rank) const { return call.receive + rank * call.receive_step + at; }
  WINDLASS_DEVICE uint64_t result(uint32_t) const { return call.receive + at; }
  WINDLASS_DEVICE bool moves(uint32_t rank) const { return receive(rank) != send(rank); }
};

// A channel of this rank.
struct LlChannel {
  uint32_t number;
  uint64_t region, count_word;
  WINDLASS_DEVICE LlChannel(const WindlassCollectiveLaunch& launch, uint32_t number_)
      : number(number_), region(launch.regions[launch.rank]), count_word(region + launch.wires[0].channels + number * WINDLASS_LL_COUNT_BYTES) {}
};

// Runs a channel's packet number `count` (from init) by a whole warp: stores it to all peers, waits for theirs, stores the result. False: aborted.
template <class Reducer, int ranks_max, bool straight, class Part>
WINDLASS_DEVICE bool run_ll_packet(const WindlassCollectiveLaunch& launch, const LlChannel& own, uint64_t count, const Part& part) {
  const uint32_t me = launch.rank, channel = own.number;
  const uint64_t region = own.region;
  const uint32_t bytes = part.bytes(), left = bytes > part.at ? bytes - part.at : 0;
  // What goes to each rank; then what has come from it.
  uint64_t x[ranks_max];
  WINDLASS_UNROLL
  for (int rank = 0; rank < ranks_max; ++rank) {
    x[rank] = 0;
    if (left && rank < (int)launch.ranks) x[rank] = load_eight<straight>(part.send(rank), left);
  }
  const uint64_t tag = launch.first_tag + count;
  // Offset of this thread's LL pair in a receiver's region, in its first ring.
  const uint64_t in_slot = launch.wires[0].rings + (channel * WINDLASS_LL_SLOTS + (uint32_t)count % WINDLASS_LL_SLOTS) * WINDLASS_LL_SLOT_BYTES + 16 * lane_index();
  const uint64_t ring_bytes = (uint64_t)(WINDLASS_LL_SLOTS * WINDLASS_LL_SLOT_BYTES) << launch.channels_log2;
  const auto is_peer = [&](int rank) { return rank != (int)me && rank < (int)launch.ranks && left != 0; };
  WINDLASS_UNROLL
  for (int rank = 0; rank < ranks_max; ++rank) store_ll_if(is_peer(rank), reinterpret_cast<char*>(launch.regions[rank] + in_slot + ring_of(me, rank) * ring_bytes), x[rank], tag);

  uint64_t found[ranks_max];
  WINDLASS_UNROLL
  for (int rank = 0; rank < ranks_max; ++rank) found[rank] = tag;
  Waiting waiting;
  for (;;) {
    WINDLASS_UNROLL
    for (int rank = 0; rank < ranks_max; ++rank)
      load_ll_if(is_peer(rank), reinterpret_cast<const char*>(region + in_slot + ring_of(rank, me) * ring_bytes), tag, x[rank], found[rank]);
    bool there = true;
    WINDLASS_UNROLL
    for (int rank = 0; rank < ranks_max; ++rank) there &= found[rank] == tag;
    if (all_of_warp(there)) break;
    if (!waiting.ends(launch)) continue;
    uint32_t missing = 0;
    WINDLASS_UNROLL
    for (int rank = 0; rank < ranks_max; ++rank) missing |= (uint32_t)(found[rank] != tag) << rank;
    WINDLASS_NO_UNROLL
    for (uint32_t rank = 0; rank < launch.ranks; ++rank)
      if (any_of_warp(missing >> rank & 1) && lane_index() == 0)
        report_entry(launch.report, me, WindlassP2pReportEntry{rank, WINDLASS_WAITED_LL_DATA, channel, 0, count, count});
    return false;
  }
  // All threads have read the count, as the vote shows.
  if (lane_index() == 0) store_word(own.count_word, count + 1);

  if (left == 0) return true;
  if constexpr (Reducer::reduces) {
    store_eight<straight>(part.result(me), reduce_words<Reducer>(x, launch.ranks, Reduction{launch.reduction, launch.scale}), left);
  } else {
    // In place, this rank's own part needs no store.
    WINDLASS_UNROLL
    for (int rank = 0; rank < ranks_max; ++rank)
      if (rank < (int)launch.ranks && (rank != (int)me || part.moves(rank))) store_eight<straight>(part.receive(rank), x[rank], left);
  }
  return true;
}

// `straight`: every part of every buffer lies and ends at multiples of 8.
template <class Reducer, int ranks_max, bool straight>
WINDLASS_DEVICE void run_ll(const WindlassCollectiveLaunch& launch) {
  begin_after_previous(launch.flags & WINDLASS_COLLECTIVE_EARLY_NEXT);
  // Channels in order: see Channels.
  const uint32_t stride = block_count() * launch.role_warps;
  WINDLASS_NO_UNROLL
  for (uint32_t channel = block_index() + block_count() * warp_index(); channel < launch.used_channels; channel += stride) {
    const LlChannel own(launch, channel);
    const LaunchPart part{launch, channel * WINDLASS_LL_PAYLOAD_BYTES + 8 * lane_index()};
    if (!run_ll_packet<Reducer, ranks_max, straight>(launch, own, load_word_relaxed(own.count_word), part)) return;
  }
}

// Runs a batch: the packets of all calls in a row. One warp runs a channel's packets one after the other, so for the protocol each is a
// launch.
template <class Reducer, int ranks_max, bool straight>
WINDLASS_DEVICE void run_batch(const WindlassBatchLaunch& batch) {
  const WindlassCollectiveLaunch& launch = batch.launch;
  begin_after_previous(launch.flags & WINDLASS_COLLECTIVE_EARLY_NEXT);
  const uint32_t stride = block_count() * launch.role_warps;
  WINDLASS_NO_UNROLL
  for (uint32_t channel = block_index() + block_count() * warp_index(); channel < launch.used_channels; channel += stride) {
    const LlChannel own(launch, channel);
    uint64_t count = load_word_relaxed(own.count_word);
    WINDLASS_NO_UNROLL
    for (uint32_t packet = channel; packet < (uint32_t)launch.packets; packet += launch.used_channels, ++count) {
      const WindlassBatchCall& call = batch.calls[batch.call_of_packet[packet]];
      const BatchPart part{call, (packet - call.first_packet) * WINDLASS_LL_PAYLOAD_BYTES + 8 * lane_index()};
      if (!run_ll_packet<Reducer, ranks_max, straight>(launch, own, count, part)) return;
    }
  }
}
