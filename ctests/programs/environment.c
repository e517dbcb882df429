/* Holds that results are right whichever of NCCL's variables are set, and whenever. A round covers every path of Windlass. On a
 * communicator of all ranks it runs small and large collectives, large all-gathers in memory of ncclMemAlloc, and messages, and
 * makes a window twice over memory that is freed and allocated again. Then come communicators of two ranks, whose all-reduce
 * comes beside a receive that waits. A second round, with new communicators, leaves out the gathers and windows.
 *
 * Variables in CTESTS_LATE (NAME=VALUE, separated by blanks) are set after the first call of all, as by programs that ask for
 * the version first; those in CTESTS_LATER between the two rounds. Reports tell which paths ran. Ranks are processes. */
#define _GNU_SOURCE
#include "../support/collective.h"
#include "../support/messages.h"
#include "../support/windows.h"

#include <stdlib.h>
#include <string.h>

enum { KIB = 1024, GATHERS = 6 };
enum { FIRST, SECOND, EARLY_PAIRS, LATE_PAIRS = EARLY_PAIRS + RANKS_MAX };

/* Sets the variables that the variable `list` names. */
static void set_listed(const char* list) {
  const char* text = getenv(list);
  char* copy = text ? strdup(text) : NULL;
  for (char *rest = copy, *pair; rest && (pair = strsep(&rest, " "));) {
    char* value = strchr(pair, '=');
    if (!value) continue;
    *value++ = 0;
    setenv(pair, value, 1);
  }
  free(copy);
}

static struct transfer sum_of(int rank, int ranks, size_t bytes) {
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .count = bytes / sizeof(float),
                              .rank = rank, .ranks = ranks, .key = bytes};
  transfer_prepare(&transfer);
  return transfer;
}

static void collective(struct rank* self, ncclComm_t communicator, size_t bytes) {
  struct transfer transfer = sum_of(self->rank, self->ranks, bytes);
  transfer_launch(&transfer, communicator, self->stream);
  wait_for(self->stream);
  transfer_verify(&transfer, self);
  transfer_release(&transfer);
}

/* Each rank sends to the rank `step` places after it. */
static void ring(struct rank* self, ncclComm_t communicator, size_t bytes, int step) {
  int next = (self->rank + step) % self->ranks, before = (self->rank + self->ranks - step) % self->ranks;
  struct message out = message_to_send((uint64_t)self->rank, bytes, 0), in = message_to_receive((uint64_t)before, bytes, 0);
  NCCL(ncclGroupStart());
  message_send(&out, next, communicator, self->stream);
  message_receive(&in, before, communicator, self->stream);
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  message_verify(&in, self);
  message_release(&out);
  message_release(&in);
}

/* A window over a block that is freed, allocated again and registered again. */
static void windows(struct rank* self, ncclComm_t communicator) {
  for (int round = 0; round < 3; round++) {
    struct memory block = memory_alloc(self, NCCLS, window_room(self));
    window_end(communicator, window_over(communicator, block.at, block.bytes));
    memory_free(self, &block);
  }
}

static void gathers(struct rank* self, ncclComm_t communicator) {
  size_t count = gather_count(self, 65536);
  struct memory memory = memory_alloc(self, NCCLS, gather_room(self, count) + count);
  for (uint64_t key = 0; key < GATHERS; key++) {
    struct gather gather = gather_into(self, NULL, &memory, 0, count, key);
    gather_run(self, communicator, &gather);
  }
  memory_free(self, &memory);
}

static void round_of(struct rank* self, ncclComm_t communicator) {
  collective(self, communicator, KIB);
  collective(self, communicator, 1024 * KIB);
  ring(self, communicator, 64 * KIB, 1);
  ring(self, communicator, 16 * KIB, self->ranks - 1);
}

/* The lower rank waits for a message of another communicator. The upper rank sends it only after an all-reduce of both, the
 * first call that needs NCCL's part of their communicator. */
static void pair(struct rank* self, ncclComm_t other, int slot) {
  int own = self->rank % 2;
  if (self->rank - own + 1 >= self->ranks) return;
  ncclUniqueId id;
  for (int maker = 0; maker + 1 < self->ranks; maker += 2) {
    ncclUniqueId made = share_id(self, slot + maker, maker);
    if (maker == self->rank - own) id = made;
  }
  ncclComm_t communicator;
  NCCL(ncclCommInitRank(&communicator, 2, id, own));
  struct message late = own ? message_to_send(7, 4 * KIB, 0) : message_to_receive(7, 4 * KIB, 0);
  struct transfer sum = sum_of(own, 2, 1024 * KIB);
  CUstream beside = new_stream();
  if (!own) message_receive(&late, self->rank + 1, other, beside);
  transfer_launch(&sum, communicator, self->stream);
  wait_for(self->stream);
  if (own) message_send(&late, self->rank - 1, other, beside);
  wait_for(beside);
  if (!own) message_verify(&late, self);
  transfer_verify(&sum, self);
  transfer_release(&sum);
  message_release(&late);
  CUDA(cuStreamDestroy_v2(beside));
  NCCL(ncclCommDestroy(communicator));
}

static void all(struct rank* self) {
  ncclComm_t first = world(self, FIRST);
  round_of(self, first);
  gathers(self, first);
  windows(self, first);
  pair(self, first, EARLY_PAIRS);
  set_listed("CTESTS_LATER");
  ncclComm_t second = world(self, SECOND);
  round_of(self, second);
  pair(self, second, LATE_PAIRS);
  ncclComm_t both[] = {first, second};
  destroy_each(both, 2);
}

int main(int count, char** arguments) {
  begin("environment", 120);
  choose(count, arguments);
  int version;
  NCCL(ncclGetVersion(&version));
  set_listed("CTESTS_LATE");
  run_ranks("processes", PROCESSES, rank_count(4), all, NULL);
  return finish();
}
