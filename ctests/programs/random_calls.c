/* Holds: hundreds of calls drawn from a seed, on several communicators and streams, alone and in groups, give what the
 * host computes; every rank draws the same sequence. */
#include "../support/collective.h"

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

static void all(struct rank* self) {
  struct random random = random_from(*(uint64_t*)self->argument);
  int half = self->rank % 2, known = collectives_known();
  struct place places[COMMUNICATORS] = {{world(self, 0), self->rank, self->ranks},
                                        {NULL, self->ranks - 1 - self->rank, self->ranks},
                                        {NULL, self->rank / 2, (self->ranks + 1 - half) / 2}};
  NCCL(ncclCommSplit(places[0].communicator, 0, -self->rank, &places[1].communicator, NULL));
  NCCL(ncclCommSplit(places[0].communicator, half, self->rank, &places[2].communicator, NULL));
  CUstream streams[STREAMS] = {self->stream, new_stream(), new_stream()};
  for (uint64_t key = 1; key <= STEPS; key++) step(self, &random, places, streams, known, key);
  for (int i = COMMUNICATORS - 1; i >= 0; i--) NCCL(ncclCommDestroy(places[i].communicator));
  for (int i = 1; i < STREAMS; i++) CUDA(cuStreamDestroy_v2(streams[i]));
}

int main(void) {
  begin("random_calls", 120);
  uint64_t seed = program_seed(20240);
  run_ranks("random calls", PROCESSES, rank_count(4), all, &seed);
  return finish();
}
