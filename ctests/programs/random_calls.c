/* Holds that hundreds of calls drawn from a seed, on several communicators and streams, alone and in groups, give what the host
 * computes. Every rank draws the same sequence. */
#include "../support/collective.h"

#include <stdlib.h>
#include <string.h>

enum { STEPS = 260, COMMUNICATORS = 3, STREAMS = 3, BATCH_MAX = 4 };

struct place { ncclComm_t communicator; int rank, ranks; };

static struct transfer draw(struct random* random, const struct place* place, int known, uint64_t key) {
  struct transfer transfer = {.which = (enum collective)random_below(random, (uint64_t)known),
                              .type = REDUCIBLE[random_below(random, REDUCIBLE_COUNT)],
                              .op = (ncclRedOp_t)random_below(random, ncclNumOps),
                              .in_place = random_below(random, 2) != 0,
                              .rank = place->rank, .ranks = place->ranks, .key = key};
  uint64_t magnitude = random_below(random, 14);
  transfer.count = (size_t)random_below(random, (uint64_t)1 << magnitude);
  transfer.root = (int)(random_next(random) % (uint64_t)place->ranks);
  if (transfer.op == ncclAvg && !average_is_exact(transfer.type, place->ranks)) transfer.op = ncclSum;
  return transfer;
}

/* A batch: up to four calls, each on a communicator and its stream, in one group or one after another. */
static void step(struct rank* self, struct random* random, const struct place* places, CUstream* streams, int known,
                 uint64_t key) {
  struct transfer transfers[BATCH_MAX];
  int chosen[BATCH_MAX];
  int batch = 1 + (int)random_below(random, BATCH_MAX);
  bool grouped = random_below(random, 3) == 0;
  for (int i = 0; i < batch; i++) {
    chosen[i] = (int)random_below(random, COMMUNICATORS);
    transfers[i] = draw(random, &places[chosen[i]], known, key * BATCH_MAX + (uint64_t)i);
    transfer_prepare(&transfers[i]);
  }
  if (grouped) NCCL(ncclGroupStart());
  for (int i = 0; i < batch; i++) transfer_launch(&transfers[i], places[chosen[i]].communicator, streams[chosen[i]]);
  if (grouped) NCCL(ncclGroupEnd());
  for (int i = 0; i < STREAMS; i++) wait_for(streams[i]);
  for (int i = 0; i < batch; i++) {
    transfer_verify(&transfers[i], self);
    transfer_release(&transfers[i]);
  }
}

/* Every rank sends to the rank `distance` places after it and receives from the one before it, equally many random bytes. */
static void shift(struct rank* self, struct random* random, const struct place* place, CUstream stream, uint64_t key) {
  int distance = (int)(random_next(random) % (uint64_t)place->ranks);
  size_t count = (size_t)random_below(random, 20000);
  int to = (place->rank + distance) % place->ranks, from = (place->rank + place->ranks - distance) % place->ranks;
  int32_t* host = malloc(count * 4 + 1);
  int32_t* wanted = malloc(count * 4 + 1);
  void* given = device_alloc(count * 4);
  void* gotten = device_alloc(count * 4);
  input_fill(host, key, place->rank, 0, count, ncclInt32, ncclSum);
  upload(given, host, count * 4);
  NCCL(ncclGroupStart());
  NCCL(ncclSend(given, count, ncclInt32, to, place->communicator, as_cuda(stream)));
  NCCL(ncclRecv(gotten, count, ncclInt32, from, place->communicator, as_cuda(stream)));
  NCCL(ncclGroupEnd());
  wait_for(stream);
  download(host, gotten, count * 4);
  input_fill(wanted, key, from, 0, count, ncclInt32, ncclSum);
  CHECK(memcmp(host, wanted, count * 4) == 0);
  record(self, host, count * 4);
  free(host);
  free(wanted);
  device_free(given);
  device_free(gotten);
}

static void all(struct rank* self) {
  struct random random = random_from(*(uint64_t*)self->argument);
  int half = self->rank % 2, known = collectives_known();
  struct place places[COMMUNICATORS] = {{world(self, 0), self->rank, self->ranks},
                                        {NULL, self->ranks - 1 - self->rank, self->ranks},
                                        {NULL, self->rank / 2, (self->ranks + 1 - half) / 2}};
  NCCL(ncclCommSplit(places[0].communicator, 0, -self->rank, &places[1].communicator, NULL));
  NCCL(ncclCommSplit(places[0].communicator, half, self->rank, &places[2].communicator, NULL));
  CUstream streams[STREAMS] = {self->stream, new_stream(), new_stream()};
  for (uint64_t key = 1; key <= STEPS; key++) {
    step(self, &random, places, streams, known, key);
    if (key % 4 == 0) shift(self, &random, &places[key / 4 % COMMUNICATORS], streams[key / 4 % STREAMS], key);
  }
  for (int i = COMMUNICATORS - 1; i >= 0; i--) NCCL(ncclCommDestroy(places[i].communicator));
  for (int i = 1; i < STREAMS; i++) CUDA(cuStreamDestroy_v2(streams[i]));
}

int main(void) {
  begin("random_calls", 120);
  uint64_t seed = program_seed(20240);
  int ranks = rank_count(4);
  run_ranks("processes", PROCESSES, ranks, all, &seed);
  run_ranks("threads", THREADS, ranks, all, &seed);
  return finish();
}
