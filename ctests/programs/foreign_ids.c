/* Holds that communicators carry collectives whose ids a process without Windlass made, and so do their children. With CTESTS_LONER
 * that rank is without Windlass. With the argument `faults` NCCL makes the communicator on all ranks but one; with `grouped` one rank
 * alone makes it in a group. */
#include "../support/collective.h"

#include <stdlib.h>
#include <string.h>

static void works(struct rank* self, ncclComm_t communicator, int rank, int ranks, uint64_t key) {
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclInt64, .op = ncclSum, .count = 519, .rank = rank,
                              .ranks = ranks, .key = key};
  transfer_prepare(&transfer);
  together(self);
  transfer_launch(&transfer, communicator, self->stream);
  wait_for(self->stream);
  together(self);
  transfer_verify(&transfer, self);
  transfer_release(&transfer);
}

static ncclComm_t made(struct rank* self, int slot) {
  ncclComm_t communicator = NULL;
  ncclUniqueId id = share_foreign_id(self, slot, slot % self->ranks);
  NCCL(ncclCommInitRank(&communicator, self->ranks, id, self->rank));
  return communicator;
}

static void all(struct rank* self) {
  const char* loner = getenv("CTESTS_LONER");
  if (loner && atoi(loner) == self->rank) setenv("WINDLASS_PEER_GROUPS", "off", 1);
  ncclComm_t first = made(self, 0), second = made(self, 1), child = NULL, grandchild = NULL;
  works(self, first, self->rank, self->ranks, 10);
  works(self, second, self->rank, self->ranks, 20);
  NCCL(ncclCommSplit(second, self->rank / 2, self->rank, &child, NULL));
  NCCL(ncclCommSplit(child, 0, self->rank, &grandchild, NULL));
  works(self, child, self->rank % 2, 2, 30);
  works(self, grandchild, self->rank % 2, 2, 40);
  destroy_each((ncclComm_t[]){grandchild, child, second, first}, 4);
}

/* NCCL runs it, as other ranks may make several in one group. */
static void in_a_group(struct rank* self) {
  ncclComm_t communicator = NULL;
  ncclUniqueId id = share_foreign_id(self, 2, 0);
  NCCL(ncclGroupStart());
  NCCL(ncclCommInitRank(&communicator, self->ranks, id, self->rank));
  NCCL(ncclGroupEnd());
  works(self, communicator, self->rank, self->ranks, 50);
  NCCL(ncclCommDestroy(communicator));
}

/* One rank makes each init in a group, the others do not, and all split at once: nobody waits for a rank that is a call behind. */
static void grouped_by_one(struct rank* self) {
  for (int round = 0; round < 24; round++) {
    ncclComm_t communicator = NULL, child = NULL;
    ncclUniqueId id = share_foreign_id(self, 4 + round, 0);
    if (self->rank == 2) NCCL(ncclGroupStart());
    NCCL(ncclCommInitRank(&communicator, self->ranks, id, self->rank));
    if (self->rank == 2) NCCL(ncclGroupEnd());
    NCCL(ncclCommSplit(communicator, 0, self->rank, &child, NULL));
    destroy_each((ncclComm_t[]){child, communicator}, 2);
    meet(self);
  }
}

static void one_fails(struct rank* self) {
  if (self->rank == 1) setenv("WINDLASS_SIM_LOST_INITS", "1", 1);
  ncclComm_t communicator = NULL;
  ncclUniqueId id = share_foreign_id(self, 3, 0);
  CODE(ncclCommInitRank(&communicator, self->ranks, id, self->rank), self->rank == 1 ? ncclRemoteError : ncclSuccess);
  meet(self);
  if (communicator) NCCL(ncclCommAbort(communicator));
}

int main(int count, char** words) {
  begin("foreign_ids", 100);
  choose(count, words);
  int ranks = rank_count(4) / 2 * 2;
  if (is_section_chosen("faults")) {
    run_ranks("one fails", PROCESSES, ranks, one_fails, NULL);
    return finish();
  }
  if (count > 1 && !strcmp(words[1], "grouped")) {
    run_ranks("grouped by one", PROCESSES, ranks, grouped_by_one, NULL);
    return finish();
  }
  run_ranks("processes", PROCESSES, ranks, all, NULL);
  run_ranks("group", PROCESSES, ranks, in_a_group, NULL);
  if (!getenv("CTESTS_LONER")) run_ranks("threads", THREADS, ranks, all, NULL);
  return finish();
}
