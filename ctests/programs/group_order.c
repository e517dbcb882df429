/* Holds that the communicators of a group run in an order that all ranks see alike, whether Windlass or NCCL runs their calls: on one
 * stream ranks may group the same calls in any order. With a stream each any order works, grouped or not. */
#include "../support/collective.h"
#include "../support/messages.h"

enum { COMMUNICATORS = 3 };

/* What a communicator runs: two kinds that a peer group may serve, and a collective that is too large for that here. */
enum what { SMALL, RING, LARGE, WHATS };

struct task {
  enum what what;
  ncclComm_t communicator;
  CUstream stream;
  struct transfer transfer;
  struct message from, to;
};

static struct task prepare(struct rank* self, enum what what, ncclComm_t communicator, uint64_t key) {
  int before = (self->rank + self->ranks - 1) % self->ranks;
  struct task task = {.what = what, .communicator = communicator, .stream = self->stream};
  if (what == RING) {
    task.from = message_to_send(key * 64 + (uint64_t)self->rank, 5000, 0);
    task.to = message_to_receive(key * 64 + (uint64_t)before, 5000, 0);
    return task;
  }
  task.transfer = (struct transfer){.which = ALL_REDUCE, .type = ncclInt32, .op = ncclSum, .key = key,
                                    .count = what == SMALL ? 1001 : 20001, .rank = self->rank, .ranks = self->ranks};
  transfer_prepare(&task.transfer);
  return task;
}

static void issue(struct rank* self, const struct task* task) {
  if (task->what != RING) {
    transfer_launch(&task->transfer, task->communicator, task->stream);
    return;
  }
  NCCL(ncclGroupStart());
  message_send(&task->from, (self->rank + 1) % self->ranks, task->communicator, task->stream);
  message_receive(&task->to, (self->rank + self->ranks - 1) % self->ranks, task->communicator, task->stream);
  NCCL(ncclGroupEnd());
}

static void verify(struct rank* self, struct task* task) {
  if (task->what != RING) {
    transfer_verify(&task->transfer, self);
    transfer_release(&task->transfer);
    return;
  }
  message_verify(&task->to, self);
  message_release(&task->from);
  message_release(&task->to);
}

static void grouped(struct rank* self, const struct task* first, const struct task* second) {
  NCCL(ncclGroupStart());
  issue(self, first);
  issue(self, second);
  NCCL(ncclGroupEnd());
}

static void settle(struct rank* self, struct task* first, struct task* second) {
  wait_for(first->stream);
  wait_for(second->stream);
  together(self);
  verify(self, first);
  verify(self, second);
}

/* Rank 0 groups both in one order, the other ranks in the other. */
static void on_one_stream(struct rank* self, struct task* first, struct task* second) {
  together(self);
  grouped(self, self->rank == 0 ? first : second, self->rank == 0 ? second : first);
  settle(self, first, second);
}

/* The other ranks call both one by one, in the opposite order. */
static void on_a_stream_each(struct rank* self, struct task* first, struct task* second, CUstream other) {
  second->stream = other;
  together(self);
  if (self->rank == 0) {
    grouped(self, first, second);
  } else {
    issue(self, second);
    issue(self, first);
  }
  settle(self, first, second);
}

static void all(struct rank* self) {
  ncclComm_t communicators[COMMUNICATORS];
  CUstream other = new_stream();
  uint64_t key = 0;
  for (int which = 0; which < COMMUNICATORS; which++) communicators[which] = world(self, which);
  /* One call of each kind first: NCCL makes its connections then, for which ranks wait on the host. */
  for (int which = 0; which < COMMUNICATORS; which++) {
    for (enum what what = SMALL; what < WHATS; what++) {
      struct task task = prepare(self, what, communicators[which], ++key);
      together(self);
      issue(self, &task);
      wait_for(task.stream);
      together(self);
      verify(self, &task);
    }
  }
  /* Every two communicators in both orders: one of the two is against the order of their tokens. */
  for (int pair = 0; pair < COMMUNICATORS * COMMUNICATORS; pair++) {
    ncclComm_t one = communicators[pair / COMMUNICATORS], two = communicators[pair % COMMUNICATORS];
    if (one == two) continue;
    for (int mix = 0; mix < WHATS * WHATS; mix++) {
      for (int each = 0; each < 2; each++) {
        struct task first = prepare(self, (enum what)(mix / WHATS), one, ++key);
        struct task second = prepare(self, (enum what)(mix % WHATS), two, ++key);
        if (each) on_a_stream_each(self, &first, &second, other);
        else on_one_stream(self, &first, &second);
      }
    }
  }
  together(self);
  CUDA(cuStreamDestroy_v2(other));
  for (int which = 0; which < COMMUNICATORS; which++) NCCL(ncclCommDestroy(communicators[which]));
}

int main(void) {
  begin("group_order", 100);
  int ranks = rank_count(2);
  run_ranks("processes", PROCESSES, ranks, all, NULL);
  run_ranks("threads", THREADS, ranks, all, NULL);
  return finish();
}
