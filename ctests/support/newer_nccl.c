/* Functions of NCCL 2.29 to 2.31 that the simulator lacks, over the simulator, and one of a CUDA runtime that NCCL shares with the
 * program. One is a collective with a configuration of its
 * own, which must arrive as the program gave it. The other is a put of bytes without a signal, whose window is an address of the
 * caller's own device. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <nccl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int cudaGetDevice(int* device) {
  const char* given = getenv("CTESTS_RUNTIME_DEVICE");
  *device = given ? atoi(given) : 0;
  return 0;
}

ncclResult_t ncclAllReduceConfig(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t communicator,
                                 cudaStream_t stream, const ncclCollConfig_t* configuration) {
  if (configuration) {
    const char* algorithm = configuration->algSelection;
    if (configuration->magic != NCCL_API_MAGIC || configuration->maxCTAs != 7) return ncclInvalidArgument;
    if (!algorithm || strcmp(algorithm, "ring")) return ncclInvalidArgument;
  }
  /* By its own name the call would reach Windlass, which takes no other library for a part of NCCL. */
  ncclResult_t (*reduce)(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) = NULL;
  *(void**)&reduce = dlsym(dlopen("libnccl.so.0", RTLD_LAZY | RTLD_NOLOAD), "ncclAllReduce");
  return reduce ? reduce(from, to, count, type, op, communicator, stream) : ncclInternalError;
}

ncclResult_t ncclPutSignal(const void* from, size_t count, ncclDataType_t type, int peer, ncclWindow_t window, size_t offset, int signal,
                           int context, unsigned flags, ncclComm_t communicator, cudaStream_t stream) {
  (void)peer, (void)signal, (void)context, (void)flags;
  int (*copy)(uint64_t, uint64_t, size_t, cudaStream_t) = NULL;
  *(void**)&copy = dlsym(RTLD_DEFAULT, "cuMemcpyAsync");
  if (!copy || !communicator || type != ncclUint8) return ncclInvalidArgument;
  return copy((uintptr_t)window + offset, (uintptr_t)from, count, stream) ? ncclUnhandledCudaError : ncclSuccess;
}
