/* Functions of NCCL 2.29 to 2.31 that the simulator lacks, over the simulator, and one of a CUDA runtime that NCCL shares with the
 * program. One is a collective with a configuration of its
 * own, which must arrive as the program gave it. Another is a put of bytes without a signal, whose window is an address of the
 * caller's own device. A suspend only notes that it was called: it fails where the communicator sleeps, and a resume where it does not. */
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

/* The communicators that were suspended, which of them sleep, and how often each did. */
static struct { ncclComm_t communicator; int sleeps, times; } suspended[64];

static int place_of(ncclComm_t communicator) {
  int place = 0;
  while (suspended[place].communicator && suspended[place].communicator != communicator) place++;
  suspended[place].communicator = communicator;
  return place;
}

ncclResult_t ncclCommSuspend(ncclComm_t communicator, int flags) {
  int place = place_of(communicator);
  if (!(flags & NCCL_SUSPEND_MEM)) return ncclSuccess;
  if (suspended[place].sleeps) return ncclInvalidUsage;
  suspended[place].sleeps = 1;
  suspended[place].times++;
  return ncclSuccess;
}

ncclResult_t ncclCommResume(ncclComm_t communicator) {
  int place = place_of(communicator);
  if (!suspended[place].sleeps) return ncclInvalidUsage;
  suspended[place].sleeps = 0;
  return ncclSuccess;
}

/* Its persistent bytes say how often it was suspended, and one more while it sleeps. */
ncclResult_t ncclCommMemStats(ncclComm_t communicator, ncclCommMemStat_t stat, uint64_t* value) {
  int place = place_of(communicator);
  if (!value) return ncclInvalidArgument;
  *value = stat == ncclStatGpuMemPersist ? 10 * (uint64_t)suspended[place].times + (uint64_t)suspended[place].sleeps : 0;
  return ncclSuccess;
}
