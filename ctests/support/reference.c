/* The host reference: see reference.h. */
#include "reference.h"

#include <stdlib.h>
#include <string.h>

const ncclDataType_t REDUCIBLE[] = {ncclInt8,   ncclUint8,   ncclInt32,   ncclUint32,  ncclInt64,
                                    ncclUint64, ncclFloat16, ncclFloat32, ncclFloat64, ncclBfloat16};

static const struct { size_t bytes; bool floating, is_signed; const char* name; } TYPES[] = {
    [ncclInt8] = {1, false, true, "int8"},       [ncclUint8] = {1, false, false, "uint8"},
    [ncclInt32] = {4, false, true, "int32"},     [ncclUint32] = {4, false, false, "uint32"},
    [ncclInt64] = {8, false, true, "int64"},     [ncclUint64] = {8, false, false, "uint64"},
    [ncclFloat16] = {2, true, true, "float16"},  [ncclFloat32] = {4, true, true, "float32"},
    [ncclFloat64] = {8, true, true, "float64"},  [ncclBfloat16] = {2, true, true, "bfloat16"},
};

size_t type_bytes(ncclDataType_t type) { return TYPES[type].bytes; }
const char* type_name(ncclDataType_t type) { return TYPES[type].name; }

const char* op_name(ncclRedOp_t op) {
  static const char* const names[] = {"sum", "prod", "max", "min", "avg"};
  return (unsigned)op < 5 ? names[op] : "custom";
}

/* The bits of a float as a 16-bit float, rounded towards zero, which is exact for the values used here. */
static uint16_t half_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (!(bits & 0x7fffffffu)) return (uint16_t)(bits >> 16);
  return (uint16_t)((bits >> 16 & 0x8000u) | ((bits >> 13 & 0x3ffffu) - ((127u - 15u) << 10)));
}

static uint16_t bfloat_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static void put(void* to, size_t index, ncclDataType_t type, int64_t whole, double value) {
  unsigned char* place = (unsigned char*)to + index * type_bytes(type);
  uint16_t narrow = 0;
  float single = (float)value;
  switch (type) {
    case ncclFloat16: narrow = half_bits(single); memcpy(place, &narrow, 2); break;
    case ncclBfloat16: narrow = bfloat_bits(single); memcpy(place, &narrow, 2); break;
    case ncclFloat32: memcpy(place, &single, 4); break;
    case ncclFloat64: memcpy(place, &value, 8); break;
    default: memcpy(place, &whole, type_bytes(type)); /* little endian: the low bytes wrap as the type does */
  }
}

int input_value(uint64_t key, int rank, size_t index, ncclDataType_t type, ncclRedOp_t op) {
  struct random random = random_from(key * 0x100000001b3u + (uint64_t)rank * 0x10001u + index * 0x9e3779b1u);
  uint64_t drawn = random_next(&random);
  if (op == ncclProd) return TYPES[type].is_signed && drawn % 5 == 0 ? -1 : 1 + (int)(drawn % 2);
  return TYPES[type].is_signed ? (int)(drawn % 15) - 7 : (int)(drawn % 15);
}

void input_fill(void* to, uint64_t key, int rank, size_t first, size_t count, ncclDataType_t type, ncclRedOp_t op) {
  for (size_t i = 0; i < count; i++) {
    int value = input_value(key, rank, first + i, type, op);
    put(to, i, type, value, value);
  }
}

void reduced_fill(void* to, uint64_t key, int ranks, size_t first, size_t count, ncclDataType_t type, ncclRedOp_t op,
                  int factor) {
  for (size_t i = 0; i < count; i++) {
    int64_t result = 0;
    for (int rank = 0; rank < ranks; rank++) {
      int64_t value = (int64_t)factor * input_value(key, rank, first + i, type, op);
      if (rank == 0) result = value;
      else if (op == ncclProd) result *= value;
      else if (op == ncclMax) result = value > result ? value : result;
      else if (op == ncclMin) result = value < result ? value : result;
      else result += value;
    }
    /* The integer average divides towards zero, as C does. */
    double exact = op == ncclAvg ? (double)result / ranks : (double)result;
    put(to, i, type, op == ncclAvg ? result / ranks : result, exact);
  }
}
