// Reduces 8 bytes of each rank, in the order of ranks from 0 upward, so that every rank gets the same bits.
//
// A reducer folds words (64 bits, whole elements): begin(first), add(each next), end. 16-bit floats are kept as 32-bit ones until
// the end and rounded once. Divergence: NCCL rounds at each step; ours is nearer to the exact sum.
// Averages as NCCL makes them: elements of floats are multiplied by 1/ranks first, sums of integers wrap and are then divided
// towards zero.
#pragma once
#include "collective.h"
#include "machine.cuh"

// Values of ncclDataType_t.
enum ReducedType : uint32_t {
  type_int8, type_uint8, type_int32, type_uint32, type_int64, type_uint64, type_half, type_float, type_double, type_bfloat, type_float8_e4m3, type_float8_e5m2
};
// Values of ncclRedOp_t, and by_scaled_sum, which is Windlass's own: NCCL gives the numbers from there on to operators of its users.
// Only ordered.cuh handles it and floats of 8 bits.
enum ReducedBy : uint32_t { by_sum, by_product, by_max, by_min, by_average, by_scaled_sum };

struct Reduction {
  uint32_t code;   // WindlassCollectiveLaunch.reduction
  uint64_t scale;  // WindlassCollectiveLaunch.scale

  WINDLASS_DEVICE uint32_t type() const { return code & 0xff; }
  WINDLASS_DEVICE uint32_t by() const { return code >> 8; }
};

// Nothing is reduced: data only moves.
struct Copy {
  static constexpr bool reduces = false;
};

// Sums of floats. Each element is multiplied by the scale, which is 1 except for averages; 1 changes no bit but a signaling NaN's.
struct SumF32 {
  static constexpr bool reduces = true;
  struct Fold {
    float low, high;
  };
  static WINDLASS_DEVICE float part(uint64_t x, uint32_t at, float scale) {
    return multiply_floats(float_of_bits((uint32_t)(x >> 32 * at)), scale);
  }
  static WINDLASS_DEVICE Fold begin(uint64_t x, const Reduction& how) {
    const float scale = float_of_bits((uint32_t)how.scale);
    return Fold{part(x, 0, scale), part(x, 1, scale)};
  }
  static WINDLASS_DEVICE void add(Fold& fold, uint64_t x, const Reduction& how) {
    const float scale = float_of_bits((uint32_t)how.scale);
    fold.low = add_floats(fold.low, part(x, 0, scale));
    fold.high = add_floats(fold.high, part(x, 1, scale));
  }
  static WINDLASS_DEVICE uint64_t end(const Fold& fold, const Reduction&) {
    return bits_of_float(fold.low) | (uint64_t)bits_of_float(fold.high) << 32;
  }
};

struct Half {
  static WINDLASS_DEVICE float wide(uint64_t x, uint32_t at) { return float_of_half((uint16_t)(x >> 16 * at)); }
  static WINDLASS_DEVICE uint32_t narrow(float low, float high) { return halves_of_floats(low, high); }
};
struct Bfloat {
  static WINDLASS_DEVICE float wide(uint64_t x, uint32_t at) { return float_of_bits((uint32_t)(x >> 16 * at) << 16); }
  static WINDLASS_DEVICE uint32_t narrow(float low, float high) { return bfloats_of_floats(low, high); }
};

// Four elements of 16 bits, as wide ones.
struct Quad {
  float part[4];
};
template <class Element>
WINDLASS_DEVICE Quad wide_quad(uint64_t x) {
  return Quad{{Element::wide(x, 0), Element::wide(x, 1), Element::wide(x, 2), Element::wide(x, 3)}};
}
template <class Element>
WINDLASS_DEVICE uint64_t narrow_quad(const Quad& quad) {
  return Element::narrow(quad.part[0], quad.part[1]) | (uint64_t)Element::narrow(quad.part[2], quad.part[3]) << 32;
}

