/* Holds that collectives with a configuration of their own (NCCL 2.31) are held in a group like all others while the
 * communicator is lazy. One thread may bring all ranks, calls run in the order in which they were made, and the configuration
 * may be freed as soon as a call has returned. Without a configuration such a call meets the plain one of another rank.
 * Runs on the simulator with newer_nccl.c. */
#include "../support/one_thread.h"

#include <stdlib.h>
#include <string.h>

enum { COUNT = 100, RANKS = 2 };

static ncclResult_t reduce_configured(float* buffer, ncclComm_t communicator, CUstream stream) {
  char* algorithm = strdup("ring");
  ncclCollConfig_t configuration = NCCL_COLLCONFIG_INITIALIZER;
  configuration.maxCTAs = 7;
  configuration.algSelection = algorithm;
  ncclResult_t answer = ncclAllReduceConfig(buffer, buffer, COUNT, ncclFloat, ncclSum, communicator, as_cuda(stream), &configuration);
  count_calls("ncclAllReduceConfig", 1);
  memset(algorithm, 'x', strlen(algorithm));
  free(algorithm);
  memset(&configuration, 0x55, sizeof configuration);
  return answer;
}

/* A broadcast and a sum, each in a buffer of its own: NCCL guarantees no order within a group. */
static void in_a_group(struct one_thread* all, const ncclComm_t* communicators) {
  float values[COUNT], *given[RANKS], *summed[RANKS];
  for (int rank = 0; rank < RANKS; rank++) {
    one_thread_use(all, rank);
    for (int i = 0; i < COUNT; i++) values[i] = (float)(i + 1000 * rank);
    float** buffers[] = {&given[rank], &summed[rank]};
    for (int which = 0; which < 2; which++) {
      *buffers[which] = device_alloc(sizeof values);
      upload(*buffers[which], values, sizeof values);
    }
  }
  NCCL(ncclGroupStart());
  for (int rank = 0; rank < RANKS; rank++) {
    NCCL(ncclBroadcast(given[rank], given[rank], COUNT, ncclFloat, 0, communicators[rank], as_cuda(all->streams[rank])));
    CODE(reduce_configured(summed[rank], communicators[rank], all->streams[rank]), ncclSuccess);
  }
  NCCL(ncclGroupEnd());
  for (int rank = 0; rank < RANKS; rank++) {
    one_thread_use(all, rank);
    wait_for(all->streams[rank]);
    download(values, given[rank], sizeof values);
    for (int i = 0; i < COUNT; i++) {
      if (!EQUAL(values[i], i)) break;
    }
    download(values, summed[rank], sizeof values);
    for (int i = 0; i < COUNT; i++) {
      if (!EQUAL(values[i], RANKS * i + 1000)) break;
    }
    device_free(given[rank]);
    device_free(summed[rank]);
  }
}

static void launch_without(const struct transfer* t, ncclComm_t communicator, CUstream on) {
  cudaStream_t stream = as_cuda(on);
  switch (t->which) {
    case ALL_REDUCE: NCCL(ncclAllReduceConfig(t->send, t->receive, t->count, t->type, t->op, communicator, stream, NULL)); break;
    case REDUCE: NCCL(ncclReduceConfig(t->send, t->receive, t->count, t->type, t->op, t->root, communicator, stream, NULL)); break;
    case BROADCAST: NCCL(ncclBroadcastConfig(t->send, t->receive, t->count, t->type, t->root, communicator, stream, NULL)); break;
    case ALL_GATHER: NCCL(ncclAllGatherConfig(t->send, t->receive, t->count, t->type, communicator, stream, NULL)); break;
    case REDUCE_SCATTER:
      NCCL(ncclReduceScatterConfig(t->send, t->receive, t->count, t->type, t->op, communicator, stream, NULL));
      break;
    case ALL_TO_ALL: NCCL(ncclAlltoAllConfig(t->send, t->receive, t->count, t->type, communicator, stream, NULL)); break;
    case GATHER: NCCL(ncclGatherConfig(t->send, t->receive, t->count, t->type, t->root, communicator, stream, NULL)); break;
    default: NCCL(ncclScatterConfig(t->send, t->receive, t->count, t->type, t->root, communicator, stream, NULL));
  }
}

/* Rank 0 calls by the name that takes a configuration, rank 1 by the plain one. */
static void without_on_one_rank(struct one_thread* all, const ncclComm_t* communicators) {
  for (int which = 0; which < COLLECTIVES; which++) {
    if (which == BCAST) continue;
    struct transfer both[RANKS];
    for (int rank = 0; rank < RANKS; rank++) {
      one_thread_use(all, rank);
      both[rank] = (struct transfer){.which = which, .type = ncclFloat, .op = ncclSum, .count = COUNT, .rank = rank, .ranks = RANKS, .key = which};
      transfer_prepare(&both[rank]);
    }
    NCCL(ncclGroupStart());
    launch_without(&both[0], communicators[0], all->streams[0]);
    transfer_launch(&both[1], communicators[1], all->streams[1]);
    NCCL(ncclGroupEnd());
    for (int rank = 0; rank < RANKS; rank++) {
      one_thread_use(all, rank);
      wait_for(all->streams[rank]);
      transfer_verify(&both[rank], &all->all);
      transfer_release(&both[rank]);
    }
  }
}

int main(void) {
  begin("configured calls", 60);
  if (rank_count(RANKS) < RANKS) return finish();
  struct one_thread all = one_thread_begin("one thread", RANKS);
  ncclComm_t communicators[RANKS];
  int devices[] = {0, 1};
  NCCL(ncclCommInitAll(communicators, RANKS, devices));
  for (int i = 0; i < RANKS; i++) count_calls("lazy/2/built", 1);
  /* In the first round NCCL builds the communicator, in the second it exists. */
  for (int round = 0; round < 2; round++) in_a_group(&all, communicators);
  without_on_one_rank(&all, communicators);
  one_thread_end_streams(&all);
  NCCL(ncclGroupStart());
  for (int rank = 0; rank < RANKS; rank++) NCCL(ncclCommDestroy(communicators[rank]));
  NCCL(ncclGroupEnd());
  one_thread_print(&all, "one-thread");
  return finish();
}
