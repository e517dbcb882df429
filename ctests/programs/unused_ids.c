/* Holds: a thousand ids, of which every tenth makes a pair that nothing is done with and the others nothing, leave no thread
 * and no socket behind. NCCL alone keeps a thread and a socket for each id that was never used. */
#include "../support/held.h"
#include "../support/team.h"

enum { IDS = 1000 };

static void takes_ids(struct rank* self) {
  ncclComm_t communicator = world(self, 0);
  foretell(self->ranks, STAYS);
  struct held before = held_now();
  const struct held room = {10, 4, 100, (size_t)32 << 20};
  for (int round = 0; round < IDS; round++) {
    ncclUniqueId id;
    if (round % 10) {
      if (round % self->ranks == self->rank) NCCL(ncclGetUniqueId(&id));
      continue;
    }
    ncclComm_t made = NULL;
    id = share_id(self, 0, round / 10 % self->ranks);
    NCCL(ncclCommInitRank(&made, self->ranks, id, self->rank));
    foretell(self->ranks, STAYS);
    NCCL(ncclCommDestroy(made));
  }
  meet(self);
  CHECK(held_again(&before, &room));
  meet(self);
  NCCL(ncclCommDestroy(communicator));
}

int main(void) {
  begin("unused_ids", 120);
  rank_count(2);
  run_ranks("ids", PROCESSES, 2, takes_ids, NULL);
  return finish();
}
