// What a warp of one role does with the units of the user's buffers, over LL128 and Simple alike: some warps of a block send,
// others receive, and neither waits for the other; so a lane moves bytes both ways at once.
#pragma once
#include "bytes.cuh"
#include "ll128.cuh"
#include "simple.cuh"
#include "reduction.cuh"

// The first `vectors` bytes, whole vectors, by pieces as wide as the address allows: all in flight at once, as every wait costs as much
// as the wire does for a unit.
template <class Format, class Piece>
WINDLASS_DEVICE void load_vectors(Vector (&unit)[Format::groups], const char* from, uint32_t vectors) {
  WINDLASS_UNROLL
  for (int group = 0; group < Format::groups; ++group)
    if (Format::holds(group) && Format::offset(group) < vectors) unit[group] = load_pieces<Piece>(from + Format::offset(group), 16);
}
template <class Format, class Piece>
WINDLASS_DEVICE void store_vectors(const Vector (&unit)[Format::groups], char* to, uint32_t vectors) {
  WINDLASS_UNROLL
  for (int group = 0; group < Format::groups; ++group)
    if (Format::holds(group) && Format::offset(group) < vectors) store_pieces<Piece>(to + Format::offset(group), unit[group], 16);
}

// What is left beyond the first `vectors` bytes: a vector that the buffer does not fill, or all at an odd address. In a loop, and the
// unit stays in registers, as only constants index it.
template <class Format>
WINDLASS_DEVICE void load_rest(Vector (&unit)[Format::groups], const char* from, uint32_t vectors, uint32_t part) {
  WINDLASS_NO_UNROLL
  for (int group = 0; group < Format::groups; ++group) {
    const uint32_t at = Format::offset(group);
    if (!Format::holds(group) || at < vectors || at >= part) continue;
    const bool even = (uint64_t)from % 2 == 0;
    const Vector v = part - at >= 16 && even ? load_pieces<uint16_t>(from + at, 16) : load_bytes(from + at, part - at);
    WINDLASS_UNROLL
    for (int place = 0; place < Format::groups; ++place) {
      choose(unit[place].x, v.x, place == group);
      choose(unit[place].y, v.y, place == group);
    }
  }
}
template <class Format>
WINDLASS_DEVICE void store_rest(const Vector (&unit)[Format::groups], char* to, uint32_t vectors, uint32_t part) {
  WINDLASS_NO_UNROLL
  for (int group = 0; group < Format::groups; ++group) {
    const uint32_t at = Format::offset(group);
    if (!Format::holds(group) || at < vectors || at >= part) continue;
    Vector v = unit[0];
    WINDLASS_UNROLL
    for (int place = 1; place < Format::groups; ++place) {
      choose(v.x, unit[place].x, place == group);
      choose(v.y, unit[place].y, place == group);
    }
    store_bytes(to + at, v, part - at);
  }
}

// This step's unit of the user's buffer that begins at `buffer`. Whole vectors first, all in flight at once.
template <class Format, bool straight, class Source>
WINDLASS_DEVICE void load_unit(const Lane<Format, straight, Source>& way, Vector (&unit)[Format::groups], uint64_t buffer, uint64_t bytes) {
  const char* const from = reinterpret_cast<const char*>(buffer + way.offset());
  const uint32_t part = way.part_of(bytes), width = straight ? 16 : access_width((uint64_t)from), vectors = straight ? part : width >= 4 ? part & ~15u : 0;
  WINDLASS_UNROLL
  for (int group = 0; group < Format::groups; ++group) {
    unit[group] = Vector{0, 0};
    if (Format::holds(group) && Format::offset(group) < (width == 16 ? vectors : 0)) unit[group] = load_input(from + Format::offset(group));
  }
  if constexpr (!straight) {
    if (width != 16 && vectors) load_vectors<Format, uint32_t>(unit, from, vectors);
    if (vectors != part) load_rest<Format>(unit, from, vectors, part);
  }
}
template <class Format, bool straight, class Source>
WINDLASS_DEVICE void store_unit(const Lane<Format, straight, Source>& way, const Vector (&unit)[Format::groups], uint64_t buffer, uint64_t bytes) {
  char* const to = reinterpret_cast<char*>(buffer + way.offset());
  const uint32_t part = way.part_of(bytes), width = straight ? 16 : access_width((uint64_t)to), vectors = straight ? part : width >= 4 ? part & ~15u : 0;
  WINDLASS_UNROLL
  for (int group = 0; group < Format::groups; ++group)
    if (Format::holds(group) && Format::offset(group) < (width == 16 ? vectors : 0)) store_output(to + Format::offset(group), unit[group]);
  if constexpr (!straight) {
    if (width != 16 && vectors) store_vectors<Format, uint32_t>(unit, to, vectors);
    if (vectors != part) store_rest<Format>(unit, to, vectors, part);
  }
}

