/* Calls that NCCL runs in a peer group, to be counted from outside: `passed WHAT TIMES`, one thread with two simulated GPUs. `alone`: averages of
 * integers, one after the other. `group`: both ranks' in a group, as nccl-tests does. `made`: the same with an operation that is made and destroyed
 * around each call. Two runs that differ in TIMES give the instructions of one round, which is two calls. */
#include "nccl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GPUS = 2, COUNT = 16 };

int cuInit(unsigned), cuDevicePrimaryCtxRetain(void**, int), cuCtxSetCurrent(void*), cuStreamCreate(cudaStream_t*, unsigned);
int cuMemAlloc_v2(void**, size_t), cuStreamSynchronize(cudaStream_t);

static void check(int code, int line) {
  if (code != 0) fprintf(stderr, "line %d: error %d\n", line, code), exit(1);
}
#define CHECK(call) check((int)(call), __LINE__)

int main(int count, char** arguments) {
  if (count != 3) return 2;
  int is_alone = strcmp(arguments[1], "alone") == 0, is_made = strcmp(arguments[1], "made") == 0;
  void *contexts[GPUS], *from[GPUS], *to[GPUS];
  cudaStream_t streams[GPUS];
  ncclComm_t communicators[GPUS];
  CHECK(cuInit(0));
  for (int gpu = 0; gpu < GPUS; gpu++) {
    CHECK(cuDevicePrimaryCtxRetain(&contexts[gpu], gpu));
    CHECK(cuCtxSetCurrent(contexts[gpu]));
    CHECK(cuStreamCreate(&streams[gpu], 1));
    CHECK(cuMemAlloc_v2(&from[gpu], COUNT * sizeof(int)));
    CHECK(cuMemAlloc_v2(&to[gpu], COUNT * sizeof(int)));
  }
  CHECK(ncclCommInitAll(communicators, GPUS, NULL));
  for (int round = 0; round < atoi(arguments[2]); round++) {
    if (!is_alone) CHECK(ncclGroupStart());
    for (int gpu = 0; gpu < GPUS; gpu++) {
      ncclRedOp_t operation = ncclAvg;
      float factor = 2;
      CHECK(cuCtxSetCurrent(contexts[gpu]));
      if (is_made) CHECK(ncclRedOpCreatePreMulSum(&operation, &factor, ncclFloat, ncclScalarHostImmediate, communicators[gpu]));
      CHECK(ncclAllReduce(from[gpu], to[gpu], COUNT, is_made ? ncclFloat : ncclInt, operation, communicators[gpu], streams[gpu]));
      if (is_made) CHECK(ncclRedOpDestroy(operation, communicators[gpu]));
    }
    if (!is_alone) CHECK(ncclGroupEnd());
  }
  for (int gpu = 0; gpu < GPUS; gpu++) {
    CHECK(cuCtxSetCurrent(contexts[gpu]));
    CHECK(cuStreamSynchronize(streams[gpu]));
    CHECK(ncclCommDestroy(communicators[gpu]));
  }
  return 0;
}
