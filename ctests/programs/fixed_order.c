/* Holds that with WINDLASS_ORDER=fixed every element of a reduction that rounds is the fold of the ranks' values of that
 * element, from rank 0 upward, to the bit. That is so in all-reduce, reduce and reduce-scatter, of any slice, at any offset,
 * alone, in groups, with every root and in a graph, for every operation and type that rounds. Values differ much in magnitude,
 * so any other order shows. With the word `differs` the test holds the opposite, that some elements differ, to prove that it
 * would find a wrong order. */
#include "../support/harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { OWN = ncclNumOps, OPERATIONS = 4, SLICES = 3 };

struct type {
  ncclDataType_t code;
  const char* name;
  size_t bytes;
  int exponent_bits, fraction_bits;
  double most;
  bool saturates, is_for_nccl;
};
static const struct type TYPES[] = {
    {ncclFloat32, "float32", 4, 8, 23, HUGE_VAL, false, true},      {ncclFloat64, "float64", 8, 11, 52, HUGE_VAL, false, true},
    {ncclFloat16, "float16", 2, 5, 10, 65504, false, true},         {ncclBfloat16, "bfloat16", 2, 8, 7, HUGE_VAL, false, true},
    {ncclFloat8e4m3, "float8e4m3", 1, 4, 3, 448, true, false},      {ncclFloat8e5m2, "float8e5m2", 1, 5, 2, 57344, true, false},
};
enum { TYPES_COUNT = sizeof TYPES / sizeof TYPES[0] };

static bool expects_differences;
static uint64_t seed;
static size_t elements(void) { return on_gpus() ? (size_t)5 << 20 | 11 : 9011; }

/* The value of the type nearest to `value`, halfway cases to even. */
static double rounded(const struct type* type, double value) {
  if (type->bytes == 8 || value == 0) return value;
  if (type->bytes == 4) return (float)value;
  int exponent, least = 2 - (1 << (type->exponent_bits - 1));
  frexp(value, &exponent);
  exponent = exponent - 1 < least ? least : exponent - 1;
  double step = ldexp(1, exponent - type->fraction_bits), nearest = nearbyint(value / step) * step;
  if (fabs(nearest) <= type->most) return nearest;
  return copysign(type->saturates ? type->most : HUGE_VAL, value);
}

static void put(const struct type* type, void* place, double value) {
  float single = (float)value;
  if (type->bytes == 8) memcpy(place, &value, 8);
  if (type->bytes == 4) memcpy(place, &single, 4);
  if (type->bytes > 2) return;
  /* The bits of `value`, which is a value of the type: sign, exponent and fraction. */
  int exponent, bias = (1 << (type->exponent_bits - 1)) - 1;
  double fraction = frexp(fabs(value), &exponent);
  unsigned bits = 0;
  if (isinf(value)) {
    bits = ((1u << type->exponent_bits) - 1) << type->fraction_bits;
  } else if (value != 0 && exponent - 1 >= 1 - bias) {
    bits = (unsigned)(exponent - 1 + bias) << type->fraction_bits;
    bits += (unsigned)ldexp(fraction * 2 - 1, type->fraction_bits);
  } else {
    bits = (unsigned)ldexp(fabs(value), type->fraction_bits + bias - 1);
  }
  bits |= (unsigned)(signbit(value) != 0) << (8 * type->bytes - 1);
  memcpy(place, &bits, type->bytes);
}

/* A step of the fold, computed as the fold is: in double for doubles, else in float. */
static double combined(const struct type* type, bool multiplies, double one, double other) {
  if (type->bytes == 8) return multiplies ? one * other : one + other;
  volatile float result = multiplies ? (float)one * (float)other : (float)one + (float)other;
  return result;
}

/* A rank's input at `index`: a value of the type. */
static double value_of(const struct type* type, int operation, int rank, size_t index) {
  struct random random = random_from(index * 31 + (size_t)rank * 7919 + (size_t)operation * 104729 + (size_t)type->code);
  uint64_t bits = random_next(&random);
  double fraction = 1 + (double)(bits >> 12) / (double)(1ull << 52);
  int spread = operation == ncclProd ? 1 : type->bytes == 1 ? 6 : type->bytes == 2 ? 12 : 40;
  double value = ldexp(fraction, (int)(bits % (uint64_t)spread) - spread / 2);
  return rounded(type, bits & 0x800 ? -value : value);
}
static double scalar_of(const struct type* type, int rank) { return rounded(type, 0.75 + 0.1875 * rank); }

