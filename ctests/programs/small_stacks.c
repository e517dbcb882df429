/* Holds that communicators can be made, used and ended on threads with little stack, as interpreters and other languages have them.
 * Argument: KiB of stack. */
#include "../support/harness.h"

#include <pthread.h>
#include <stdlib.h>

enum { COUNT = 300, ROUNDS = 3 };

/* The smallest stack that a build without optimizations needs is 48 KiB; optimized it is 16. */
static int kibibytes = 64;

/* A sum of ones. */
static void works(ncclComm_t communicator, int ranks, CUstream stream, void* memory) {
  static const int ones[COUNT] = {[0] = 1, [COUNT - 1] = 1};
  int first, last;
  upload(memory, ones, sizeof ones);
  NCCL(ncclAllReduce(memory, memory, COUNT, ncclInt, ncclSum, communicator, as_cuda(stream)));
  wait_for(stream);
  download(&first, memory, sizeof first);
  download(&last, (int*)memory + COUNT - 1, sizeof last);
  EQUAL(first, ranks);
  EQUAL(last, ranks);
}

static void* on_small_stack(void* of) {
  struct rank* self = of;
  CUDA(cuCtxSetCurrent(self->context));
  void* memory = device_alloc(COUNT * sizeof(int));
  for (int round = 0; round < ROUNDS; round++) {
    ncclComm_t communicator = world(self, round), half;
    CUcontext current = NULL;
    CUDA(cuCtxGetCurrent(&current));
    CHECK(current == self->context);
    works(communicator, self->ranks, self->stream, memory);
    NCCL(ncclCommSplit(communicator, self->rank % 2, self->rank, &half, NULL));
    works(half, self->ranks / 2, self->stream, memory);
    if (round) NCCL(ncclCommDestroy(half));
    else NCCL(ncclCommAbort(half));
    meet(self);
    NCCL(ncclCommDestroy(communicator));
  }
  device_free(memory);
  return NULL;
}

static void all(struct rank* self) {
  pthread_t thread;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  CHECK(!pthread_attr_setstacksize(&attributes, (size_t)kibibytes << 10));
  if (CHECK(!pthread_create(&thread, &attributes, on_small_stack, self))) pthread_join(thread, NULL);
  pthread_attr_destroy(&attributes);
}

int main(int count, char** arguments) {
  if (count > 1) kibibytes = atoi(arguments[1]);
  begin("small_stacks", 60);
  int ranks = rank_count(4);
  if (ranks % 2) skip("needs an even number of ranks");
  run_ranks("processes", PROCESSES, ranks, all, NULL);
  run_ranks("threads", THREADS, ranks, all, NULL);
  return finish();
}
