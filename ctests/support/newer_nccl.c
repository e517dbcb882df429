/* What the stand-in for NCCL lacks of 2.31, over it: a collective with a configuration of its own. It holds that this comes as the
 * program gave it. */
#include <nccl.h>
#include <string.h>

ncclResult_t ncclAllReduceConfig(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t communicator,
                                 cudaStream_t stream, const ncclCollConfig_t* configuration) {
  if (configuration) {
    const char* algorithm = configuration->algSelection;
    if (configuration->magic != NCCL_API_MAGIC || configuration->maxCTAs != 7) return ncclInvalidArgument;
    if (!algorithm || strcmp(algorithm, "ring")) return ncclInvalidArgument;
  }
  return ncclAllReduce(from, to, count, type, op, communicator, stream);
}