static double expected(const struct type* type, int operation, int ranks, size_t index) {
  double fold = 0, reciprocal = 1.0 / ranks;
  if (type->bytes < 8) reciprocal = (float)reciprocal;
  for (int rank = 0; rank < ranks; rank++) {
    double value = value_of(type, operation, rank, index);
    if (operation == ncclAvg) value = combined(type, true, value, reciprocal);
    if (operation == OWN) value = rounded(type, combined(type, true, value, scalar_of(type, rank)));
    fold = rank == 0 ? value : combined(type, operation == ncclProd, fold, value);
  }
  return rounded(type, fold);
}

/* One type and operation, with its buffers. */
struct work {
  struct rank* self;
  const struct type* type;
  int operation;
  ncclRedOp_t op;
  ncclComm_t communicator;
  char *input, *output, *seen, *wanted; /* the first two on the device */
  struct random random;                 /* the same on all ranks */
};
static size_t different;

/* Holds that `count` elements of the output, from `at` on, are the expected ones from `first` on. */
static void verify(struct work* work, size_t at, size_t first, size_t count, const char* how) {
  size_t bytes = work->type->bytes;
  download(work->seen, work->output + at * bytes, count * bytes);
  for (size_t i = 0; i < count; i++) {
    if (memcmp(work->seen + i * bytes, work->wanted + (first + i) * bytes, bytes) == 0) continue;
    if (different++ == 0 && !expects_differences) {
      fprintf(stderr, "%s of %s, operation %d: element %zu of %zu from %zu on is not in fixed order\n", how, work->type->name,
              work->operation, i, count, first);
    }
  }
  device_fill(work->output, 0xee, elements() * bytes);
}

static const void* from(struct work* work, size_t first) { return work->input + first * work->type->bytes; }
static void* to(struct work* work, size_t at) { return work->output + at * work->type->bytes; }

static void all_reduce(struct work* work, size_t first, size_t at, size_t count) {
  NCCL(ncclAllReduce(from(work, first), to(work, at), count, work->type->code, work->op, work->communicator, as_cuda(work->self->stream)));
}
static void reduce(struct work* work, size_t first, size_t at, size_t count, int root) {
  NCCL(ncclReduce(from(work, first), to(work, at), count, work->type->code, work->op, root, work->communicator, as_cuda(work->self->stream)));
}

static void one_by_one(struct work* work) {
  size_t all = elements(), share = all / (size_t)work->self->ranks;
  all_reduce(work, 0, 0, all);
  wait_for(work->self->stream);
  verify(work, 0, 0, all, "all-reduce");
  for (int slice = 0; slice < SLICES; slice++) {
    size_t most = slice == 0 ? 2 : slice == 1 ? 700 : all / 2;
    size_t count = 1 + random_below(&work->random, most - 1), first = random_below(&work->random, all - count);
    size_t at = random_below(&work->random, all - count);
    all_reduce(work, first, at, count);
    wait_for(work->self->stream);
    verify(work, at, first, count, "all-reduce of a slice");
    int root = (int)random_below(&work->random, (uint64_t)work->self->ranks);
    reduce(work, first, at, count, root);
    wait_for(work->self->stream);
    if (root == work->self->rank) verify(work, at, first, count, "reduce");
  }
  NCCL(ncclReduceScatter(from(work, 0), to(work, 3), share, work->type->code, work->op, work->communicator, as_cuda(work->self->stream)));
  wait_for(work->self->stream);
  verify(work, 3, share * (size_t)work->self->rank, share, "reduce-scatter");
}

