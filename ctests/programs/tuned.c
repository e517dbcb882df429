/* Holds that ranks agree on limits cell by cell. A table that all ranks have decides what is native, and so does one rank's
 * table where the other has none or cannot read its own. A cell that differs between two ranks has the built-in limit on both;
 * other cells hold, and no rank hangs. The argument says which case runs: same, other, none or wrong. */
#include "../support/collective.h"
#include "../support/tuning.h"

#include <string.h>

static const char* what;

/* All-reduces up to 1 MiB are native, all-gathers never. */
static void write_table(const struct rank* self) {
  const bool is_odd = self->rank == 1;
  if (is_odd && !strcmp(what, "none")) return;
  FILE* file = tuning_begin(self);
  if (!file) return;
  const char* key = is_odd && !strcmp(what, "wrong") ? "native_bytes" : "native_bytes_max";
  tuning_row(file, self, "all_reduce", key, is_odd && !strcmp(what, "other") ? "2M" : "1M");
  tuning_row(file, self, "all_gather", key, "none");
  tuning_end(file);
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
