/* Holds that a thousand ids leave no thread and no socket behind when only unused pairs are made of them, nor do ids of
 * communicators that NCCL makes. NCCL's root ends when all ranks have been there, and then Windlass's port. NCCL alone keeps a
 * thread and a socket of each id of which nothing is made. So does Windlass so far: with the argument `nothing` the program
 * fails. */
#include "../support/held.h"
#include "../support/team.h"

static const struct held ROOM = {10, 4, 100, (size_t)32 << 20};

static void of_pairs(struct rank* self) {
  ncclComm_t first = world(self, 0);
  expect_lazy(self->ranks, UNBUILT);
  struct held before = held_now();
  for (int round = 0; round < 1000; round++) {
    ncclComm_t made = NULL;
    ncclUniqueId id = share_id(self, 0, round % self->ranks);
    NCCL(ncclCommInitRank(&made, self->ranks, id, self->rank));
    expect_lazy(self->ranks, UNBUILT);
    NCCL(ncclCommDestroy(made));
  }
  meet(self);
  CHECK(held_again(&before, &ROOM));
  meet(self);
  NCCL(ncclCommDestroy(first));
}

static void of_communicators(struct rank* self) {
  struct held before = {0};
  for (int round = 0; round < 50; round++) {
    ncclComm_t communicator = world(self, 0);
    meet(self);
    NCCL(ncclCommDestroy(communicator));
    meet(self);
    if (round == 4) before = held_now();
  }
  CHECK(held_again(&before, &ROOM));
  meet(self);
}

static void of_nothing(struct rank* self) {
  ncclComm_t first = world(self, 0);
  expect_lazy(self->ranks, UNBUILT);
  struct held before = held_now();
  for (int round = 0; round < 500; round++) {
    ncclUniqueId id;
    NCCL(ncclGetUniqueId(&id));
  }
  CHECK(held_again(&before, &ROOM));
  meet(self);
  NCCL(ncclCommDestroy(first));
}

int main(int count, char** words) {
  begin("unused_ids", 280);
  int ranks = rank_count(4);
  if (count < 2) run_ranks("ids of communicators", PROCESSES, ranks, of_communicators, NULL);
  if (count < 2) run_ranks("ids of pairs", PROCESSES, 2, of_pairs, NULL);
  else if (is_wanted(count, words, "nothing")) run_ranks("ids of nothing", PROCESSES, 2, of_nothing, NULL);
  return finish();
}
