// Floats of 8 bits, by integers and exact sums alone: older GPUs have no instructions for them, and the host must get the same bits.
//
// To a float every one of them is exact. From a float it is rounded once, to nearest, ties to even, and what is larger than the largest finite
// one becomes that, infinities too; a NaN is 0x7f: as cuda_fp8.h converts with __NV_SATFINITE.
#pragma once
#include "machine.cuh"

template <int exponent_bits, int fraction_bits, uint32_t largest_>
struct Float8 {
  static constexpr int bias = (1 << (exponent_bits - 1)) - 1, dropped_bits = 23 - fraction_bits;
  static constexpr uint32_t largest = largest_;  // the code of the largest finite one

  static WINDLASS_DEVICE float wide(uint64_t x, uint32_t at) {
    const uint32_t code = (uint32_t)(x >> 8 * at) & 0xff, all = code & 0x7f, sign = code << 24 & 0x80000000;
    // Exponent and fraction where a float has them; a power of two makes up for the bias, also of those below the normal ones.
    const float value = multiply_floats(float_of_bits(all << dropped_bits), float_of_bits((uint32_t)(127 + 127 - bias) << 23));
    constexpr uint32_t infinity = ((1u << exponent_bits) - 1) << fraction_bits;
    const uint32_t not_finite = largest < infinity && all == infinity ? 0x7f800000 : 0x7fffffff;
    return float_of_bits(sign | (all > largest ? not_finite : bits_of_float(value)));
  }
  static WINDLASS_DEVICE uint32_t narrow(float value) {
    const uint32_t bits = bits_of_float(value), all = bits & 0x7fffffff, sign = bits >> 24 & 0x80;
    constexpr uint32_t least_normal = (uint32_t)(128 - bias) << 23;
    const uint32_t rebased = all - ((uint32_t)(127 - bias) << 23);
    const uint32_t normal = (rebased + (1u << (dropped_bits - 1)) - 1 + (rebased >> dropped_bits & 1)) >> dropped_bits;
    // Below the least normal one: a float whose last place is the least of ours, so the sum is rounded as ours is to be.
    constexpr uint32_t last_place = (uint32_t)(127 + 23 + 1 - bias - fraction_bits) << 23;
    const uint32_t small = bits_of_float(add_floats(float_of_bits(all), float_of_bits(last_place))) - last_place;
    const uint32_t code = all < least_normal ? small : normal;
    return all > 0x7f800000 ? 0x7f : sign | (code < largest ? code : largest);
  }
};
typedef Float8<4, 3, 0x7e> Float8E4M3;
typedef Float8<5, 2, 0x7b> Float8E5M2;
