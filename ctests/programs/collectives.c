/* Holds that every collective gives what the host computes, for all types, operations and counts, in and out of place. Ranks are
 * processes. On the simulator, where a thread of a kernel is a thread of the host, one of seven combinations runs. */
#include "../support/collective.h"

static const size_t COUNTS[] = {0, 1, 3, 255, 1024, 16411};
enum { COUNT_COUNT = sizeof COUNTS / sizeof COUNTS[0] };

/* Seven divides none of the numbers of types, operations, counts and places, so all of them are tested together. */
static bool is_taken(uint64_t key) { return on_gpus() || key % 7 == 0; }

static void one(struct rank* self, ncclComm_t communicator, struct transfer transfer) {
  transfer.rank = self->rank;
  transfer.ranks = self->ranks;
  transfer_run(&transfer, communicator, self);
}

static void all(struct rank* self) {
  ncclComm_t communicator = world(self, 0);
  uint64_t key = 1;
  int known = collectives_known();
  for (int which = 0; which < known; which++) {
    for (int t = 0; t < REDUCIBLE_COUNT; t++) {
      for (int c = 0; c < COUNT_COUNT; c++) {
        for (int in_place = 0; in_place < 2; in_place++) {
          if (in_place && !collective_can_be_in_place(which)) continue;
          int ops = collective_reduces(which) ? ncclNumOps : 1;
          for (int op = 0; op < ops; op++, key++) {
            if (op == ncclAvg && !average_is_exact(REDUCIBLE[t], self->ranks)) continue;
            if (!is_taken(key)) continue;
            one(self, communicator, (struct transfer){.which = (enum collective)which, .type = REDUCIBLE[t],
                .op = (ncclRedOp_t)op, .count = COUNTS[c], .root = (int)(key % (uint64_t)self->ranks),
                .in_place = in_place, .key = key});
          }
        }
      }
    }
  }
  /* A call larger than any buffer or chunk of the library. On the simulator the p2p transport takes a second for a MiB, so it
   * has a quarter. */
  for (int which = 0; which < known; which++, key++) {
    size_t count = (which >= ALL_TO_ALL && !on_gpus() ? (size_t)1 << 18 : (size_t)1 << 20) + 3;
    one(self, communicator, (struct transfer){.which = (enum collective)which, .type = ncclFloat32, .op = ncclSum,
        .count = count, .root = self->ranks - 1, .key = key});
  }
  NCCL(ncclCommDestroy(communicator));
}

int main(void) {
  begin("collectives", 1140);
  int ranks = rank_count(4);
  run_ranks("collectives", PROCESSES, ranks, all, NULL);
  return finish();
}
