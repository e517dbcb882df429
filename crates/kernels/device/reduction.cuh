// Reduces words of 8 bytes of each rank, in the order of ranks from 0 upward, so that every rank gets the same bits.
//
// A reducer folds words of whole elements: begin(first), add(each next), end. That of most types reduces many words at once
// (any_reduction.cuh). 16-bit floats are kept as 32-bit ones until the end and rounded once. Divergence: NCCL rounds at each step; ours is
// nearer to the exact sum. Averages are as NCCL makes them: elements are multiplied by 1/ranks first. Integers have no averages here, as
// their divisions take longer than NCCL's.
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
  static WINDLASS_DEVICE uint64_t add_two(uint64_t a, uint64_t b) {
    return end(Fold{add_floats(float_of_bits((uint32_t)a), float_of_bits((uint32_t)b)),
                    add_floats(float_of_bits((uint32_t)(a >> 32)), float_of_bits((uint32_t)(b >> 32)))}, Reduction{});
  }
};

struct Half {
  static WINDLASS_DEVICE float wide(uint64_t x, uint32_t at) { return float_of_half((uint16_t)(x >> 16 * at)); }
  static WINDLASS_DEVICE uint32_t narrow(float low, float high) { return halves_of_floats(low, high); }
  static WINDLASS_DEVICE uint32_t add(uint32_t a, uint32_t b) { return add_halves(a, b); }
};
struct Bfloat {
  static WINDLASS_DEVICE float wide(uint64_t x, uint32_t at) {
    // By halves of the word: one instruction each.
    const uint32_t half = at < 2 ? (uint32_t)x : (uint32_t)(x >> 32);
    return float_of_bits(at % 2 ? half & 0xffff0000u : half << 16);
  }
  static WINDLASS_DEVICE uint32_t narrow(float low, float high) { return bfloats_of_floats(low, high); }
  static WINDLASS_DEVICE uint32_t add(uint32_t a, uint32_t b) { return add_bfloats(a, b); }
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
  // One instruction for two elements, where the fold has eleven. The bits are the same: the sum of two is exact in fp32, or rounded to more than twice
  // as many bits as an element keeps and two more. Then to round once more is to round once.
  static WINDLASS_DEVICE uint64_t add_two(uint64_t a, uint64_t b) {
    return Element::add((uint32_t)a, (uint32_t)b) | (uint64_t)Element::add((uint32_t)(a >> 32), (uint32_t)(b >> 32)) << 32;
  }
};
typedef SumOf16<Half> SumF16;
typedef SumOf16<Bfloat> SumBf16;

// Whether a reducer has `reduce` for many words of each rank, in place of a fold.
template <class Reducer>
constexpr bool chooses_at_run_time = false;

// Whether a sum of two ranks has a shorter way, `add_two`, unless it is an average.
template <class Reducer>
constexpr bool adds_two = false;
template <>
constexpr bool adds_two<SumF32> = true;
template <class Element>
constexpr bool adds_two<SumOf16<Element>> = true;
WINDLASS_DEVICE bool is_average(const Reduction& how) { return (uint32_t)how.scale != 0x3f800000; }

// Reduces one word of each rank to one word, by a fold.
template <class Reducer, int ranks_max>
WINDLASS_DEVICE uint64_t fold_words(const uint64_t (&x)[ranks_max], uint32_t ranks, const Reduction& how) {
  if constexpr (chooses_at_run_time<Reducer>) {
    uint64_t all[1], words[ranks_max][1];
    WINDLASS_UNROLL
    for (int rank = 0; rank < ranks_max; ++rank) words[rank][0] = x[rank];
    Reducer::reduce(all, words, ranks, how);
    return all[0];
  } else {
    typename Reducer::Fold fold = Reducer::begin(x[0], how);
    WINDLASS_UNROLL
    for (int rank = 1; rank < ranks_max; ++rank)
      if (rank < (int)ranks) Reducer::add(fold, x[rank], how);
    return Reducer::end(fold, how);
  }
}
// The same in the shortest way.
template <class Reducer, int ranks_max>
WINDLASS_DEVICE uint64_t reduce_words(const uint64_t (&x)[ranks_max], uint32_t ranks, const Reduction& how) {
  if constexpr (ranks_max == 2 && adds_two<Reducer>)
    if (!WINDLASS_SELDOM(is_average(how))) return Reducer::add_two(x[0], x[1]);
  return fold_words<Reducer>(x, ranks, how);
}
