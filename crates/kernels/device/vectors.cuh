// Loads and stores user bytes as 16-byte vectors, at any alignment and any count. A message's layout on the wire is always the
// same; only this side's own loads and stores get narrower, so the other side cannot tell.
#pragma once
#include "machine.cuh"

// The widest access that an address allows, 1 to 16 bytes. Offsets within a message are multiples of 16, so this
// holds for the whole message.
WINDLASS_DEVICE uint32_t access_width(uint64_t address) {
  const uint32_t bits = (uint32_t)address | 16;
  return bits & (0u - bits);
}

WINDLASS_DEVICE void put_piece(Vector& v, uint32_t at, uint64_t piece) {
  if (at < 8)
    v.x |= piece << (8 * at);
  else
    v.y |= piece << (8 * (at - 8));
}
WINDLASS_DEVICE uint64_t get_piece(const Vector& v, uint32_t at) {
  return at < 8 ? v.x >> (8 * at) : v.y >> (8 * (at - 8));
}

// Move `bytes` (1 to 16) of a vector by pieces, and the bytes that fill no piece one by one. They touch no byte outside.
template <class Piece>
WINDLASS_DEVICE Vector load_pieces(const char* from, uint32_t bytes) {
  constexpr uint32_t width = sizeof(Piece);
  Vector v{0, 0};
  WINDLASS_UNROLL
  for (uint32_t at = 0; at < 16; at += width)
    if (at + width <= bytes) put_piece(v, at, load_piece<Piece>(from + at));
  if (width > 1) {
    WINDLASS_NO_UNROLL
    for (uint32_t at = bytes / width * width; at < bytes; ++at) put_piece(v, at, load_piece<uint8_t>(from + at));
  }
  return v;
}
template <class Piece>
WINDLASS_DEVICE void store_pieces(char* to, Vector v, uint32_t bytes) {
  constexpr uint32_t width = sizeof(Piece);
  WINDLASS_UNROLL
  for (uint32_t at = 0; at < 16; at += width)
    if (at + width <= bytes) store_piece<Piece>(to + at, (Piece)get_piece(v, at));
  if (width > 1) {
    WINDLASS_NO_UNROLL
    for (uint32_t at = bytes / width * width; at < bytes; ++at) store_piece<uint8_t>(to + at, (uint8_t)get_piece(v, at));
  }
}

// Not inlined: the slow path, called from many places.
WINDLASS_DEVICE_FUNCTION Vector load_narrow(const char* from, uint32_t bytes, uint32_t width) {
  switch (width) {
    case 16:
    case 8: return load_pieces<uint64_t>(from, bytes);
    case 4: return load_pieces<uint32_t>(from, bytes);
    case 2: return load_pieces<uint16_t>(from, bytes);
    default: return load_pieces<uint8_t>(from, bytes);
  }
}
WINDLASS_DEVICE_FUNCTION void store_narrow(char* to, Vector v, uint32_t bytes, uint32_t width) {
  switch (width) {
    case 16:
    case 8: store_pieces<uint64_t>(to, v, bytes); break;
    case 4: store_pieces<uint32_t>(to, v, bytes); break;
    case 2: store_pieces<uint16_t>(to, v, bytes); break;
    default: store_pieces<uint8_t>(to, v, bytes); break;
  }
}
