// A lane of a wire: what a warp needs to know of it to send to all peers, or to receive from all. README.md "Collectives" says why
// it is safe.
//
// The lane's words of all peers are spread over the warp: threads p, p + 8, p + 16 and p + 24 hold the counts of rank p. One load
// of the warp brings them all, one store of it gives credit to all peers, and one vote says whether there is room at all.
#pragma once
#include "report.cuh"
#include "collective.h"
#include "vectors.cuh"
#include "waiting.cuh"

// The launch as a lane's warp reads it.
struct Collective {
  const WindlassCollectiveLaunch& launch;

  MAIL_DEVICE uint32_t me() const { return launch.rank; }
  // The rank `distance` after this one.
  MAIL_DEVICE uint32_t peer(uint32_t distance) const {
    const uint32_t rank = launch.rank + distance;
    return rank < launch.ranks ? rank : rank - launch.ranks;
  }
};

// Format: how a unit of the wire looks, payload_bytes of it in a slot of slot_bytes.
template <class Format>
struct Lane {
  static constexpr uint32_t payload_bytes = Format::payload_bytes;
  const Collective& call;
  const WindlassWire& wire;
  const uint32_t lane;
  // Of rank lane_index() % 8, as are the next ones: units of this launch that go there, and that come from there.
  uint32_t out_units, in_units;
  uint64_t word;       // what the warp has loaded: see settle
  // From birth.
  uint64_t sent, received;
  uint64_t known;      // units that it is known to have consumed
  uint32_t step = 0;   // of this launch: unit `step` of each directed pair

  // There are no more units than lanes in use, or all lanes are in use; so a shift divides.
  MAIL_DEVICE uint32_t units_of(uint64_t bytes) const {
    const uint64_t units = (bytes + payload_bytes - 1) / payload_bytes;
    return units > lane ? ((uint32_t)(units - lane - 1) >> call.launch.lanes_log2) + 1 : 0;
  }
  MAIL_DEVICE uint32_t place() const { return lane_index() % 8; }

  // `out_bytes`, `in_bytes`: of rank lane_index() % 8. What goes to this rank itself uses no slot.
  MAIL_DEVICE Lane(const Collective& call, const WindlassWire& wire, uint32_t lane, uint64_t out_bytes, uint64_t in_bytes)
      : call(call), wire(wire), lane(lane) {
    word = load_word_relaxed(words_of(call.me()) + 8 * lane_index());
    out_units = units_of(out_bytes);
    in_units = units_of(in_bytes);
  }
  // Waits for the lane's words. Before it, loads of the user's data can be sent on their way; the counts are for after it.
  MAIL_DEVICE void settle() {
    if (step) return;
    sent = from_lane(word, WINDLASS_LANE_SENT + place());
    received = from_lane(word, WINDLASS_LANE_RECEIVED + place());
    const uint64_t credit = from_lane(word, WINDLASS_LANE_CREDIT + place());
    const uint64_t proven = from_lane(word, WINDLASS_LANE_PROVEN + place());
    known = credit > proven ? credit : proven;
  }

  MAIL_DEVICE uint64_t words_of(uint32_t rank) const {
    return call.launch.slices[rank] + wire.lanes + (uint64_t)lane * WINDLASS_LANE_BYTES;
  }
  // Where unit `count` from `source` lies in the owner's slice.
  MAIL_DEVICE uint32_t slot(uint32_t owner, uint32_t source, uint64_t count) const {
    const uint32_t from = source < owner ? source : source - 1;
    const uint32_t slots = call.launch.ring_slots;
    return (uint32_t)wire.rings + (((from << call.launch.lanes_log2) + lane) * slots + ((uint32_t)count & (slots - 1))) * Format::slot_bytes;
  }
  // Of rank lane_index() % 8: where the next unit goes; where in this rank's slice the next one comes; and how they are tagged.
  MAIL_DEVICE uint64_t out_slot() const { return call.launch.slices[place()] + slot(place(), call.me(), sent); }
  MAIL_DEVICE uint32_t in_slot() const { return slot(call.me(), place(), received); }
  MAIL_DEVICE uint64_t out_tag() const { return call.launch.first_tag + sent; }
  MAIL_DEVICE uint64_t in_tag() const { return call.launch.first_tag + received; }
  // In each buffer, where this step's unit begins; and how much of so many bytes it holds.
  MAIL_DEVICE uint64_t offset() const { return ((uint64_t)step * call.launch.used_lanes + lane) * payload_bytes; }
  MAIL_DEVICE uint32_t part_of(uint64_t bytes) const {
    const uint64_t from = offset();
    return from >= bytes ? 0 : bytes - from < payload_bytes ? (uint32_t)(bytes - from) : payload_bytes;
  }

