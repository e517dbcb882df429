// Converts floats of 8 bits by integers, one float product or one float sum: older GPUs have no instructions for them, and the host must get the
// same bits.
//
// To a float the conversion is exact. From a float it rounds once, to nearest, ties to even. Values above the largest finite one, infinities
// too, become that one; a NaN becomes 0x7f. So does cuda_fp8.h with __NV_SATFINITE.
#pragma once
#include "machine.cuh"

// Both formats are values of one type, not types: so a kernel has one copy of the code for both.
struct Float8 {
  uint32_t fraction_bits;
  uint32_t largest;  // code of the largest finite value; codes above it are NaNs, except 0x7c, infinity, if that is above it

  static WINDLASS_DEVICE Float8 e4m3() { return Float8{3, 0x7e}; }
  static WINDLASS_DEVICE Float8 e5m2() { return Float8{2, 0x7b}; }
  WINDLASS_DEVICE uint32_t bias() const { return (1u << (6 - fraction_bits)) - 1; }
  WINDLASS_DEVICE uint32_t dropped_bits() const { return 23 - fraction_bits; }

  WINDLASS_DEVICE float wide(uint64_t x, uint32_t at) const {
    const uint32_t code = (uint32_t)(x >> 8 * at) & 0xff, all = code & 0x7f, sign = code << 24 & 0x80000000;
    // Exponent and fraction go to their places in a float; the product with a power of two corrects the bias, of subnormals too.
    const float value = multiply_floats(float_of_bits(all << dropped_bits()), float_of_bits((127 + 127 - bias()) << 23));
    const uint32_t not_finite = all == 0x7c ? 0x7f800000 : 0x7fffffff;
    return float_of_bits(sign | (all > largest ? not_finite : bits_of_float(value)));
  }
  WINDLASS_DEVICE uint32_t narrow(float value) const {
    const uint32_t bits = bits_of_float(value), all = bits & 0x7fffffff, sign = bits >> 24 & 0x80;
    const uint32_t rebased = all - ((127 - bias()) << 23);
    const uint32_t normal = (rebased + (1u << (dropped_bits() - 1)) - 1 + (rebased >> dropped_bits() & 1)) >> dropped_bits();
    // Subnormal results: the sum with a float whose last place is the format's least value rounds as the format does.
    const uint32_t last_place = (127 + 24 - bias() - fraction_bits) << 23;
    const uint32_t small = bits_of_float(add_floats(float_of_bits(all), float_of_bits(last_place))) - last_place;
    const uint32_t code = all < (128 - bias()) << 23 ? small : normal;
    return all > 0x7f800000 ? 0x7f : sign | (code < largest ? code : largest);
  }
};
