// The loops of a warp of one role, for LL128 and Simple alike: send parts, send one buffer to all, receive and reduce. Some warps of a
// block send, others receive, and neither waits for the other; so a channel moves bytes both ways at once.
#pragma once
#include "bytes.cuh"
#include "ll128.cuh"
#include "simple.cuh"
#include "ordered.cuh"

// Move the first `vectors` bytes, whole vectors, by pieces of the given type. All loads are in flight at once, as every wait costs as
// much as the wire does for a packet.
template <class Format, class Piece>
WINDLASS_DEVICE void load_vectors(Vector (&packet)[Format::groups], const char* from, uint32_t vectors) {
  WINDLASS_UNROLL
  for (int group = 0; group < Format::groups; ++group)
    if (Format::holds(group) && Format::offset(group) < vectors) packet[group] = load_vector_by<Piece>(from + Format::offset(group));
}
template <class Format, class Piece>
WINDLASS_DEVICE void store_vectors(const Vector (&packet)[Format::groups], char* to, uint32_t vectors) {
  WINDLASS_UNROLL
  for (int group = 0; group < Format::groups; ++group)
    if (Format::holds(group) && Format::offset(group) < vectors) store_pieces<Piece>(to + Format::offset(group), packet[group], 16);
}

// Move the bytes after the first `vectors`: a vector that the buffer does not fill, or all of it if the address is no multiple of 4. By a
// loop; the packet stays in registers, as only constants index it.
template <class Format>
WINDLASS_DEVICE void load_rest(Vector (&packet)[Format::groups], const char* from, uint32_t vectors, uint32_t part) {
  WINDLASS_NO_UNROLL
  for (int group = 0; group < Format::groups; ++group) {
    const uint32_t at = Format::offset(group);
    if (!Format::holds(group) || at < vectors || at >= part) continue;
    const bool even = (uint64_t)from % 2 == 0;
    const Vector v = part - at >= 16 && even ? load_vector_by<uint16_t>(from + at) : load_bytes(from + at, part - at);
    WINDLASS_UNROLL
    for (int place = 0; place < Format::groups; ++place) {
      choose(packet[place].x, v.x, place == group);
      choose(packet[place].y, v.y, place == group);
    }
  }
}
template <class Format>
WINDLASS_DEVICE void store_rest(const Vector (&packet)[Format::groups], char* to, uint32_t vectors, uint32_t part) {
  WINDLASS_NO_UNROLL
  for (int group = 0; group < Format::groups; ++group) {
    const uint32_t at = Format::offset(group);
    if (!Format::holds(group) || at < vectors || at >= part) continue;
    Vector v = packet[0];
    WINDLASS_UNROLL
    for (int place = 1; place < Format::groups; ++place) {
      choose(v.x, packet[place].x, place == group);
      choose(v.y, packet[place].y, place == group);
    }
    store_bytes(to + at, v, part - at);
  }
}

// Move this step's packet from or to the user's buffer that begins at `buffer`. Whole vectors first, all in flight at once.
template <class Format, bool straight, class Source>
WINDLASS_DEVICE void load_packet(const Channel<Format, straight, Source>& way, Vector (&packet)[Format::groups], uint64_t buffer, uint64_t bytes) {
  const char* const from = reinterpret_cast<const char*>(buffer + way.offset());
  const uint32_t part = way.part_of(bytes), width = straight ? 16 : access_width((uint64_t)from), vectors = straight ? part : width >= 4 ? part & ~15u : 0;
  WINDLASS_UNROLL
  for (int group = 0; group < Format::groups; ++group) {
    packet[group] = Vector{0, 0};
    if (Format::holds(group) && Format::offset(group) < (width == 16 ? vectors : 0)) packet[group] = load_input(from + Format::offset(group));
  }
  if constexpr (!straight) {
    if (width != 16 && vectors) load_vectors<Format, uint32_t>(packet, from, vectors);
    if (vectors != part) load_rest<Format>(packet, from, vectors, part);
  }
}
template <class Format, bool straight, class Source>
WINDLASS_DEVICE void store_packet(const Channel<Format, straight, Source>& way, const Vector (&packet)[Format::groups], uint64_t buffer, uint64_t bytes) {
  char* const to = reinterpret_cast<char*>(buffer + way.offset());
  const uint32_t part = way.part_of(bytes), width = straight ? 16 : access_width((uint64_t)to), vectors = straight ? part : width >= 4 ? part & ~15u : 0;
  WINDLASS_UNROLL
  for (int group = 0; group < Format::groups; ++group)
    if (Format::holds(group) && Format::offset(group) < (width == 16 ? vectors : 0)) store_output(to + Format::offset(group), packet[group]);
  if constexpr (!straight) {
    if (width != 16 && vectors) store_vectors<Format, uint32_t>(packet, to, vectors);
    if (vectors != part) store_rest<Format>(packet, to, vectors, part);
  }
}

