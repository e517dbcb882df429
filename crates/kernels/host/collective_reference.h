// Computes the right results of collectives, element by element; no code is shared with ../device/reduction.cuh.
// Integers wrap; they have no averages. Floats are folded from rank 0 upward, those of 8 and 16 bits as
// 32-bit ones that are rounded once; averages multiply each element by 1/ranks first. In maximum and minimum a NaN loses against
// a number, and +0 is above -0. All resulting NaNs of 8, 16 or 32 bits are one, as on GPUs. Floats of 8 bits saturate to the largest
// finite number. In scaled sums each rank's element is first multiplied by the rank's scalar and rounded to the type.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace reference {

enum Type : uint32_t { int8, uint8, int32, uint32, int64, uint64, half, single, wide, brain, e4m3, e5m2 };
enum Operation : uint32_t { sum, product, maximum, minimum, average, scaled_sum };
constexpr uint32_t types = 12, operations = 6;
constexpr uint32_t element_bytes[types] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
inline const char* const type_names[types] = {"int8", "uint8", "int32", "uint32", "int64", "uint64", "f16", "f32", "f64", "bf16", "e4m3", "e5m2"};
inline const char* const operation_names[operations] = {"sum", "product", "maximum", "minimum", "average", "scaled sum"};

inline bool is_float(uint32_t type) { return type >= half; }
inline bool is_signed(uint32_t type) { return type == int8 || type == int32 || type == int64; }

// A binary float of up to 16 bits: the number of its exponent bits and fraction bits.
struct Shape {
  int exponent_bits, fraction_bits;
  bool has_infinity = true;  // else codes of the highest exponent are numbers, except the highest one: NaN
  bool saturates = false;    // values that are too large become the largest finite number, not infinity
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int bits() const { return 1 + exponent_bits + fraction_bits; }
  uint32_t infinity() const { return ((1u << exponent_bits) - 1) << fraction_bits; }
  uint32_t largest() const { return has_infinity ? infinity() - 1 : (1u << (bits() - 1)) - 2; }
};
constexpr Shape half_shape{5, 10}, brain_shape{8, 7}, e4m3_shape{4, 3, false, true}, e5m2_shape{5, 2, true, true};
inline const Shape* shape_of(uint32_t type) {
  return type == half ? &half_shape : type == brain ? &brain_shape : type == e4m3 ? &e4m3_shape : type == e5m2 ? &e5m2_shape : nullptr;
}

inline double decode(uint32_t bits, const Shape& shape) {
  const int top = (1 << shape.exponent_bits) - 1, exponent = (int)(bits >> shape.fraction_bits) & top;
  const int fraction = (int)bits & ((1 << shape.fraction_bits) - 1);
  double value;
  if (shape.has_infinity ? exponent == top : (bits & ((1u << (shape.bits() - 1)) - 1)) > shape.largest())
    value = fraction ? NAN : INFINITY;
  else if (exponent == 0)
    value = std::ldexp(fraction, 1 - shape.bias() - shape.fraction_bits);
  else
    value = std::ldexp(fraction + (1 << shape.fraction_bits), exponent - shape.bias() - shape.fraction_bits);
  return bits >> (shape.bits() - 1) & 1 ? -value : value;
}
// Rounds to nearest, ties to even. Every NaN becomes the one that GPUs make.
inline uint32_t encode(double value, const Shape& shape) {
  const uint32_t top = 1u << (shape.bits() - 1);
  if (std::isnan(value)) return top - 1;
  const uint32_t sign = std::signbit(value) ? top : 0, most = shape.saturates ? shape.largest() : shape.infinity();
  value = std::fabs(value);
  if (std::isinf(value)) return sign | most;
  const int least = 1 - shape.bias();
  int exponent = value == 0 ? least : std::ilogb(value);
  if (exponent < least) exponent = least;
  // The quotient is exact, as the divisor is a power of two. From 2^fraction_bits on it is a normal number, from twice that the next exponent.
  const uint32_t steps = (uint32_t)std::nearbyint(std::ldexp(value, shape.fraction_bits - exponent));
  const uint32_t bits = ((uint32_t)(exponent - least) << shape.fraction_bits) + steps;
  return sign | (bits < most ? bits : most);
}

