/* Holds that collectives with a configuration of their own (NCCL 2.31) are held in a group like all others while the
 * communicator is lazy. One thread may bring all ranks, calls run in the order in which they were made, and the configuration
 * may be freed as soon as a call has returned. Runs on the simulator with newer_nccl.c. */
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
  one_thread_end_streams(&all);
  NCCL(ncclGroupStart());
  for (int rank = 0; rank < RANKS; rank++) NCCL(ncclCommDestroy(communicators[rank]));
  NCCL(ncclGroupEnd());
  one_thread_print(&all, "one-thread");
  return finish();
}