/* Three all-reduces, so many that NCCL would run them without fixed order, and a reduce to each rank, of different sizes. */
static void in_a_group(struct work* work) {
  size_t all = elements(), firsts[3], counts[3], part = all / 8, at = 0;
  NCCL(ncclGroupStart());
  for (int i = 0; i < 3; i++) {
    counts[i] = 1 + random_below(&work->random, part);
    firsts[i] = random_below(&work->random, all - part);
    all_reduce(work, firsts[i], (size_t)i * part, counts[i]);
  }
  size_t own = 0, own_first = 0;
  for (int root = 0; root < work->self->ranks; root++) {
    size_t count = random_below(&work->random, part), first = random_below(&work->random, all - part);
    reduce(work, first, 3 * part, count, root);
    if (root == work->self->rank) own = count, own_first = first;
  }
  NCCL(ncclGroupEnd());
  wait_for(work->self->stream);
  char* results = work->output;
  for (int i = 0; i < 4; i++) {
    size_t count = i < 3 ? counts[i] : own;
    download(work->seen, results + at * work->type->bytes, count * work->type->bytes);
    for (size_t j = 0; j < count; j++) {
      size_t index = (i < 3 ? firsts[i] : own_first) + j;
      if (memcmp(work->seen + j * work->type->bytes, work->wanted + index * work->type->bytes, work->type->bytes) == 0) continue;
      if (different++ == 0 && !expects_differences) {
        fprintf(stderr, "call %d of a group of %s, operation %d: element %zu of %zu\n", i, work->type->name, work->operation, j, count);
      }
    }
    at += part;
  }
  device_fill(work->output, 0xee, all * work->type->bytes);
}

static void in_a_graph(struct work* work) {
  size_t all = elements(), count = all / 3;
  CUgraph graph = NULL;
  CUgraphExec executable = NULL;
  CUDA(cuStreamBeginCapture_v2(work->self->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  all_reduce(work, 5, 1, count);
  CUDA(cuStreamEndCapture(work->self->stream, &graph));
  CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
  for (int launch = 0; launch < 2; launch++) {
    CUDA(cuGraphLaunch(executable, work->self->stream));
    wait_for(work->self->stream);
    verify(work, 1, 5, count, "all-reduce in a graph");
  }
  CUDA(cuGraphExecDestroy(executable));
  CUDA(cuGraphDestroy(graph));
}

static void run(struct rank* self, ncclComm_t communicator, const struct type* type, int operation) {
  size_t bytes = elements() * type->bytes;
  struct work work = {.self = self, .type = type, .operation = operation, .op = (ncclRedOp_t)operation, .communicator = communicator,
                      .input = device_alloc(bytes), .output = device_alloc(bytes), .seen = malloc(bytes), .wanted = malloc(bytes),
                      .random = random_from(seed + (uint64_t)(100 * type->code) + (uint64_t)operation)};
  char* given = malloc(bytes);
  void* on_device = device_alloc(8);
  for (size_t i = 0; i < elements(); i++) {
    put(type, given + i * type->bytes, value_of(type, operation, self->rank, i));
    put(type, work.wanted + i * type->bytes, expected(type, operation, self->ranks, i));
  }
  upload(work.input, given, bytes);
  device_fill(work.output, 0xee, bytes);
  if (operation == OWN) {
    /* Half of the ranks have their scalar on the device. */
    char scalar[8] = {0};
    bool is_here = self->rank % 2 == 0;
    put(type, scalar, scalar_of(type, self->rank));
    upload(on_device, scalar, sizeof scalar);
    NCCL(ncclRedOpCreatePreMulSum(&work.op, is_here ? (void*)scalar : on_device, type->code,
                                  is_here ? ncclScalarHostImmediate : ncclScalarDevice, communicator));
  }
  one_by_one(&work);
  in_a_group(&work);
  in_a_graph(&work);
  record(self, work.wanted, bytes);
  if (operation == OWN) NCCL(ncclRedOpDestroy(work.op, communicator));
  device_free(on_device);
  device_free(work.input);
  device_free(work.output);
  free(given);
  free(work.seen);
  free(work.wanted);
}

static void all(struct rank* self) {
  static const int operations[OPERATIONS] = {ncclSum, ncclProd, ncclAvg, OWN};
  ncclComm_t communicator = world(self, 0);
  for (int type = 0; type < TYPES_COUNT; type++) {
    if (expects_differences && !TYPES[type].is_for_nccl) continue;
    for (int operation = 0; operation < OPERATIONS; operation++) run(self, communicator, &TYPES[type], operations[operation]);
  }
  if (expects_differences) {
    CHECK(different > 0);
  } else {
    EQUAL(different, 0);
  }
  NCCL(ncclCommDestroy(communicator));
}

int main(int count, char** arguments) {
  expects_differences = count > 1 && strcmp(arguments[1], "differs") == 0;
  begin("fixed order", on_gpus() ? 300 : 200);
  seed = program_seed(7);
  run_ranks("processes", PROCESSES, rank_count(4), all, NULL);
  return finish();
}
