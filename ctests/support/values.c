/* Values that every rank knows of every other: see values.h. */
#define _GNU_SOURCE
#include "values.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { FLOATS = 4, POOLS = 1 + 2 * FLOATS, BLOCK = 512 };

static const struct format {
  ncclDataType_t type;
  int bytes, mantissa_bits, bias;
  double unit, smallest; /* the relative error of a rounding; half of the least distance of two values */
} FORMATS[FLOATS] = {
    {ncclFloat16, 2, 10, 15, 0x1p-11, 0x1p-25},
    {ncclBfloat16, 2, 7, 127, 0x1p-8, 0},
    {ncclFloat32, 4, 23, 127, 0x1p-24, 0},
    {ncclFloat64, 8, 52, 1023, 0x1p-53, 0},
};

static unsigned char* pools;
static size_t pool_bytes;
static float halves[1 << 16]; /* the value of every 16-bit float */

static const struct format* format_of(ncclDataType_t type) {
  for (int i = 0; i < FLOATS; i++) {
    if (FORMATS[i].type == type) return &FORMATS[i];
  }
  return NULL;
}

bool type_is_floating(ncclDataType_t type) { return format_of(type) != NULL; }

static int pool_of(ncclDataType_t type, bool real) {
  const struct format* format = format_of(type);
  return format ? 1 + (int)(format - FORMATS) + (real ? FLOATS : 0) : 0;
}

static float half_value(unsigned bits) {
  int exponent = (int)(bits >> 10 & 31), mantissa = (int)(bits & 1023);
  float size = exponent == 0 ? ldexpf((float)mantissa, -24)
             : exponent == 31 ? (mantissa ? NAN : INFINITY) : ldexpf((float)(1024 + mantissa), exponent - 25);
  return bits >> 15 ? -size : size;
}

void values_share(size_t bytes) {
  pool_bytes = bytes;
  pools = mmap(NULL, values_all_bytes() * RANKS_MAX, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pools == MAP_FAILED) {
    perror("mmap");
    exit(STATUS_FAILED);
  }
  for (unsigned bits = 0; bits < 1u << 16; bits++) halves[bits] = half_value(bits);
}

size_t values_bytes(void) { return pool_bytes; }

size_t values_all_bytes(void) { return pool_bytes * POOLS; }

const void* values_all(int rank) { return pools + values_all_bytes() * (size_t)rank; }

size_t values_offset(struct source source) { return pool_bytes * (size_t)pool_of(source.type, source.real) + source.at; }

const void* values_of(int rank, struct source source) { return (const char*)values_all(rank) + values_offset(source); }

/* The bits of a random value. Exact values are 0 or a power of two from 1/4 to 2, real ones anything from 1/4 to 2, so that a
 * product of 8 never falls below the least normal 16-bit float. */
static uint64_t float_bits(const struct format* format, bool real, uint64_t drawn) {
  uint64_t sign = (drawn & 1) << (8 * format->bytes - 1), mantissa = 0, exponent;
  if (real) {
    exponent = (uint64_t)format->bias - drawn / 2 % 3;
    mantissa = drawn >> 11 & (((uint64_t)1 << format->mantissa_bits) - 1);
  } else {
    uint64_t which = drawn / 2 % 9;
    if (which < 1) return sign;
    exponent = (uint64_t)format->bias + 1 - which % 4;
  }
  return sign | exponent << format->mantissa_bits | mantissa;
}

void values_fill(int rank, uint64_t seed) {
  struct random random = random_from(seed * RANKS_MAX + (uint64_t)rank);
  unsigned char* pool = (unsigned char*)values_all(rank);
  for (size_t at = 0; at < pool_bytes; at += 8) {
    uint64_t word = random_next(&random);
    memcpy(pool + at, &word, 8);
  }
  for (int i = 0; i < FLOATS; i++) {
    for (int real = 0; real < 2; real++) {
      pool = (unsigned char*)values_all(rank) + values_offset((struct source){FORMATS[i].type, real, 0});
      for (size_t at = 0; at < pool_bytes; at += (size_t)FORMATS[i].bytes) {
        uint64_t bits = float_bits(&FORMATS[i], real, random_next(&random));
        memcpy(pool + at, &bits, (size_t)FORMATS[i].bytes); /* little endian: the low bytes */
      }
    }
  }
}