template <class To, class From>
To reinterpret(From from) {
  To to;
  static_assert(sizeof to == sizeof from, "bits");
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class Float>
Float fold_floats(uint32_t by, Float a, Float b) {
  if (by == sum || by == average || by == scaled_sum) return a + b;
  if (by == product) return a * b;
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  if (a == b) return std::signbit(a) == (by == maximum) ? b : a;
  return (a > b) == (by == maximum) ? a : b;
}
template <class Float, class Element>
Float reduce_floats(uint32_t by, uint32_t ranks, const Element& element) {
  const Float scale = by == average ? (Float)(1.0 / ranks) : (Float)1;
  Float all = element(0) * scale;
  for (uint32_t rank = 1; rank < ranks; ++rank) {
    const Float next = element(rank) * scale;
    all = fold_floats<Float>(by, all, next);
  }
  return all;
}

inline uint64_t extended(uint32_t type, uint64_t bits) {
  const uint32_t unused = 64 - 8 * element_bytes[type];
  return is_signed(type) ? (uint64_t)((int64_t)(bits << unused) >> unused) : bits << unused >> unused;
}
template <class Bits>
uint64_t reduce_integers(uint32_t type, uint32_t by, uint32_t ranks, const Bits& bits) {
  uint64_t all = extended(type, bits(0));
  for (uint32_t rank = 1; rank < ranks; ++rank) {
    const uint64_t next = extended(type, bits(rank));
    const bool above = is_signed(type) ? (int64_t)next > (int64_t)all : next > all;
    switch (by) {
      case product: all *= next; break;
      case maximum: all = above ? next : all; break;
      case minimum: all = above ? all : next; break;
      default: all += next;
    }
  }
  return extended(type, all);
}

// Reduces one element of each rank, `bits(rank)`. Bits beyond the element's width have no meaning.
template <class Bits>
uint64_t reduce(uint32_t type, uint32_t by, uint32_t ranks, const Bits& bits) {
  if (const Shape* shape = shape_of(type)) {
    const uint32_t mask = (1u << shape->bits()) - 1;
    return encode(reduce_floats<float>(by, ranks, [&](uint32_t rank) { return (float)decode((uint32_t)bits(rank) & mask, *shape); }), *shape);
  }
  switch (type) {
    case single: {
      const float all = reduce_floats<float>(by, ranks, [&](uint32_t rank) { return reinterpret<float>((uint32_t)bits(rank)); });
      return std::isnan(all) ? 0x7fffffff : reinterpret<uint32_t>(all);
    }
    case wide: return reinterpret<uint64_t>(reduce_floats<double>(by, ranks, [&](uint32_t rank) { return reinterpret<double>((uint64_t)bits(rank)); }));
    default: return reduce_integers(type, by, ranks, bits);
  }
}

inline bool is_nan(uint32_t type, uint64_t bits) {
  if (type == single) return std::isnan(reinterpret<float>((uint32_t)bits));
  if (type == wide) return std::isnan(reinterpret<double>(bits));
  return is_float(type) && std::isnan(decode((uint32_t)bits, *shape_of(type)));
}

// An element times a scalar of its type.
inline uint64_t scaled(uint32_t type, uint64_t element, uint64_t scalar) {
  if (const Shape* shape = shape_of(type)) {
    const uint32_t mask = (1u << shape->bits()) - 1;
    return encode((float)decode((uint32_t)element & mask, *shape) * (float)decode((uint32_t)scalar & mask, *shape), *shape);
  }
  if (type == single) return reinterpret<uint32_t>(reinterpret<float>((uint32_t)element) * reinterpret<float>((uint32_t)scalar));
  if (type == wide) return reinterpret<uint64_t>(reinterpret<double>(element) * reinterpret<double>(scalar));
  return element * scalar;
}

// --- inputs: a function of seed, call, rank and place ---------------------------------------------------------------------

enum Values { usual, special, like_tags, spread };

inline uint64_t mixed(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

// Elements of floats of about the same size, so that rounding depends on the order; or of any size; or NaNs, infinities and the like.
inline uint64_t float_bits(uint32_t type, Values values, uint64_t random) {
  const uint32_t width = 8 * element_bytes[type];
  const int fraction_bits = shape_of(type) ? shape_of(type)->fraction_bits : type == single ? 23 : 52;
  const uint64_t one = 1ull << fraction_bits, sign = random >> 63 << (width - 1);
  const uint64_t infinity = ((1ull << (width - 1)) - 1) & ~(one - 1), bias = (infinity >> (fraction_bits + 1));
  const uint64_t fraction = random & (one - 1), choice = random >> 56 & 15;
  // Any of the 256 codes.
  if (values == special && width == 8) return random & 0xff;
  if (values == spread) {
    // Half of the elements lie at both ends of the exponents, without a fraction: few bits show which elements cancel, and in which order.
    const uint64_t most = bias - 1 < 30 ? bias - 1 : 30, at = random >> 52 & 0x3ff;
    if (random >> 51 & 1) return sign | (at & 1 ? bias - most : bias + most) << fraction_bits;
    return sign | (bias - most + at % (2 * most + 1)) << fraction_bits | fraction;
  }
  if (values == special) switch (choice) {
      case 0: return sign | infinity | one >> 1;  // NaN
      case 1: return sign | infinity;
      case 2: return sign;  // zero
      case 3: return sign | fraction;  // subnormal, or zero
      case 4: return sign | 1;
      case 5: return sign | one;  // the least normal number
      case 6: return sign | (infinity - 1);
      case 7: return sign | bias << fraction_bits;  // 1
      case 8: return sign | infinity | one >> 1 | fraction;
    }
  return sign | (bias - 3 + (choice & 7)) << fraction_bits | fraction;
}

struct Inputs {
  uint64_t seed, first_tag;
  Values values;
  uint32_t type;
  bool pooled = false;  // all calls take elements of the same pool
  uint64_t first = 0;   // index in the pool of the call's first element
  static uint64_t at_random(uint64_t seed, uint64_t index, uint32_t rank) {
    return mixed(mixed(seed) + index * 0xd1342543de82ef95ull + rank * 0xaf251af3b0f025b5ull);
  }
  uint64_t element(uint64_t call, uint32_t rank, uint64_t index) const {
    const uint64_t random = at_random(seed ^ (pooled ? 0 : call * 0x9e3779b97f4a7c15ull), first + index, rank);
    if (values == like_tags) return first_tag + random % 256;
    if (is_float(type)) return float_bits(type, values, random);
    return values == special && (random >> 60) < 4 ? (random >> 59 & 1 ? ~0ull : 1ull << (8 * element_bytes[type] - 1)) : random;
  }
  // The scalar by which a rank multiplies; now and then a NaN, infinity or the like.
  uint64_t scalar(uint64_t which, uint32_t rank) const {
    const uint64_t random = at_random(seed ^ ~which, 0, rank);
    return is_float(type) ? float_bits(type, which % 8 ? usual : special, random) : random;
  }
};

}  // namespace reference
