/* Holds that communicators made after cuDevicePrimaryCtxReset (cudaDeviceReset) have the same features as earlier ones and give
 * right results: nothing of the former context is used again. A communicator that is never destroyed does no harm when its
 * context ends. */
#include "../support/harness.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SMALL = 300, LARGE = 100003, MESSAGE = 50000, ROUNDS = 3, AFTER_RESET_US = 300000 };

static int32_t value(int round, int rank, size_t index) { return (int32_t)(round * 1000 + rank * 100 + (int)(index % 89)); }

static void reduced(struct rank* self, ncclComm_t communicator, void* memory, int32_t* host, size_t count, int round) {
  for (size_t i = 0; i < count; i++) host[i] = value(round, self->rank, i);
  upload(memory, host, count * sizeof *host);
  NCCL(ncclAllReduce(memory, memory, count, ncclInt32, ncclSum, communicator, as_cuda(self->stream)));
  wait_for(self->stream);
  download(host, memory, count * sizeof *host);
  for (size_t i = 0; i < count; i++) {
    int64_t wanted = 0;
    for (int rank = 0; rank < self->ranks; rank++) wanted += value(round, rank, i);
    if (!EQUAL(host[i], wanted)) break;
  }
  record(self, host, count * sizeof *host);
}

static void shifted(struct rank* self, ncclComm_t communicator, int32_t* memory, int32_t* host, int round) {
  int next = (self->rank + 1) % self->ranks, before = (self->rank + self->ranks - 1) % self->ranks;
  for (size_t i = 0; i < MESSAGE; i++) host[i] = value(round, self->rank, i);
  upload(memory, host, MESSAGE * sizeof *host);
  NCCL(ncclGroupStart());
  NCCL(ncclSend(memory, MESSAGE, ncclInt32, next, communicator, as_cuda(self->stream)));
  NCCL(ncclRecv(memory + MESSAGE, MESSAGE, ncclInt32, before, communicator, as_cuda(self->stream)));
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  download(host, memory + MESSAGE, MESSAGE * sizeof *host);
  for (size_t i = 0; i < MESSAGE; i++)
    if (!EQUAL(host[i], value(round, before, i))) break;
  record(self, host, MESSAGE * sizeof *host);
}

/* A graph that captures a call, launched and destroyed. */
static void captured(struct rank* self, ncclComm_t communicator, void* memory) {
  CUgraph graph = NULL;
  CUgraphExec executable = NULL;
  device_fill(memory, 0, SMALL * sizeof(int32_t));
  CUDA(cuStreamBeginCapture_v2(self->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  NCCL(ncclAllReduce(memory, memory, SMALL, ncclInt32, ncclMax, communicator, as_cuda(self->stream)));
  CUDA(cuStreamEndCapture(self->stream, &graph));
  CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
  CUDA(cuGraphDestroy(graph));
  CUDA(cuGraphLaunch(executable, self->stream));
  wait_for(self->stream);
  CUDA(cuGraphExecDestroy(executable));
}

static void used(struct rank* self, ncclComm_t communicator, int round) {
  int32_t* host = malloc(LARGE * sizeof *host);
  int32_t* memory = device_alloc(2 * LARGE * sizeof *host);
  void* block = NULL;
  reduced(self, communicator, memory, host, SMALL, round);
  shifted(self, communicator, memory, host, round);
  reduced(self, communicator, memory, host, LARGE, round);
  captured(self, communicator, memory);
  NCCL(ncclMemAlloc(&block, LARGE * sizeof *host));
  reduced(self, communicator, block, host, LARGE, round);
  NCCL(ncclMemFree(block));
  device_free(memory);
  free(host);
}

/* Everything that lives in the context ends, then the context. */
static void reset(struct rank* self) {
  CUDA(cuStreamDestroy_v2(self->stream));
  CUDA(cuCtxSetCurrent(NULL));
  meet(self);
  CUDA(cuDevicePrimaryCtxReset_v2(self->device));
  meet(self);
}

static void begin_again(struct rank* self) {
  self->context = use_device(self->device);
  self->stream = new_stream();
}

static void again(struct rank* self) {
  for (int round = 0; round < ROUNDS; round++) {
    ncclComm_t communicator = world(self, 2 * round), half = NULL;
    used(self, communicator, round);
    NCCL(ncclCommSplit(communicator, 0, -self->rank, &half, NULL));
    ncclComm_t second = world(self, 2 * round + 1);
    used(self, second, round);
    NCCL(ncclCommDestroy(half));
    NCCL(ncclCommDestroy(second));
    NCCL(ncclCommDestroy(communicator));
    reset(self);
    /* Time for threads of the library to run, while there is a context and while there is none. */
    if (round == 1) usleep(AFTER_RESET_US);
    begin_again(self);
  }
}

static void never_destroyed(struct rank* self) {
  ncclComm_t communicator = world(self, 0);
  used(self, communicator, 7);
  reset(self);
  usleep(AFTER_RESET_US);
  begin_again(self);
}

int main(void) {
  begin("context_reset", 90);
  int ranks = rank_count(3);
  run_ranks("again", PROCESSES, ranks, again, NULL);
  /* A communicator that is never destroyed is no leak in this test. */
  setenv("WINDLASS_SIM_STRICT", "0", 1);
  run_ranks("never destroyed", PROCESSES, ranks, never_destroyed, NULL);
  return finish();
}
