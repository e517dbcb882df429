// A channel of LL128 or Simple, as its sending warp (Sender) and its receiving warp (Receiver) see it. README.md "Collectives" says why it is safe.
//
// A channel numbers its packets from init, all connections alike: a launch takes as many numbers as its largest connection needs, and a
// smaller connection leaves out the last ones. So slot and tag are the same for all peers. State of each peer is spread over the warp:
// lanes p, p + 8, p + 16 and p + 24 hold that of rank p.
#pragma once
#include "report.cuh"
#include "rings.cuh"
#include "source.cuh"
#include "vectors.cuh"
#include "waiting.cuh"

// Format: the layout of a packet, which has payload_bytes in a slot of slot_bytes.
//
// `straight` code is for launches in which every rank sends every other one as many packets (WINDLASS_COLLECTIVE_EVEN), and every part of
// every buffer lies and ends at multiples of 16. All other launches have kernels of their own: code that is not run is still in the way.
//
// Source: where the packets lie in the user's buffers.
template <class Format, bool straight, class Source = OneCall>
struct Channel {
  static constexpr int groups = Format::groups;
  static constexpr bool several = Source::several;
  static constexpr uint32_t payload_bytes = Format::payload_bytes;
  const WindlassCollectiveLaunch& launch;
  const WindlassWire& wire;
  const uint32_t channel;
  uint32_t steps;     // numbers that this launch takes
  uint32_t step = 0;  // index of the current one
  uint64_t base;      // the first of them. A sender knows it only after `settle`
  // Only if not straight. Packets of rank place(); the ranks whose packets this step moves, a bit each.
  uint32_t packets, ranks;
  Source source;

  WINDLASS_DEVICE uint32_t packets_of(uint64_t packets) const { return packets > channel ? (uint32_t)(packets - channel - 1) / launch.used_channels + 1 : 0; }
  // `bytes`: what moves between this rank and rank place().
  WINDLASS_DEVICE Channel(const Source& source, const WindlassWire& wire, uint32_t channel, uint64_t bytes)
      : launch(source.launch()), wire(wire), channel(channel), source(source) {
    steps = packets_of(launch.packets);
    if (!straight) packets = place() >= launch.ranks ? 0 : even() ? steps : packets_of((bytes + payload_bytes - 1) / payload_bytes);
  }
  WINDLASS_DEVICE uint32_t me() const { return launch.rank; }
  // The rank `distance` after this one.
  WINDLASS_DEVICE uint32_t peer(uint32_t distance) const {
    const uint32_t rank = launch.rank + distance;
    return rank < launch.ranks ? rank : rank - launch.ranks;
  }
  WINDLASS_DEVICE uint32_t place() const { return lane_index() % 8; }
  // Whether every rank sends every other one a packet of each number, possibly an empty one.
  WINDLASS_DEVICE bool even() const { return straight || launch.flags & WINDLASS_COLLECTIVE_EVEN; }

  // Stores the numbers from which the next launch's sender goes on. Called by one thread.
  WINDLASS_DEVICE void tell_sent(uint64_t base) const {
    const uint64_t word = words_of(me()) + 8 * WINDLASS_CHANNEL_SENT;
    // An even launch ends only with something from every peer. So each peer had ended the launches before, and has consumed numbers below `base`.
    if (even())
      store_own_words(word, Vector{base + steps, base});
    else
      store_word(word, base + steps);
  }

  // Whether this step has a packet to move. Called once a step, by the whole warp: it finds the step's call and its peers.
  WINDLASS_DEVICE bool has_step() {
    if (several && step < steps) source.find(step * launch.used_channels + channel);
    if (straight) return step < steps;
    ranks = ballot_of_warp(step < packets) & 0xff;
    return ranks != 0;
  }
  // Whether this step moves a packet to or from `rank`; for this rank: of its own part.
  WINDLASS_DEVICE bool moves(uint32_t rank) const { return straight ? rank < launch.ranks : ranks >> rank & 1; }
  WINDLASS_DEVICE bool moves_peer(uint32_t rank) const { return rank != me() && moves(rank); }

  WINDLASS_DEVICE uint64_t words_of(uint32_t rank) const { return launch.regions[rank] + wire.channels + channel * WINDLASS_CHANNEL_BYTES; }
  WINDLASS_DEVICE uint64_t credit_word(uint32_t owner, uint32_t of) const { return words_of(owner) + 8 * (WINDLASS_CHANNEL_CREDIT + of); }
  WINDLASS_DEVICE uint64_t number() const { return base + step; }
  WINDLASS_DEVICE uint64_t tag() const { return launch.first_tag + number(); }
  // Offset in a receiver's region of the slot of this step's packet in its first ring.
  WINDLASS_DEVICE uint64_t slot() const {
    const uint32_t slots = launch.ring_slots;
    return wire.rings + (channel * slots + ((uint32_t)number() & (slots - 1))) * Format::slot_bytes;
  }
  WINDLASS_DEVICE uint64_t ring_bytes() const { return (uint64_t)(launch.ring_slots * Format::slot_bytes) << launch.channels_log2; }
  // The byte of each buffer at which this step's packet begins; and how many of a buffer's `bytes` the packet holds.
  WINDLASS_DEVICE uint64_t offset() const { return ((uint64_t)step * launch.used_channels + channel - source.first_packet()) * payload_bytes; }
  WINDLASS_DEVICE uint32_t part_of(uint64_t bytes) const {
    const uint64_t from = offset();
    return from >= bytes ? 0 : bytes - from < payload_bytes ? (uint32_t)(bytes - from) : payload_bytes;
  }
};