  // The ranks to which this step sends, or from which it receives: a bit each.
  MAIL_DEVICE uint32_t sends_to() const { return ballot_of_warp(step < out_units) & 0xff; }
  MAIL_DEVICE uint32_t receives_from() const { return ballot_of_warp(step < in_units) & 0xff & ~(1u << call.me()); }

  // Waits till the next unit may go to each of these ranks. False: the communicator is aborted, and it is told what was waited for.
  // For all before the first goes: no peer needs this unit more than those without room do.
  MAIL_DEVICE bool wait_for_room(uint32_t ranks, uint32_t waited_for) {
    const bool goes = ranks >> place() & 1 && place() != call.me();
    const uint32_t slots = call.launch.ring_slots;
    if (!MAIL_SELDOM(any_of_warp(goes && sent - known >= slots))) return true;
    const uint64_t word = words_of(call.me()) + 8 * (WINDLASS_LANE_CREDIT + place());
    Waiting waiting;
    for (;;) {
      // Relaxed is enough: the stores that follow depend on the vote, and the receiver's loads had returned before it gave the
      // credit.
      const uint64_t credit = load_word_relaxed(word);
      known = credit > known ? credit : known;
      const bool stalled = goes && sent - known >= slots;
      if (!any_of_warp(stalled)) return true;
      if (!waiting.ends(call.launch)) continue;
      if (stalled && lane_index() < 8)
        report_entry(call.launch.report, call.me(), WindlassMailReportEntry{place(), waited_for, lane, 0, sent, known});
      return false;
    }
  }
  MAIL_DEVICE void has_sent(uint32_t ranks) {
    if (ranks >> place() & 1) ++sent;
  }

  // The units of this step from these ranks have been used, so their loads have returned. Credit goes to who may want it.
  MAIL_DEVICE void has_consumed(uint32_t ranks) {
    const bool mine = ranks >> place() & 1;
    if (mine) ++received;
    // Who sends little and gets something from here in the same launch needs no credit: what it gets proves that all before this
    // launch was consumed, as this rank's launches come one after the other.
    const uint32_t slots = call.launch.ring_slots;
    const bool wanted = out_units == 0 || in_units > slots / 2;
    const uint32_t every = slots >= 4 ? slots / 4 : 1;
    const bool now = (step + 1) % every == 0 || step + 1 == in_units;
    sync_warp();
    if (mine && wanted && now && lane_index() < 8)
      store_word(words_of(lane_index()) + 8 * (WINDLASS_LANE_CREDIT + call.me()), received);
  }

  // What the next launch begins with: told by the warp that sends, the one that receives, or one that does both.
  MAIL_DEVICE void end(bool sends, bool receives) {
    // A lane that had nothing to move has not settled: its counts stay what they were.
    settle();
    const uint32_t kind = lane_index() & ~7u;
    // That something comes from a peer proves it: see has_consumed. The proof is good from the next launch on.
    const bool mine = kind == WINDLASS_LANE_SENT       ? sends
                      : kind == WINDLASS_LANE_RECEIVED ? receives
                      : kind == WINDLASS_LANE_PROVEN   ? sends && in_units
                                                       : false;
    const uint64_t value = kind == WINDLASS_LANE_SENT ? sent : kind == WINDLASS_LANE_RECEIVED ? received : sent - out_units;
    if (mine) store_word(words_of(call.me()) + 8 * lane_index(), value);
  }

  // The warp leaves without the next units of these ranks.
  MAIL_DEVICE void report_missing(uint32_t ranks, uint32_t waited_for) const {
    if (lane_index() < 8 && ranks >> place() & 1)
      report_entry(call.launch.report, call.me(), WindlassMailReportEntry{place(), waited_for, lane, 0, received, received});
  }
};

// The lanes that a warp serves, one after the other, in order: the first lane that is unfinished anywhere is then served by all
// ranks, whatever their grids are, so none waits for ever.
struct Lanes {
  uint32_t next, last, stride;

  MAIL_DEVICE Lanes(const WindlassCollectiveLaunch& launch, uint32_t warp)
      : next(block_index() + block_count() * warp), last(launch.used_lanes), stride(block_count() * launch.role_warps) {}
};