// Copies this rank's own packet to every rank's place; take_packet then overwrites those of the peers.
template <int groups, int ranks_max>
WINDLASS_DEVICE void spread(Vector (&x)[ranks_max][groups], const Vector (&own)[groups]) {
  WINDLASS_UNROLL
  for (int rank = 0; rank < ranks_max; ++rank) {
    WINDLASS_UNROLL
    for (int group = 0; group < groups; ++group) x[rank][group] = own[group];
  }
}
// How many ranks' packets a warp takes at once. Of two ranks the peer's alone: what only moves has no other, and a sum of two floats has the same bits
// in either order. So nothing is chosen by rank: a warp has one packet in hand at a time, and each instruction less for it counts.
template <class Reducer, int ranks_max>
constexpr int sources_of = ranks_max == 2 && !chooses_at_run_time<Reducer> && !scales<Reducer> ? 1 : ranks_max;

template <class Reducer>
constexpr bool sums_16_bits = false;
template <class Element>
constexpr bool sums_16_bits<SumOf16<Element>> = true;

// Reduces one packet of each rank to one packet. Of one source: that and what `result` holds, which is this rank's own.
template <class Reducer, int groups, int sources>
WINDLASS_DEVICE void reduce_packet(Vector (&result)[groups], const Vector (&x)[sources][groups], const WindlassCollectiveLaunch& launch) {
  const Reduction how{launch.reduction, launch.scale};
  if constexpr (sources == 1) {
    if constexpr (adds_two<Reducer>) {
      // One branch a packet.
      if (!WINDLASS_SELDOM(is_average(how))) {
        WINDLASS_UNROLL
        for (int group = 0; group < groups; ++group)
          result[group] = Vector{Reducer::add_two(result[group].x, x[0][group].x), Reducer::add_two(result[group].y, x[0][group].y)};
        return;
      }
    }
    WINDLASS_UNROLL
    for (int group = 0; group < groups; ++group) {
      const uint64_t low[2] = {result[group].x, x[0][group].x}, high[2] = {result[group].y, x[0][group].y};
      result[group] = Vector{fold_words<Reducer>(low, 2, how), fold_words<Reducer>(high, 2, how)};
    }
  } else if constexpr (chooses_at_run_time<Reducer>) {
    uint64_t words[sources][2 * groups], all[2 * groups];
    WINDLASS_UNROLL
    for (int rank = 0; rank < sources; ++rank) {
      WINDLASS_UNROLL
      for (int group = 0; group < groups; ++group) words[rank][2 * group] = x[rank][group].x, words[rank][2 * group + 1] = x[rank][group].y;
    }
    Reducer::reduce(all, words, launch.ranks, how);
    WINDLASS_UNROLL
    for (int group = 0; group < groups; ++group) result[group] = Vector{all[2 * group], all[2 * group + 1]};
  } else {
    WINDLASS_UNROLL
    for (int group = 0; group < groups; ++group) {
      uint64_t low[sources], high[sources];
      WINDLASS_UNROLL
      for (int rank = 0; rank < sources; ++rank) low[rank] = x[rank][group].x, high[rank] = x[rank][group].y;
      result[group] = Vector{reduce_words<Reducer>(low, launch.ranks, how), reduce_words<Reducer>(high, launch.ranks, how)};
    }
  }
}

// Loads the packet of the next step; of no bytes after the last.
template <class Way>
WINDLASS_DEVICE void load_next(Way& way, Vector (&packet)[Way::groups], uint64_t buffer, uint64_t bytes) {
  ++way.step;
  load_packet(way, packet, buffer, bytes);
  --way.step;
}

