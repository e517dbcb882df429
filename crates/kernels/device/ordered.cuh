// Reductions that run here only in fixed order: floats of 8 bits, and scaled sums of every type. They have kernels of their own, so that
// the other kernels need no registers for them.
//
// Floats of 8 bits are folded as those of 16 bits are: as 32-bit ones, rounded once. In a scaled sum each rank multiplies its own elements by
// its own scalar, rounded to their type, before it sends and before it folds them; the fold is that of a sum.
#pragma once
#include "any_reduction.cuh"
#include "float8.cuh"

// Whether the kernels of this reducer multiply the elements of scaled sums.
template <class Reducer>
constexpr bool scales = false;

// Of 8-bit floats all words hold 32-bit elements, of 16-bit floats the first two; of other types the first word holds all elements.
struct OrderedFold {
  uint64_t words[4];
};

WINDLASS_DEVICE bool is_of_8(uint32_t type) { return type >= type_float8_e4m3; }
WINDLASS_DEVICE bool is_widened(uint32_t type) { return type == type_half || type >= type_bfloat; }
WINDLASS_DEVICE Float8 float8_of(uint32_t type) { return type == type_float8_e4m3 ? Float8::e4m3() : Float8::e5m2(); }

// Widens four elements; of 8-bit floats those in the low half.
WINDLASS_DEVICE Quad wide_quad_of(uint32_t type, uint64_t x) {
  switch (type) {
    case type_half: return wide_quad<Half>(x);
    case type_bfloat: return wide_quad<Bfloat>(x);
    default: {
      const Float8 format = float8_of(type);
      return Quad{{format.wide(x, 0), format.wide(x, 1), format.wide(x, 2), format.wide(x, 3)}};
    }
  }
}
WINDLASS_DEVICE uint64_t narrow_quad_of(uint32_t type, const Quad& quad) {
  switch (type) {
    case type_half: return narrow_quad<Half>(quad);
    case type_bfloat: return narrow_quad<Bfloat>(quad);
    default: {
      const Float8 format = float8_of(type);
      return format.narrow(quad.part[0]) | format.narrow(quad.part[1]) << 8 | format.narrow(quad.part[2]) << 16 | format.narrow(quad.part[3]) << 24;
    }
  }
}

// One rank's word as it enters the fold. Only averages are scaled here: elements of scaled sums are scaled already.
WINDLASS_DEVICE OrderedFold ordered_entry(uint64_t x, const Reduction& how) {
  OrderedFold entry{{x, 0, 0, 0}};
  if (!is_widened(how.type())) return entry;
  const float scale = how.by() == by_average ? float_of_bits((uint32_t)how.scale) : 1.0f;
  WINDLASS_UNROLL
  for (int half = 0; half < 2; ++half) {
    if (half == 1 && !is_of_8(how.type())) break;
    const Quad quad = wide_quad_of(how.type(), x >> 32 * half);
    entry.words[2 * half] = two_floats(multiply_floats(quad.part[0], scale), multiply_floats(quad.part[1], scale));
    entry.words[2 * half + 1] = two_floats(multiply_floats(quad.part[2], scale), multiply_floats(quad.part[3], scale));
  }
  return entry;
}

WINDLASS_DEVICE_FUNCTION OrderedFold ordered_begin(uint64_t x, Reduction how) { return ordered_entry(x, how); }
WINDLASS_DEVICE_FUNCTION OrderedFold ordered_add(OrderedFold fold, uint64_t x, Reduction how) {
  const OrderedFold next = ordered_entry(x, how);
  if (is_widened(how.type())) {
    combine_floats(how.by(), fold.words, next.words);
    return fold;
  }
  uint64_t all[1] = {fold.words[0]};
  combine(how.type(), how.by(), all, {next.words[0]});
  return OrderedFold{{all[0], 0, 0, 0}};
}
WINDLASS_DEVICE_FUNCTION uint64_t ordered_end(OrderedFold fold, Reduction how) {
  if (!is_widened(how.type())) return fold.words[0];
  const auto narrow = [&](uint64_t low, uint64_t high) {
    return narrow_quad_of(how.type(), Quad{{float_at(low, 0), float_at(low, 1), float_at(high, 0), float_at(high, 1)}});
  };
  const uint64_t low = narrow(fold.words[0], fold.words[1]);
  return is_of_8(how.type()) ? low | narrow(fold.words[2], fold.words[3]) << 32 : low;
}

