// Loads and stores user bytes that fill no vector or lie at an odd address, by loops, which need few registers and little code.
#pragma once
#include "vectors.cuh"

// The widest access that the address and the place in the vector allow and `left` bytes need, up to 8.
WINDLASS_DEVICE uint32_t next_width(uint64_t address_and_place, uint32_t left) {
  const uint32_t allowed = access_width(address_and_place | 8);
  return left >= allowed ? allowed : left >= 4 && allowed >= 4 ? 4 : left >= 2 && allowed >= 2 ? 2 : 1;
}

// Not inlined: code that rarely runs should not lie between the rest.
// They move `bytes` bytes (at least 1; more than 16 count as 16) and touch no byte outside.
WINDLASS_DEVICE_FUNCTION Vector load_bytes(const char* from, uint32_t bytes) {
  Vector v{0, 0};
  const uint32_t end = bytes < 16 ? bytes : 16;
  WINDLASS_NO_UNROLL
  for (uint32_t at = 0; at < end;) {
    const char* const here = from + at;
    const uint32_t width = next_width((uint64_t)here | at, end - at);
    const uint64_t piece = width == 8   ? load_piece<uint64_t>(here)
                           : width == 4 ? load_piece<uint32_t>(here)
                           : width == 2 ? load_piece<uint16_t>(here)
                                        : load_piece<uint8_t>(here);
    put_piece(v, at, piece);
    at += width;
  }
  return v;
}
WINDLASS_DEVICE_FUNCTION void store_bytes(char* to, Vector v, uint32_t bytes) {
  const uint32_t end = bytes < 16 ? bytes : 16;
  WINDLASS_NO_UNROLL
  for (uint32_t at = 0; at < end;) {
    char* const here = to + at;
    const uint32_t width = next_width((uint64_t)here | at, end - at);
    const uint64_t piece = get_piece(v, at);
    switch (width) {
      case 8: store_piece<uint64_t>(here, piece); break;
      case 4: store_piece<uint32_t>(here, (uint32_t)piece); break;
      case 2: store_piece<uint16_t>(here, (uint16_t)piece); break;
      default: store_piece<uint8_t>(here, (uint8_t)piece); break;
    }
    at += width;
  }
}
