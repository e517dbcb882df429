/* Holds that programs that work with NCCL because their messages are on separate communicators work here, too. Cases: an
 * ungrouped ring, two communicators in opposite orders, a pipeline with one direction on each of two communicators, and six
 * communicators launched in opposite orders. */
#include "../support/messages.h"

#include <stdlib.h>

static int wanted_count;
static char** wanted_names;
static bool wanted(const char* part) { return is_wanted(wanted_count, wanted_names, part); }

static ncclComm_t pair_of(struct rank* self, int slot, int low, int high) {
  ncclComm_t communicator = NULL;
  ncclUniqueId id = share_id(self, slot, low);
  if (self->rank == low || self->rank == high) {
    NCCL(ncclCommInitRank(&communicator, 2, id, self->rank == high));
  }
  return communicator;
}

/* Every rank sends to the next and receives from the one before, each at once and on the communicator and stream of that pair
 * alone, as PyTorch's isend and irecv do. No ring is large enough to absorb the message, so on one communicator this hangs. (The
 * simulator, where such a message takes a minute, has a smaller one.) */
static void ring(struct rank* self) {
  const size_t bytes = (size_t)(on_gpus() ? 72 : 36) << 20;
  int before = (self->rank + self->ranks - 1) % self->ranks;
  ncclComm_t pairs[RANKS_MAX] = {NULL}; /* the communicator of each rank and the next one */
  for (int low = 0; low < self->ranks; low++) pairs[low] = pair_of(self, low, low, (low + 1) % self->ranks);
  CUstream streams[2] = {new_stream(), new_stream()};
  /* In each pair the first rank has rank 0. */
  for (int low = 0; low < self->ranks; low++) {
    if (pairs[low]) acquaint(self, pairs[low], low != self->rank);
  }
  for (uint64_t round = 0; round < (on_gpus() ? 3 : 1); round++) {
    struct message from = message_to_send(round * 16 + (uint64_t)self->rank, bytes, 0);
    struct message to = message_to_receive(round * 16 + (uint64_t)before, bytes, 0);
    message_send(&from, 1, pairs[self->rank], streams[0]);
    message_receive(&to, 0, pairs[before], streams[1]);
    wait_for(streams[0]);
    wait_for(streams[1]);
    message_verify(&to, self);
    message_release(&from);
    message_release(&to);
  }
  for (int i = 0; i < 2; i++) CUDA(cuStreamDestroy_v2(streams[i]));
  for (int low = 0; low < self->ranks; low++) {
    if (pairs[low]) NCCL(ncclCommDestroy(pairs[low]));
  }
}

/* Two communicators over the same two ranks, with a stream each. One rank begins with the first, the other with the second, and
 * each sends on one and receives on the other. With one order for both communicators each would wait for a call that the other
 * rank makes later. */
static void opposite(struct rank* self) {
  const size_t bytes = (size_t)(on_gpus() ? 72 : 36) << 20;
  ncclComm_t communicators[2] = {NULL, NULL};
  int own = self->rank % 2, low = self->rank - own;
  for (int pair = 0; pair + 1 < self->ranks; pair += 2) {
    for (int which = 0; which < 2; which++) {
      ncclComm_t made = pair_of(self, pair * 2 + which, pair, pair + 1);
      if (pair == low) communicators[which] = made;
    }
  }
  CUstream streams[2] = {new_stream(), new_stream()};
  for (int which = 0; which < 2; which++) acquaint(self, communicators[which], own);
  for (uint64_t round = 0; round < (on_gpus() ? 3 : 1); round++) {
    /* Rank 0 sends on the first and receives on the second communicator. */
    struct message from = message_to_send(round * 4 + (uint64_t)own, bytes, 0);
    struct message to = message_to_receive(round * 4 + (uint64_t)(1 - own), bytes, 0);
    message_send(&from, 1 - own, communicators[own], streams[own]);
    meet(self);
    message_receive(&to, 1 - own, communicators[1 - own], streams[1 - own]);
    for (int which = 0; which < 2; which++) wait_for(streams[which]);
    message_verify(&to, self);
    message_release(&from);
    message_release(&to);
  }
  for (int which = 0; which < 2; which++) {
    CUDA(cuStreamDestroy_v2(streams[which]));
    NCCL(ncclCommDestroy(communicators[which]));
  }
}