/* Integers wrap as their type does; an average is the wrapped sum, divided towards zero. The outer loop is over ranks, so that
 * the inner ones over elements are simple. */
#define INTEGERS(NAME, TYPE, UNSIGNED)                                                                     \
  static size_t NAME(const struct reduction* reduction, const TYPE* seen) {                                \
    TYPE result[BLOCK];                                                                                    \
    for (size_t first = 0; first < reduction->count; first += BLOCK) {                                     \
      size_t count = reduction->count - first < BLOCK ? reduction->count - first : BLOCK;                  \
      memcpy(result, (const TYPE*)reduction->inputs[0] + first, count * sizeof(TYPE));                     \
      for (int rank = 1; rank < reduction->ranks; rank++) {                                                \
        const TYPE* input = (const TYPE*)reduction->inputs[rank] + first;                                  \
        switch (reduction->op) {                                                                           \
          case ncclProd:                                                                                   \
            for (size_t i = 0; i < count; i++) result[i] = (TYPE)((UNSIGNED)result[i] * (UNSIGNED)input[i]); \
            break;                                                                                         \
          case ncclMax: for (size_t i = 0; i < count; i++) result[i] = result[i] > input[i] ? result[i] : input[i]; break; \
          case ncclMin: for (size_t i = 0; i < count; i++) result[i] = result[i] < input[i] ? result[i] : input[i]; break; \
          default: for (size_t i = 0; i < count; i++) result[i] = (TYPE)((UNSIGNED)result[i] + (UNSIGNED)input[i]); \
        }                                                                                                  \
      }                                                                                                    \
      for (size_t i = 0; reduction->op == ncclAvg && i < count; i++) result[i] = (TYPE)(result[i] / (TYPE)reduction->ranks); \
      if (memcmp(result, seen + first, count * sizeof(TYPE)) == 0) continue;                               \
      for (size_t i = 0; i < count; i++) {                                                                 \
        if (result[i] != seen[first + i]) return first + i;                                                \
      }                                                                                                    \
    }                                                                                                      \
    return reduction->count;                                                                               \
  }
INTEGERS(int8s, int8_t, unsigned)
INTEGERS(uint8s, uint8_t, unsigned)
INTEGERS(int32s, int32_t, uint32_t)
INTEGERS(uint32s, uint32_t, uint32_t)
INTEGERS(int64s, int64_t, uint64_t)
INTEGERS(uint64s, uint64_t, uint64_t)

static void decode(double* to, const void* from, size_t first, size_t count, ncclDataType_t type) {
  const uint16_t* narrow = (const uint16_t*)from + first;
  switch (type) {
    case ncclFloat16: for (size_t i = 0; i < count; i++) to[i] = halves[narrow[i]]; break;
    case ncclBfloat16:
      for (size_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)narrow[i] << 16;
        float value;
        memcpy(&value, &bits, 4);
        to[i] = value;
      }
      break;
    case ncclFloat32: for (size_t i = 0; i < count; i++) to[i] = ((const float*)from)[first + i]; break;
    default: memcpy(to, (const double*)from + first, count * sizeof *to);
  }
}

/* `size` accumulates the magnitude to which the rounding errors of partial results are relative. */
static void accumulate(double* result, double* size, const double* input, size_t count, ncclRedOp_t op) {
  switch (op) {
    case ncclProd: for (size_t i = 0; i < count; i++) size[i] = fabs(result[i] *= input[i]); break;
    case ncclMax: for (size_t i = 0; i < count; i++) result[i] = result[i] > input[i] ? result[i] : input[i]; break;
    case ncclMin: for (size_t i = 0; i < count; i++) result[i] = result[i] < input[i] ? result[i] : input[i]; break;
    default: for (size_t i = 0; i < count; i++) result[i] += input[i], size[i] += fabs(input[i]);
  }
}

/* The value of a 16-bit type nearest to `value`, halfway cases to even. */
static double rounded(const struct format* format, float value) {
  int exponent, least = 1 - format->bias;
  frexpf(value, &exponent);
  double step = ldexp(1, (exponent - 1 < least ? least : exponent - 1) - format->mantissa_bits);
  return format->bytes == 2 ? nearbyint(value / step) * step : value;
}

