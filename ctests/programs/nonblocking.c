/* Holds that a communicator with `blocking = 0` returns ncclInProgress where NCCL may, becomes ready by polling, and then gives
 * the same results; finalize and destroy work the same way. An init whose other ranks never come returns at once, alone and in a
 * group, and can be aborted. */
#include "../support/collective.h"

#include <time.h>

static void settle(ncclComm_t communicator) { EQUAL(settled(communicator, ncclInProgress), ncclSuccess); }

static bool started(ncclResult_t answer) { return answer == ncclSuccess || answer == ncclInProgress; }

/* CHECK(started(call)) counts only the check: the call itself is counted here. */
#define STARTED(function, ...) (count_calls(#function, 1), CHECK(started(function(__VA_ARGS__))))

static void all(struct rank* self) {
  ncclConfig_t configuration = NCCL_CONFIG_INITIALIZER;
  configuration.blocking = 0;
  ncclComm_t communicator = NULL, child = NULL;
  ncclUniqueId id = share_id(self, 0, 0);
  STARTED(ncclCommInitRankConfig, &communicator, self->ranks, id, self->rank, &configuration);
  settle(communicator);
  int ranks = 0;
  NCCL(ncclCommCount(communicator, &ranks));
  EQUAL(ranks, self->ranks);

  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .count = 30011,
                              .rank = self->rank, .ranks = self->ranks, .key = 5};
  transfer_prepare(&transfer);
  STARTED(ncclAllReduce, transfer.send, transfer.receive, transfer.count, transfer.type, transfer.op, communicator,
          as_cuda(self->stream));
  settle(communicator);
  wait_for(self->stream);
  transfer_verify(&transfer, self);
  transfer_release(&transfer);

  NCCL(ncclGroupStart());
  transfer = (struct transfer){.which = ALL_GATHER, .type = ncclInt8, .count = 513, .rank = self->rank,
                               .ranks = self->ranks, .key = 6};
  transfer_prepare(&transfer);
  STARTED(ncclAllGather, transfer.send, transfer.receive, transfer.count, transfer.type, communicator,
          as_cuda(self->stream));
  STARTED(ncclGroupEnd);
  settle(communicator);
  wait_for(self->stream);
  transfer_verify(&transfer, self);
  transfer_release(&transfer);

  STARTED(ncclCommSplit, communicator, self->rank % 2, self->rank, &child, NULL);
  settle(communicator);
  CHECK(child != NULL);
  settle(child);
  STARTED(ncclCommFinalize, child);
  settle(child);
  NCCL(ncclCommDestroy(child));
  STARTED(ncclCommFinalize, communicator);
  settle(communicator);
  NCCL(ncclCommDestroy(communicator));
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Rank 0 begins an init to which no other rank comes. */
static void nobody_comes(struct rank* self) {
  ncclUniqueId ids[2] = {share_id(self, 0, 0), share_id(self, 1, 0)};
  for (int i = 0; self->rank == 0 && i < 2; i++) {
    ncclConfig_t configuration = NCCL_CONFIG_INITIALIZER;
    configuration.blocking = 0;
    ncclComm_t communicator = NULL;
    ncclResult_t state = ncclSuccess;
    double began = seconds();
    if (i == 0) {
      CODE(ncclCommInitRankConfig(&communicator, self->ranks, ids[i], self->rank, &configuration), ncclInProgress);
    } else {
      NCCL(ncclGroupStart());
      STARTED(ncclCommInitRankConfig, &communicator, self->ranks, ids[i], self->rank, &configuration);
      CODE(ncclGroupEnd(), ncclInProgress);
    }
    NCCL(ncclCommGetAsyncError(communicator, &state));
    EQUAL(state, ncclInProgress);
    NCCL(ncclCommAbort(communicator));
    CHECK(seconds() - began < 10);
  }
  meet(self);
}

int main(void) {
  begin("nonblocking", 60);
  run_ranks("nonblocking", PROCESSES, rank_count(4), all, NULL);
  /* How NCCL's root takes a rank that leaves is not tested here. */
  if (!on_gpus()) run_ranks("nobody comes", PROCESSES, 2, nobody_comes, NULL);
  return finish();
}
