/* Holds that a communicator made right after another one's end has a peer group, where the symmetric heap has room for three.
 * The ended one has given back its memory by then, although its ranks finish at different times. The ends are destroys, destroys
 * of two, and aborts in the middle of a receive without a sender. Words as `choose` has them. */
#include "../support/messages.h"

enum { ROUNDS = 12, BYTES = 3000 };

/* Every rank sends to the next. */
static void passes(struct rank* self, ncclComm_t communicator, uint64_t key) {
  struct parcel parcels[RANKS_MAX];
  for (int rank = 0; rank < self->ranks; rank++) {
    parcels[rank] = (struct parcel){rank, (rank + 1) % self->ranks, BYTES, 0, 1, ncclUint8, key + (uint64_t)rank};
  }
  exchange_whole(self, communicator, parcels, self->ranks);
}

static void destroyed(struct rank* self) {
  ncclComm_t other = world(self, 0);
  for (uint64_t round = 0; round < ROUNDS; round++) {
    ncclComm_t communicator = world(self, 1);
    if (round % 4 == 0) passes(self, communicator, round);
    NCCL(ncclCommDestroy(communicator));
  }
  passes(self, other, ROUNDS);
  NCCL(ncclCommDestroy(other));
}

static void both(struct rank* self) {
  for (uint64_t round = 0; round < ROUNDS; round++) {
    ncclComm_t two[2] = {world(self, 0), world(self, 1)};
    if (round % 4 == 0) passes(self, two[round / 4 % 2], round);
    for (int i = 0; i < 2; i++) NCCL(ncclCommDestroy(two[i]));
  }
}

static void aborted(struct rank* self) {
  ncclComm_t other = world(self, 0);
  struct message never = message_to_receive(7, BYTES, 0);
  for (uint64_t round = 0; round < ROUNDS; round++) {
    ncclComm_t communicator = world(self, 1);
    message_receive(&never, (self->rank + self->ranks - 1) % self->ranks, communicator, self->stream);
    NCCL(ncclCommAbort(communicator));
  }
  wait_for(self->stream);
  message_untouched(&never);
  message_release(&never);
  passes(self, other, ROUNDS);
  NCCL(ncclCommDestroy(other));
}

static void all(struct rank* self) {
  RUN_PART(destroyed, self);
  RUN_PART(both, self);
  RUN_PART(aborted, self);
}

int main(int count, char** words) {
  begin("successors", 100);
  choose(count, words);
  int ranks = rank_count(4);
  if (is_section_chosen("processes")) run_ranks("processes", PROCESSES, ranks, all, NULL);
  if (is_section_chosen("threads")) run_ranks("threads", THREADS, ranks, all, NULL);
  return finish();
}