/* The fold from rank 0 upward that WINDLASS_ORDER=fixed guarantees: in floats, rounded to the type once; of doubles in doubles. */
static void fold(double* result, const struct reduction* reduction, const struct format* format, size_t first, size_t count) {
  double input[BLOCK];
  volatile float reciprocal = 1.0f / (float)reduction->ranks;
  for (int rank = 0; rank < reduction->ranks; rank++) {
    decode(input, reduction->inputs[rank], first, count, reduction->type);
    for (size_t i = 0; i < count; i++) {
      /* Volatile, so that the compiler does not fuse a product and a sum into one rounding. */
      volatile double value = input[i];
      if (reduction->op == ncclAvg) value = format->bytes == 8 ? input[i] * (1.0 / reduction->ranks) : (float)input[i] * reciprocal;
      if (rank == 0) {
        result[i] = value;
      } else if (format->bytes == 8) {
        result[i] = reduction->op == ncclProd ? result[i] * value : result[i] + value;
      } else {
        volatile float step = reduction->op == ncclProd ? (float)result[i] * (float)value : (float)result[i] + (float)value;
        result[i] = step;
      }
    }
  }
  for (size_t i = 0; format->bytes == 2 && i < count; i++) result[i] = rounded(format, (float)result[i]);
}

static bool is_in_fixed_order(void) {
  const char* order = getenv("WINDLASS_ORDER");
  return order && strcmp(order, "auto") != 0;
}

/* The first element that is not the fold to the bit. Real values are never zero. */
static size_t folds(const struct reduction* reduction, const struct format* format, const void* seen) {
  double wanted[BLOCK], other[BLOCK];
  for (size_t first = 0; first < reduction->count; first += BLOCK) {
    size_t count = reduction->count - first < BLOCK ? reduction->count - first : BLOCK;
    fold(wanted, reduction, format, first, count);
    decode(other, seen, first, count, reduction->type);
    for (size_t i = 0; i < count; i++) {
      if (wanted[i] != other[i]) return first + i;
    }
  }
  return reduction->count;
}

static size_t floats(const struct reduction* reduction, const void* seen) {
  const struct format* format = format_of(reduction->type);
  bool chooses = reduction->op == ncclMax || reduction->op == ncclMin, averages = reduction->op == ncclAvg;
  bool is_exact = !reduction->real && !(averages && (reduction->ranks & (reduction->ranks - 1)));
  if (!chooses && reduction->real && is_in_fixed_order()) return folds(reduction, format, seen);
  /* As many roundings as ranks, one more for an average's factor; twice for doubles, as the reference rounds, too. */
  double roundings = chooses || is_exact ? 0 : (reduction->ranks + 2) * (format->bytes == 8 ? 2 : 1) * format->unit;
  double smallest = roundings > 0 ? reduction->ranks * format->smallest : 0, divisor = averages ? reduction->ranks : 1;
  double result[BLOCK], size[BLOCK], other[BLOCK];
  for (size_t first = 0; first < reduction->count; first += BLOCK) {
    size_t count = reduction->count - first < BLOCK ? reduction->count - first : BLOCK;
    decode(result, reduction->inputs[0], first, count, reduction->type);
    for (size_t i = 0; i < count; i++) size[i] = fabs(result[i]);
    for (int rank = 1; rank < reduction->ranks; rank++) {
      decode(other, reduction->inputs[rank], first, count, reduction->type);
      accumulate(result, size, other, count, reduction->op);
    }
    decode(other, seen, first, count, reduction->type);
    for (size_t i = 0; i < count; i++) {
      double wanted = result[i] / divisor;
      bool near = fabs(other[i] - wanted) <= roundings * size[i] / divisor + smallest;
      bool same_zero = chooses || !is_exact || wanted != 0 || signbit(wanted) == signbit(other[i]);
      if (!near || !same_zero) return first + i;
    }
  }
  return reduction->count;
}

size_t reduction_differs(const struct reduction* reduction, const void* seen) {
  switch (reduction->type) {
    case ncclInt8: return int8s(reduction, seen);
    case ncclUint8: return uint8s(reduction, seen);
    case ncclInt32: return int32s(reduction, seen);
    case ncclUint32: return uint32s(reduction, seen);
    case ncclInt64: return int64s(reduction, seen);
    case ncclUint64: return uint64s(reduction, seen);
    default: return floats(reduction, seen);
  }
}