template <class Format, bool straight, class Source = OneCall>
struct Sender : Channel<Format, straight, Source> {
  using Channel<Format, straight, Source>::launch;
  Vector own;       // WINDLASS_CHANNEL_SENT, WINDLASS_CHANNEL_PROVEN
  uint64_t credit;  // rank place() is known to have consumed the numbers below

  WINDLASS_DEVICE Sender(const Source& source, const WindlassWire& wire, uint32_t channel, uint64_t bytes) : Channel<Format, straight, Source>(source, wire, channel, bytes) {
    own = load_own_words(this->words_of(this->me()) + 8 * WINDLASS_CHANNEL_SENT);
    credit = load_word_relaxed(this->credit_word(this->me(), this->place()));
  }
  // Uses the channel's words, which the constructor loads. The caller issues loads of user data before, so that these do not wait for the words.
  WINDLASS_DEVICE void settle() {
    if (this->step) return;
    this->base = own.x;
    credit = credit > own.y ? credit : own.y;
  }

  // Waits until all peers of this step have room for its packet. False: aborted, and reported with `waited_for`. The wait is for
  // all before the first store: no peer needs this packet more than those without room do.
  WINDLASS_DEVICE bool wait_for_room(uint32_t waited_for) {
    const uint32_t slots = launch.ring_slots, place = this->place();
    const bool goes = this->moves_peer(place);
    if (!WINDLASS_SELDOM(any_of_warp(goes && this->number() - credit >= slots))) return true;
    const uint64_t word = this->credit_word(this->me(), place);
    Waiting waiting;
    for (;;) {
      // A relaxed load is enough: the packet's stores depend on it by the vote (A2), and the receiver's loads from the slot had
      // returned before it stored the credit.
      const uint64_t now = load_word_relaxed(word);
      credit = now > credit ? now : credit;
      // The lanes that report decide. Another lane of the same rank may have loaded the word a moment before or after: a warp must not leave by its value.
      const uint32_t missing = ballot_of_warp(goes && this->number() - credit >= slots) & 0xff;
      if (!missing) return true;
      if (!waiting.ends(launch)) continue;
      if (missing >> lane_index() & 1) report_entry(launch.report, this->me(), WindlassP2pReportEntry{place, waited_for, this->channel, 0, this->number(), credit});
      return false;
    }
  }
  WINDLASS_DEVICE void end() {
    settle();
    if (lane_index() == 0) this->tell_sent(this->base);
  }
};

template <class Format, bool straight, class Source = OneCall>
struct Receiver : Channel<Format, straight, Source> {
  using Channel<Format, straight, Source>::launch;
  static constexpr bool loads_ahead = false;  // see receive_parts

  WINDLASS_DEVICE Receiver(const Source& source, const WindlassWire& wire, uint32_t channel, uint64_t bytes) : Channel<Format, straight, Source>(source, wire, channel, bytes) {
    this->base = load_word_relaxed(this->words_of(this->me()) + 8 * WINDLASS_CHANNEL_RECEIVED);
    if (!straight && this->place() == this->me()) this->packets = 0;
  }

  // Gives credit for this step's packets. Called once they have been used, so that their loads have returned. An even launch of at
  // most half a ring gives none: the proof of the launch before reaches as far.
  WINDLASS_DEVICE void has_consumed() {
    const uint32_t slots = launch.ring_slots;
    if (this->even() && this->steps <= slots / 2) return;
    const uint32_t next = this->step + 1, every = slots >= 4 ? slots / 4 : 1;
    sync_warp();
    if ((next & (every - 1)) == 0 || next == this->steps) give(this->moves_peer(this->place()), this->base + next);
  }
  // Stores `credit` at rank place(), if `so`.
  WINDLASS_DEVICE void give(bool so, uint64_t credit) const {
    if (lane_index() < 8 && so) store_word(this->credit_word(this->place(), this->me()), credit);
  }
  // Reports that the warp leaves without the next packets of `ranks`, a bit each.
  WINDLASS_DEVICE void report_missing(uint32_t ranks, uint32_t waited_for) const {
    if (lane_index() < 8 && ranks >> this->place() & 1)
      report_entry(launch.report, this->me(), WindlassP2pReportEntry{this->place(), waited_for, this->channel, 0, this->number(), this->number()});
  }
  WINDLASS_DEVICE void end() const {
    // A peer that sent fewer packets than others, or none, gets credit for all numbers, too.
    if (!this->even()) {
      sync_warp();
      give(this->place() < launch.ranks && this->place() != this->me(), this->base + this->steps);
    }
    if (lane_index() == 0) store_word(this->words_of(this->me()) + 8 * WINDLASS_CHANNEL_RECEIVED, this->base + this->steps);
  }
};

// The rank of packet `i` of the `sources` that a warp takes at once: of one, the only peer of two ranks; of more, that rank.
template <int sources, class Way>
WINDLASS_DEVICE uint32_t source_of(const Way& way, int i) { return sources == 1 ? way.peer(1) : (uint32_t)i; }

// The channels that a warp serves, one after the other, ascending. As grids are equal, all ranks serve the first channel that is
// unfinished on any of them, so no warp waits for ever.
struct Channels {
  uint32_t next, last, stride;

  WINDLASS_DEVICE Channels(const WindlassCollectiveLaunch& launch, uint32_t warp)
      : next(block_index() + block_count() * warp), last(launch.used_channels), stride(block_count() * launch.role_warps) {}
};
