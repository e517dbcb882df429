// Every type and operation that has no kernels of its own, chosen at run time by functions that are not inlined. The choice takes more
// instructions than the arithmetic, so one call combines whole packets of two ranks; of 16-bit floats one word of all ranks.
#pragma once
#include "reduction.cuh"

WINDLASS_DEVICE uint64_t two_floats(float low, float high) { return bits_of_float(low) | (uint64_t)bits_of_float(high) << 32; }
WINDLASS_DEVICE float float_at(uint64_t x, uint32_t at) { return float_of_bits((uint32_t)(x >> 32 * at)); }

// --- two words, element by element -------------------------------------------------------------------------------------------
struct Sum {
  static WINDLASS_DEVICE float of(float a, float b) { return add_floats(a, b); }
  static WINDLASS_DEVICE double of(double a, double b) { return add_doubles(a, b); }
  static WINDLASS_DEVICE uint32_t of(uint32_t a, uint32_t b) { return a + b; }
  static WINDLASS_DEVICE uint64_t of(uint64_t a, uint64_t b) { return a + b; }
  static WINDLASS_DEVICE uint64_t of_bytes(uint64_t a, uint64_t b) {
    constexpr uint64_t tops = 0x8080808080808080ull;
    return ((a & ~tops) + (b & ~tops)) ^ ((a ^ b) & tops);
  }
};
struct Product {
  static WINDLASS_DEVICE float of(float a, float b) { return multiply_floats(a, b); }
  static WINDLASS_DEVICE double of(double a, double b) { return multiply_doubles(a, b); }
  static WINDLASS_DEVICE uint32_t of(uint32_t a, uint32_t b) { return a * b; }
  static WINDLASS_DEVICE uint64_t of(uint64_t a, uint64_t b) { return a * b; }
  static WINDLASS_DEVICE uint64_t of_bytes(uint64_t a, uint64_t b) {
    uint64_t all = 0;
    WINDLASS_UNROLL
    for (uint32_t at = 0; at < 64; at += 8) all |= (uint64_t)((uint32_t)(a >> at) * (uint32_t)(b >> at) & 0xff) << at;
    return all;
  }
};
struct Max {
  static WINDLASS_DEVICE float of(float a, float b) { return max_floats(a, b); }
  static WINDLASS_DEVICE double of(double a, double b) { return max_doubles(a, b); }
  static WINDLASS_DEVICE uint32_t of(uint32_t a, uint32_t b) { return a > b ? a : b; }
  static WINDLASS_DEVICE uint64_t of(uint64_t a, uint64_t b) { return a > b ? a : b; }
  static WINDLASS_DEVICE uint64_t of_bytes(uint64_t a, uint64_t b) {
    constexpr uint64_t tops = 0x8080808080808080ull;
    // The top bit of each byte: whether the low bits of `a` are at least those of `b`, then whether all of `a` is at least `b`.
    const uint64_t low = (a | tops) - (b & ~tops), all = ((a & ~b) | (~(a ^ b) & low)) & tops;
    const uint64_t of_a = all | (all - (all >> 7));
    return (a & of_a) | (b & ~of_a);
  }
};
struct Min {
  static WINDLASS_DEVICE float of(float a, float b) { return min_floats(a, b); }
  static WINDLASS_DEVICE double of(double a, double b) { return min_doubles(a, b); }
};

template <class Operation, int words>
WINDLASS_DEVICE void combine_floats_by(uint64_t (&a)[words], const uint64_t (&b)[words]) {
  WINDLASS_UNROLL
  for (int at = 0; at < words; ++at)
    a[at] = two_floats(Operation::of(float_at(a[at], 0), float_at(b[at], 0)), Operation::of(float_at(a[at], 1), float_at(b[at], 1)));
}
template <class Operation, int words>
WINDLASS_DEVICE void combine_doubles_by(uint64_t (&a)[words], const uint64_t (&b)[words]) {
  WINDLASS_UNROLL
  for (int at = 0; at < words; ++at) a[at] = bits_of_double(Operation::of(double_of_bits(a[at]), double_of_bits(b[at])));
}
// Of unsigned integers.
template <class Operation, int words>
WINDLASS_DEVICE void combine_integers_by(uint32_t type, uint64_t (&a)[words], const uint64_t (&b)[words]) {
  switch (type / 2) {
    case type_int8 / 2:
      WINDLASS_UNROLL
      for (int at = 0; at < words; ++at) a[at] = Operation::of_bytes(a[at], b[at]);
      break;
    case type_int32 / 2:
      WINDLASS_UNROLL
      for (int at = 0; at < words; ++at)
        a[at] = Operation::of((uint32_t)a[at], (uint32_t)b[at]) | (uint64_t)Operation::of((uint32_t)(a[at] >> 32), (uint32_t)(b[at] >> 32)) << 32;
      break;
    default:
      WINDLASS_UNROLL
      for (int at = 0; at < words; ++at) a[at] = Operation::of(a[at], b[at]);
      break;
  }
}