/* A pipeline of two stages: activations go by one communicator, gradients come back by the other. Each stage posts the next
 * receive before the send that its peer waits for, as Megatron does. */
static void pipeline(struct rank* self) {
  enum { STEPS = 12 };
  ncclComm_t onward = world(self, 0), back = world(self, 1);
  const size_t bytes = (on_gpus() ? (size_t)16 : (size_t)2) << 20;
  struct message from[2], to[STEPS];
  CUstream streams[2] = {new_stream(), new_stream()};
  int peer = 1 - self->rank;
  acquaint(self, onward, self->rank);
  acquaint(self, back, self->rank);
  for (int i = 0; i < 2; i++) from[i] = message_to_send((uint64_t)self->rank, bytes, 0);
  for (int i = 0; i < STEPS; i++) to[i] = message_to_receive((uint64_t)peer, bytes, 0);
  for (int step = 0; step < STEPS; step++) {
    message_receive(&to[step], peer, self->rank ? onward : back, streams[0]);
    message_send(&from[step % 2], peer, self->rank ? back : onward, streams[1]);
  }
  for (int i = 0; i < 2; i++) {
    wait_for(streams[i]);
    CUDA(cuStreamDestroy_v2(streams[i]));
  }
  for (int i = 0; i < STEPS; i++) {
    message_verify(&to[i], self);
    message_release(&to[i]);
  }
  for (int i = 0; i < 2; i++) message_release(&from[i]);
  NCCL(ncclCommDestroy(back));
  NCCL(ncclCommDestroy(onward));
}

/* Six communicators with a stream each. Half of the ranks launch on them from the first on, half from the last. */
static void six(struct rank* self) {
  enum { COMMUNICATORS = 6, ROUNDS = 3 };
  ncclComm_t communicators[COMMUNICATORS];
  CUstream streams[COMMUNICATORS];
  struct exchange exchanges[COMMUNICATORS];
  const size_t bytes = (on_gpus() ? (size_t)40 : (size_t)1) << 20;
  struct parcel parcels[COMMUNICATORS][2];
  for (int i = 0; i < COMMUNICATORS; i++) {
    communicators[i] = world(self, i);
    streams[i] = new_stream();
    for (int from = 0; from < 2; from++) {
      parcels[i][from] = (struct parcel){.from = from, .to = 1 - from, .bytes = bytes, .type = ncclUint8,
                                         .key = (uint64_t)(i * 2 + from)};
    }
    exchanges[i] = exchange_prepare(self->rank, parcels[i], 2);
    acquaint(self, communicators[i], self->rank);
  }
  for (uint64_t round = 0; round < ROUNDS; round++) {
    for (int i = 0; i < COMMUNICATORS; i++) {
      int which = self->rank ? COMMUNICATORS - 1 - i : i;
      NCCL(ncclGroupStart());
      exchange_issue(&exchanges[which], communicators[which], streams[which]);
      NCCL(ncclGroupEnd());
      /* Both halves of the ranks have launched their first three before they begin with the others. */
      if (i == COMMUNICATORS / 2 - 1) meet(self);
    }
    for (int i = 0; i < COMMUNICATORS; i++) wait_for(streams[i]);
    for (int i = 0; i < COMMUNICATORS; i++) {
      exchange_verify(&exchanges[i], self);
      exchange_renew(&exchanges[i], 100 * (round + 1));
    }
  }
  for (int i = COMMUNICATORS - 1; i >= 0; i--) {
    exchange_release(&exchanges[i]);
    CUDA(cuStreamDestroy_v2(streams[i]));
    NCCL(ncclCommDestroy(communicators[i]));
  }
}

int main(int count, char** arguments) {
  wanted_count = count;
  wanted_names = arguments;
  /* Streams that share a hardware queue wait for each other's kernels. */
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  begin("pairs", 280);
  int ranks = rank_count(4), devices = device_count();
  if (devices > 2 && wanted("ring")) run_ranks("ring", PROCESSES, 3, ring, NULL);
  if (wanted("opposite")) run_ranks("opposite", PROCESSES, ranks, opposite, NULL);
  if (wanted("pipeline")) run_ranks("pipeline", PROCESSES, 2, pipeline, NULL);
  if (wanted("six")) run_ranks("six", PROCESSES, 2, six, NULL);
  return finish();
}
