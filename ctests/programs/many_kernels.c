/* Holds that a thread that brings both ranks may have more calls in a group than a stream can queue launches (WINDLASS_SIM_QUEUE
 * on the simulator, about 1024 on GPUs). In fixed order each call is a kernel, and rank 0's launches must not wait for rank 1's,
 * which come after them. */
#include "../support/one_thread.h"

enum { CALLS_MAX = 1500, COUNT = 8, RANKS = 2 };

static int calls(void) { return on_gpus() ? CALLS_MAX : 600; }

int main(void) {
  begin("many kernels", 60);
  if (rank_count(RANKS) < RANKS) return finish();
  struct one_thread all = one_thread_begin("one thread", RANKS);
  ncclComm_t communicators[RANKS];
  int devices[] = {0, 1};
  NCCL(ncclCommInitAll(communicators, RANKS, devices));
  static float values[CALLS_MAX * COUNT];
  float *given[RANKS], *summed = NULL;
  for (int rank = 0; rank < RANKS; rank++) {
    one_thread_use(&all, rank);
    for (int i = 0; i < CALLS_MAX * COUNT; i++) values[i] = (float)(i + 1000 * rank);
    given[rank] = device_alloc(sizeof values);
    upload(given[rank], values, sizeof values);
    if (rank == 0) summed = device_alloc(sizeof values);
  }
  NCCL(ncclGroupStart());
  for (int rank = 0; rank < RANKS; rank++) {
    for (int call = 0; call < calls(); call++) {
      /* Each call has the same root, so each takes a kernel of its own. */
      NCCL(ncclReduce(given[rank] + call * COUNT, summed + call * COUNT, COUNT, ncclFloat, ncclSum, 0, communicators[rank],
                      as_cuda(all.streams[rank])));
    }
  }
  NCCL(ncclGroupEnd());
  for (int rank = 0; rank < RANKS; rank++) {
    one_thread_use(&all, rank);
    wait_for(all.streams[rank]);
  }
  one_thread_use(&all, 0);
  download(values, summed, sizeof values);
  for (int i = 0; i < calls() * COUNT; i++) {
    if (!EQUAL(values[i], 2 * i + 1000)) break;
  }
  device_free(summed);
  for (int rank = 0; rank < RANKS; rank++) {
    one_thread_use(&all, rank);
    device_free(given[rank]);
  }
  one_thread_end_streams(&all);
  NCCL(ncclGroupStart());
  for (int rank = 0; rank < RANKS; rank++) NCCL(ncclCommDestroy(communicators[rank]));
  NCCL(ncclGroupEnd());
  one_thread_print(&all, "one-thread");
  return finish();
}
