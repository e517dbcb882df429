/* Holds that many communicators of the same ranks live at once: each runs a collective and a ring of messages, the last one as
 * the first, also when all have run something. Afterwards their memory is free again. Says on standard error what they cost rank
 * 0. The argument is their number. */
#include "../support/collective.h"
#include "../support/held.h"
#include "../support/messages.h"

#include <stdlib.h>

enum { MOST = 256, BYTES = 1 << 12 };

static void say_held(const struct rank* self, const char* when, const struct held* start) {
  struct held now = held_now();
  if (self->rank != 0) return;
  fprintf(stderr, "many_communicators: %s: device memory %+.1f MiB, descriptors %+d, threads %+d\n", when,
          ((double)now.device_bytes - (double)start->device_bytes) / (1 << 20), now.descriptors - start->descriptors,
          now.threads - start->threads);
}

/* All-reduces and all-gathers in turn, with different bytes each time. */
static void reduces(struct rank* self, ncclComm_t communicator, int number) {
  struct transfer transfer = {.which = number % 2 ? ALL_GATHER : ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .rank = self->rank,
                              .count = BYTES / sizeof(float) / (size_t)self->ranks, .ranks = self->ranks, .key = (uint64_t)number};
  transfer_run(&transfer, communicator, self);
}

static void passes(struct rank* self, ncclComm_t communicator, int number) {
  int next = (self->rank + 1) % self->ranks, before = (self->rank + self->ranks - 1) % self->ranks;
  uint64_t key = (uint64_t)(RANKS_MAX * number);
  struct message from = message_to_send(key + (uint64_t)self->rank, BYTES, 0), to = message_to_receive(key + (uint64_t)before, BYTES, 0);
  NCCL(ncclGroupStart());
  message_send(&from, next, communicator, self->stream);
  message_receive(&to, before, communicator, self->stream);
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  message_verify(&to, self);
  message_release(&from);
  message_release(&to);
}

/* In the second round from the last one back: the communicator served first need not be the one served best. */
static void serve_all(struct rank* self, const ncclComm_t* communicators, int count, int round) {
  for (int i = 0; i < count; i++) {
    int place = round ? count - 1 - i : i;
    reduces(self, communicators[place], MOST * round + place);
    passes(self, communicators[place], MOST * round + place);
  }
}

/* Memory that peers have mapped is free only when they have closed it, too. Ids keep sockets of the process that made them. */
static void hold_given_back(struct rank* self, const struct held* start, int count) {
  struct held room = {.descriptors = 64 + 2 * count, .threads = 1000, .mappings = 10000, .device_bytes = (size_t)16 << 20};
  if (on_gpus()) room.device_bytes = (size_t)1 << 30; /* of 56 GiB NCCL keeps 514 MiB, which its kernels need on a device */
  CHECK(held_again(start, &room));
  say_held(self, "after their end", start);
}

static void live_at_once(struct rank* self) {
  int count = *(int*)self->argument;
  ncclComm_t communicators[MOST];
  meet(self);
  struct held start = held_now();
  meet(self);
  for (int i = 0; i < count; i++) communicators[i] = world(self, 0);
  meet(self);
  say_held(self, "when they are made", &start);
  meet(self);
  for (int round = 0; round < 2; round++) serve_all(self, communicators, count, round);
  meet(self);
  say_held(self, "when each has run", &start);
  meet(self);
  destroy_each(communicators, count);
  meet(self);
  hold_given_back(self, &start, count);
  meet(self);
}

int main(int count, char** words) {
  begin("many_communicators", 280);
  int communicators = count > 1 ? atoi(words[1]) : 64;
  if (communicators < 1 || communicators > MOST) skip("1 to 256 communicators");
  run_ranks("ranks", PROCESSES, rank_count(2), live_at_once, &communicators);
  return finish();
}
