/* Holds: a tuning table that all ranks have decides what is fast; where one rank has another, none, or one that cannot be
 * read, the built-in one holds on all of them, and nothing hangs. The argument says which: same, other, none or wrong. */
#include "../support/collective.h"

#include <stdlib.h>
#include <string.h>

static const char* what;

/* All-reduces to 1 MiB are fast, all-gathers never. */
static void write_table(const struct rank* self) {
  char path[512];
  const bool is_odd = self->rank == 1, is_wrong = is_odd && !strcmp(what, "wrong");
  int major = 0, minor = 0, multiprocessors = 0;
  if (is_odd && !strcmp(what, "none")) return;
  CUDA(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self->device));
  CUDA(cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, self->device));
  CUDA(cuDeviceGetAttribute(&multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, self->device));
  const char* folder = getenv("CTESTS_CALLS"); /* the runner's */
  snprintf(path, sizeof path, "%s.table-%d", folder ? folder : "tuned", self->rank);
  FILE* file = fopen(path, "w");
  if (!CHECK(file != NULL)) return;
  fprintf(file, "windlass-tuning 1\n# of rank %d\n", self->rank);
  for (int multicast = 0; multicast < 2; multicast++) {
    const char* form = "%s ranks %d gpu %d.%d/%d multicast %s %s %s\n";
    const char *limit = is_wrong ? "fast_bytes" : "fast_bytes_max", *word = multicast ? "yes" : "no";
    const char* most = is_odd && !strcmp(what, "other") ? "2M" : "1M";
    fprintf(file, form, "all_reduce", self->ranks, major, minor, multiprocessors, word, limit, most);
    fprintf(file, form, "all_gather", self->ranks, major, minor, multiprocessors, word, limit, "none");
  }
  CHECK(fclose(file) == 0);
  setenv("WINDLASS_TUNING", path, 1); /* before the first call, which reads it */
}

static void runs(struct rank* self, ncclComm_t communicator, enum collective which, size_t count, int times) {
  for (int call = 0; call < times; call++) {
    struct transfer transfer = {.which = which, .type = ncclFloat32, .op = ncclSum, .count = count, .rank = self->rank,
                                .ranks = self->ranks, .key = (uint64_t)call};
    transfer_prepare(&transfer);
    together(self);
    transfer_launch(&transfer, communicator, self->stream);
    wait_for(self->stream);
    together(self);
    transfer_verify(&transfer, self);
    transfer_release(&transfer);
  }
}

static void all(struct rank* self) {
  ncclComm_t communicators[2] = {NULL, NULL};
  write_table(self);
  communicators[0] = world(self, 0);
  NCCL(ncclCommSplit(communicators[0], 0, self->rank, &communicators[1], NULL));
  for (int which = 0; which < 2; which++) {
    runs(self, communicators[which], ALL_REDUCE, 1 << 16, 5);
    runs(self, communicators[which], ALL_GATHER, 1 << 8, 8);
  }
  for (int which = 1; which >= 0; which--) NCCL(ncclCommDestroy(communicators[which]));
}

int main(int count, char** arguments) {
  begin("tuned", 60);
  what = count > 1 ? arguments[1] : "same";
  run_ranks("processes", PROCESSES, rank_count(2), all, NULL);
  return finish();
}