template <class Element>
struct SumOf16 {
  static constexpr bool reduces = true;
  typedef Quad Fold;
  static WINDLASS_DEVICE Fold begin(uint64_t x, const Reduction& how) {
    Quad fold = wide_quad<Element>(x);
    WINDLASS_UNROLL
    for (int at = 0; at < 4; ++at) fold.part[at] = multiply_floats(fold.part[at], float_of_bits((uint32_t)how.scale));
    return fold;
  }
  static WINDLASS_DEVICE void add(Fold& fold, uint64_t x, const Reduction& how) {
    WINDLASS_UNROLL
    for (int at = 0; at < 4; ++at)
      fold.part[at] = add_floats(fold.part[at], multiply_floats(Element::wide(x, at), float_of_bits((uint32_t)how.scale)));
  }
  static WINDLASS_DEVICE uint64_t end(const Fold& fold, const Reduction&) { return narrow_quad<Element>(fold); }
};
typedef SumOf16<Half> SumF16;
typedef SumOf16<Bfloat> SumBf16;

// --- every other type and operation: chosen at run time, by functions that are not inlined ---------------------------------
// Of 16-bit floats both words hold 32-bit elements; of other types the first word holds all elements.
struct AnyFold {
  uint64_t first, second;
};

WINDLASS_DEVICE uint64_t two_floats(float low, float high) { return bits_of_float(low) | (uint64_t)bits_of_float(high) << 32; }
WINDLASS_DEVICE float float_at(uint64_t x, uint32_t at) { return float_of_bits((uint32_t)(x >> 32 * at)); }

WINDLASS_DEVICE float combine_floats(uint32_t by, float a, float b) {
  switch (by) {
    case by_product: return multiply_floats(a, b);
    case by_max: return max_floats(a, b);
    case by_min: return min_floats(a, b);
    default: return add_floats(a, b);
  }
}
WINDLASS_DEVICE uint64_t combine_two_floats(uint32_t by, uint64_t a, uint64_t b) {
  return two_floats(combine_floats(by, float_at(a, 0), float_at(b, 0)), combine_floats(by, float_at(a, 1), float_at(b, 1)));
}
WINDLASS_DEVICE double combine_doubles(uint32_t by, double a, double b) {
  switch (by) {
    case by_product: return multiply_doubles(a, b);
    case by_max: return max_doubles(a, b);
    case by_min: return min_doubles(a, b);
    default: return add_doubles(a, b);
  }
}
// Wide: an unsigned type in which the arithmetic wraps as the element does.
template <class Element, class Wide>
WINDLASS_DEVICE uint64_t combine_integers(uint32_t by, uint64_t a, uint64_t b) {
  constexpr uint32_t bits = 8 * sizeof(Element);
  constexpr uint64_t mask = bits == 64 ? ~0ull : (1ull << bits % 64) - 1;
  uint64_t all = 0;
  WINDLASS_UNROLL
  for (uint32_t at = 0; at < 64; at += bits) {
    const Element x = (Element)(a >> at), y = (Element)(b >> at);
    Element z;
    switch (by) {
      case by_product: z = (Element)((Wide)x * (Wide)y); break;
      case by_max: z = x > y ? x : y; break;
      case by_min: z = x < y ? x : y; break;
      default: z = (Element)((Wide)x + (Wide)y); break;
    }
    all |= ((uint64_t)z & mask) << at;
  }
  return all;
}
template <class Element>
WINDLASS_DEVICE uint64_t divide_integers(uint64_t a, uint64_t by) {
  constexpr uint32_t bits = 8 * sizeof(Element);
  constexpr uint64_t mask = bits == 64 ? ~0ull : (1ull << bits % 64) - 1;
  uint64_t all = 0;
  WINDLASS_UNROLL
  for (uint32_t at = 0; at < 64; at += bits) all |= ((uint64_t)(Element)((Element)(a >> at) / (Element)by) & mask) << at;
  return all;
}

WINDLASS_DEVICE uint64_t combine_words(uint32_t type, uint32_t by, uint64_t a, uint64_t b) {
  switch (type) {
    case type_int8: return combine_integers<int8_t, uint32_t>(by, a, b);
    case type_uint8: return combine_integers<uint8_t, uint32_t>(by, a, b);
    case type_int32: return combine_integers<int32_t, uint32_t>(by, a, b);
    case type_uint32: return combine_integers<uint32_t, uint32_t>(by, a, b);
    case type_int64: return combine_integers<int64_t, uint64_t>(by, a, b);
    case type_uint64: return combine_integers<uint64_t, uint64_t>(by, a, b);
    case type_double: return bits_of_double(combine_doubles(by, double_of_bits(a), double_of_bits(b)));
    default: return combine_two_floats(by, a, b);
  }
}

