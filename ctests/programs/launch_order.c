/* Holds that a communicator whose launches NCCL orders among those of all others (launchOrderImplicit, NCCL 2.31) is NCCL's, and so are
 * its children. In one part rank 1 alone has that in its configuration, in the other in the configuration of a split. The reports tell
 * who ran the calls. */
#include "../support/collective.h"

static void reduces(struct rank* self, ncclComm_t communicator, uint64_t key) {
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .count = 1000, .rank = self->rank, .ranks = self->ranks, .key = key};
  transfer_run(&transfer, communicator, self);
}

static ncclConfig_t in_order_on_rank_1(const struct rank* self) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  if (self->rank == 1) config.launchOrderImplicit = 1;
  return config;
}

static void init(struct rank* self) {
  ncclComm_t communicator, child;
  ncclConfig_t config = in_order_on_rank_1(self);
  NCCL(ncclCommInitRankConfig(&communicator, self->ranks, share_id(self, 0, 0), self->rank, &config));
  reduces(self, communicator, 1);
  NCCL(ncclCommSplit(communicator, 0, self->rank, &child, NULL));
  reduces(self, child, 2);
  destroy_each((ncclComm_t[]){child, communicator}, 2);
}

static void split(struct rank* self) {
  ncclComm_t parent = world(self, 1), child, grandchild;
  ncclConfig_t config = in_order_on_rank_1(self);
  reduces(self, parent, 3);
  NCCL(ncclCommSplit(parent, 0, self->rank, &child, &config));
  reduces(self, child, 4);
  NCCL(ncclCommSplit(child, 0, self->rank, &grandchild, NULL));
  reduces(self, grandchild, 5);
  destroy_each((ncclComm_t[]){grandchild, child, parent}, 3);
}

static void both(struct rank* self) {
  init(self);
  split(self);
}

int main(void) {
  begin("launch order", 100);
  run_ranks("processes", PROCESSES, rank_count(3), both, NULL);
  return finish();
}