// This rank's own unit at every rank's place: others' come there.
template <int groups, int ranks_max>
WINDLASS_DEVICE void spread(Vector (&x)[ranks_max][groups], const Vector (&own)[groups]) {
  WINDLASS_UNROLL
  for (int rank = 0; rank < ranks_max; ++rank) {
    WINDLASS_UNROLL
    for (int group = 0; group < groups; ++group) x[rank][group] = own[group];
  }
}
// One unit of each rank into one.
template <class Reducer, int groups, int ranks_max>
WINDLASS_DEVICE void reduce_unit(Vector (&result)[groups], const Vector (&x)[ranks_max][groups], const WindlassCollectiveLaunch& launch) {
  const Reduction how{launch.reduction, launch.scale};
  WINDLASS_UNROLL
  for (int group = 0; group < groups; ++group) {
    uint64_t low[ranks_max], high[ranks_max];
    WINDLASS_UNROLL
    for (int rank = 0; rank < ranks_max; ++rank) low[rank] = x[rank][group].x, high[rank] = x[rank][group].y;
    result[group] = Vector{reduce_words<Reducer>(low, launch.ranks, how), reduce_words<Reducer>(high, launch.ranks, how)};
  }
}

// Sends its part to each rank. What a rank keeps itself is copied beside that, if data only moves.
template <class Reducer, int ranks_max, class Way>
WINDLASS_DEVICE bool send_parts(Way& way) {
  const WindlassCollectiveLaunch& launch = way.launch;
  const uint32_t me = way.me();
  // Several that move bytes send the same to all.
  const bool copies = !Reducer::reduces && !Way::several && way.source.receive(me) != way.source.send(me);
  for (; way.has_step(); ++way.step) {
    // All loads are on their way before the first is waited for.
    Vector out[ranks_max - 1][Way::groups];
    WINDLASS_UNROLL
    for (int distance = 1; distance < ranks_max; ++distance) {
      const uint32_t rank = way.peer(distance);
      if (distance < (int)launch.ranks && way.moves(rank)) load_unit(way, out[distance - 1], way.source.send(rank), way.source.send_bytes(rank));
    }
    if (copies && way.moves(me)) {
      Vector own[Way::groups];
      load_unit(way, own, way.source.send(me), way.source.send_bytes(me));
      store_unit(way, own, way.source.receive(me), way.source.receive_bytes(me));
    }
    if (!put_unit<ranks_max>(way, out, WINDLASS_WAITED_LL128_CREDIT)) return false;
  }
  return true;
}

// Sends the same to all.
template <int ranks_max, class Way>
WINDLASS_DEVICE bool send_same(Way& way) {
  const uint32_t me = way.me();
  const auto is_apart = [&] { return way.source.receive(me) != way.source.send(me); };
  const bool copies = !Way::several && is_apart();
  for (; way.has_step(); ++way.step) {
    Vector own[1][Way::groups];
    load_unit(way, own[0], way.source.send(me), way.source.send_bytes(me));
    if (!put_unit<ranks_max>(way, own, WINDLASS_WAITED_LL128_CREDIT)) return false;
    if ((Way::several ? is_apart() : copies) && way.moves(me)) store_unit(way, own[0], way.source.receive(me), way.source.receive_bytes(me));
  }
  return true;
}

template <class Reducer, int ranks_max, class Way>
WINDLASS_DEVICE bool receive_parts(Way& way) {
  const WindlassCollectiveLaunch& launch = way.launch;
  const uint32_t me = way.me();
  for (; way.has_step(); ++way.step) {
    Vector x[ranks_max][Way::groups];
    if constexpr (Reducer::reduces) {
      Vector own[Way::groups];
      load_unit(way, own, way.source.send(me), way.source.send_bytes(me));
      spread(x, own);
      if (!take_unit(way, x, WINDLASS_WAITED_LL128_DATA)) return false;
      reduce_unit<Reducer>(own, x, launch);
      store_unit(way, own, way.source.receive(me), way.source.receive_bytes(me));
    } else {
      if (!take_unit(way, x, WINDLASS_WAITED_LL128_DATA)) return false;
      WINDLASS_UNROLL
      for (int rank = 0; rank < ranks_max; ++rank)
        if (way.moves_peer(rank)) store_unit(way, x[rank], way.source.receive(rank), way.source.receive_bytes(rank));
    }
    way.has_consumed();
  }
  return true;
}