// One rank's word as it enters the fold: elements of floats are scaled for sums and averages.
WINDLASS_DEVICE AnyFold any_entry(uint64_t x, const Reduction& how) {
  const bool sums = how.by() == by_sum || how.by() == by_average;
  const float scale = sums ? float_of_bits((uint32_t)how.scale) : 1.0f;
  switch (how.type()) {
    case type_half:
    case type_bfloat: {
      const Quad quad = how.type() == type_half ? wide_quad<Half>(x) : wide_quad<Bfloat>(x);
      return AnyFold{two_floats(multiply_floats(quad.part[0], scale), multiply_floats(quad.part[1], scale)),
                     two_floats(multiply_floats(quad.part[2], scale), multiply_floats(quad.part[3], scale))};
    }
    case type_float:
      return AnyFold{two_floats(multiply_floats(float_at(x, 0), scale), multiply_floats(float_at(x, 1), scale)), 0};
    case type_double:
      return AnyFold{sums ? bits_of_double(multiply_doubles(double_of_bits(x), double_of_bits(how.scale))) : x, 0};
    default: return AnyFold{x, 0};
  }
}
WINDLASS_DEVICE bool is_of_16(uint32_t type) { return type == type_half || type == type_bfloat; }

WINDLASS_DEVICE_FUNCTION AnyFold any_begin(uint64_t x, Reduction how) { return any_entry(x, how); }
WINDLASS_DEVICE_FUNCTION AnyFold any_add(AnyFold fold, uint64_t x, Reduction how) {
  const AnyFold next = any_entry(x, how);
  if (is_of_16(how.type()))
    return AnyFold{combine_two_floats(how.by(), fold.first, next.first), combine_two_floats(how.by(), fold.second, next.second)};
  return AnyFold{combine_words(how.type(), how.by(), fold.first, next.first), 0};
}
WINDLASS_DEVICE_FUNCTION uint64_t any_end(AnyFold fold, Reduction how) {
  const Quad quad{{float_at(fold.first, 0), float_at(fold.first, 1), float_at(fold.second, 0), float_at(fold.second, 1)}};
  if (how.type() == type_half) return narrow_quad<Half>(quad);
  if (how.type() == type_bfloat) return narrow_quad<Bfloat>(quad);
  if (how.by() != by_average) return fold.first;
  switch (how.type()) {
    case type_int8: return divide_integers<int8_t>(fold.first, how.scale);
    case type_uint8: return divide_integers<uint8_t>(fold.first, how.scale);
    case type_int32: return divide_integers<int32_t>(fold.first, how.scale);
    case type_uint32: return divide_integers<uint32_t>(fold.first, how.scale);
    case type_int64: return divide_integers<int64_t>(fold.first, how.scale);
    case type_uint64: return divide_integers<uint64_t>(fold.first, how.scale);
    default: return fold.first;
  }
}

struct AnyReduction {
  static constexpr bool reduces = true;
  typedef AnyFold Fold;
  static WINDLASS_DEVICE Fold begin(uint64_t x, const Reduction& how) { return any_begin(x, how); }
  static WINDLASS_DEVICE void add(Fold& fold, uint64_t x, const Reduction& how) { fold = any_add(fold, x, how); }
  static WINDLASS_DEVICE uint64_t end(const Fold& fold, const Reduction& how) { return any_end(fold, how); }
};

// Reduces one word of each rank to one word.
template <class Reducer, int ranks_max>
WINDLASS_DEVICE uint64_t reduce_words(const uint64_t (&x)[ranks_max], uint32_t ranks, const Reduction& how) {
  typename Reducer::Fold fold = Reducer::begin(x[0], how);
  WINDLASS_UNROLL
  for (int rank = 1; rank < ranks_max; ++rank)
    if (rank < (int)ranks) Reducer::add(fold, x[rank], how);
  return Reducer::end(fold, how);
}
