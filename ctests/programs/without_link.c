/* Holds that pairs work without NVLink, where NCCL moves all bytes: collectives, messages, and one after the other that use NCCL's
 * part of an ended one. One rank alone sends to itself and makes messages without bytes: that waits for no other rank. So NCCL
 * never builds such a pair. Children of a pair work, too. */
#include "../support/collective.h"
#include "../support/messages.h"

#include <string.h>

static void reduces(struct rank* self, ncclComm_t communicator, uint64_t key) {
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclInt64, .op = ncclSum, .count = 519, .rank = self->rank,
                              .ranks = self->ranks, .key = key};
  transfer_run(&transfer, communicator, self);
}

static void sends(struct rank* self, ncclComm_t communicator, int to, int from, uint64_t key) {
  struct message sent = message_to_send(key + (uint64_t)self->rank, 3001, 0);
  struct message received = message_to_receive(key + (uint64_t)from, 3001, 0);
  NCCL(ncclGroupStart());
  message_send(&sent, to, communicator, self->stream);
  message_receive(&received, from, communicator, self->stream);
  /* On GPUs NCCL 2.28.9 alone waits for the other rank even then (2 x H200). */
  if (!on_gpus()) NCCL(ncclSend(sent.at, 0, ncclInt8, 1 - self->rank, communicator, as_cuda(self->stream)));
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  message_verify(&received, self);
  message_release(&sent);
  message_release(&received);
}

static void all(struct rank* self) {
  ncclComm_t first = world(self, 0), alone = world(self, 1), child = NULL;
  reduces(self, first, 1);
  /* Each in turn. The other rank comes to no call of this pair meanwhile. */
  for (int turn = 0; turn < self->ranks; turn++) {
    if (turn == self->rank) sends(self, alone, self->rank, self->rank, 20);
    meet(self);
  }
  NCCL(ncclCommDestroy(alone));
  for (uint64_t round = 0; round < 3; round++) {
    ncclComm_t again = world(self, 2);
    reduces(self, again, 30 + round);
    sends(self, again, 1 - self->rank, 1 - self->rank, 40 + round);
    sends(self, again, self->rank, self->rank, 50 + round);
    reduces(self, again, 60 + round);
    NCCL(ncclCommDestroy(again));
  }
  NCCL(ncclCommSplit(first, 0, self->rank, &child, NULL));
  reduces(self, child, 70);
  sends(self, child, 1 - self->rank, 1 - self->rank, 80);
  NCCL(ncclCommDestroy(child));
  NCCL(ncclCommDestroy(first));
}

int main(void) {
  begin("without_link", 100);
  if (rank_count(2) < 2) skip("needs two ranks");
  run_ranks("processes", PROCESSES, 2, all, NULL);
  run_ranks("threads", THREADS, 2, all, NULL);
  return finish();
}
