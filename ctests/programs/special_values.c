/* Holds that minimum, maximum, sum and product of special values are as on NCCL alone: not-a-numbers, infinities, zeros of both
 * signs, and the smallest and largest values of every floating type. There is no reference but the run on NCCL alone. A digest
 * of all bits is printed of minimum and maximum, of f64 without which not-a-number it is (there Windlass and NCCL were seen to
 * differ with two ranks). Sums and products have a digest without that, too, for two ranks, where all pairs of special values
 * occur; of more ranks they depend on the order. */
#include "../support/collective.h"

#include <stdlib.h>
#include <string.h>

enum { COUNT = 1024 };

/* The bits of a type: the place of its sign, and the number of bits of its fraction. */
struct layout { ncclDataType_t type; int sign, fraction; };
static const struct layout layouts[] = {{ncclFloat16, 15, 10}, {ncclBfloat16, 15, 7}, {ncclFloat32, 31, 23}, {ncclFloat64, 63, 52}};

static uint64_t special(const struct layout* layout, int which) {
  uint64_t one = 1, infinity = ((one << (layout->sign - layout->fraction)) - 1) << layout->fraction;
  uint64_t unit = ((one << (layout->sign - layout->fraction - 1)) - 1) << layout->fraction; /* 1.0 */
  const uint64_t positive[] = {0, infinity, infinity | one << (layout->fraction - 1), infinity - 1, 1, unit, unit | 1};
  enum { KINDS = sizeof positive / sizeof positive[0] };
  return positive[which % KINDS] | (uint64_t)(which / KINDS % 2) << layout->sign;
}

static bool is_nan(const struct layout* layout, uint64_t bits) {
  uint64_t magnitude = bits & (((uint64_t)1 << layout->sign) - 1);
  return magnitude > special(layout, 1);
}

/* Which value this rank has at `index`: with two ranks all pairs occur; further ranks mix, so that few elements have many
 * combinations. */
static int chosen(int index, int rank, uint64_t mixed) {
  enum { VALUES = 14 };
  if (rank == 0) return index % VALUES;
  if (rank == 1) return index / VALUES % VALUES;
  return (int)((mixed >> (8 * (rank - 2))) % VALUES);
}

static uint64_t result_of(struct rank* self, ncclComm_t communicator, const struct layout* layout, ncclRedOp_t op) {
  size_t element = (size_t)(layout->sign + 1) / 8;
  unsigned char* host = calloc(COUNT, element);
  uint64_t digest = digest_of(0, NULL, 0);
  struct random random = random_from(77);
  for (int i = 0; i < COUNT; i++) {
    uint64_t bits = special(layout, chosen(i, self->rank, random_next(&random)));
    memcpy(host + (size_t)i * element, &bits, element); /* the low bytes */
  }
  void* buffer = device_alloc(COUNT * element);
  upload(buffer, host, COUNT * element);
  NCCL(ncclAllReduce(buffer, buffer, COUNT, layout->type, op, communicator, as_cuda(self->stream)));
  wait_for(self->stream);
  download(host, buffer, COUNT * element);
  for (int i = 0; i < COUNT; i++) {
    uint64_t bits = 0;
    memcpy(&bits, host + (size_t)i * element, element);
    bool which_is_open = op == ncclSum || op == ncclProd || layout->type == ncclFloat64;
    if (which_is_open && is_nan(layout, bits)) bits = special(layout, 2);
    digest = digest_of(digest, &bits, sizeof bits);
  }
  device_free(buffer);
  free(host);
  return digest;
}

static void all(struct rank* self) {
  static const ncclRedOp_t operations[] = {ncclMin, ncclMax, ncclSum, ncclProd};
  ncclComm_t communicator = world(self, 0);
  size_t operation_count = self->ranks == 2 ? 4 : 2;
  for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
    for (size_t j = 0; j < operation_count; j++) {
      uint64_t digest = result_of(self, communicator, &layouts[i], operations[j]);
      record(self, &digest, sizeof digest);
      if (self->rank == 0) printf("type %d operation %d digest %016llx\n", layouts[i].type, operations[j], (unsigned long long)digest);
    }
  }
  CHECK(fflush(stdout) == 0);
  NCCL(ncclCommDestroy(communicator));
}

int main(void) {
  begin("special_values", 60);
  int ranks = rank_count(4);
  run_ranks("pair", PROCESSES, 2, all, NULL);
  if (ranks > 2) run_ranks("ranks", PROCESSES, ranks, all, NULL);
  return finish();
}