struct OrderedReduction {
  static constexpr bool reduces = true;
  typedef OrderedFold Fold;
  static WINDLASS_DEVICE Fold begin(uint64_t x, const Reduction& how) { return ordered_begin(x, how); }
  static WINDLASS_DEVICE void add(Fold& fold, uint64_t x, const Reduction& how) { fold = ordered_add(fold, x, how); }
  static WINDLASS_DEVICE uint64_t end(const Fold& fold, const Reduction& how) { return ordered_end(fold, how); }
};
template <>
constexpr bool scales<OrderedReduction> = true;

// --- this rank's own elements of a scaled sum --------------------------------------------------------------------------------

// A word with the scalar at every element's place. A scalar in memory is read each time, so that it occupies no register.
WINDLASS_DEVICE_FUNCTION uint64_t scalars_of(uint32_t type, uint64_t bits_or_address, bool is_address) {
  const char* const at = reinterpret_cast<const char*>(bits_or_address);
  switch (type) {
    case type_int8:
    case type_uint8:
    case type_float8_e4m3:
    case type_float8_e5m2: return (is_address ? load_piece<uint8_t>(at) : (uint8_t)bits_or_address) * 0x0101010101010101ull;
    case type_half:
    case type_bfloat: return (is_address ? load_piece<uint16_t>(at) : (uint16_t)bits_or_address) * 0x0001000100010001ull;
    case type_int32:
    case type_uint32:
    case type_float: return (is_address ? load_piece<uint32_t>(at) : (uint32_t)bits_or_address) * 0x0000000100000001ull;
    default: return is_address ? load_piece<uint64_t>(at) : bits_or_address;
  }
}

template <class Element>
WINDLASS_DEVICE uint64_t multiply_quads(uint64_t a, uint64_t b) {
  Quad quad = wide_quad<Element>(a);
  WINDLASS_UNROLL
  for (int at = 0; at < 4; ++at) quad.part[at] = multiply_floats(quad.part[at], Element::wide(b, at));
  return narrow_quad<Element>(quad);
}
// Multiplies by `how.scale`, a word of scalars; rounds once, to the elements' type. Frequent types have code of their own, others run as a product of
// two ranks.
WINDLASS_DEVICE uint64_t scaled_word(uint64_t x, const Reduction& how) {
  switch (how.type()) {
    case type_half: return multiply_quads<Half>(x, how.scale);
    case type_bfloat: return multiply_quads<Bfloat>(x, how.scale);
    case type_float:
    case type_double: {
      uint64_t all[1] = {x};
      combine(how.type(), by_product, all, {how.scale});
      return all[0];
    }
    default: {
      const uint64_t both[2] = {x, how.scale};
      return reduce_words<OrderedReduction>(both, 2, how);
    }
  }
}
WINDLASS_DEVICE_FUNCTION Vector scaled(Vector v, Reduction how) {
  // One copy of the code.
  WINDLASS_NO_UNROLL
  for (int word = 0; word < 2; ++word) v = Vector{v.y, scaled_word(v.x, how)};
  return v;
}

// Scales a packet of this rank's own elements, if the reduction is a scaled sum, before the packet is sent or folded.
template <class Reducer, int groups>
WINDLASS_DEVICE void scale_own(Vector (&packet)[groups], const WindlassCollectiveLaunch& launch) {
  if constexpr (scales<Reducer>) {
    const Reduction told{launch.reduction, launch.scale};
    if (told.by() != by_scaled_sum) return;
    const Reduction how{told.type() | by_product << 8, scalars_of(told.type(), told.scale, launch.flags & WINDLASS_COLLECTIVE_SCALAR_AT)};
    WINDLASS_UNROLL
    for (int group = 0; group < groups; ++group) packet[group] = scaled(packet[group], how);
  }
}