template <int words>
WINDLASS_DEVICE void combine_floats(uint32_t by, uint64_t (&a)[words], const uint64_t (&b)[words]) {
  switch (by) {
    case by_product: return combine_floats_by<Product>(a, b);
    case by_max: return combine_floats_by<Max>(a, b);
    case by_min: return combine_floats_by<Min>(a, b);
    default: return combine_floats_by<Sum>(a, b);
  }
}
template <int words>
WINDLASS_DEVICE void combine_doubles(uint32_t by, uint64_t (&a)[words], const uint64_t (&b)[words]) {
  switch (by) {
    case by_product: return combine_doubles_by<Product>(a, b);
    case by_max: return combine_doubles_by<Max>(a, b);
    case by_min: return combine_doubles_by<Min>(a, b);
    default: return combine_doubles_by<Sum>(a, b);
  }
}
// Sums and products wrap and are the same with and without sign. Maxima and minima are maxima of unsigned integers, once some bits are
// flipped: the tops of signed ones, all for a minimum.
template <int words>
WINDLASS_DEVICE void combine_integers(uint32_t type, uint32_t by, uint64_t (&a)[words], const uint64_t (&b)[words]) {
  if (by == by_product) return combine_integers_by<Product>(type, a, b);
  if (by != by_max && by != by_min) return combine_integers_by<Sum>(type, a, b);
  const uint64_t tops = type == type_int8 ? 0x8080808080808080ull : type == type_int32 ? 0x8000000080000000ull : type == type_int64 ? 1ull << 63 : 0;
  const uint64_t flipped = by == by_min ? ~tops : tops;
  uint64_t other[words];
  WINDLASS_UNROLL
  for (int at = 0; at < words; ++at) a[at] ^= flipped, other[at] = b[at] ^ flipped;
  combine_integers_by<Max>(type, a, other);
  WINDLASS_UNROLL
  for (int at = 0; at < words; ++at) a[at] ^= flipped;
}

// Makes `a` what both are together.
template <int words>
WINDLASS_DEVICE void combine(uint32_t type, uint32_t by, uint64_t (&a)[words], const uint64_t (&b)[words]) {
  if (type < type_half) return combine_integers(type, by, a, b);
  if (type == type_double) return combine_doubles(by, a, b);
  combine_floats(by, a, b);
}

// --- all ranks ---------------------------------------------------------------------------------------------------------------
template <int words>
struct Words {
  uint64_t word[words];
};

template <int words>
WINDLASS_DEVICE_FUNCTION Words<words> any_combine(Words<words> a, Words<words> b, uint32_t type, uint32_t by) {
  combine(type, by, a.word, b.word);
  return a;
}

// One word of 16-bit floats of each rank, widened, and rounded once.
template <class Element, int ranks_max>
WINDLASS_DEVICE uint64_t reduce_quads(const Words<ranks_max>& x, uint32_t ranks, const Reduction& how) {
  const float scale = how.by() == by_average ? float_of_bits((uint32_t)how.scale) : 1.0f;
  const auto wide = [&](uint64_t word, uint64_t (&to)[2]) {
    const Quad quad = wide_quad<Element>(word);
    WINDLASS_UNROLL
    for (int at = 0; at < 2; ++at) to[at] = two_floats(multiply_floats(quad.part[2 * at], scale), multiply_floats(quad.part[2 * at + 1], scale));
  };
  uint64_t all[2];
  wide(x.word[0], all);
  WINDLASS_UNROLL
  for (int rank = 1; rank < ranks_max; ++rank) {
    if (rank >= (int)ranks) continue;
    uint64_t next[2];
    wide(x.word[rank], next);
    combine_floats(how.by(), all, next);
  }
  return narrow_quad<Element>(Quad{{float_at(all[0], 0), float_at(all[0], 1), float_at(all[1], 0), float_at(all[1], 1)}});
}
template <int ranks_max>
WINDLASS_DEVICE_FUNCTION uint64_t any_of_16(Words<ranks_max> x, uint32_t ranks, Reduction how) {
  return how.type() == type_half ? reduce_quads<Half>(x, ranks, how) : reduce_quads<Bfloat>(x, ranks, how);
}

struct AnyReduction {
  static constexpr bool reduces = true;

  // Reduces the same words of each rank.
  template <int words, int ranks_max>
  static WINDLASS_DEVICE void reduce(uint64_t (&result)[words], const uint64_t (&x)[ranks_max][words], uint32_t ranks, const Reduction& how) {
    if (how.type() == type_half || how.type() == type_bfloat) {
      WINDLASS_UNROLL
      for (int at = 0; at < words; ++at) {
        Words<ranks_max> each;
        WINDLASS_UNROLL
        for (int rank = 0; rank < ranks_max; ++rank) each.word[rank] = x[rank][at];
        result[at] = any_of_16(each, ranks, how);
      }
      return;
    }
    const bool scales = how.by() == by_average;
    Words<words> factors, fold;
    WINDLASS_UNROLL
    for (int at = 0; at < words; ++at) factors.word[at] = how.type() == type_double ? how.scale : how.scale * 0x100000001ull, fold.word[at] = x[0][at];
    if (scales) fold = any_combine(fold, factors, how.type(), by_product);
    WINDLASS_UNROLL
    for (int rank = 1; rank < ranks_max; ++rank) {
      if (rank >= (int)ranks) continue;
      Words<words> next;
      WINDLASS_UNROLL
      for (int at = 0; at < words; ++at) next.word[at] = x[rank][at];
      if (scales) next = any_combine(next, factors, how.type(), by_product);
      fold = any_combine(fold, next, how.type(), how.by());
    }
    WINDLASS_UNROLL
    for (int at = 0; at < words; ++at) result[at] = fold.word[at];
  }
};
template <>
constexpr bool chooses_at_run_time<AnyReduction> = true;