// Sends each rank its part. If data only moves, this rank's own part is copied in the same loop. False: aborted.
template <class Reducer, int ranks_max, class Way>
WINDLASS_DEVICE bool send_parts(Way& way) {
  const WindlassCollectiveLaunch& launch = way.launch;
  const uint32_t me = way.me();
  // Batches that only move bytes use send_same.
  const bool copies = !Reducer::reduces && !Way::several && way.source.receive(me) != way.source.send(me);
  for (; way.has_step(); ++way.step) {
    // All loads are on their way before the first is waited for.
    Vector out[ranks_max - 1][Way::groups];
    WINDLASS_UNROLL
    for (int distance = 1; distance < ranks_max; ++distance) {
      const uint32_t rank = way.peer(distance);
      if (distance < (int)launch.ranks && way.moves(rank)) load_packet(way, out[distance - 1], way.source.send(rank), way.source.send_bytes(rank));
    }
    if (copies && way.moves(me)) {
      Vector own[Way::groups];
      load_packet(way, own, way.source.send(me), way.source.send_bytes(me));
      store_packet(way, own, way.source.receive(me), way.source.receive_bytes(me));
    }
    if constexpr (scales<Reducer>) {
      WINDLASS_UNROLL
      for (int distance = 1; distance < ranks_max; ++distance)
        if (distance < (int)launch.ranks && way.moves(way.peer(distance))) scale_own<Reducer>(out[distance - 1], launch);
    }
    if (!put_packet<ranks_max>(way, out, WINDLASS_WAITED_LL128_CREDIT)) return false;
  }
  return true;
}

// Sends one packet to all peers, and copies it to this rank's own place unless in place. False: aborted.
template <int ranks_max, class Way>
WINDLASS_DEVICE bool send_same(Way& way) {
  const uint32_t me = way.me();
  const auto is_apart = [&] { return way.source.receive(me) != way.source.send(me); };
  const bool copies = !Way::several && is_apart();
  for (; way.has_step(); ++way.step) {
    Vector own[1][Way::groups];
    load_packet(way, own[0], way.source.send(me), way.source.send_bytes(me));
    if (!put_packet<ranks_max>(way, own, WINDLASS_WAITED_LL128_CREDIT)) return false;
    if ((Way::several ? is_apart() : copies) && way.moves(me)) store_packet(way, own[0], way.source.receive(me), way.source.receive_bytes(me));
  }
  return true;
}

template <class Reducer, int ranks_max, class Way>
WINDLASS_DEVICE bool receive_parts(Way& way) {
  const WindlassCollectiveLaunch& launch = way.launch;
  const uint32_t me = way.me();
  constexpr int sources = sources_of<Reducer, ranks_max>;
  // Simple packets are of large buffers, which no cache holds: the next one's own data are under way while the warp waits for this one. Sums of 16 bits
  // took 4 % less with it, of fp32 6 % more; over LL128 it gained nothing.
  constexpr bool ahead = Way::loads_ahead && sums_16_bits<Reducer> && sources == 1;
  Vector next[Way::groups];
  if constexpr (ahead) load_packet(way, next, way.source.send(me), way.source.send_bytes(me));
  for (; way.has_step(); ++way.step) {
    Vector x[sources][Way::groups];
    if constexpr (Reducer::reduces) {
      Vector own[Way::groups];
      if constexpr (ahead) {
        WINDLASS_UNROLL
        for (int group = 0; group < Way::groups; ++group) own[group] = next[group];
        load_next(way, next, way.source.send(me), way.source.send_bytes(me));
      } else {
        load_packet(way, own, way.source.send(me), way.source.send_bytes(me));
      }
      scale_own<Reducer>(own, launch);
      if constexpr (sources > 1) spread(x, own);
      if (!take_packet(way, x, WINDLASS_WAITED_LL128_DATA)) return false;
      reduce_packet<Reducer>(own, x, launch);
      store_packet(way, own, way.source.receive(me), way.source.receive_bytes(me));
    } else {
      if (!take_packet(way, x, WINDLASS_WAITED_LL128_DATA)) return false;
      WINDLASS_UNROLL
      for (int i = 0; i < sources; ++i) {
        const uint32_t rank = source_of<sources>(way, i);
        if (way.moves_peer(rank)) store_packet(way, x[i], way.source.receive(rank), way.source.receive_bytes(rank));
      }
    }
    way.has_consumed();
  }
  return true;
}
